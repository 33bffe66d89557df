"""Resources of the compiled CUDA kernels, read from the library by NVIDIA's cuobjdump; needs no GPU."""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagedtree._ops import find_library

__all__ = [
    "Kernel",
    "cuda_library",
    "extract_cubins",
    "find_cuobjdump",
    "list_instructions",
    "read_code_bytes",
    "read_kernels",
    "read_launch_bounds",
]

MISSING = "cuobjdump is not here: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"


@dataclass(frozen=True)
class Kernel:
    symbol: str  # the name in the library
    name: str  # the same demangled, where c++filt is there
    architecture: str  # sm_80, ...
    registers: int  # of a thread
    stack_bytes: int  # per thread, spilled registers included
    shared_bytes: int  # per CTA, without the dynamic part of a launch; with 1 KB that GPUs since Hopper reserve


def cuda_library() -> Path | None:
    path = find_library("libpagedtree_cuda.so")
    return None if path is None else Path(path)


def find_cuobjdump() -> str | None:
    executable = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec and not executable else []:
        for path in sorted(Path(folder).glob("cu*/bin/cuobjdump")):
            return str(path)
    return executable


def _cuobjdump(*arguments: object) -> str:
    program = find_cuobjdump()
    if program is None:
        raise FileNotFoundError(MISSING)
    return subprocess.run([program, *map(str, arguments)], text=True, capture_output=True, check=True).stdout


def extract_cubins(library: Path, architecture: str, folder: Path) -> list[Path]:
    """Writes the library's machine code for `architecture` ("sm_90" takes sm_90a too) into `folder`, one file each.

    Raises FileNotFoundError without cuobjdump.
    """
    program = find_cuobjdump()
    if program is None:
        raise FileNotFoundError(MISSING)
    subprocess.run([program, "-xelf", "all", str(library.resolve())], cwd=folder, check=True, capture_output=True)
    pattern = re.compile(rf"\.{architecture}a?\.cubin$")
    return sorted(path for path in folder.glob("*.cubin") if pattern.search(path.name))


def _demangle(names: list[str]) -> list[str]:
    if shutil.which("c++filt") is None:
        return names
    process = subprocess.run(["c++filt"], input="\n".join(names), text=True, capture_output=True, check=True)
    return [
        re.sub(r"pagedtree::cuda::|pagedtree::|\(anonymous namespace\)::|^void ", "", line)
        for line in process.stdout.splitlines()
    ]


def read_kernels(library: Path) -> list[Kernel]:
    """Returns every kernel for every architecture, in the library's order. Raises FileNotFoundError without
    cuobjdump."""
    rows: list[tuple[str, str, int, int, int]] = []
    architecture = name = ""
    for line in _cuobjdump("-res-usage", library).splitlines():
        if match := re.match(r"arch = (\w+)", line):
            architecture = match[1]
        elif match := re.match(r" *Function ([^\s:]+):", line):
            name = match[1]
        elif match := re.match(r" *REG:(\d+) STACK:(\d+) SHARED:(\d+) ", line):
            rows.append((name, architecture, int(match[1]), int(match[2]), int(match[3])))
    names = _demangle([row[0] for row in rows])
    return [Kernel(row[0], name, *row[1:]) for name, row in zip(names, rows, strict=True)]


def read_launch_bounds(cubin: Path) -> dict[str, int]:
    """Returns each kernel's maximum threads per CTA by its symbol in a cubin, as `__launch_bounds__` gave them."""
    return {symbol: _attribute(info, _MAX_THREADS) for symbol, info in _sections(cubin, ".nv.info.")}


def read_code_bytes(cubin: Path) -> dict[str, int]:
    return {symbol: len(code) for symbol, code in _sections(cubin, ".text.")}


def _sections(cubin: Path, prefix: str) -> Iterator[tuple[str, bytes]]:
    """The sections whose names begin so: the rest of the name, and the contents."""
    data = cubin.read_bytes()
    (headers,), (size, count, names) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HHH", data, 58)
    sections = [struct.unpack_from("<IIQQQQ", data, headers + i * size) for i in range(count)]
    for name_at, _, _, _, start, length in sections:
        begin = sections[names][4] + name_at
        name = data[begin : data.index(b"\0", begin)].decode()
        if name.startswith(prefix):
            yield name.removeprefix(prefix), data[start : start + length]


_MAX_THREADS = 5  # EIATTR_MAX_THREADS, as cuobjdump -elf calls it


def _attribute(info: bytes, wanted: int) -> int:
    at = 0
    while at < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        size = value if form == 4 else 0  # EIFMT_SVAL: a value of that many bytes follows; others have it in place
        if attribute == wanted:
            return int(struct.unpack_from("<I", info, at + 4)[0])
        at += 4 + size
    return 0


def _instructions(library: Path, architecture: str, symbols: list[str]) -> Iterator[tuple[str, str]]:
    name = ""
    for line in _cuobjdump("-sass", "-arch", architecture, "-fun", ",".join(symbols), library).splitlines():
        if match := re.match(r"\s*Function : (\S+)", line):
            name = match[1]
        elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+ )?(USETMAXREG[^;]*\w|[A-Z][\w.]*)", line):
            yield name, match[1]


def list_instructions(library: Path, kernels: list[Kernel]) -> dict[Kernel, list[str]]:
    """Lists the machine instructions of each of the library's `kernels` in order; USETMAXREG with its operands.

    Takes half a second a kernel. Raises FileNotFoundError without cuobjdump.
    """
    listings: dict[Kernel, list[str]] = {kernel: [] for kernel in kernels}
    for architecture in {kernel.architecture for kernel in kernels}:
        of_symbol = {kernel.symbol: listings[kernel] for kernel in kernels if kernel.architecture == architecture}
        for symbol, opcode in _instructions(library, architecture, list(of_symbol)):
            of_symbol[symbol].append(opcode)
    return listings
