"""Under grad mode ops run forward, refuse backward, raise versions of written tensors."""

from __future__ import annotations

import pytest
import torch
from support import int32
from torch import Tensor

import pagedtree as pt

TABLE, LENS, OFFSETS = int32([[0], [1]], "cpu"), int32([3, 3], "cpu"), int32([0, 1, 2], "cpu")
SLOTS = torch.tensor([1, 10])
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


def test_leaves_are_not_written(backend: str) -> None:
    keys = cache().requires_grad_()
    before = keys.detach().clone()
    with pytest.raises(ValueError, match="append_kv: cannot write to a leaf tensor that requires grad"):
        pt.append_kv(rows(), rows(), keys, cache(), *here(SLOTS))
    assert torch.equal(keys.detach(), before)


def test_tensors_of_inference_mode(backend: str) -> None:
    with torch.inference_mode():
        keys, new = cache(), torch.randn(2, 2, 64)
    with torch.no_grad():
        pt.append_kv(torch.ones(2, 2, 64), new, keys, cache(), *here(SLOTS))
    assert (keys[0, 1] == 1).all()


@pytest.mark.parametrize("grad", [False, True])
def test_compiled(backend: str, grad: bool) -> None:
    """A compiled forward pass works although backward is traced ahead."""
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
        with pytest.raises(RuntimeError, match="tree_attention: has no gradient"):
            out.sum().backward()
