"""Hopper's functions of pagedtree::ptx (csrc/cuda/tile/ptx_sm90.cuh) against the results that the PTX manual defines.

The kernels are in csrc/cuda/instructions_sm90.cu. The operands of wgmma are small integers, exact in fp32. Gaps in
shared memory are NaN, which exposes wrong places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from pagedtree.check.case import Case, NotApplicable, Place
from pagedtree.check.cases import instructions
from pagedtree.check.cases.instructions import Words, as_tensor, instruction_case
from pagedtree.testing import backends

TABLE = "pagedtree_instructions_sm90"
# Sizes of the warpgroup's inputs, as in `Words` of instructions_sm90.cu, and of each thread's output.
THREADS, NUMBERS, OWN, IMAGE_BYTES, OUT = 128, 128, 16, 80 * 1024, 128
STEPS = 4  # multiplications in a row, each of 16 k
PANEL_BYTES, B_BEGINS = 64 * 128, 16 * 1024  # 64 rows of 128 bytes; B's offset in shared memory, A is at 0
NAN = 0x7FFF  # in fp16 and in bf16

# One test vector: inputs and outputs.
Vector = tuple[Words, Words]
THREAD = np.arange(THREADS)


def given_words(numbers: list[int], own: np.ndarray, image: np.ndarray) -> Words:
    """Returns [threads, words] of the numbers, uint32 [threads, 4, 4] and the initial bytes of shared memory."""
    told = np.zeros(NUMBERS, np.uint32)
    told[: len(numbers)] = np.array(numbers, np.int64).astype(np.uint32)
    held = np.zeros(IMAGE_BYTES, np.uint8)
    held[: image.nbytes] = image.reshape(-1).view(np.uint8)
    return np.concatenate([told, own.reshape(-1), held.view(np.uint32)]).astype(np.uint32).reshape(THREADS, -1)


def no_words() -> np.ndarray:
    return np.zeros((THREADS, STEPS, OWN // STEPS), np.uint32)


def any_words(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 2**32, shape, dtype=np.uint32)


def given_back(columns: np.ndarray) -> Words:
    """Returns [threads, up to 128 words], padded with the zeros that the kernel has not overwritten."""
    out = np.zeros((THREADS, OUT), np.uint32)
    out[:, : columns.shape[1]] = columns
    return out


# wgmma ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The layout of A [64, 128] and B [N, 128] in shared memory, and the multiplications.

    Attributes:
        leading, stride: the byte offsets of the descriptors.
        panel: bytes from the first 64 k to the other 64, where the matrix is K-major.
        steps: which 16 k are multiplied, in order.
        accumulates: whether the first step adds to D; the others do.
    """

    leading: int
    stride: int
    panel: int
    steps: tuple[int, ...]
    accumulates: bool

    def k_major(self, rows: int) -> np.ndarray:
        """Returns byte offsets [rows, 128 k]. A row's 64 k are 128 bytes, whose chunk c of 16 is at c xor row % 8;
        `stride` leads from eight rows to the next."""
        row, k = np.arange(rows)[:, None], np.arange(128)
        chunk = k % 64 // 8 ^ row % 8
        return k // 64 * self.panel + row // 8 * self.stride + row % 8 * 128 + chunk * 16 + k % 8 * 2

    def n_major(self, columns: int) -> np.ndarray:
        """Returns byte offsets [columns, 128 k]. The same with 64 columns of one k in 128 bytes: `stride` leads from
        eight k to the next eight, `leading` from 64 columns to the next 64."""
        n, k = np.arange(columns)[:, None], np.arange(128)
        chunk = n % 64 // 8 ^ k % 8
        return n // 64 * self.leading + k // 8 * self.stride + k % 8 * 128 + chunk * 16 + n % 8 * 2


