"""Each raw op validates all arguments, needed or not, and names the wrong one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls.raw import RawCall, raw_call, raw_calls
from support import int32
from torch import Tensor

import pagedtree as pt
from pagedtree._ops import ops


def refusal(call: RawCall, **changes: Any) -> str:
    """Returns the argument that the error names; checks that nothing was written."""
    before = {name: t.clone() for name, t in call.tensors().items()}
    with pytest.raises(RuntimeError) as caught:
        call(**changes)
    for name, t in call.tensors().items():
        assert t.view(torch.uint8).equal(before[name].view(torch.uint8)) or name in changes, (call.name, name)
    op = call.name.partition(".")[0]
    found = re.match(rf"{op}: ([\w\[\]]+): expected", str(caught.value))
    assert found, (call.name, changes.keys(), str(caught.value))
    return found[1]


@pytest.mark.parametrize("wrong", [torch.zeros(1, 1, 1, dtype=torch.complex64), torch.zeros(3, 2, 3, 2, 3, 2)], ids=str)
def test_tensors_of_another_kind(wrong: Tensor) -> None:
    """A dtype or rank that no op takes is refused, also for an optional tensor."""
    for call in raw_calls():
        for name in call.tensor_arguments():
            value = call.arguments.get(name)
            is_list = isinstance(value, list)
            answer = refusal(call, **{name: [value[0], wrong] if is_list else wrong})
            # An added tensor may be refused for its companions.
            assert answer == (f"{name}[1]" if is_list else name) or value is None, (call.name, name, answer)


def test_the_device_of_each_tensor() -> None:
    """Direct calls, since dispatch sends meta tensors to the fake implementation."""
    dispatch = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for call in raw_calls():
        unnamed = []
        for name, t in call.tensors().items():
            with pytest.raises(RuntimeError, match=r"\w+: expected the device|no backend for this device") as caught:
                call.function.redispatch(dispatch, **{**call.arguments, name: t.to("meta")})
            unnamed += [] if f" {name}:" in str(caught.value) else [name]
        assert len(unnamed) == 1, (call.name, unnamed)  # it sets the device


def unaligned(t: Tensor) -> Tensor:
    """Copies values one byte off alignment."""
    span = 1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
    memory = torch.frombuffer(bytearray(span * t.element_size() + 1), dtype=t.dtype, count=span, offset=1)
    memory.view(torch.uint8).copy_(t.as_strided((span,), (1,)).view(torch.uint8))
    return memory.as_strided(t.shape, t.stride())


def test_addresses_between_elements(backend: str) -> None:
    if backend == "cuda":
        pytest.skip("torch copies to a GPU's own addresses, which are aligned")
    for call in raw_calls():
        for name, value in call.arguments.items():
            t = value[-1] if isinstance(value, list) else value
            if not isinstance(t, Tensor) or t.element_size() == 1 or t.numel() == 0:
                continue
            shifted = unaligned(t)
            assert shifted.data_ptr() % t.element_size() == 1
            changes = {name: [*value[:-1], shifted] if isinstance(value, list) else shifted}
            with pytest.raises(RuntimeError, match=rf"{name}.*: expected an address that is a multiple of its el"):
                call(**changes)


@pytest.mark.parametrize("byte", [2, 128, 255])
def test_bools_of_any_byte(backend: str, device: torch.device, byte: int) -> None:
    """Every byte but 0 is True."""
    pairs = set()
    for call in raw_calls(device):
        for name, t in call.tensors().items():
            if t.dtype != torch.bool:
                continue
            pairs.add((call.name, name))
            expected, call.arguments[name] = call.named_results(), (t.view(torch.uint8) * byte).view(torch.bool)
            for result, found in call.named_results().items():
                is_same = found.view(torch.uint8).equal(expected[result].view(torch.uint8))
                assert is_same or result.startswith(f"{name}["), (call.name, name, result)
    assert {("select_nodes", "valid"), ("sample", "grammar_mask"), ("rerank_tree", "active")} <= pairs


def of(name: str, **changes: Any) -> Callable[[], Any]:
    return lambda: raw_call(name)(**changes)


FAR = 2**32 + 1  # wraps to 1
MESSAGES: list[tuple[str, Callable[[], Any]]] = [
    ("slot_mapping: page_size: expected 1..2147483647, got 0", of("slot_mapping", page_size=0)),
    ("prepare_step: page_size: expected 1..2147483647, got 0", of("prepare_step", page_size=0)),
    ("attention_plan: num_kv_heads: expected below 2^31, got 4294967297",
     of("attention_plan", num_kv_heads=FAR, num_q_heads=FAR)),
    ("attention_plan: num_q_heads: expected below 2^31, got 4294967298",
     of("attention_plan", num_q_heads=FAR + 1)),
    ("expand_tree: num_kv: expected 2..32, the frontier's nodes included, got 1", of("expand_tree", num_kv=1)),
    ("expand_tree: num_kv: expected 2..32, the frontier's nodes included, got 9223372036854775807",
     of("expand_tree", num_kv=2**63 - 1)),
    ('expand_tree: filter_order: expected "top_k_first" or "joint", got "x"', of("expand_tree", filter_order="x")),
    ('token_logprobs: filter_order: expected "top_k_first" or "joint", got "x"',
     of("token_logprobs", filter_order="x", temperature=None, top_k=None, top_p=None, min_p=None)),
    ('verify_block: draft_filter_order: expected "top_k_first" or "joint", got "x"',
     of("verify_block", draft_filter_order="x")),
    ("advance_conv: max_nodes: expected 0..256, got 257",
     of("advance_conv", cu_nodes=None, parents=None, depths=None, accept_index=None, num_accepted=None,
        cu_seqlens=int32([0, 5, 8]), max_nodes=257)),
    ("step_shards: num_ranks: expected 1..2147483647, got 0", of("step_shards", num_ranks=0)),
    ("step_shards: rank: expected 0..num_ranks - 1, got 1", of("step_shards", rank=1)),
    ("step_shards: digit: expected a digit of the logits' keys, got 8", of("step_shards", digit=8)),
    ("step_shards: received: expected the words of the last round", of("step_shards", last=2)),
    ("step_shards: vocab: expected at least this rank's 40 columns, got 39", of("step_shards", vocab=39)),
    ("step_shards: first_token: expected 0..1, got 2", of("step_shards", vocab=41, first_token=2)),
    ("weigh_shards: num_ranks: expected 1..2147483647, got -1", of("weigh_shards", num_ranks=-1)),
    ("follow_shards: last: expected 1 or 5, got 4294967297", of("follow_shards", last=FAR)),
    ("follow_shards: vocab: expected 1..2^20, got 0", of("follow_shards", vocab=0)),
    ("walk_shards: vocab: expected 1..2^20, got 9223372036854775807", of("walk_shards", vocab=2**63 - 1)),
    ("_use_backend: index: expected -1..", lambda: ops._use_backend(99)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call"), MESSAGES, ids=[message.partition(",")[0] for message, _ in MESSAGES])
def test_messages_name_the_wrong_argument(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        call()


def test_slot_mapping_reads_its_offsets_last() -> None:
    """Without total_q offsets give the rows, so sizes are checked first."""
    table, lens, offsets = int32([[0, 1]]), int32([3]), int32([0, 3])
    assert pt.slot_mapping(table, lens, offsets, 2).tolist() == [0, 1, 2]
    for page_size in (0, -16):
        with pytest.raises(ValueError, match=r"slot_mapping: page_size: expected 1\.\.2147483647, got -?\d+$"):
            pt.slot_mapping(table, lens, offsets, page_size)
    for wrong in (offsets.float(), offsets.to(torch.complex64), offsets[None], offsets[:0]):
        with pytest.raises(ValueError, match="slot_mapping: cu_seqlens_q: expected "):
            pt.slot_mapping(table, lens, wrong, 16)
    with pytest.raises(ValueError, match=r"cu_seqlens_q: expected an end in 0\.\.32, .*, got -3"):
        pt.slot_mapping(table, lens, -offsets, 16)
