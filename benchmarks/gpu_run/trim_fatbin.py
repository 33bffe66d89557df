"""Keeps only the GPU code of some sources in a shared library, and compresses the result.

    python trim_fatbin.py LIBRARY OUT.xz REGEX

REGEX is searched in the names of the sources. Other code becomes zeros: the library still loads, as CUDA loads modules
at a kernel's first launch, but kernels of other sources fail.
"""

from __future__ import annotations

import lzma
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

MAGIC = struct.pack("<IH", 0xBA55ED50, 1)  # and the version
HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes after it
ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of this header, bytes after it
NAMES_AT = 64  # offset of the names in an entry's header
KEPT_BYTES = 64  # of dropped code: the ELF header


def entries_of(data: bytearray) -> Iterator[tuple[bytes, int, int]]:
    """Yields each entry's names, and its code's range."""
    for match in re.finditer(re.escape(MAGIC), bytes(data)):
        _, _, header_bytes, size = HEADER.unpack_from(data, match.start())
        at = match.start() + header_bytes
        end = at + size
        while at < end:
            _, _, entry_bytes, code_bytes = ENTRY.unpack_from(data, at)
            code = at + entry_bytes
            yield bytes(data[at + NAMES_AT : code]), code, code + code_bytes
            at = code + code_bytes


def trim(data: bytearray, wanted: re.Pattern[bytes]) -> tuple[int, int]:
    """Returns bytes kept and dropped."""
    kept = dropped = 0
    for names, begin, end in list(entries_of(data)):
        if wanted.search(names):
            kept += end - begin
        else:
            data[begin + KEPT_BYTES : end] = bytes(end - begin - KEPT_BYTES)
            dropped += end - begin
    return kept, dropped


def main() -> int:
    if len(sys.argv) != 4:
        print(__doc__, file=sys.stderr)
        return 2
    data = bytearray(Path(sys.argv[1]).read_bytes())
    kept, dropped = trim(data, re.compile(sys.argv[3].encode()))
    if not kept:
        print(f"{sys.argv[1]} has no GPU code of a source that matches {sys.argv[3]}", file=sys.stderr)
        return 1
    with lzma.open(sys.argv[2], "wb", preset=6) as out:
        out.write(data)
    print(f"kept {kept / 1e6:.1f} MB of GPU code, dropped {dropped / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
