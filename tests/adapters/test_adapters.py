"""What holds for every adapter: it imports without the packages it stands for, and does not wait for the device."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from pagedtree import integrations
from pagedtree.integrations import flash_attn, flashinfer, sglang
from pagedtree.integrations.flashinfer import mla, paged
from pagedtree.integrations.sglang.attention import PagedTreeBackend

FOLDER = Path(integrations.__file__).parent
ADAPTERS = ["sglang", "sglang.attention", "sglang.plugin", "flashinfer", "flash_attn"]
IMPORTS = """
import importlib, sys
others = ["sglang", "sgl_kernel", "flashinfer", "flash_attn", "vllm", "accelerate", "kernels", "transformers"]
sys.modules.update(dict.fromkeys(others))  # whose import then fails
import pagedtree, pagedtree.integrations, pagedtree.tools.cli
assert "torch._dynamo" not in sys.modules  # the compiler: its import takes longer than all of these
for name in sys.argv[1:]:
    if name == "transformers":
        del sys.modules[name]
    importlib.import_module("pagedtree.integrations." + name)
"""


@pytest.mark.parametrize(
    "adapters",
    # The core suite's tests of transformers import it where the other engines are not installed.
    [pytest.param(ADAPTERS, id="without"), pytest.param(["transformers"], id="with", marks=pytest.mark.slow)],
)
def test_adapters_import_alone(adapters: list[str]) -> None:
    """The package needs no engine, and an adapter no other engine than its own."""
    if "transformers" in adapters:
        pytest.importorskip("transformers")
    subprocess.run([sys.executable, "-c", IMPORTS, *adapters], check=True)


@pytest.mark.parametrize("name", ["flash_attn/*.py", "masks.py", "sglang/*.py", "flashinfer/*.py"])
def test_adapters_are_small(name) -> None:
    files = sorted(FOLDER.glob(name))
    assert files
    assert all(len(path.read_text(encoding="utf-8").splitlines()) < 200 for path in files)


@pytest.mark.parametrize(
    "op",
    [sglang.verify_tree_greedy, sglang.tree_speculative_sampling_target_only, flashinfer.chain_speculative_sampling],
)
@pytest.mark.parametrize("option", ["options", "grammar_mask"])
def test_request_options_are_refused_by_name(op, option) -> None:
    with pytest.raises(TypeError, match=f"{op.__name__}.*{option}"):
        op(**{option: None})


def functions() -> Iterator[Any]:
    for adapter in (flash_attn, flashinfer, sglang):
        for name in adapter.__all__:
            given = getattr(adapter, name)
            members = vars(given).items() if inspect.isclass(given) else [("", given)]
            for member, function in members:
                if inspect.isfunction(function) and member[:1] != "_":
                    yield pytest.param(inspect.unwrap(function), id=f"{name}.{member}".strip("."))
    for name in ("forward_decode", "forward_extend", "init_forward_metadata"):
        yield pytest.param(getattr(PagedTreeBackend, name), id=f"{PagedTreeBackend.__name__}.{name}")


@pytest.mark.parametrize("function", list(functions()))
def test_each_argument_is_read_or_a_hint(function) -> None:
    """What is read is served or refused by name; what is not read is in the docstring, or among the hints, by name."""
    body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body  # type: ignore[attr-defined]
    read = {node.id for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    unread = {*inspect.signature(function).parameters}.difference(read, paged.HINTS, mla.HINTS, {"self"})
    text = re.findall(r"[^.:;]*(?:[:;] )?(?:hints|no effect|neither read nor written)", inspect.getdoc(function) or "")
    assert unread <= set(re.findall(r"\w+", " ".join(text)))


# Fake tensors have no values: whoever reads one on the host, or needs one for a size, fails.


def integers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def call_build_tree() -> None:
    for mode, mask in ((0, torch.zeros(999).bool()), (1, torch.zeros(99).bool()), (2, integers(99))):
        links = [integers(2, 4) for _ in range(3)]
        lens = integers(2)
        form = integers(2, 5), integers(2, 3), lens, mask, integers(8)
        sglang.build_tree_kernel_efficient(*form, *links, 2, 3, 4, mode)
        sglang.tree_mask_words(mask, lens, 4, mode)
    sglang.reconstruct_indices_from_tree_mask(torch.zeros(32).bool(), lens, integers(8), *links, 2, 4)


def call_verify() -> None:
    outs = integers(12), integers(2, 3), integers(2)
    trees = [integers(2, 6) for _ in range(4)]
    sglang.verify_tree_greedy(*outs, *trees, integers(2, 6))
    probs = torch.zeros(2, 6, 9)
    sglang.tree_speculative_sampling_target_only(
        *outs, *trees, torch.zeros(2, 6), torch.zeros(2), probs, probs, 0.5, 0.5
    )


def call_move() -> None:
    sglang.move_kv_cache([torch.zeros(9, 2, 8)], [torch.zeros(9, 2, 8)], integers(1500), integers(1500))


def call_chain() -> None:
    probs = torch.zeros(2, 4, 9)
    flashinfer.chain_speculative_sampling(probs[:, :3], integers(2, 3, dtype=torch.int32), probs)


def call_paged() -> None:
    cache, indices, indptr = torch.zeros(4, 2, 4, 2, 64), integers(3, dtype=torch.int32), integers(3, dtype=torch.int32)
    flashinfer.page_table(indptr, indices, integers(2, dtype=torch.int32), 4, max_pages=2)
    flashinfer.get_batch_indices_positions(indptr, integers(2), 5)
    new = torch.zeros(5, 2, 64)
    flashinfer.append_paged_kv_cache(new, new, integers(5), integers(5), cache, indices, indptr, integers(2))


def call_flash_attn() -> None:
    q, k, cache = torch.zeros(2, 3, 4, 64), torch.zeros(2, 3, 2, 64), torch.zeros(5, 4, 2, 64)
    table, lens = integers(2, 2, dtype=torch.int32), integers(2, dtype=torch.int32)
    for options in ({"causal": True}, {"causal": False}, {"window_size": (2, 3)}):
        flash_attn.flash_attn_with_kvcache(
            q, cache, cache, k, k, cache_seqlens=lens, block_table=table, return_softmax_lse=True, **options
        )
        cos = torch.zeros(9, 16)
        flash_attn.flash_attn_with_kvcache(q, cache, cache, k, k, cos, cos, lens, page_table=table, **options)
        offsets = integers(3, dtype=torch.int32)
        flash_attn.flash_attn_varlen_func(q[0], k[0], k[0], offsets, offsets, 3, 3, **options)


CALLS = [call_build_tree, call_verify, call_move, call_chain, call_paged, call_flash_attn]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_nothing_is_read_on_the_host(call) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        call()


def test_values_that_the_adapters_make_pass_the_checks(value_checks, on_device) -> None:
    pool = torch.arange(5.0).view(5, 1, 1).repeat(1, 1, 4)
    sglang.move_kv_cache([pool], [], torch.tensor([0, 4]), torch.tensor([3, 2]))
    assert pool[:, 0, 0].tolist() == [3, 1, 2, 3, 2]
    for n in (0, 1, 3):
        probs = torch.full((2, n + 1, 5), 0.2)
        tokens = flashinfer.chain_speculative_sampling(probs[:, :n], integers(2, n), probs)[0]
        assert tokens[:, :n].eq(0).all() and tokens[:, n].ge(0).all()  # equal distributions: all drafts are accepted
    call_build_tree()
    call_verify()


def test_a_read_on_the_host_is_noticed() -> None:
    with FakeTensorMode(), pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        flashinfer.page_table(integers(3), integers(3), integers(2), 4)
