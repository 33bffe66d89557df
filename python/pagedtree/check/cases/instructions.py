"""Each function of pagedtree::ptx (csrc/cuda/tile/ptx.cuh) against the result that the PTX manual defines.

The kernels are in csrc/cuda/instructions.cu. Hopper's functions are in instructions_sm90.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from pagedtree._engine import library
from pagedtree.check.case import Case, Difference, NotApplicable, Place, equal

Words = np.ndarray
BACKENDS = ("simt", "cuda")
CLUSTER = 4  # CTAs of a cluster, where the device has clusters
TABLE = "pagedtree_instructions"  # the function of the library that gives its kernels


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        (
            "run",
            ctypes.CFUNCTYPE(
                ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)
            ),
        ),
    )


class _Instructions(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("ctas", "threads", "in_words", "out_words", "count")),
        ("items", ctypes.POINTER(_Instruction)),
    )


def has_table(backend: str, table: str) -> bool:
    return hasattr(library(backend), table)


def _items(backend: str, table: str) -> _Instructions:
    function = getattr(library(backend), table)
    function.restype = ctypes.POINTER(_Instructions)
    contents: _Instructions = function().contents
    return contents


def run_instruction(name: str, words: Words, place: Place, table: str = TABLE) -> tuple[Words, int]:
    """Returns uint32 [ctas, threads, words], computed from words [threads, words], and the CTAs of a cluster."""
    items = _items(place.backend, table)
    (item,) = (item for item in items.items[: items.count] if item.name == name.encode())
    assert words.shape == (items.threads, items.in_words) and words.dtype == np.uint32
    inputs = place.put(torch.from_numpy(words.view(np.int32).copy()))
    out = torch.zeros((items.ctas, items.threads, items.out_words), dtype=torch.int32, device=place.device)
    cluster = ctypes.c_int32()
    stream = torch.cuda.current_stream(place.device).cuda_stream if place.device.type == "cuda" else None
    with torch.cuda.device(place.device if place.device.type == "cuda" else -1):
        error = item.run(inputs.data_ptr(), out.data_ptr(), stream, ctypes.byref(cluster))
    if error is not None:
        raise RuntimeError(error.decode())
    return out.cpu().numpy().view(np.uint32), cluster.value


def instruction_names(backend: str, table: str = TABLE) -> list[str]:
    items = _items(backend, table)
    return [item.name.decode() for item in items.items[: items.count]]


# Inputs: [64 threads, 12 words] ---------------------------------------------------------------------------------------


def any_words(seed: int) -> Words:
    return np.random.default_rng(seed).integers(0, 2**32, (64, 12), dtype=np.uint32)


def numbers(dtype: torch.dtype) -> Callable[[int], Words]:
    """Returns two numbers in [-2, 2) per word for an mma's operands, then one fp32 per word for its sums."""

    def words(seed: int) -> Words:
        rng = np.random.default_rng(seed)
        operands = torch.from_numpy(rng.uniform(-2, 2, (64, 16))).to(dtype).view(torch.int16).numpy()
        sums = rng.uniform(-2, 2, (64, 4)).astype(np.float32)
        return np.concatenate([operands.view(np.uint32), sums.view(np.uint32)], axis=1)

    return words


def tf32_numbers(seed: int) -> Words:
    """Returns numbers in [-2, 2), one per word; the last 13 bits are 0 except in the sums."""
    values = np.random.default_rng(seed).uniform(-2, 2, (64, 12)).astype(np.float32).view(np.uint32)
    values[:, :8] &= np.uint32(0xFFFFE000)
    return values


def exponents(seed: int) -> Words:
    values = np.random.default_rng(seed).uniform(-152, 129, (64, 12)).astype(np.float32)
    values[:8, 0] = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5]
    values[8:16, 1] = [-125.0, -127.0, -149.0, -150.0, 127.0, 128.0, 1e30, -1e30]
    values[16:20, 2] = np.array([1, 2**23 - 1, 2**31 + 1, 2**31], dtype=np.uint32).view(np.float32)  # subnormal
    return values.view(np.uint32)


