"""Every form of PTX instruction in the library: the interpreter (tools/ptx) executes it, or another witness is named.

The wrappers of csrc/cuda/tile/ptx_cuda.cuh are executed from PTX by themselves, and must give what the manual defines;
those of Hopper alone in test_ptx_hopper.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from ptx.execute import executed_from_ptx, ptx_of, simt_library
from ptx.formats import from_e4m3, to_e4m3
from ptx.interpreter import Block
from ptx.module import Fault, Module
from ptx.state import Memory

from pagedtree import _C
from pagedtree.check.case import Case, Place
from pagedtree.check.cases import instructions
from pagedtree.check.runner import OK, run_row
from pagedtree.testing import backends
from pagedtree.tools.cubin import cuda_library, find_cuobjdump

SIMT, CUDA = simt_library(), cuda_library()
ARCHITECTURES = _C.build_info()["cuda_architectures"]
pytestmark = [
    pytest.mark.skipif(SIMT is None or "simt" not in backends(), reason="built without simt"),
    pytest.mark.skipif(CUDA is None or find_cuobjdump() is None, reason="no CUDA library or no cuobjdump"),
    pytest.mark.skipif(not any("+PTX" in one for one in ARCHITECTURES), reason="built without PTX"),
]
# Who stands for what the interpreter refuses: the first words of a form, and the witness.
WITNESSES = {
    "barrier.cluster": "instructions/of_cta and the rows of check that run in clusters, on simt",
    "mapa": "instructions/of_cta, on simt",
    "call": "nvcc's own: the same C++ runs on simt",
}
FORM = re.compile(
    r"(?:^|[;{}:])\s*(?:@!?[%\w]+\s+)?([a-z][a-z0-9_]*(?:(?:\.|::)\w+)*)(?=[\s;])([^;{}]*(?:\{[^}]*\}[^;{}]*)*);", re.M
)
HEADER = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry kernel(.param .u64 pointer) {\n"
REGISTERS = ".reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>; .reg .f64 %fd<9>;"
# Names that inline assembly declares within its braces.
LOCAL_NAMES = {"p": "%p1", "x": "%f1", "y": "%f2", "late": "%p2", "turns": "%r1", "%tmp": "%rd1"}


def forms_in(text: str) -> dict[str, str]:
    """By form, one statement of it."""
    found: dict[str, str] = {}
    for match in FORM.finditer(re.sub(r"//[^\n]*", "", text)):
        found.setdefault(match[1], match[1] + match[2])
    return {
        form: statement for form, statement in found.items() if "." in form or form in ("bra", "ret", "exit", "trap")
    }


def refusal(form: str, statement: str, memory: Memory, data: np.ndarray) -> str:
    """Why the interpreter does not execute the statement, "" if it does."""
    local = r"(?<![%$.\w])(p|x|y|late|turns|%tmp)\b(?=\s*[,|\]]|$)"
    statement = re.sub(local, lambda match: LOCAL_NAMES[match[1]], statement)
    if form.startswith("ld.param"):
        statement = re.sub(r"\[[^]]*\]", "[pointer]", statement)
    if form.startswith("bra"):
        statement = form + " END"
    module = Module(f"{HEADER}{REGISTERS}\n{statement};\nEND:\nret;\n}}\n")
    entry = module.entry("kernel")
    block = Block(entry, bytes(64), memory, (0, 0, 0), (128, 1, 1), (1, 1, 1), 1 << 18)
    address = np.full(128, data.ctypes.data, np.uint64)
    for register in set(re.findall(r"%rd\d+", statement)):
        block.registers[register] = address
    try:
        block.run()
    except (
        Fault
    ) as fault:  # zeros and one address for everything: out of bounds, misaligned or waiting is an answer, too
        return str(fault) if re.search("not known here|Error", str(fault)) else ""
    return ""


def refusals(text: str) -> dict[str, str]:
    data = np.zeros(1 << 21, np.uint8)[1 << 19 :]
    data = data[-data.ctypes.data % 4096 :]
    memory = Memory()
    found = {form: refusal(form, statement, memory, data) for form, statement in forms_in(text).items()}
    return {form: why for form, why in found.items() if why}


def test_every_form_is_covered() -> None:
    assert CUDA is not None
    text = ptx_of(CUDA)
    assert len(forms_in(text)) > 250
    refused = refusals(text)
    unknown = {form: why for form, why in refused.items() if not form.startswith(tuple(WITNESSES))}
    assert unknown == {}
    assert all(any(form.startswith(prefix) for form in refused) for prefix in WITNESSES), "one is known by now"


@pytest.mark.parametrize(
    "statement", ["lop3.b32 %r1, %r2, %r3, %r4, 0x1e", "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 %fd1, %fd2"]
)
def test_an_unknown_form_would_be_found(statement: str) -> None:
    assert CUDA is not None
    text = f"{{\n\t{statement};\n}}\n"
    assert list(refusals(text)) == list(forms_in(text)) == [statement.split()[0]]


def is_clustered(case: Case) -> bool:
    return "of_cta" in case.name


@pytest.mark.parametrize(
    "case", [case for case in instructions.cases() if not is_clustered(case)], ids=lambda case: case.name
)
def test_golden_vectors_from_ptx(case: Case) -> None:
    """The PTX gives what `python -m pagedtree check` expects of a GPU."""
    assert SIMT is not None and CUDA is not None
    with executed_from_ptx(SIMT, CUDA, lambda name: "18instruction_kernel" in name) as executed:
        row = run_row(case, Place(torch.device("cpu"), "simt"))
    assert executed and (row.status, row.detail) == (OK, "")


# What nvcc makes of plain C++, against plain Python -------------------------------------------------------------------


def bits(word: int) -> str:
    return f"{word:032b}"


def low_word(value: int) -> int:
    return value & 0xFFFFFFFF


WORDS: list[tuple[str, Callable[[int, int, int], int]]] = [
    ("brev.b32 %r0, %r1", lambda x, y, z: int(bits(x)[::-1], 2)),
    ("bfind.u32 %r0, %r1", lambda x, y, z: x.bit_length() - 1),
    ("bfind.shiftamt.u32 %r0, %r1", lambda x, y, z: 32 - x.bit_length()),
    ("shf.l.wrap.b32 %r0, %r1, %r2, %r3", lambda x, y, z: (y << 32 | x) << z % 32 >> 32),
    ("shf.r.wrap.b32 %r0, %r1, %r2, %r3", lambda x, y, z: (y << 32 | x) >> z % 32),
    ("mul.hi.u32 %r0, %r1, %r2", lambda x, y, z: x * y >> 32),
]


def run_on(statement: str, registers: dict[str, Any]) -> Block:
    entry = Module(f"{HEADER}{REGISTERS}\n{statement};\nret;\n}}\n").entry("kernel")
    block = Block(entry, bytes(64), Memory(), (0, 0, 0), (128, 1, 1), (1, 1, 1), 1024)
    block.registers |= registers
    block.run()
    return block


@pytest.mark.parametrize(("statement", "expected"), WORDS)
def test_words(statement: str, expected: Callable[[int, int, int], int]) -> None:
    given = np.random.default_rng(1).integers(1, 2**32, (3, 128), np.uint32)
    given[0, :32] = 1 << np.arange(32)
    block = run_on(statement, {f"%r{i + 1}": row.copy() for i, row in enumerate(given)})
    assert block.registers["%r0"].tolist() == [low_word(expected(*map(int, column))) for column in given.T]


def test_the_upper_half_of_a_product_of_64_bits() -> None:
    x, y = np.random.default_rng(2).integers(0, 2**64, (2, 128), np.uint64)
    found = run_on("mul.hi.u64 %rd0, %rd1, %rd2", {"%rd1": x, "%rd2": y}).registers["%rd0"]
    assert found.tolist() == [int(a) * int(b) >> 64 for a, b in zip(x, y, strict=True)]


def test_lanes_with_the_same_word() -> None:
    words = np.random.default_rng(3).integers(0, 5, 128, np.uint32)
    found = run_on("match.any.sync.b32 %r0, %r1, -1", {"%r1": words}).registers["%r0"].tolist()
    for lane, mask in enumerate(found):
        warp = words[lane // 32 * 32 :][:32]
        assert mask == sum(1 << i for i in range(32) if warp[i] == words[lane])


def test_numbers() -> None:
    """One rounding of x y + z, also down, and signs; of doubles the product alone has 106 bits."""
    x, y, z = np.random.default_rng(4).standard_normal((3, 128)).astype(np.float32)
    z[:64] = -x[:64] * y[:64]
    registers = {f"%f{i + 1}": values.view(np.uint32) for i, values in enumerate((x, y, z))}
    below = run_on("fma.rm.f32 %f0, %f1, %f2, %f3", registers).registers["%f0"].view(np.float32)
    for found, *given in zip(below, x, y, z, strict=True):
        a, b, c = (Fraction(float(value)) for value in given)
        assert Fraction(float(found)) <= a * b + c < Fraction(float(np.nextafter(found, np.float32(np.inf))))
    signs = run_on("copysign.f32 %f0, %f1, %f2", registers).registers["%f0"].view(np.float32)
    assert (signs == np.copysign(y, x)).all()
    x, y = np.random.default_rng(5).standard_normal((2, 128))
    registers = {f"%fd{i + 1}": values.view(np.uint64) for i, values in enumerate((x, y, -x * y))}
    rest = run_on("fma.rn.f64 %fd0, %fd1, %fd2, %fd3", registers).registers["%fd0"].view(np.float64)
    assert rest.tolist() == [float(Fraction(a) * Fraction(b) - Fraction(a * b)) for a, b in zip(x, y, strict=True)]


def test_codes_of_e4m3() -> None:
    """Each code's own number, ties between neighbours, and what is too large, as torch converts them."""
    codes = np.arange(256, dtype=np.uint8)
    numbers = from_e4m3(codes)[codes & 127 != 127]
    assert (to_e4m3(numbers) == codes[codes & 127 != 127]).all()
    middles = (numbers[:126] + numbers[1:127]) / 2
    expected = torch.from_numpy(middles).float().to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (to_e4m3(middles) == expected).all()
    assert to_e4m3(np.array([1e6, -np.inf, np.nan])).tolist() == [126, 254, 127]
