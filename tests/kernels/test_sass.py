"""nvcc's library: architectures, registers, spills, instructions, size."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

from pagedtree import _C
from pagedtree.tools import info
from pagedtree.tools.cubin import (
    Kernel,
    cuda_library,
    extract_cubins,
    find_cuobjdump,
    list_instructions,
    read_code_bytes,
    read_kernels,
)

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = cuda_library()
pytestmark = [
    pytest.mark.skipif(LIBRARY is None, reason="built without CUDA"),
    pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump here"),
]
MAX_REGISTERS = 255
MAX_BYTES = 40_000_000
INSTRUCTION_BYTES = 16
# Attention by mma.sync, its values of 512 columns, attention by wgmma.
INSTANCES = {"attention_kernel<": 80, "attention_kernel<Instance<.*, 576, ": 8, "attention_sm90_kernel<": 28}
ALL_ARCHITECTURES = [
    "sm_" + architecture.replace("+PTX", "").replace(".", "") for architecture in _C.build_info()["cuda_architectures"]
]
# If 9.0 is built too, 9.0a has only the kernels that need it.
ARCHITECTURES = [sm for sm in ALL_ARCHITECTURES if sm != "sm_90a" or "sm_90" not in ALL_ARCHITECTURES]
for_hopper = pytest.mark.skipif("sm_90a" not in ALL_ARCHITECTURES, reason="built without 9.0a")


@lru_cache
def kernels() -> list[Kernel]:
    assert LIBRARY is not None
    return read_kernels(LIBRARY)


LISTINGS: dict[Kernel, list[str]] = {}


def listings(architecture: str, pattern: str, number: int) -> dict[str, list[str]]:
    """Disassembles `number` matching kernels, half a second each."""
    matches = [k for k in kernels() if k.architecture == architecture and re.match(pattern, k.name)]
    assert LIBRARY is not None and len(matches) == number
    LISTINGS.update(list_instructions(LIBRARY, [kernel for kernel in matches if kernel not in LISTINGS]))
    return {kernel.name: LISTINGS[kernel] for kernel in matches}


def instructions(architecture: str, pattern: str, number: int) -> dict[str, Counter[str]]:
    return {name: Counter(opcodes) for name, opcodes in listings(architecture, pattern, number).items()}


def of_kernels(quick: str, number: int, every: str, total: int) -> pytest.MarkDecorator:
    """Parametrises over a few kernels, in `make test-all` over all."""
    long = pytest.param(every, total, marks=pytest.mark.slow)
    return pytest.mark.parametrize(("pattern", "number"), [(quick, number), long], ids=["quick", "all"])


def count(opcodes: Counter[str], prefix: str) -> int:
    return sum(n for opcode, n in opcodes.items() if re.match(rf"{prefix}\b", opcode))


def missing_registers(name: str, opcodes: Counter[str]) -> int:
    """Returns registers that roles request beyond their CTA's; one too many blocks consumers forever."""
    (kernel,) = (k for k in kernels() if k.architecture == "sm_90a" and k.name == name)
    counts = dict(re.findall(r"USETMAXREG\.(TRY_ALLOC|DEALLOC)\..*\b0x([0-9a-f]+)", "\n".join(opcodes)))
    rows, head_dim, head_dim_v = (int(re.findall(r", (\d+), (\d+), (\d+)>", name)[0][i]) for i in (1, 0, 2))
    consumers = 2 if head_dim != head_dim_v else rows // 64  # warpgroups
    of_roles = consumers * int(counts["TRY_ALLOC"], 16) + int(counts["DEALLOC"], 16)
    return (of_roles - (consumers + 1) * kernel.registers) * 128


def test_each_architecture_has_every_kernel() -> None:
    names = {sm: {k.name for k in kernels() if k.architecture == sm} for sm in ALL_ARCHITECTURES}
    all_names = set().union(*names.values())
    of_hopper = {name for name in all_names if "_sm90_kernel<" in name}
    assert of_hopper <= names.get("sm_90a", set())
    assert all(names[sm] | of_hopper == all_names for sm in ARCHITECTURES)
    for pattern, number in INSTANCES.items():
        is_built = "sm90" not in pattern or "sm_90a" in ALL_ARCHITECTURES
        assert len([name for name in all_names if re.match(pattern, name)]) == number * is_built


