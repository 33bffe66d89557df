"""Hopper's instructions as tools/ptx interprets them, each against plain numpy, and one kernel that nvcc compiled.

The layouts are written here once more, element by element, after the PTX manual's figures.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ptx import execute
from ptx.execute import executed_from_ptx, simt_library
from ptx.formats import from_bfloat16, to_bfloat16
from ptx.interpreter import Block
from ptx.mbarriers import TensorMap
from ptx.module import Entry, Fault, Module
from ptx.state import PARAM, Memory
from ptx.warpgroups import operand_addresses

from pagedtree import _C
from pagedtree.check.case import Case, Place
from pagedtree.check.cases import instructions_sm90
from pagedtree.check.runner import OK, run_row
from pagedtree.testing import backends
from pagedtree.tools.cubin import cuda_library, find_cuobjdump

SIMT = simt_library()
CUDA = cuda_library()
ROOT = Path(__file__).parents[2]
HEADER = ".version 8.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 memory[];\n"
REGISTERS = ".reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<40>; .reg .b64 %rd<9>; .reg .f32 %f<260>;\n"
PARAMS = ".param .u64 pointer, .param .align 128 .b8 map[128]"


def kernel(body: str) -> str:
    return f"{HEADER}.visible .entry kernel({PARAMS}) {{\n{REGISTERS}{body}\nret;\n}}\n"


def block_of(body: str, threads: int = 128, shared_bytes: int = 1 << 17, params: bytes = bytes(256)) -> Block:
    """A CTA that is to run this PTX."""
    entry = Module(kernel(body)).entry("kernel")
    return Block(entry, params, Memory(), (0, 0, 0), (threads, 1, 1), (1, 1, 1), shared_bytes)


def bits_of(values: np.ndarray, kind: str) -> np.ndarray:
    return to_bfloat16(values) if kind == "bf16" else values.astype(np.float16).view(np.uint16)


def values_of(bits: np.ndarray, kind: str) -> np.ndarray:
    return from_bfloat16(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    return values_of(bits_of(values, kind), kind)


def store_k_major(shared: np.ndarray, start: int, bits: np.ndarray, stride: int) -> None:
    """Rows of 64 k: `stride` bytes from eight rows to the next, 128 from a row to the next, swizzled."""
    for row, values in enumerate(bits):
        line = start + row // 8 * stride + row % 8 * 128
        for column in range(8):
            piece = line + (column ^ row % 8) * 16
            shared[piece : piece + 16] = values[column * 8 : column * 8 + 8].view(np.uint8)


def store_outer_major(shared: np.ndarray, start: int, bits: np.ndarray, leading: int, stride: int) -> None:
    """bits [n, k]: a line holds 64 n of one k."""
    for panel in range(len(bits) // 64):
        for k in range(bits.shape[1]):
            line = start + panel * leading + k // 8 * stride + k % 8 * 128
            for column in range(8):
                piece, n = line + (column ^ k % 8) * 16, panel * 64 + column * 8
                shared[piece : piece + 16] = np.ascontiguousarray(bits[n : n + 8, k]).view(np.uint8)


def descriptor(start: int, leading: int, stride: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 62


def mma(columns: int, kind: str, a: str, b: int, accumulate: str, transposed: str) -> str:
    d = ", ".join(f"%f{i}" for i in range(columns // 2))
    return (
        f"mov.b64 %rd1, {b};\n"
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{d}}}, {a}, %rd1, {accumulate}, 1, 1, "
        f"{transposed};\n"
    )


FENCE, COMMIT = "wgmma.fence.sync.aligned;\n", "wgmma.commit_group.sync.aligned;\n"
WAIT = "wgmma.wait_group.sync.aligned 0;\n"
TRUTH = "setp.eq.u32 %p1, 0, 0;\nsetp.ne.u32 %p0, 0, 0;\n"  # p1 is true, p0 is false


def sums_of(block: Block, columns: int, first_thread: int = 0) -> np.ndarray:
    """[64, columns] from the registers, after the manual's figure of D."""
    d = np.zeros((64, columns), np.float32)
    for warp in range(4):
        for lane in range(32):
            for i in range(columns // 2):
                row = 16 * warp + lane // 4 + (8 if i % 4 >= 2 else 0)
                thread = first_thread + warp * 32 + lane
                d[row, i // 4 * 8 + lane % 4 * 2 + i % 2] = block.registers[f"%f{i}"][thread].view(np.float32)
    return d


def a_in_registers(bits: np.ndarray) -> dict[str, np.ndarray]:
    """[64, 16] -> four words of each of 128 threads."""
    words = {f"%r{i}": np.zeros(128, np.uint32) for i in range(4)}
    for thread in range(128):
        row, k = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        for i, (down, right) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
            low, high = bits[row + down, k + right : k + right + 2].astype(np.uint32)
            words[f"%r{i}"][thread] = high << np.uint32(16) | low
    return words


CASES = [  # columns, type, A in registers, B N-major
    (64, "bf16", False, False),
    (128, "f16", False, True),
    (256, "bf16", True, False),
    (128, "bf16", True, True),
    (256, "f16", True, True),
]


@pytest.mark.parametrize(("columns", "kind", "in_registers", "transposed"), CASES)
def test_wgmma(columns: int, kind: str, in_registers: bool, transposed: bool) -> None:
    """The first of two multiplications has scale-d 0, the second adds; strides with gaps between the atoms."""
    random = np.random.default_rng(columns)
    a, b = (rounded(random.standard_normal((n, 64)).astype(np.float32), kind) for n in (64, columns))
    stride_a, stride_b, leading = 1024 + 1024, (1024, 3072)[columns == 64], 8 * 1024 + 1024
    at_a, at_b = 0, 32 * 1024
    steps = []
    for step in (0, 2):  # k from 0 and from 32: the second starts within the rows of 128 bytes
        a_text = "{%r0, %r1, %r2, %r3}" if in_registers else "%rd0"
        load_a = "" if in_registers else f"mov.b64 %rd0, {descriptor(at_a + step * 32, 16, stride_a)};\n"
        start, offsets = (at_b + step * 2 * 1024, (leading, 1024)) if transposed else (at_b + step * 32, (16, stride_b))
        flags = str(int(transposed)) if in_registers else f"0, {int(transposed)}"
        accumulate = "%p1" if step else "%p0"
        steps.append(load_a + mma(columns, kind, a_text, descriptor(start, *offsets), accumulate, flags))
    block = block_of(TRUTH + FENCE + "".join(steps) + COMMIT + WAIT)
    store_k_major(block.shared, at_a, bits_of(a, kind), stride_a)
    if transposed:
        store_outer_major(block.shared, at_b, bits_of(b, kind), leading, 1024)
    else:
        store_k_major(block.shared, at_b, bits_of(b, kind), stride_b)
    first = random.standard_normal(128).astype(np.float32)
    for i in range(columns // 2):
        block.registers[f"%f{i}"] = first.view(np.uint32)  # what scale-d 0 ignores
    ks = [slice(0, 16), slice(0, 16) if in_registers else slice(32, 48)]
    if in_registers:
        block.registers.update(a_in_registers(bits_of(a, kind)[:, :16]))
    block.run()
    expected = a[:, ks[0]] @ b[:, :16].T + a[:, ks[1]] @ b[:, 32:48].T
    np.testing.assert_allclose(sums_of(block, columns), expected, rtol=1e-5, atol=1e-5)


def test_operand_addresses_by_hand() -> None:
    """Elements of the manual's figures of the 128-byte swizzle, at 2048."""
    k_major = operand_addresses(descriptor(2048, 16, 1024), 64, False)
    assert k_major[0, 0] == 2048 and k_major[0, 8] == 2048 + 16
    assert k_major[1, 0] == 2048 + 128 + 16 and k_major[1, 8] == 2048 + 128  # columns 0 and 1 change places
    assert k_major[7, 3] == 2048 + 7 * 128 + 7 * 16 + 6 and k_major[8, 0] == 2048 + 1024
    assert operand_addresses(descriptor(2048 + 32, 16, 1024), 64, False)[2, 0] == 2048 + 2 * 128  # column 2 xor 2
    n_major = operand_addresses(descriptor(2048, 8192, 1024), 128, True)
    assert n_major[1, 0] == 2048 + 2 and n_major[0, 1] == 2048 + 128 + 16 and n_major[8, 1] == 2048 + 128
    assert n_major[0, 8] == 2048 + 1024 and n_major[64, 0] == 2048 + 8192


ONE = FENCE + mma(64, "bf16", "{%r0, %r1, %r2, %r3}", descriptor(0, 16, 1024), "%p0", "0") + COMMIT


def test_wgmma_is_late() -> None:
    """B is what it is at the wait; a group that nobody has waited for has no result."""
    store = "mov.u32 %r9, %tid.x;\nshl.b32 %r9, %r9, 6;\nmov.u32 %r8, 0;\n" + "".join(
        f"st.shared.u32 [%r9+{i * 4}], %r8;\n" for i in range(16)
    )
    other = re.sub(r"%f(\d+)", lambda register: f"%f{int(register[1]) + 100}", ONE)
    ones = bits_of(np.ones((64, 64), np.float32), "bf16")
    results = []
    for body in (ONE + WAIT + store, ONE + store + WAIT, ONE + other + WAIT.replace(" 0", " 1")):
        block = block_of(TRUTH + body)
        store_k_major(block.shared, 0, ones, 1024)
        block.registers.update(a_in_registers(ones[:, :16]))
        if "wait_group.sync.aligned 1" in body:
            with pytest.raises(Fault, match="exits with wgmma in flight"):
                block.run()
            assert "%f100" not in block.registers
        else:
            block.run()
        results.append(np.unique(sums_of(block, 64)).tolist())
    assert results == [[16], [0], [16]]


@pytest.mark.parametrize(
    ("early", "fault"),
    [
        ("mov.f32 %f200, %f3;\n", "register of a wgmma in flight"),
        ("mov.u32 %r2, 0;\n", "register of a wgmma in flight"),
        ("mov.u32 %r9, %r2;\n", None),  # a read of A does no harm
        ("mov.f32 %f200, %f100;\n", None),
    ],
)
def test_registers_of_a_wgmma_in_flight(early: str, fault: str | None) -> None:
    block = block_of(TRUTH + ONE + early + WAIT)
    block.shared[:] = 0
    if fault is None:
        return block.run()
    with pytest.raises(Fault, match=fault):
        block.run()


def test_a_warpgroup_is_four_warps() -> None:
    """Warps that come by different ways multiply together; three warps do not multiply."""
    parted = "mov.u32 %r9, %tid.x;\nand.b32 %r9, %r9, 32;\nsetp.ne.u32 %p2, %r9, 0;\n@%p2 bra AWAY;\nBACK:\n"
    block = block_of(TRUTH + parted + ONE + WAIT + "bra DONE;\nAWAY:\nmov.u32 %r7, 1;\nbra BACK;\nDONE:\n", 256)
    ones = bits_of(np.ones((64, 64), np.float32), "bf16")
    store_k_major(block.shared, 0, ones, 1024)
    block.registers.update({r: np.tile(v, 2) for r, v in a_in_registers(ones[:, :16]).items()})
    block.run()
    assert (sums_of(block, 64) == 16).all() and (sums_of(block, 64, 128) == 16).all()
    with pytest.raises(Fault, match="deadlock"):
        block_of(TRUTH + ONE + WAIT, 96).run()


@pytest.mark.parametrize(
    "together", ["redux.sync.add.s32 %r1, %r9, -1;\n", "bar.warp.sync -1;\nld.shared.u32 %r1, [%r8];\n"]
)
def test_a_warp_waits_for_its_threads(together: str) -> None:
    """Those that come by another way, further down."""
    body = (
        "mov.u32 %r9, %tid.x;\nand.b32 %r9, %r9, 1;\nsetp.ne.u32 %p2, %r9, 0;\nmov.u32 %r8, 0;\nmov.u32 %r7, 16;\n"
        f"@%p2 bra AWAY;\nBACK:\n{together}bra DONE;\nAWAY:\nst.shared.u32 [%r8], %r7;\nbra BACK;\nDONE:\n"
    )
    block = block_of(body, 64)
    block.run()
    assert (block.registers["%r1"] == 16).all()
    with pytest.raises(Fault, match="deadlock"):
        block_of(body.replace("bra BACK", "bra DONE"), 64).run()


WAIT_FOR_LOAD = "{.reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%r0], 0; @!p bra L;}\n"


def load_kernel(coordinates: tuple[int, ...], expected_bytes: int, wait: str) -> str:
    """Thread 0 loads a box to 2048, all threads wait; thread t reads its 16 bytes at 2048 + 16 t."""
    text = ", ".join(str(c) for c in coordinates)
    return (
        "mov.u32 %r1, %tid.x;\nsetp.ne.u32 %p1, %r1, 0;\nmov.u32 %r0, 0;\nmov.u32 %r2, 2048;\n@%p1 bra READY;\n"
        "mbarrier.init.shared::cta.b64 [%r0], 1;\nfence.mbarrier_init.release.cluster; fence.proxy.async;\n"
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r0], {expected_bytes};\nmov.b64 %rd0, map;\n"
        f"cp.async.bulk.tensor.{len(coordinates)}d.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[%r2], [%rd0, {{{text}}}], [%r0];\nREADY:\nbar.sync 0;\n{wait}"
        "shl.b32 %r3, %r1, 4;\nadd.u32 %r3, %r3, 2048;\nld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r3];\n"
    )


def run_load(array: np.ndarray, box: tuple[int, ...], at: tuple[int, ...], missing: int = 0, wait: bool = True):
    """Bytes [threads, 16] that the threads read."""
    size = int(np.prod(box)) * array.itemsize
    block = block_of(load_kernel(at, size - missing, WAIT_FOR_LOAD if wait else ""), max(size // 16, 32))
    block.tensor_maps[PARAM + block.entry.params["map"]] = TensorMap.of(array, box)
    block.run()
    return np.stack([block.registers[f"%r{i}"] for i in range(4, 8)], 1).view(np.uint8)


@pytest.mark.parametrize("at", [(64, 2, 1, 3), (0, 0, 0, 5), (64, 3, 1, 4), (0, -1, 0, 0)])
def test_load_of_four_axes(at: tuple[int, int, int, int]) -> None:
    """[pages, 2, tokens, 128] of 16 bits by boxes [2, 1, 4, 64]: zeros outside, rows of 128 bytes swizzled."""
    array = np.random.default_rng(1).integers(1, 1 << 16, (6, 2, 5, 128), np.uint16)
    read = run_load(array, (64, 4, 1, 2), at).reshape(-1, 8, 16)
    for line, (page, token) in enumerate((p, t) for p in range(2) for t in range(4)):
        page, token = page + at[3], token + at[1]
        inside = page < 6 and 0 <= token < 5
        expected = array[page, at[2], token, at[0] : at[0] + 64] if inside else np.zeros(64, np.uint16)
        for column in range(8):
            assert read[line, column ^ line % 8].view(np.uint16).tolist() == expected[column * 8 :][:8].tolist()


def test_load_of_three_axes_with_strides() -> None:
    array = np.random.default_rng(2).integers(1, 256, (4, 8, 256), np.uint8)[::2, :, :128]
    read = run_load(array, (128, 8, 1), (0, 0, 1)).reshape(8, 8, 16)
    for line in range(8):
        assert (read[line][[column ^ line for column in range(8)]].reshape(-1) == array[1, line]).all()


def test_load_that_nobody_awaits_or_whose_bytes_are_miscounted() -> None:
    array = np.ones((1, 8, 64), np.uint16)
    with pytest.raises(Fault, match="deadlock"):
        run_load(array, (64, 8, 1), (0, 0, 0), missing=16)
    with pytest.raises(Fault, match="in flight"):
        run_load(array, (64, 8, 1), (0, 0, 0), wait=False)


def test_phases_of_an_mbarrier() -> None:
    """64 threads produce and 64 consume one word through two mbarriers; three phases."""
    wait = "{{.reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%r{}], %r{}; @!p bra L;}}\n"
    body = (
        "mov.u32 %r1, %tid.x;\nmov.u32 %r10, 0;\nmov.u32 %r11, 8;\nsetp.ne.u32 %p1, %r1, 0;\n@%p1 bra READY;\n"
        "mbarrier.init.shared::cta.b64 [%r10], 64;\nmbarrier.init.shared::cta.b64 [%r11], 64;\nREADY:\nbar.sync 0;\n"
        "mov.u32 %r2, 0;\nmov.u32 %r5, 0;\nsetp.gt.u32 %p2, %r1, 63;\nLOOP:\nand.b32 %r3, %r2, 1;\n@%p2 bra PRODUCE;\n"
        + wait.format(10, 3)
        + "ld.shared.u32 %r6, [memory+16];\nmad.lo.u32 %r5, %r5, 10, %r6;\nmbarrier.arrive.shared::cta.b64 _, [%r11];\n"
        "bra NEXT;\nPRODUCE:\nxor.b32 %r4, %r3, 1;\n" + wait.format(11, 4) + "add.u32 %r7, %r2, 1;\n"
        "st.shared.u32 [memory+16], %r7;\nmbarrier.arrive.shared::cta.b64 _, [%r10];\nNEXT:\nadd.u32 %r2, %r2, 1;\n"
        "setp.lt.u32 %p3, %r2, 3;\n@%p3 bra LOOP;\n"
    )
    block = block_of(body)
    block.run()
    assert (block.registers["%r5"][:64] == 123).all()
    with pytest.raises(Fault, match="deadlock"):
        block_of(body.replace("[%r11], 64", "[%r11], 65")).run()
    with pytest.raises(Fault, match="not initialised"):
        block_of(body.replace("mbarrier.init.shared::cta.b64 [%r11], 64;", "")).run()


COPY = (
    "mov.u32 %r1, %tid.x;\nmov.u32 %r0, 0;\nsetp.ne.u32 %p1, %r1, 0;\n@%p1 bra READY;\n"
    "mbarrier.init.shared::cta.b64 [%r0], 32;\nREADY:\nbar.sync 0;\nld.param.u64 %rd0, [pointer];\n"
    "shl.b32 %r2, %r1, 4;\ncvt.u64.u32 %rd1, %r2;\nadd.u64 %rd1, %rd0, %rd1;\nadd.u32 %r3, %r2, 128;\n"
    "cp.async.cg.shared.global [%r3], [%rd1], 16;\n"
)
ARRIVE = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r0];\n"


def test_copies_that_an_mbarrier_counts() -> None:
    """Thread t reads what thread 31 - t copied; a copy after the arrival is not counted."""
    words = np.arange(128, dtype=np.uint32)
    params = struct.pack("Q", words.ctypes.data) + bytes(256)
    read = "xor.b32 %r4, %r2, 496;\nld.shared.u32 %r5, [%r4+128];\n"
    block = block_of(COPY + ARRIVE + WAIT_FOR_LOAD + read, 32, params=params)
    block.run()
    assert (block.registers["%r5"] == words[::4][::-1]).all()
    with pytest.raises(Fault, match="deadlock"):  # 32 arrivals of 33
        block_of((COPY + ARRIVE + WAIT_FOR_LOAD).replace("b64 [%r0], 32", "b64 [%r0], 33"), 32, params=params).run()
    late = COPY.replace("cp.async.cg", ARRIVE + "cp.async.cg") + WAIT_FOR_LOAD + read + "cp.async.wait_all;\n"
    block = block_of(late.replace("wait_all", "commit_group;\ncp.async.wait_group 0"), 32, params=params)
    block.run()
    assert (block.registers["%r5"] == 0xFFFFFFFF).all()


def test_named_barriers() -> None:
    """Two pairs of warps, each with a barrier from a register, and a warp that arrives and goes on."""
    body = (
        "mov.u32 %r1, %tid.x;\nshr.u32 %r2, %r1, 6;\nadd.u32 %r3, %r2, 1;\nmov.u32 %r5, 64;\nand.b32 %r6, %r1, 63;\n"
        "shl.b32 %r7, %r1, 2;\nst.shared.u32 [%r7], %r1;\nbar.sync %r3, %r5;\nxor.b32 %r8, %r7, 128;\n"
        "ld.shared.u32 %r9, [%r8];\nsetp.gt.u32 %p1, %r1, 95;\n@%p1 bra LAST;\nsetp.gt.u32 %p2, %r1, 63;\n"
        "@%p2 bra FIRST;\nbra DONE;\nFIRST:\nbar.sync 5, 64;\nld.shared.u32 %r10, [memory+1024];\nbra DONE;\nLAST:\n"
        "mov.u32 %r11, 7;\nst.shared.u32 [memory+1024], %r11;\nbar.arrive 5, 64;\nDONE:\n"
    )
    block = block_of(body)
    block.run()
    assert (block.registers["%r9"] == np.arange(128) ^ 32).all()
    assert (block.registers["%r10"][64:96] == 7).all()
    for wrong in (body.replace("bar.arrive 5, 64;", ""), body.replace("bar.arrive 5, 64", "bar.arrive 6, 64")):
        with pytest.raises(Fault, match="deadlock"):
            block_of(wrong).run()


def hopper_ptx(folder: Path, *options: str) -> str:
    """What nvcc makes of the self-test's kernel: "bf16" gets its keys by TMA, "f16" by cp.async."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on the PATH")
    source, ptx = folder / "hopper.cu", folder / "hopper.ptx"
    parameters = ", ".join(
        f"const __grid_constant__ {kind}" for kind in ["pagedtree::ptx::TensorMap"] * 3 + ["probe::HopperParams<{0}>"]
    )
    instances = [
        f"template __global__ void probe::hopper<{dtype}, {copies}>({parameters.format(dtype)});\n"
        for dtype, copies in (("__nv_bfloat16", "false"), ("__half", "true"))
    ]
    source.write_text('#include "hopper.cuh"\n' + "".join(instances))
    includes = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'simt'}"]
    target = ["-gencode", "arch=compute_90a,code=compute_90a", "-std=c++17", "-ptx"]
    subprocess.run(["nvcc", *target, *options, *includes, source, "-o", ptx], check=True, capture_output=True)
    return ptx.read_text()


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Entry]:
    module = Module(hopper_ptx(tmp_path_factory.mktemp("ptx")))
    return {"f16" if "__half" in name else "bf16": module.entry(name) for name in module.heads}


def test_a_build_for_debugging_ends_long_waits(tmp_path: Path) -> None:
    """Behind each try of a wait in a loop; other builds wait as long as it takes."""
    loop = r"L: mbarrier\.try_wait\S* p, [^;]*;"
    ending = r" add\.u32 turns, turns, 1; setp\.eq\.and\.u32 late, turns, (\d+), !p; @late trap; @!p bra L;"
    plain, trapping = hopper_ptx(tmp_path), hopper_ptx(tmp_path, "-DPAGEDTREE_TRAP_SPINS")
    waits = len(re.findall(loop, plain))
    assert waits > 0 and "trap" not in plain
    assert re.findall(loop + ending, trapping) == [str(2**26)] * waits == [str(2**26)] * trapping.count("try_wait")
    assert trapping.count("mov.u32 turns, 0;") == waits


def run_hopper(entries: dict[str, Entry], dtype: str, bug: str) -> float:
    """The largest error of (Q K^T) V over pages, over the largest result."""
    entry, random, tiles = entries[dtype], np.random.default_rng(3), 3
    pages = random.permutation(tiles * 4 + 3).astype(np.int32)
    shapes = [(1, 1, 64, 128), (len(pages), 1, 16, 128), (len(pages), 1, 16, 128)]
    q, k, v = (bits_of(0.3 * random.standard_normal(shape).astype(np.float32), dtype) for shape in shapes)
    out = np.full((64, 128), np.nan, np.float32)
    pointers = [array.ctypes.data for array in (q, k, v, out, pages)]
    params = bytes(384) + struct.pack("QQQQQii", *pointers, tiles, bug_number(bug))
    block = Block(entry, params, Memory(), (0, 0, 0), (160, 1, 1), (1, 1, 1), 81920 + 1024)
    for start, array in zip(entry.params.values(), (q, k, v), strict=False):
        block.tensor_maps[PARAM + start] = TensorMap.of(array, (64, array.shape[2], 1, 1))
    block.run()
    used = pages[: tiles * 4]
    q, k, v = (values_of(array, dtype).reshape(-1, 128) for array in (q[0], k[used], v[used]))
    expected = rounded(q @ k.T, dtype) @ v
    return float(np.abs(out - expected).max() / np.abs(expected).max())


def bug_number(name: str) -> int:
    text = (ROOT / "tests" / "simt" / "bugs.h").read_text()
    return re.findall(r"^  (k\w+),", text, re.MULTILINE).index(name)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_kernel_from_nvcc(hopper: dict[str, Entry], dtype: str) -> None:
    assert run_hopper(hopper, dtype, "kNone") < 0.01


@pytest.mark.parametrize(
    ("dtype", "bug", "fault"),
    [
        ("bf16", "kNoEmptyWait", "more arrivals"),
        ("bf16", "kShortExpect", "deadlock"),
        ("bf16", "kNoFullWait", "in flight"),
        ("bf16", "kNoWgmmaWait", None),
        ("bf16", "kUnawaitedLoad", "in flight"),
        ("f16", "kOtherStride", None),
        ("f16", "kSwappedRows", None),
    ],
)
def test_bugs_of_a_kernel_show(hopper: dict[str, Entry], dtype: str, bug: str, fault: str | None) -> None:
    if fault is None:
        assert not run_hopper(hopper, dtype, bug) < 0.01
    else:
        with pytest.raises(Fault, match=fault):
            run_hopper(hopper, dtype, bug)


# The wrappers of csrc/cuda/tile/ptx_sm90_cuda.cuh, as nvcc has compiled them ------------------------------------------


class BlockWithMap(Block):
    """Has the tensor map of `Call` in csrc/cuda/instructions_sm90.cu, which only a driver could make."""

    def __init__(self, entry: Entry, params: bytes, *arguments: Any) -> None:
        super().__init__(entry, params, *arguments)
        (words,) = struct.unpack_from("<Q", params)
        image = words + 4 * (instructions_sm90.NUMBERS + instructions_sm90.THREADS * instructions_sm90.OWN)
        tensor = TensorMap(image, 2, (128, 5, 3, 4), (2, 3 * 256, 256, 15 * 256), (64, 4, 2, 2))
        call = PARAM + next(iter(entry.params.values()))
        self.tensor_maps |= {call + 64: tensor, call + 128: tensor}  # CUDA 13 has aligned it to more than CUDA 12


@pytest.mark.skipif(SIMT is None or "simt" not in backends(), reason="built without simt")
@pytest.mark.skipif(CUDA is None or find_cuobjdump() is None, reason="no CUDA library or no cuobjdump")
@pytest.mark.skipif("9.0a+PTX" not in _C.build_info()["cuda_architectures"], reason="built without PTX for 9.0a")
@pytest.mark.parametrize("case", list(instructions_sm90.cases()), ids=lambda case: case.name)
def test_golden_vectors_from_ptx(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The PTX gives what `python -m pagedtree check` expects of a GPU."""
    monkeypatch.setattr(execute, "Block", BlockWithMap)
    assert SIMT is not None and CUDA is not None
    with executed_from_ptx(SIMT, CUDA, lambda name: "instruction_sm90_kernel" in name) as executed:
        row = run_row(case, Place(torch.device("cpu"), "simt"))
    assert executed and (row.status, row.detail) == (OK, "")
