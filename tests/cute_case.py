"""CuTe's vectors, from `make witness`."""

from __future__ import annotations

import io
import lzma
from pathlib import Path

import numpy as np

VECTORS = np.load(io.BytesIO(lzma.decompress((Path(__file__).parent / "cute" / "vectors.npz.xz").read_bytes())))