def small_integers(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.integers(-15, 16, (rows, 128)).astype(np.float32)


def bits(matrix: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(matrix).to(dtype).view(torch.int16).numpy().view(np.uint16)


def image_of(*matrices: tuple[int, np.ndarray, np.ndarray]) -> np.ndarray:
    """Returns shared memory with matrices (start, element offsets, bits)."""
    image = np.full(IMAGE_BYTES // 2, NAN, np.uint16)
    for begin, offsets, elements in matrices:
        assert np.unique(offsets).size == offsets.size and begin % 1024 == 0
        image[(begin + offsets) // 2] = elements
    return image


def left_registers(elements: np.ndarray) -> np.ndarray:
    """Returns A of one step [64, 16], as a thread's four words: two neighbours of rows g and g + 8, then of the other
    eight k; g is the lane's quad."""
    word = np.arange(4)
    row = (THREAD // 32 * 16 + THREAD % 32 // 4)[:, None] + word % 2 * 8
    k = (THREAD % 4 * 2)[:, None] + word // 2 * 8
    return elements[row, k].astype(np.uint32) | elements[row, k + 1].astype(np.uint32) << np.uint32(16)


def sums_of_threads(product: np.ndarray, first: int, accumulates: bool) -> Words:
    """Returns [threads, N / 2] words of D [64, N], plus each word's place from `first`, if given."""
    register = np.arange(product.shape[1] // 2)
    row = (THREAD // 32 * 16 + THREAD % 32 // 4)[:, None] + register % 4 // 2 * 8
    column = (THREAD % 4 * 2)[:, None] + register // 4 * 8 + register % 2
    begun = THREAD[:, None] * OUT + first + register if accumulates else 0
    return (product[row, column] + begun).astype(np.float32).view(np.uint32)


def k_slice(step: int) -> slice:
    return slice(16 * step, 16 * step + 16)


def layout_numbers(layout: Layout, b_n_major: bool) -> list[int]:
    """Returns `Layout` of instructions_sm90.cu. Each step's operand begins 32 bytes after the previous one, or for
    N-major B with the next 16 k."""
    k_major = [step // 4 * layout.panel + step % 4 * 32 for step in layout.steps]
    n_major = [step * 2 * layout.stride for step in layout.steps]
    starts = [x for a, b in zip(k_major, n_major if b_n_major else k_major, strict=True) for x in (a, b + B_BEGINS)]
    return [int(layout.accumulates), layout.leading, layout.stride, layout.leading, layout.stride, *starts]


def k_major_layouts(n: int) -> list[Layout]:
    """Rows without gaps, one panel after the other; and panels with interleaved rows."""
    return [Layout(16, 1024, n * 128, (0, 1, 2, 3), False), Layout(0, 2048, 1024, (1, 6, 3, 4), True)]


def n_major_layouts(n: int) -> list[Layout]:
    """64 columns after 64 columns; and eight k after eight k, with gaps between if there is room."""
    apart = min(n * 16 + 1024, 4096)
    return [Layout(16 * 1024, 1024, 0, (0, 1, 2, 3), False), Layout(1024, apart, 0, (1, 6, 3, 4), True)]


def multiplication(kind: str, dtype: torch.dtype, n: int, layout: Layout, seed: int) -> Vector:
    """kind: "wgmma_ss", "wgmma_rs/K-major" or "wgmma_rs/N-major"."""
    rng = np.random.default_rng(seed)
    a, b = small_integers(rng, 64), small_integers(rng, n)
    registers, b_n_major = no_words(), kind.endswith("N-major")
    right = (B_BEGINS, layout.n_major(n) if b_n_major else layout.k_major(n), bits(b, dtype))
    image = image_of(right)
    if kind == "wgmma_ss":
        image = image_of((0, layout.k_major(64), bits(a, dtype)), right)
    else:
        registers = np.stack([left_registers(bits(a, dtype)[:, k_slice(step)]) for step in layout.steps], 1)
    product = sum(a[:, k_slice(step)] @ b[:, k_slice(step)].T for step in layout.steps)
    assert isinstance(product, np.ndarray)
    words = given_words(layout_numbers(layout, b_n_major), registers, image)
    return words, given_back(sums_of_threads(product, 0, layout.accumulates))


def multiplications(kind: str, dtype: torch.dtype, n: int) -> list[Vector]:
    layouts = n_major_layouts(n) if kind.endswith("N-major") else k_major_layouts(n)
    return [multiplication(kind, dtype, n, layout, seed) for seed, layout in enumerate(layouts)]


def groups() -> list[Vector]:
    """Runs two steps in D of the older group, two in the newer group's."""
    layout, rng = k_major_layouts(64)[1], np.random.default_rng(2)
    a, b = small_integers(rng, 64), small_integers(rng, 64)
    image = image_of(*((at, layout.k_major(64), bits(x, torch.float16)) for at, x in ((0, a), (B_BEGINS, b))))
    products = [a[:, k_slice(step)] @ b[:, k_slice(step)].T for step in layout.steps]
    sums = [sums_of_threads(products[i] + products[i + 1], i * 16, True) for i in (0, 2)]
    return [(given_words(layout_numbers(layout, False), no_words(), image), given_back(np.concatenate(sums, 1)))]


def written_again() -> list[Vector]:
    """Runs two steps whose operands overwrite the first ones in place. Each of the images has 32 KB."""
    layout, rng, steps = Layout(16, 1024, PANEL_BYTES, (0, 5, 0, 0), True), np.random.default_rng(3), (0, 5)
    images, sums = [], []
    for i in range(2):
        a, b = small_integers(rng, 64), small_integers(rng, 64)
        image = image_of(*((at, layout.k_major(64), bits(x, torch.bfloat16)) for at, x in ((0, a), (B_BEGINS, b))))
        images.append(image[: 32 * 1024 // 2])
        product = (
            a[:, k_slice(steps[0])] @ b[:, k_slice(steps[0])].T + a[:, k_slice(steps[1])] @ b[:, k_slice(steps[1])].T
        )
        sums.append(sums_of_threads(product, i * 32, True))
    words = given_words(layout_numbers(layout, False), no_words(), np.concatenate(images))
    return [(words, given_back(np.concatenate(sums, 1)))]


def descriptors() -> list[Vector]:
    """Bits 0 to 13: the address, 16 to 29: the leading offset, 32 to 45: the stride offset, each in units of 16 bytes;
    62 and 63: 1 for the 128-byte swizzle."""
    rng, fields = np.random.default_rng(4), no_words()
    fields[:, 0, 0] = rng.integers(0, IMAGE_BYTES // 16, THREADS) * 16
    fields[:, 0, 1:3] = rng.integers(0, 2**14, (THREADS, 2)) * 16
    offset, leading, stride = fields[:, 0, :3].astype(np.uint64).T >> np.uint64(4)
    values = offset | leading << np.uint64(16) | stride << np.uint64(32) | np.uint64(1 << 62)
    return [(given_words([], fields, np.zeros(0, np.uint32)), given_back(values[:, None].view(np.uint32)))]


# mbarriers and copies -------------------------------------------------------------------------------------------------


def phases() -> list[Vector]:
    """Checks in four phases that threads 64 to 127 get the other half's values of the same phase."""
    words = any_words(np.random.default_rng(5), (THREADS, 4, 4))
    results = np.where((THREAD >= 64)[:, None], words[(THREAD ^ 32) % 64].reshape(THREADS, 16), 0)
    return [(given_words([], words, np.zeros(0, np.uint32)), given_back(results))]


def arriving_copies() -> list[Vector]:
    """In each of two phases, two copies of other threads, of which the second is zeros if that thread is odd."""
    chunks = any_words(np.random.default_rng(6), (2, 2, THREADS, 4))
    chunks_there = chunks.copy()
    chunks_there[:, 1, 1::2] = 0
    results = [chunks_there[phase, half][THREAD ^ (32, 64)[half]] for phase in range(2) for half in range(2)]
    return [(given_words([], no_words(), chunks), given_back(np.concatenate(results, 1)))]


def bulk_copies() -> list[Vector]:
    """Returns in each of two phases the chunk after the thread's own, of two copies."""
    chunks = any_words(np.random.default_rng(8), (2 * THREADS + 1, 4))
    results = np.concatenate([chunks[1 : THREADS + 1], chunks[THREADS + 1 :]], 1)
    return [(given_words([], no_words(), chunks), given_back(results))]


def told_values() -> list[Vector]:
    """Returns, by CTA, phase and sending CTA, another thread's value plus 4 times that rank plus this one's."""
    words = any_words(np.random.default_rng(9), (THREADS, 4, 4))
    values = np.ascontiguousarray(words[THREAD ^ 32, :2, :2]).view(np.uint64)[:, None]  # [threads, 1, phases, 1]
    to, by = np.arange(4, dtype=np.uint64)[:, None, None], np.arange(4, dtype=np.uint64)
    results = (values + to + np.uint64(4) * by).view(np.uint32).reshape(THREADS, -1)
    return [(given_words([], words, np.zeros(0, np.uint32)), given_back(results))]


# Where a box begins, the innermost axis first: inside the tensor; before it on two axes; past its end on all but the
# columns; past the last column.
BOXES = [(64, 3, 1, 0, 0), (0, -1, 0, 0, -1), (32, 4, 2, 1, 1), (96, 1, 0, 0, 0)]


def loads() -> list[Vector]:
    """Returns the rows of 128 bytes of a box, the innermost axis first. The chunk c of 16 bytes is at c xor row % 8;
    outside the tensor are zeros."""
    tensor = np.random.default_rng(7).integers(1, 2**16, (2, 2, 3, 5, 128), dtype=np.uint16)
    columns = []
    for x, *begin in BOXES:
        box = np.zeros((16, 8, 8), np.uint16)  # rows, chunks, elements
        for row in range(16):
            at = [first + (row >> axis & 1) for axis, first in enumerate(begin)][::-1]
            if not all(0 <= index < size for index, size in zip(at, tensor.shape, strict=False)):
                continue
            elements = np.zeros(64, np.uint16)
            inside = tensor[tuple(at)][x : x + 64]
            elements[: inside.size] = inside
            box[row, np.arange(8) ^ row % 8] = elements.reshape(8, 8)
        columns.append(box.reshape(THREADS, 8).view(np.uint32))
    words = given_words([number for box in BOXES for number in box], no_words(), tensor)
    return [(words, given_back(np.concatenate(columns, 1)))]


# Cases ----------------------------------------------------------------------------------------------------------------

VECTORS: dict[str, Callable[[], list[Vector]]] = {
    "mbar_arrive": phases,
    "cp_async_mbar_arrive": arriving_copies,
    "tma_load_5d": loads,
    "bulk_load": bulk_copies,
    "tell": told_values,
    "fence_proxy_async": written_again,
    "matrix_descriptor": descriptors,
    "wgmma_wait": groups,
    "setmaxnreg": lambda: multiplications("wgmma_rs/K-major", torch.float16, 256),
}


def cases() -> Iterator[Case]:
    for name, vectors in VECTORS.items():
        yield _case(name, vectors)
    for kind in ("wgmma_ss", "wgmma_rs/K-major", "wgmma_rs/N-major"):
        for word, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            for n in (64, 128, 256):
                yield _case(f"{kind}/{word}/N {n}", partial(multiplications, kind, dtype, n))


def _case(name: str, make: Callable[[], list[Vector]]) -> Case:
    vectors = lru_cache(make)

    def run(place: Place) -> Tensor:
        check_applies(place)
        results = (instructions.run_instruction(name, inputs, place, TABLE)[0] for inputs, _ in vectors())
        return torch.cat([as_tensor(words) for words in results])

    return instruction_case(name, run, lambda: np.stack([expected for _, expected in vectors()]))


def absent(place: Place) -> str | None:
    """None, or why the place does not run code for 9.0a."""
    is_gpu = place.device.type == "cuda"
    if place.backend not in backends() or (is_gpu and torch.cuda.get_device_capability(place.device) != (9, 0)):
        return "only on GPUs of compute capability 9.0"
    return None if instructions.has_table(place.backend, TABLE) else "this build has no code for 9.0a"


def check_applies(place: Place) -> None:
    if reason := absent(place):
        raise NotApplicable(reason)