def float8_words(seed: int) -> Words:
    """Returns four e4m3 codes per word, all but NaN."""
    codes = any_words(seed).view(np.uint8)
    return np.where(codes % 128 == 127, codes - np.uint8(1), codes).view(np.uint32)


def float8_numbers(seed: int) -> Words:
    """Returns numbers around e4m3 values: ties and their neighbours, subnormal ones, too large ones, NaN."""
    rng = np.random.default_rng(seed)
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    extremes = codes.new_tensor([464.0, 480.0, np.inf, 1e-30, 2.0**-149])
    middles = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, extremes])
    bits = np.concatenate([middles.float().view(torch.int32).numpy(), np.array([0x7F800001, 0x7FC00000])])
    neighbours = rng.choice(bits, (64, 12)) + rng.integers(-1, 2, (64, 12))
    signs = rng.integers(0, 2, (64, 12), dtype=np.uint32) << np.uint32(31)
    return np.where(rng.random((64, 12)) < 0.8, neighbours.clip(0).astype(np.uint32) | signs, any_words(seed))


def pairs(dtype: torch.dtype) -> Callable[[int], Words]:
    """Returns numbers to compare, word i with word i + 4: zeros of both signs, infinities, NaN, and equal ones, too."""

    def words(seed: int) -> Words:
        rng = np.random.default_rng(seed)
        specials = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1.5, torch.finfo(dtype).max, 1e-7, -1e-7]
        bits = torch.tensor(specials, dtype=dtype).view(torch.int32 if dtype == torch.float32 else torch.int16).numpy()
        choices = rng.choice(bits, (64, 48 // bits.itemsize)).view(np.uint32)
        return np.where(rng.random((64, 12)) < 0.5, choices, any_words(seed))

    return words


# Expected results: [64, 12] -> [64, 4] --------------------------------------------------------------------------------


def _by_warp(function: Callable[[Words], Words]) -> Callable[[Words], Words]:
    return lambda words: np.concatenate([function(words[:32]), function(words[32:])])


def _ldmatrix(words: Words, axes: tuple[int, ...] = (0, 1, 2)) -> Words:
    """Thread 8 i + r holds row r of 8x8 matrix i; thread l gets elements 2 (l % 4) and the next of row l // 4."""
    matrices = np.ascontiguousarray(words[:, :4]).view(np.uint16).reshape(4, 8, 8)
    pairs = np.ascontiguousarray(matrices.transpose(axes)).view(np.uint32)
    return np.array([[pairs[i, lane // 4, lane % 4] for i in range(4)] for lane in range(32)])


def fragments(words: Words, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns A [16, 16], B [16, 8] and the sums [16, 8] that the 32 threads of a warp hold, in float64."""
    bits = torch.from_numpy(np.ascontiguousarray(words[:, :6]).view(np.int16).copy())
    values = bits.view(dtype).double().numpy()  # [32, 12]
    a, b, sums = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for lane in range(32):
        group, pair = lane // 4, lane % 4 * 2
        for e in range(2):
            for i in range(4):  # rows g and g + 8, then the same for the columns from 8 on
                a[group + i % 2 * 8, pair + e + i // 2 * 8] = values[lane, 2 * i + e]
            for i in range(2):
                b[pair + e + i * 8, group] = values[lane, 8 + 2 * i + e]
                sums[group + i * 8, pair + e] = words[lane, 8:].view(np.float32)[2 * i + e]
    return a, b, sums


def _mma(dtype: torch.dtype) -> Callable[[Words], Words]:
    def multiply(words: Words) -> Words:
        a, b, sums = fragments(words, dtype)
        result = (a @ b + sums).astype(np.float32)
        lanes = [[result[lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2] for i in range(4)] for lane in range(32)]
        return np.array(lanes, dtype=np.float32).view(np.uint32)

    return multiply


def _mma_tf32(words: Words) -> Words:
    values = words.view(np.float32).astype(np.float64)
    a, b, result = np.zeros((16, 8)), np.zeros((8, 8)), np.zeros((32, 4))
    for lane in range(32):
        for i in range(4):
            a[lane // 4 + i % 2 * 8, lane % 4 + i // 2 * 4] = values[lane, i]
        for i in range(2):
            b[lane % 4 + i * 4, lane // 4] = values[lane, 4 + i]
    for lane in range(32):
        for i in range(4):
            result[lane, i] = (a @ b)[lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2] + values[lane, 8 + i]
    return result.astype(np.float32).view(np.uint32)


def _ex2(words: Words) -> Words:
    """2^x; subnormal numbers and results are 0 (.ftz)."""
    x = words[:, :4].view(np.float32).astype(np.float64)
    x = np.where(np.abs(x) < 2.0**-126, 0.0, x)
    with np.errstate(over="ignore", under="ignore"):
        y = np.exp2(x).astype(np.float32)
    return np.where(y < np.float32(2.0**-126), np.float32(0), y).view(np.uint32)


def _max_nan(dtype: torch.dtype) -> Callable[[Words], Words]:
    def larger(words: Words) -> Words:
        kind = torch.int32 if dtype == torch.float32 else torch.int16
        a, b = (torch.from_numpy(words[:, i : i + 4].copy().view(np.int32)).view(kind) for i in (0, 4))
        x, y = a.view(dtype).float(), b.view(dtype).float()
        nan = torch.tensor(0x7FFFFFFF if dtype == torch.float32 else 0x7FFF, dtype=kind)
        first = (x > y) | ((x == y) & ~torch.signbit(x))  # +0 is above -0
        return (
            torch.where(x.isnan() | y.isnan(), nan, torch.where(first, a, b)).view(torch.int32).numpy().view(np.uint32)
        )

    return larger


def _halves(words: Words, which: slice, scale: float) -> Words:
    """Returns two halves per word: its four e4m3 codes times `scale`."""
    codes = words[:, :4].copy().view(np.uint8).reshape(64, 4, 4)[:, :, which].reshape(64, 8)
    values = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float() * scale
    return values.half().view(torch.int16).numpy().view(np.uint32)


def _e4m3_from_floats(words: Words) -> Words:
    """Returns two numbers of each word: the nearest code, at most 448 in magnitude; NaN is 0x7f."""
    values = torch.from_numpy(words[:, :8].copy().view(np.float32))
    codes = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint32)
    codes = np.where(values.isnan().numpy(), np.uint32(0x7F), codes)
    return codes[:, ::2] | codes[:, 1::2] << np.uint32(8)


def _fetch_add(words: Words) -> Words:
    old, value = words[:, :2], words[:, 4:6]
    return np.stack([old, old + value], axis=2).reshape(64, 4)


def floats_within(limit: float, unit: float) -> Difference:
    """Returns a check whether fp32 words are off by more than limit * max(|value|, unit); NaN equals NaN."""

    def difference(found: Tensor, expected: Tensor) -> str:
        x, y = (tensor.to(torch.int32).view(torch.float32).double() for tensor in (found, expected))
        good = (x == y) | (x.isnan() & y.isnan()) | ((x - y).abs() <= limit * y.abs().clamp(min=unit))
        if good.all():
            return ""
        at = (~good).nonzero()[0].tolist()
        return (
            f"{int((~good).sum())} of {good.numel()} numbers are off, first at {at}: {x[tuple(at)]} not {y[tuple(at)]}"
        )

    return difference


# An mma may add its products in any order and cut the sums: 2^-22 of 16 products of up to 4 and of the
# accumulator. ex2.approx: 2 units in the last place.
SUMS, POWERS = floats_within(2.0**-22, 66.0), floats_within(2.0**-22, 2.0**-126)

# Name -> inputs, expected results, tolerance.
GOLDEN: dict[str, tuple[Callable[[int], Words], Callable[[Words], Words], Difference]] = {
    "ldmatrix_x4": (any_words, _by_warp(_ldmatrix), equal),
    "ldmatrix_x4_trans": (any_words, _by_warp(lambda words: _ldmatrix(words, (0, 2, 1))), equal),
    "mma_m16n8k16/bf16": (numbers(torch.bfloat16), _by_warp(_mma(torch.bfloat16)), SUMS),
    "mma_m16n8k16/fp16": (numbers(torch.float16), _by_warp(_mma(torch.float16)), SUMS),
    "mma_m16n8k8/tf32": (tf32_numbers, _by_warp(_mma_tf32), SUMS),
    "cp_async_16": (any_words, lambda words: words[:, :4] * (np.arange(64)[:, None] % 2 == 0), equal),
    "cp_async_wait": (any_words, lambda words: words[:, [0, 1, 6, 7]], equal),
    "ex2": (exponents, _ex2, POWERS),
    "max_nan/fp32": (pairs(torch.float32), _max_nan(torch.float32), equal),
    "max_nan/bf16": (pairs(torch.bfloat16), _max_nan(torch.bfloat16), equal),
    "max_nan/fp16": (pairs(torch.float16), _max_nan(torch.float16), equal),
    "half2_from_e4m3": (float8_words, lambda words: _halves(words, slice(2), 1.0), equal),
    "e4m3_from_floats": (float8_numbers, _e4m3_from_floats, equal),
    "move_e4m3": (float8_words, lambda words: _halves(words, slice(1, None, 2), 1 / 256), equal),
    "fetch_add": (any_words, _fetch_add, equal),
    "barrier_sync": (any_words, lambda words: words[np.arange(64) ^ 32, :4], equal),
    "barrier_arrive": (any_words, lambda words: words[np.arange(64) % 32, :4], equal),
}


def cases() -> Iterator[Case]:
    for name, (inputs, meaning, compare) in GOLDEN.items():
        yield _golden(name, inputs, meaning, compare)
    yield instruction_case(
        "smem_addr", lambda place: as_tensor(run_instruction("smem_addr", any_words(0), place)[0]), _addresses
    )
    yield instruction_case("of_cta", _in_clusters, lambda: _neighbours(any_words(0)))


def _golden(name: str, inputs: Callable[[int], Words], meaning: Callable[[Words], Words], compare: Difference) -> Case:
    seed_words = np.concatenate([inputs(seed) for seed in range(4)])
    parts = np.split(seed_words, 4)

    def run(place: Place) -> Tensor:
        return torch.cat([as_tensor(run_instruction(name, words, place)[0]) for words in parts])

    def by_definition() -> Words:
        return np.concatenate([np.tile(meaning(words), (8, 1, 1)) for words in parts])  # every CTA gives the same

    return instruction_case(name, run, by_definition, compare)


def instruction_case(
    name: str, run: Callable[[Place], Tensor], by_definition: Callable[[], Words], compare: Difference = equal
) -> Case:
    return Case(
        f"instructions/{name}", (), lambda place: {"words": run(place)}, lambda: {"words": as_tensor(by_definition())},
        always_loops=True, compare={"words": compare}, backends=BACKENDS, against="the PTX manual's definition",
    )  # fmt: skip


def as_tensor(words: Words) -> Tensor:
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def _addresses() -> Words:
    """Thread, byte offset of its words, alignment, CTA."""
    return np.array([[[thread, 16 * thread, 0, cta] for thread in range(64)] for cta in range(8)])


def _neighbours(words: Words) -> Words:
    """Returns the next CTA's words plus its rank in the cluster; then cluster, its size, the CTA's own rank."""
    rows = []
    for cta in range(8):
        rank = cta % CLUSTER
        sums = words[:, :3] + np.uint32((rank + 1) % CLUSTER)
        ids = np.full((64, 1), cta // CLUSTER << 16 | CLUSTER << 8 | rank, dtype=np.uint32)
        rows.append(np.concatenate([sums, ids], axis=1))
    return np.array(rows)


def _in_clusters(place: Place) -> Tensor:
    results, cluster = run_instruction("of_cta", any_words(0), place)
    if cluster == 1:
        raise NotApplicable("this GPU has no clusters")
    return as_tensor(results)
