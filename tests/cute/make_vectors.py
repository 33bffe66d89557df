"""Makes vectors.npz.xz for test_cute.py and test_panels.py (`make witness`): runs witness.cpp, compiled with CuTe of
NVIDIA's packages nvidia-cutlass and nvidia-cuda-cccl, whose releases the file records, on the CPU.
"""

from __future__ import annotations

import io
import lzma
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
VECTORS = HERE / "vectors.npz.xz"
BUILD = HERE.parents[1] / "build" / "cute"
PACKAGES = ("nvidia-cutlass==4.2.0.0", "nvidia-cuda-cccl==13.3.5.0.6")


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
    buffer = io.BytesIO()
    np.savez(buffer, origin=np.array(PACKAGES), **vectors)
    # wgmma's forms are alike: a third smaller than np.savez_compressed.
    size = VECTORS.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    print(VECTORS, size, "bytes")


if __name__ == "__main__":
    main()
