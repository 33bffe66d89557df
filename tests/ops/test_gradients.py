"""Under grad mode the ops work forward, refuse backward, and count the versions of what they write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from step_case import int32
from torch import Tensor

import pagedtree as pt
from pagedtree._gradients import OPS_OF_INTEGERS
from pagedtree._ops import _overload, _public_ops

TABLE, LENS, OFFSETS = int32([[0], [1]], "cpu"), int32([3, 3], "cpu"), int32([0, 1, 2], "cpu")
SLOTS = torch.tensor([1, 10])
REFUSAL = r"{}: expected no backward pass: pagedtree's ops are for inference only"

pytestmark = pytest.mark.usefixtures("on_device")


def rows() -> Tensor:
    return torch.randn(2, 2, 64, requires_grad=True)


def cache() -> Tensor:
    return torch.randn(2, 8, 2, 64)


def here(*tensors: Tensor) -> list[Tensor]:
    return [t.to(torch.get_default_device()) for t in tensors]


def attend(q: Tensor, k: Tensor, v: Tensor, places: list[Tensor] | None = None, **options: object) -> Tensor:
    out = pt.tree_attention(q, k, v, *(places or here(TABLE, LENS, OFFSETS)), **options)
    assert isinstance(out, Tensor)
    return out


def merge() -> Tensor:
    lse = torch.zeros(2, 2)
    return pt.merge_states(rows(), lse, rows(), lse)[0]


def written_out() -> Tensor:
    return attend(rows().half(), cache().half(), cache().half(), out=torch.empty(2, 2, 64, dtype=torch.float16))


def appended() -> Tensor:
    both = torch.randn(2, 2, 8, 2, 64)
    pt.append_kv(rows(), rows().detach(), both[0], both[1], *here(SLOTS))
    return both


def compacted() -> Tensor:
    values = cache() * torch.ones(1, requires_grad=True)
    path = torch.tensor([[0, 2], [0, 2]], dtype=torch.int32)
    pt.compact_kv([values], *here(TABLE, LENS), path, torch.ones(2, dtype=torch.int32))
    return values


def grown() -> Tensor:
    state = pt.start_draft(torch.tensor([1, 2]), max_kv_nodes=4)
    return pt.expand_tree(state, torch.randn(2, 8, requires_grad=True), num_children=2).scores[:, 1:]


def delta_rule() -> Tensor:
    q, g = torch.randn(2, 1, 8).half(), torch.zeros(2, 1)
    return pt.tree_delta_rule(
        q.requires_grad_(), q, q, g, None, torch.zeros(1, 1, 8, 8), *here(OFFSETS[:1]), None, cu_seqlens=cut()
    )


def cut() -> Tensor:
    return here(int32([0, 2], "cpu"))[0]


def advanced() -> Tensor:
    k, g = torch.randn(2, 1, 8).half(), torch.zeros(2, 1)
    state = torch.zeros(1, 1, 8, 8) * torch.ones(1, requires_grad=True)
    pt.advance_state(state, *here(OFFSETS[:1]), k, k, g, None, None, cu_seqlens=cut())
    return state


def convolution() -> Tensor:
    x = torch.randn(2, 8).half().requires_grad_()
    return pt.tree_conv1d(x, x.T, None, torch.zeros(1, 8, 1).half(), *here(OFFSETS[:1]), None, cu_seqlens=cut())


def shifted() -> Tensor:
    state = torch.zeros(1, 8, 1).half() * torch.ones(1, requires_grad=True).half()
    pt.advance_conv(state, *here(OFFSETS[:1]), torch.randn(2, 8).half(), None, cu_seqlens=cut())
    return state


FORWARDS: dict[str, Callable[[], Tensor]] = {
    "tree_attention": lambda: attend(rows().half(), cache().half(), cache().half()),
    "tree_attention.out": written_out,
    "merge_states": merge,
    "append_kv": appended,
    "compact_kv": compacted,
    "expand_tree": grown,
    "best_first_tree": lambda: pt.best_first_tree(
        torch.randn(1, 2, 3, requires_grad=True),
        torch.zeros(1, 2, 3, dtype=torch.int64),
        torch.tensor([0]),
        4,
        return_log_probs=True,
    )[2],
    "tree_delta_rule": lambda: delta_rule(),
    "advance_state": advanced,
    "tree_conv1d": lambda: convolution(),
    "advance_conv": shifted,
    "token_logprobs": lambda: pt.token_logprobs(torch.randn(2, 8, requires_grad=True), torch.tensor([0, 1]))[0],
}


@pytest.mark.parametrize("name", FORWARDS)
def test_backward_is_refused(backend: str, name: str) -> None:
    out = FORWARDS[name]()
    assert out.requires_grad and out.isfinite().all()
    with pytest.raises(RuntimeError, match=REFUSAL.format(name.partition(".")[0])):
        out.sum().backward()
    with torch.no_grad():
        assert not FORWARDS[name]().requires_grad or name in ("compact_kv", "advance_state", "advance_conv")


def test_every_op_is_known(device: torch.device) -> None:
    """Outputs of floats are refused; what the other ops give and write are integers."""
    of_floats = {name.partition(".")[0] for name in _public_ops()} - OPS_OF_INTEGERS
    assert {name.partition(".")[0] for name in FORWARDS} == of_floats
    trees = pt.TreeBatch.from_trees([pt.DraftTree.chain(1)], device=device)
    logits = torch.randn(2, 8, requires_grad=True)
    verdict = pt.verify_greedy(logits, torch.zeros(2, dtype=torch.int64), trees)
    assert not any(part.is_floating_point() or part.requires_grad for part in verdict)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_versions(backend: str, mode: Callable[[], object]) -> None:
    keys, values, new = cache(), cache(), torch.randn(2, 2, 64)
    with mode():
        before = keys._version, values._version
        pt.append_kv(new, new, keys, values, *here(SLOTS))
        assert keys._version > before[0] and values._version > before[1]
        before = keys._version, values._version
        pt.append_kv(new, None, keys, None, *here(SLOTS))
        assert keys._version > before[0] and values._version == before[1]
        before = keys._version, values._version
        path = torch.tensor([[0, 1], [0, 1]], dtype=torch.int32)
        pt.compact_kv([keys, values], *here(TABLE, LENS), path, torch.ones(2, dtype=torch.int32))
        assert keys._version > before[0] and values._version > before[1]
        out = torch.empty(2, 2, 64, dtype=torch.float16)
        version = out._version if not out.is_inference() else None
        attend(new.half(), keys.half(), values.half(), out=out)
        assert version is None or out._version > version


def test_a_write_invalidates_what_was_saved(backend: str) -> None:
    keys, weight = cache(), torch.randn(64, requires_grad=True)
    loss = (keys * weight).sum()  # saves the keys for the backward pass
    pt.append_kv(rows().detach(), rows().detach(), keys, cache(), *here(SLOTS))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_leaves_are_not_written(backend: str) -> None:
    keys = cache().requires_grad_()
    kept = keys.detach().clone()
    with pytest.raises(ValueError, match="append_kv: expected to write no leaf tensor that requires grad"):
        pt.append_kv(rows(), rows(), keys, cache(), *here(SLOTS))
    assert torch.equal(keys.detach(), kept)


def test_tensors_of_inference_mode(backend: str) -> None:
    with torch.inference_mode():
        keys, new = cache(), torch.randn(2, 2, 64)
    with torch.no_grad():
        pt.append_kv(torch.ones(2, 2, 64), new, keys, cache(), *here(SLOTS))
    assert (keys[0, 1] == 1).all()


@pytest.mark.parametrize("grad", [False, True])
def test_compiled(backend: str, grad: bool) -> None:
    """A compiled forward pass works, too, although its backward is traced ahead."""
    torch._dynamo.reset()
    places, (slots,) = here(TABLE, LENS, OFFSETS), here(SLOTS)
    weight, x = torch.randn(64, 64, dtype=torch.float32, requires_grad=True), torch.randn(2, 2, 64)

    def layer(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        hidden = x @ weight
        pt.append_kv(hidden, hidden, keys, values, slots)
        return attend(hidden.half(), keys.half(), values.half(), places)

    keys, values = cache(), cache()
    with torch.set_grad_enabled(grad):
        expected = layer(x, keys.clone(), values.clone())
        out = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, keys, values)
    assert torch.equal(out, expected) and out.requires_grad == grad
    if grad:
        with pytest.raises(RuntimeError, match=REFUSAL.format("tree_attention")):
            out.sum().backward()


def test_opcheck(backend: str) -> None:
    q, k, v = rows().half(), cache().half(), cache().half()
    arguments = (k, v, *here(TABLE, LENS, OFFSETS))
    torch.library.opcheck(_overload("tree_attention"), (q.detach(), *arguments))
    # The others run the backward pass.
    forward = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_overload("tree_attention"), (q.detach().requires_grad_(), *arguments), test_utils=forward)