# Filters and rare rows use local memory. A change may only lower these.
MOST_STACK = {
    "walk_kernel<": 112, "expand_drawn_kernel<": 96, "logprobs_kernel": 96,
    "expand_top_kernel<": 72, "expand_sm90_kernel<": 80, "medusa_top_kernel<": 72, "grow_kernel": 48,
}  # fmt: skip


def most_stack(name: str) -> int:
    return sum(most for begin, most in MOST_STACK.items() if name.startswith(begin))


def test_no_kernel_spills() -> None:
    assert [k for k in kernels() if k.stack_bytes > most_stack(k.name) or k.registers > MAX_REGISTERS] == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_no_kernel_uses_local_memory(architecture: str) -> None:
    number = sum(kernel.architecture == architecture for kernel in kernels())
    found = instructions(architecture, "", number)
    assert all(found.values()), "code of every kernel"
    assert [name for name, opcodes in found.items() if count(opcodes, "LDL|STL") and not most_stack(name)] == []


ATTENTION = "attention_kernel<Instance<__nv_bfloat16, __nv_bfloat16, "


@of_kernels(ATTENTION + "128, (16|64), ", 2, "attention_kernel<", INSTANCES["attention_kernel<"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_uses_the_tensor_cores(architecture: str, pattern: str, number: int) -> None:
    for name, opcodes in instructions(architecture, pattern, number).items():
        assert count(opcodes, "HMMA") >= 16, name
        assert count(opcodes, "LDSM") >= 8, name
        assert count(opcodes, "LDGSTS") >= 4, name
        assert count(opcodes, "LDL|STL") == 0, name


@of_kernels(ATTENTION + "576, ", 2, "attention_kernel<Instance<.*, 576, ", 8)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_wide_tiles_read_the_stages_once(architecture: str, pattern: str, number: int) -> None:
    """A warp multiplies half of K's nine panels and a quarter of V, and copies 8 keys (first, K, V), and Q if 16-bit.

    Masked stages share the products' code.
    """
    for name, opcodes in instructions(architecture, pattern, number).items():
        rows, is_float8 = int(re.findall(r", (\d+), \d+>", name)[0]), "Float8" in name
        blocks, halves = rows // 16, 1 if is_float8 else 2
        of_k, of_v = 9 * (2 * blocks + halves), 2 * (blocks + 4 * halves)
        assert count(opcodes, "HMMA") == blocks * (9 * 4 + 2 * 16), name
        assert count(opcodes, "LDSM") == of_k + of_v, name
        of_join = 2
        assert count(opcodes, "LDGSTS") == (3 * 9 if is_float8 else 3 * 18 + 3) + of_join, name
        assert count(opcodes, "LDL|STL") == 0, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_delta_rule_uses_the_tensor_cores(architecture: str) -> None:
    """128 channels of 16 rows are multiplied by 8 state columns in two parts and 8 keys of two dtypes; then the update.
    With channel decays rows and keys have two parts too, half of the channels per iteration."""
    for name, opcodes in instructions(architecture, "delta_rule_kernel", 2).items():
        by_channel = "true" in name
        assert count(opcodes, r"HMMA\.1688\.F32\.TF32") == (2 * 4 * 2 * 3 if by_channel else 8 * 2 * 2 + 4 * 2), name
        assert count(opcodes, r"HMMA\.16816") == (0 if by_channel else 2 * 8), name
        assert count(opcodes, "LDL|STL") == 0, name


@of_kernels(r"few_tokens_kernel<__nv_bfloat16, \(StateWords\)1", 4, "few_tokens_kernel<", 16)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_states_of_few_tokens_stay_in_registers(architecture: str, pattern: str, number: int) -> None:
    """128 channels of 16 columns are read and written once, by words. Products of 16 rows have two parts; with
    channel decays three, as have up to three steps of 16 keys, and a loop updates the state."""
    for name, opcodes in instructions(architecture, pattern, number).items():
        ((words, advances, by_channel),) = re.findall(r"\(StateWords\)(\d), (\w+), (\w+)>", name)
        parts, of_keys, steps = (3, 3 * 2 * 3, 8) if by_channel == "true" else (2, 0, 1)
        of_state = 8 * 4 * parts + (8 * 4 if advances == "true" and by_channel == "false" else 0)
        assert 0 <= count(opcodes, r"HMMA\.1688\.F32\.TF32") - of_state <= of_keys, name
        word, number_of_words = ("128", 16) if words == "1" else ("64", 32)
        of_walks = 3  # keys of a token and its ancestor, a query
        assert 0 <= count(opcodes, rf"LDG\.E\.{word}") - number_of_words <= of_walks, name
        assert advances == "false" or count(opcodes, rf"STG\.E\.{word}") * steps == number_of_words, name
        assert count(opcodes, "LDL|STL") == 0, name


# Code that runs once dominates small calls. Bounds of instructions on sm_90a by name prefix: in all; to the last EXIT,
# before rare paths; before the first copy to shared memory; before the first product; after the last one. A change may
# only lower them.
BUDGETS = {
    "attention_kernel<Instance<__nv_bfloat16, __nv_bfloat16, 128, 16, 128> >": (4616, 2319, 187, 595, 791),
    "attention_kernel<Instance<__nv_bfloat16, __nv_bfloat16, 128, 64, 128> >": (6016, 3763, 189, 660, 949),
    "attention_kernel<Instance<__nv_bfloat16, Float8E4M3, 128, 16, 128> >": (5096, 2690, 364, 780, 783),
    "attention_sm90_kernel<Sm90Instance<__nv_bfloat16, __nv_bfloat16, 128, 64, 128> >": (5000, 4798, 380, 2243, 1621),
    "attention_sm90_kernel<Sm90Instance<__nv_bfloat16, __nv_bfloat16, 128, 128, 128> >": (5720, 5525, 378, 2330, 1603),
    "attention_sm90_kernel<Sm90Instance<__nv_bfloat16, __nv_bfloat16, 576, 64, 512> >": (5752, 5561, 385, 2347, 2436),
    "rules_kernel<(Rule)3>": (6480,),
    "rules_kernel<(Rule)0>": (6144,),
    "rules_kernel<(Rule)1>": (6032,),
    "rules_kernel<(Rule)2>": (5552,),
    "walk_kernel<(DType)2>": (5472,),
    "kept_kernel<(DType)2, (Rule)3>": (5400,),
    "kept_sm90_kernel<(DType)2, (Rule)3>": (5400,),
    "plain_attention_kernel": (1848,),
    "logprobs_kernel": (5144,),
    "sample_kernel<(DType)2>": (4920,),
    "kept_kernel<(DType)2, (Rule)0>": (4688,),
    "kept_sm90_kernel<(DType)2, (Rule)0>": (4792,),
    "weigh_kernel": (3960,),
    "delta_rule_kernel": (3816,),
    "expand_drawn_kernel<(DType)2,": (3616,),
    "kept_kernel<(DType)2, (Rule)2>": (3592,),
    "kept_sm90_kernel<(DType)2, (Rule)2>": (3688,),
    "walk_sm90_kernel<(DType)2, true>": (3552,),
    "step_kernel<(DType)2>": (3248,),
    "few_tokens_kernel": (3016,),
    "kept_kernel<(DType)2, (Rule)1>": (2760,),
    "walk_shards_kernel": (2760,),
    "kept_sm90_kernel<(DType)2, (Rule)1>": (2848,),
    "short_tokens_kernel": (2736,),
    "sample_sm90_kernel<(DType)2>": (2840,),
    "ngram_kernel": (2520,),
    "best_first_kernel": (2160,),
    "expand_top_kernel<(DType)2>": (2072,),
    "expand_sm90_kernel<(DType)2>": (2024,),
    "rope_append_kernel": (1960,),
    "grow_kernel": (1680,),
    "chains_kernel": (1608,),
    "build_trees_kernel": (1552,),
    "join_segments_kernel": (1344,),
    "commit_kernel": (1368,),
    "medusa_top_kernel": (1280,),
    "few_nodes_kernel": (1256,),
    "walk_sm90_kernel<(DType)2, false>": (1304,),
    "path_decays_kernel": (1088,),
    "merge_kernel": (912,),
    "tokens_kernel": (776,),
    "choose_nodes_kernel": (768,),
    "mask_words_kernel": (728,),
    "write_kept_kernel": (712,),
    "rerank_kernel": (704,),
    "compact_kernel": (696,),
    "conv1d_kernel": (672,),
    "advance_conv_kernel": (648,),
    "plan_kernel": (688,),
    "place_tries_kernel": (552,),
    "follow_shards_kernel": (424,),
    "prepare_step_kernel": (424,),
    "survival_keys_kernel": (384,),
    "slot_mapping_kernel": (288,),
    "pack_kernel": (208,),
    "count_kernel": (144,),
    "fill_tree_kernel": (104,),
    "clear_kernel": (24,),
}
COPIES, PRODUCTS = re.compile("LDGSTS|UTMALDG|UBLKCP"), re.compile("HMMA|HGMMA")


def parts_of(opcodes: list[str]) -> tuple[int, ...]:
    copies, products = ([i for i, opcode in enumerate(opcodes) if kind.match(opcode)] for kind in (COPIES, PRODUCTS))
    end = max(i for i, opcode in enumerate(opcodes) if opcode == "EXIT") + 1
    return len(opcodes), end, copies[0], products[0], end - 1 - products[-1]


def above_budget(lengths: dict[str, tuple[int, ...]]) -> list[str]:
    return [
        name
        for name, budget in BUDGETS.items()
        if any(length > most for length, most in zip(lengths[name], budget, strict=True))
    ]


@for_hopper
def test_code_that_runs_once_stays_within_its_budget(tmp_path: Path) -> None:
    assert LIBRARY is not None
    cubins = extract_cubins(LIBRARY, "sm_90", tmp_path)
    sizes = {symbol: size for cubin in cubins for symbol, size in read_code_bytes(cubin).items()}
    lengths: dict[str, tuple[int, ...]] = {}
    here = [k for k in kernels() if k.architecture == "sm_90a" and "instruction" not in k.name]
    assert {re.split("[<(]", k.name)[0] for k in here} == {re.split("[<(]", name)[0] for name in BUDGETS}
    assert max(sizes[k.symbol] for k in here) <= 128 << 10
    for name, budget in BUDGETS.items():
        lengths[name] = (max(sizes[k.symbol] for k in here if k.name.startswith(name)) // INSTRUCTION_BYTES,)
        if len(budget) > 1:
            (opcodes,) = listings("sm_90a", re.escape(name), 1).values()
            assert len(opcodes) == lengths[name][0]
            lengths[name] = parts_of(opcodes)
    assert above_budget(lengths) == []
    for name, budget in BUDGETS.items():
        assert above_budget(lengths | {name: (budget[0] + 1, *lengths[name][1:])}) == [name]


@for_hopper
def test_rows_on_chip_share_an_sm() -> None:
    """Three CTAs of 256 threads fit by registers."""
    registers = [k.registers for k in kernels() if re.match("(walk|sample)_sm90_kernel<", k.name)]
    assert len(registers) == 9 and max(registers) <= 80


def test_wrappers_of_instructions_are_those_that_a_gpu_has_run() -> None:
    """CPU tests run no inline PTX: changes are unverified until `check` runs on a GPU."""
    tile, run = ROOT / "csrc" / "cuda" / "tile", ROOT / "benchmarks" / "results" / "first_gpu_run.json"
    text = b"".join((tile / name).read_bytes() for name in ("ptx_cuda.cuh", "ptx_sm90_cuda.cuh"))
    is_verified = hashlib.sha256(text).hexdigest() == json.loads(run.read_text())["ptx_wrappers"]
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert is_verified != ("unverified" in newest), "wrappers: expected those of first_gpu_run.json, or a line"


@for_hopper
@of_kernels(r"attention_sm90_kernel<Sm90Instance<__nv_bfloat16, \w+, 128, 64", 2, "attention_sm90_kernel<", 28)
def test_hopper_s_attention_uses_wgmma(pattern: str, number: int) -> None:
    """The loop has V's k-step of 16 keys and D / 16 of K's, code around it as many; consumers get registers."""
    for name, opcodes in instructions("sm_90a", pattern, number).items():
        head_dim, rows, head_dim_v = map(int, re.findall(r", (\d+), (\d+), (\d+)>", name)[0])
        latent = head_dim != head_dim_v
        # Latent: K's k-steps are a loop of 16 with a peeled product and 4 more, V's a loop of 4.
        k_steps = 8 if rows == 128 and head_dim < 256 else 4  # of V; one more ends an empty group
        products = 16 + 1 + 4 + 4 if latent else 2 * (head_dim // 16 + k_steps) + 1
        assert count(opcodes, "HGMMA") == products, name
        assert missing_registers(name, opcodes) <= 0, name
        assert count(opcodes, "HMMA") == 0, name
        # ptxas waits after each instruction if it loses track of registers.
        assert count(opcodes, "WARPGROUP.DEPBAR") == (2 if latent else 3), name
        assert count(opcodes, "LDGSTS") >= 4, name
        assert count(opcodes, "UTMALDG.5D") == (0 if "Float8" in name else 1 if latent else 2), name


@of_kernels(r"sample_kernel<\(DType\)2>", 1, "(sample|step|walk|rules)_kernel<", 13)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_read_by_sixteen_bytes(architecture: str, pattern: str, number: int) -> None:
    """A pass has four loads; narrow dtypes compare pairs."""
    for name, opcodes in instructions(architecture, pattern, number).items():
        assert count(opcodes, r"LDG\.E\.128(\.CONSTANT)?") >= 8, name
        if re.search(r"\(DType\)[12]>", name):
            assert count(opcodes, r"V?HMNMX2?\.(BF16_V2\.)?NAN") >= 8, name


@of_kernels(r"rope_append_kernel<\(DType\)2, 8>", 1, r"rope_append_kernel<\(DType\)[012], (8|4)>", 3)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_are_rotated_and_quantized_by_sixteen_bytes(architecture: str, pattern: str, number: int) -> None:
    """GPUs since 8.9 convert to e4m3 in hardware."""
    for name, opcodes in instructions(architecture, pattern, number).items():
        # Stores: two halves and other columns of queries and keys; values; unrotated keys.
        assert count(opcodes, r"STG\.E\.128(\.STRONG\.SM)?") == 7, name
        assert count(opcodes, r"LDG\.E\.128") >= 2, name
        converts = re.match(r"sm_8[0-8]", architecture) is None
        assert (count(opcodes, r"F2FP\.SATFINITE\.E4M3\..*") >= 2) == converts, name


def test_the_library_is_of_bounded_size() -> None:
    assert LIBRARY is not None
    assert LIBRARY.stat().st_size < MAX_BYTES


def test_info_lists_the_kernels() -> None:
    listed = info.collect()["cuda_kernels"]
    assert set(listed) == set(ALL_ARCHITECTURES)
    for kernel in kernels():
        assert listed[kernel.architecture][kernel.name].startswith(f"{kernel.registers} registers")


def test_without_cuobjdump_info_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pagedtree.tools.cubin.find_cuobjdump", lambda: None)
    assert "pip install nvidia-cuda-cuobjdump" in info.collect()["cuda_kernels"]["unknown"]
