"""The machine code of a compiled kernel as nvdisasm lists it: instructions, their control codes and source lines."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

# Wrappers of instructions, of which the caller is the line worth telling.
WRAPPERS = re.compile(r"ptx|/cute/|/cutlass/|cuda_(bf|fp)16|sm_\d+_intrin|device_functions|type_traits|utility")

SECTION = re.compile(r"^//-+ (\.\S+)\s+-+$")
SOURCE = re.compile(r'//## File "([^"]*)", line (\d+)( inlined at)?')
INSTRUCTION = re.compile(
    r"/\*([0-9a-f]{4,6})\*/\s+(?:@(!?U?P[T\d]+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/"
)
SECOND_WORD = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
LABEL = re.compile(r"^(\.L_\w+|\$\S+):")


@dataclass(eq=False)
class Instruction:
    """One instruction, with what its control code tells the scheduler.

    Attributes:
        opcode: with modifiers, as HMMA.16816.F32.BF16. predicate: as "P0", "!P0"; "" without one.
        stall: cycles before the warp's next instruction may follow.
        sets, reads: the scoreboard (0 to 5) that is released when the result is there, and when the operands have been
            read; None without.
        waits: scoreboards that must be released before.
        lines: (file, line) of the source, the innermost of inlined functions first.
        target: address that a branch goes to, -1 for none.
    """

    address: int
    predicate: str
    opcode: str
    arguments: str
    stall: int = 1
    sets: int | None = None
    reads: int | None = None
    waits: tuple[int, ...] = ()
    lines: tuple[tuple[str, int], ...] = ()
    target: int = -1

    @property
    def root(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def where(self) -> str:
        """file:line of the innermost function that is no wrapper of an instruction; "" without source lines."""
        named = [line for line in self.lines if not WRAPPERS.search(line[0])] or list(self.lines)
        return f"{os.path.basename(named[0][0])}:{named[0][1]}" if named else ""


@dataclass
class Function:
    """A kernel by its mangled name."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def decode_control(word: int) -> dict[str, object]:
    """The control code in the upper half of an instruction: 4 bits of stall, 1 of yield, 3 + 3 of scoreboards that it
    sets, 6 of those that it waits for."""
    code = word >> 41
    boards = [code >> shift & 7 for shift in (5, 8)]
    sets, reads = (None if board == 7 else board for board in boards)
    waits = tuple(board for board in range(6) if code >> 11 + board & 1)
    return {"stall": code & 15, "sets": sets, "reads": reads, "waits": waits}


def find_nvdisasm() -> str | None:
    """nvdisasm on the PATH, in /usr/local/cuda, or from the package nvidia-cuda-nvdisasm."""
    found = shutil.which("nvdisasm") or shutil.which("nvdisasm", path="/usr/local/cuda/bin")
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec and not found else []:
        for path in sorted(Path(folder).glob("cu*/bin/nvdisasm")):
            return str(path)
    return found


def disassemble(cubin: Path) -> list[Function]:
    """The kernels of a cubin. Raises FileNotFoundError without nvdisasm."""
    program = find_nvdisasm()
    if program is None:
        raise FileNotFoundError("nvdisasm is not here: pip install nvidia-cuda-nvdisasm")
    command = [program, "-hex", "-c", "-gi", str(cubin)]
    return parse(subprocess.run(command, check=True, text=True, capture_output=True).stdout)


def parse(listing: str) -> list[Function]:
    """The functions in the output of `nvdisasm -hex -c -gi`."""
    functions: list[Function] = []
    function: Function | None = None
    lines: tuple[tuple[str, int], ...] = ()
    is_inlined = False
    pending: list[str] = []  # labels of the instruction to come
    first: re.Match[str] | None = None  # an instruction's first line
    for text in listing.splitlines():
        if match := SECTION.match(text):
            function, lines, pending = None, (), []
            if match[1].startswith(".text."):
                function = Function(match[1].removeprefix(".text."))
                functions.append(function)
        elif function is None:
            continue
        elif match := SOURCE.search(text):
            lines = (lines if is_inlined else ()) + ((match[1], int(match[2])),)
            is_inlined = bool(match[3])
        elif match := LABEL.match(text):
            pending.append(match[1])
        elif match := INSTRUCTION.search(text):
            first = match
        elif (match := SECOND_WORD.match(text)) and first:
            address = int(first[1], 16)
            function.labels.update(dict.fromkeys(pending, address))
            pending = []
            control = decode_control(int(match[1], 16))
            found = Instruction(address, first[2] or "", first[3], first[4], lines=lines, **control)  # type: ignore[arg-type]
            function.instructions.append(found)
            first = None
    for function in functions:
        for instruction in function.instructions:
            if match := re.search(r"`\((\S+?)\)", instruction.arguments):
                instruction.target = function.labels.get(match[1], -1)
    return functions


def tensor_flops(opcode: str) -> int:
    """Floating-point operations of one warp's tensor instruction; for a wgmma the quarter of each of its four warps."""
    if match := re.match(r"[HQI]GMMA\.(\d+)x(\d+)x(\d+)", opcode):
        return 2 * int(match[1]) // 4 * int(match[2]) * int(match[3])
    if match := re.match(r"[HIQ]MMA\.(16816|16832|1688|16864)", opcode):
        return 2 * 16 * 8 * int(match[1][3:])
    return 0


def bytes_of(instruction: Instruction) -> int:
    """Bytes that one warp's load, store or copy moves."""
    sizes = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
    return 32 * next((size for name, size in sizes.items() if name in instruction.opcode), 4)
