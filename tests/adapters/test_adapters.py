"""Every adapter imports without its engine and never waits for the device."""

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
LENS, ROTARY = INTEGERS.int()[:, 0], torch.zeros(2, 9, 16)
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
    ("flash_attn_with_kvcache", {"rotary_cos": ROTARY[0], "rotary_sin": ROTARY[1]}),
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
