"""Every adapter imports without its engine, never waits for the device, and refuses wrong arguments by name."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import calls
import calls.adapters
from support import int32
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from pagedtree.integrations import flash_attn, flashinfer, sglang
from pagedtree.integrations.flashinfer import mla, paged
from pagedtree.integrations.sglang.attention import PagedTreeBackend

ADAPTERS = ["sglang", "sglang.attention", "sglang.plugin", "flashinfer", "flash_attn"]
IMPORTS = """
import importlib, sys
others = ["sglang", "sgl_kernel", "flashinfer", "flash_attn", "vllm", "accelerate", "kernels", "transformers"]
sys.modules.update(dict.fromkeys(others))  # whose import then fails
import pagedtree, pagedtree.integrations, pagedtree.tools.cli
assert "torch._dynamo" not in sys.modules  # the compiler: its import takes longer than all of these
for _ in range(2):
    for name in sys.argv[1:]:
        if name == "transformers" and sys.modules[name] is None:
            del sys.modules[name]
        importlib.import_module("pagedtree.integrations." + name)
    import torch, pagedtree
    states = torch.ones(2, 1, 1, requires_grad=True), torch.ones(2, 1)
    out, _ = pagedtree.merge_states(*states, *states)
    assert out.tolist() == [[[1.0]]] * 2 and out.requires_grad
    assert pagedtree.merge_states(*(2 * [t.to("meta") for t in states]))[0].shape == out.shape
    for name in [name for name in sys.modules if name.partition(".")[0] == "pagedtree"]:
        del sys.modules[name]
"""


@pytest.mark.parametrize(
    "adapters",
    # Tests of transformers import it where other engines are absent.
    [pytest.param(ADAPTERS, id="without"), pytest.param(["transformers"], id="with", marks=pytest.mark.slow)],
)
def test_adapters_import_alone(adapters: list[str]) -> None:
    """A forgotten adapter can be imported again."""
    if "transformers" in adapters:
        pytest.importorskip("transformers")
    subprocess.run([sys.executable, "-c", IMPORTS, *adapters], check=True)


def functions() -> Iterator[Any]:
    for adapter in (flash_attn, flashinfer, sglang):
        for name in adapter.__all__:
            entry = getattr(adapter, name)
            members = vars(entry).items() if inspect.isclass(entry) else [("", entry)]
            for member, function in members:
                if inspect.isfunction(function) and member[:1] != "_":
                    yield pytest.param(inspect.unwrap(function), id=f"{name}.{member}".strip("."))
    for name in ("forward_decode", "forward_extend", "init_forward_metadata"):
        yield pytest.param(getattr(PagedTreeBackend, name), id=f"{PagedTreeBackend.__name__}.{name}")


@pytest.mark.parametrize("function", list(functions()))
def test_each_argument_is_read_or_a_hint(function) -> None:
    """An unread argument is in the docstring or among the hints."""
    body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body  # type: ignore[attr-defined]
    names = {node.id for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    unread = {*inspect.signature(function).parameters}.difference(names, paged.HINTS, mla.HINTS, {"self"})
    text = re.findall(r"[^.:;]*(?:[:;] )?(?:hints|no effect|neither read nor written)", inspect.getdoc(function) or "")
    assert unread <= set(re.findall(r"\w+", " ".join(text)))


# Arguments that depend on no value of a tensor.
INTEGERS = torch.zeros(2, 4, dtype=torch.int64)
LENS, ROTARY = INTEGERS.int()[:, 0], ("rotary_cos", "rotary_sin")
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("sglang_verify_greedy", {}),
    ("sglang_sampling", {}),
    ("sglang_build_tree", {}),
    ("sglang_build_tree", {"tree_mask_mode": 1}),
    ("sglang_build_tree", {"tree_mask_mode": 2, "tree_mask": INTEGERS.clone()}),
    ("sglang_move_kv", {"tgt_loc": torch.zeros(1500).long(), "src_loc": torch.zeros(1500).long()}),
    ("flashinfer_chain_sampling", {"seed": None}),
    ("flashinfer_page_table", {}),
    ("flashinfer_append", {}),
    ("flash_attn_with_kvcache", {}),
    ("flash_attn_with_kvcache", {"causal": False, "window_size": (-1, -1)}),
    ("flash_attn_with_kvcache", {"causal": False, "window_size": (2, 3)}),
    ("flash_attn_with_kvcache", dict.fromkeys(ROTARY, torch.zeros(9, 16))),
    ("flash_attn_varlen", {}),
    ("flash_attn_varlen", {"causal": False, "window_size": (2, 3)}),
]


@pytest.mark.parametrize(("name", "change"), CALLS)
def test_nothing_is_read_on_the_host(name, change) -> None:
    """Fake tensors have no values, so a read on the host fails."""
    call = calls.make(name)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        call.function(**calls.mapped({**call.arguments, **change}, mode.from_tensor))


@pytest.mark.parametrize("mode", sglang.TreeMaskMode)
def test_masks_of_sglang_are_not_read_on_the_host(mode) -> None:
    with FakeTensorMode():
        lens, mask = torch.zeros(2, dtype=torch.int64), torch.zeros(99, dtype=torch.uint8)
        sglang.tree_mask_words(mask, lens, 4, mode)
        links = [torch.zeros(2, 4, dtype=torch.int64) for _ in range(3)]
        sglang.reconstruct_indices_from_tree_mask(mask[:32], lens, torch.zeros(8).int(), *links, 2, 4)
        flashinfer.get_batch_indices_positions(torch.zeros(3).int(), lens, 5)


def test_values_that_the_adapters_make_pass_the_checks(value_checks, on_device) -> None:
    pool = torch.arange(5.0).view(5, 1, 1).repeat(1, 1, 4)
    sglang.move_kv_cache([pool], [], torch.tensor([0, 4]), torch.tensor([3, 2]))
    assert pool[:, 0, 0].tolist() == [3, 1, 2, 3, 2]
    for n in (0, 1, 3):
        probs = torch.full((2, n + 1, 5), 0.2)
        drafts = torch.zeros(2, n, dtype=torch.int64)
        tokens = flashinfer.chain_speculative_sampling(probs[:, :n], drafts, probs)[0]
        assert tokens[:, :n].eq(0).all() and tokens[:, n].ge(0).all()  # equal distributions accept all drafts
    device = pool.device
    for name in ("sglang_build_tree", "sglang_verify_greedy", "sglang_sampling"):
        calls.make(name).mapped(lambda tensor: tensor.to(device)).results()


def test_a_read_on_the_host_is_noticed() -> None:
    with FakeTensorMode(), pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        flashinfer.page_table(torch.zeros(3).int(), torch.zeros(3).int(), torch.zeros(2).int(), 4)


# ---- a refused call writes nothing

IDS = torch.zeros(2, 3, dtype=torch.int64)
SHAPE = "expected shape"
NO = "expected its default, as others are not supported, "
# The call, its wrong arguments, and the refusal.
Row = tuple[str, dict[str, Any], str]
WRONG: list[Row] = [
    ("sglang_verify_greedy", {"predicts": int32([0] * 7)}, "predicts: expected at least 8 elements"),
    ("sglang_verify_greedy", {"accept_index": IDS.int()[:1]}, rf"accept_index: {SHAPE} \[2, 3\], got"),
    ("sglang_verify_greedy", {"accept_index": IDS.int()[:, :0]}, "accept_index: expected at least one column"),
    ("sglang_verify_greedy", {"accept_token_num": int32([0] * 3)}, rf"accept_token_num: {SHAPE} \[2\]"),
    ("sglang_verify_greedy", {"candidates": IDS[0]}, "candidates: expected 2 dimensions, got 1"),
    *(
        ("sglang_verify_greedy", {name: IDS}, rf"{name}: {SHAPE} \[2, 4\], got \[2, 3\]")
        for name in ("retrive_index", "retrive_next_token", "retrive_next_sibling", "target_predict")
    ),
    ("sglang_sampling", {"uniform_samples": torch.zeros(2, 3)}, rf"uniform_samples: {SHAPE} \[2, 4\]"),
    ("sglang_sampling", {"uniform_samples_for_final_sampling": torch.zeros(3)}, rf"{SHAPE} \[2\], got \[3\]"),
    ("sglang_sampling", {"target_probs": torch.zeros(2, 3, 20)}, rf"target_probs: {SHAPE} \[2, 4, 20\]"),
    ("sglang_sampling", {"threshold_single": 1.5}, r"threshold_single: expected a number in \[0, 1\], got 1.5"),
    ("sglang_sampling", {"threshold_acc": -0.1}, r"threshold_acc: expected a number in \[0, 1\], got -0.1"),
    ("sglang_build_tree", {"selected_index": IDS[:, :2]}, rf"selected_index: {SHAPE} \[2, 3\]"),
    ("sglang_build_tree", {"verified_seq_len": IDS[:1, :2]}, rf"verified_seq_len: {SHAPE} \[2\], got \[1, 2\]"),
    ("sglang_build_tree", {"parent_list": IDS}, rf"parent_list: {SHAPE} \[2, 5\]"),
    ("sglang_build_tree", {"positions": IDS[0]}, rf"positions: {SHAPE} \[8\], got \[3\]"),
    ("sglang_build_tree", {"retrive_next_token": IDS.clone()}, rf"retrive_next_token: {SHAPE} \[2, 4\]"),
    ("sglang_build_tree", {"tree_mask": torch.zeros(9).bool()}, "tree_mask: expected at least 32 elements of one byte"),
    ("sglang_build_tree", {"tree_mask": torch.zeros(99).int()}, "tree_mask: expected at least 32 elements of one byte"),
    ("sglang_move_kv", {"src_loc": torch.arange(4)}, r"src_loc: expected int32 or int64 \[3\], got torch.int64 \[4\]"),
    ("sglang_move_kv", {"tgt_loc": torch.zeros(3)}, "tgt_loc: expected int32 or int64"),
    ("flashinfer_chain_sampling", {"draft_probs": torch.zeros(2, 2, 11)}, rf"{SHAPE} \[2, 3, 11\], got \[2, 2, 11\]"),
    ("flashinfer_chain_sampling", {"target_probs": torch.zeros(2, 3, 11)}, rf"target_probs: {SHAPE} \[2, 4, 11\]"),
    ("flashinfer_chain_sampling", {"draft_token_ids": IDS[0]}, "draft_token_ids, draft_probs: expected 2 and 3"),
    ("flashinfer_chain_sampling", {"maybe_output_accepted_token_num": torch.zeros(3)}, rf"{SHAPE} \[2\]"),
    ("flashinfer_chain_sampling", {"maybe_output_emitted_draft_token_num": torch.zeros(3)}, rf"{SHAPE} \[2\]"),
    ("flashinfer_page_table", {"last_page_len": int32([1])}, rf"last_page_len: {SHAPE} \[2\], got \[1\]"),
    ("flashinfer_import_mask", {"custom_mask": torch.ones(62).bool()}, rf"custom_mask: {SHAPE} \[63\], got \[62\]"),
    ("flashinfer_import_mask", {"tree_lens": int32([5, 7])}, "tree_lens: expected 0 to 6 keys in sequence 1, got 7"),
    ("flashinfer_wrapper", {"head_dim_vo": 128}, "head_dim_v: expected head size 64 with K's 64, got 128"),
    ("flash_attn_with_kvcache", {"rotary_cos": torch.zeros(4, 8)}, "rotary_cos: expected rotary_sin and k with it"),
    ("flash_attn_with_kvcache", {**dict.fromkeys(ROTARY, torch.zeros(4, 8)), "k": None, "v": None}, "rotary_sin and k"),
    ("flash_attn_with_kvcache", {"page_table": IDS}, "block_table and page_table: expected one of the two"),
    ("flash_attn_with_kvcache", {"q": torch.zeros(2, 4, 64)}, "q: expected"),
    ("flash_attn_with_kvcache", {"v": None}, "v: expected a tensor, as k"),
    ("flash_attn_with_kvcache", {"k": None}, "v: expected None, as k"),
    ("flash_attn_with_kvcache", {"k": torch.zeros(3, 3, 2, 64)}, r"k: expected \[2,"),
    ("flash_attn_with_kvcache", {"cache_batch_idx": int32([0, 0])}, "cache_batch_idx: expected None"),
    ("flash_attn_with_kvcache", {"cache_seqlens": None}, "cache_seqlens: expected lengths"),
    ("flash_attn_with_kvcache", {"softcap": -1.0, "k": None, "v": None}, "softcap"),
    ("flash_attn_with_kvcache", {"v_cache": torch.zeros(6, 4, 2, 128), "k": None, "v": None}, "K's 64, got 128"),
]
LACKING: list[Row] = [
    ("flashinfer_chain_sampling", {"seed": IDS[:, 0]}, "seed: expected an int, got a tensor"),
    ("flashinfer_wrapper", {"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode: expected"),
    ("flashinfer_wrapper", {"prefix_len_ptr": torch.zeros(1)}, "prefix_len_ptr: expected none, got Tensor"),
    ("flashinfer_wrapper", {"token_pos_in_items_len": 3}, "token_pos_in_items_len: expected none, got int"),
    ("flashinfer_wrapper", {"window_left": 0}, "window_left: expected -1 where the batch is not causal, got 0"),
    ("flash_attn_with_kvcache", {"q_descale": torch.ones(1)}, f"q_descale: {NO}got a tensor"),
    ("flash_attn_with_kvcache", {"qv": torch.ones(1)}, f"qv: {NO}"),
    ("flash_attn_with_kvcache", {"attention_chunk": 3}, f"attention_chunk: {NO}got 3"),
    ("flash_attn_with_kvcache", {"cache_leftpad": int32([0, 0])}, f"cache_leftpad: {NO}"),
    ("flash_attn_with_kvcache", {"alibi_slopes": torch.zeros(4)}, f"alibi_slopes: {NO}"),
    ("flash_attn_varlen", {"dropout_p": 0.1}, f"dropout_p: {NO}got 0.1"),
    ("flash_attn_varlen", {"alibi_slopes": torch.zeros(4)}, f"alibi_slopes: {NO}"),
    ("flash_attn_varlen", {"return_attn_probs": True}, f"return_attn_probs: {NO}got True"),
    ("flash_attn_varlen", {"seqused_q": int32([1, 1])}, f"seqused_q: {NO}"),
    ("flash_attn_varlen", {"k": torch.zeros(6, 4, 2, 64, requires_grad=True)}, "k: .* without requires_grad"),
]
TWICE: Row = ("sglang_build_tree", {"retrieve_index": IDS}, "got both")
ROWS = [(ValueError, *row) for row in WRONG] + [(NotImplementedError, *row) for row in LACKING] + [(TypeError, *TWICE)]


@pytest.mark.parametrize(("error", "name", "change", "message"), ROWS)
def test_a_wrong_argument_is_named(error: type[Exception], name: str, change: dict[str, Any], message: str) -> None:
    call = calls.make(name)
    outputs = [value for key, value in call.arguments.items() if key in call.written]
    before = [tensor.clone() for tensor in calls.tensors_of(outputs)]
    with pytest.raises(error, match=rf"^[\w.]+: .*{message}"):
        call.function(**{**call.arguments, **change})
    assert all(map(torch.equal, calls.tensors_of(outputs), before))
