"""Autograd registration of the ops: they have no backward pass, and raise when one is requested.

The forward pass works under grad mode. Float outputs from tensors that require grad get a graph node that raises in
backward, as do tensors that an op has written, whose version counters increase.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet
from torch.utils._pytree import tree_leaves

__all__ = ["is_of_integers", "new_library", "register_gradients"]

# Their outputs cannot require grad; without an autograd kernel a call is a few microseconds faster.
OPS_OF_INTEGERS = {
    "attention_plan", "build_trees", "commit", "follow_shards", "mask_words", "medusa_propose", "ngram_propose",
    "prepare_step", "rerank_tree", "sample", "select_nodes", "slot_mapping", "step_shards", "walk_shards",
    "weigh_shards",
}  # fmt: skip


def is_of_integers(op: str) -> bool:
    return op in OPS_OF_INTEGERS or op.startswith("verify_")


def new_library(use: str) -> torch.library.Library:
    """Returns an empty library, which replaces an earlier import's."""
    # The ops outlive a package that is deleted from sys.modules, and take each registration once.
    libraries: dict[str, torch.library.Library] = vars(torch.ops.pagedtree).setdefault("_libraries", {})
    if use in libraries:
        libraries[use]._destroy()
    libraries[use] = torch.library.Library("pagedtree", "FRAGMENT")
    return libraries[use]


# An op, too: compiled forward passes trace the backward ahead, and must not fail before anyone runs it.
_library = new_library("_refuse_backward")
_library.define("_refuse_backward(str op, Tensor gradient, SymInt[] shape, ScalarType dtype) -> Tensor")


@torch.library.impl(_library, "_refuse_backward", "CompositeExplicitAutograd")
def _refuse_backward(op: str, gradient: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    raise RuntimeError(f"{op}: has no gradient: pagedtree's ops are for inference only")


@torch.library.register_fake("pagedtree::_refuse_backward", lib=_library)
def _refuse_backward_fake(op: str, gradient: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return gradient.new_empty(shape, dtype=dtype)


class _InferenceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, run: Callable[[], Any], *inputs: Tensor) -> Any:
        ctx.name, ctx.inputs = name, [(t.shape, t.dtype) for t in inputs]
        return run()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        gradient = next(g for g in gradients if g is not None)
        refuse = torch.ops.pagedtree._refuse_backward
        return None, None, *(refuse(ctx.name, gradient, shape, dtype) for shape, dtype in ctx.inputs)


class _Written(_InferenceOnly):
    @staticmethod
    def forward(ctx: Any, name: str, written: Any, *inputs: Tensor) -> Any:
        ctx.mark_dirty(written)
        return _InferenceOnly.forward(ctx, name, lambda: written, *inputs)


def register_gradients(library: torch.library.Library, op: Any) -> None:
    """Registers an op overload for autograd and for in-place views."""
    schema, name = op._schema, op._schema.name.partition("::")[2]
    below, redispatch = torch._C._after_ADInplaceOrView_keyset, op._handle.redispatch_boxed
    is_grad_enabled, any_requires_grad = torch._C.is_grad_enabled, torch._C._any_requires_grad
    places = [(i, argument.name) for i, argument in enumerate(schema.arguments) if argument.is_write]

    def written_by(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        values = [args[i] if i < len(args) else kwargs.get(key) for i, key in places]
        if values and isinstance(values[0], (list, tuple)):  # of caches
            return list(values[0])
        return [t for t in values if t is not None]

    def run(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        result = redispatch(keyset & below, *args, **kwargs)
        if places:
            # Tensors made under inference mode have no version.
            torch.autograd.graph.increment_version([t for t in written_by(args, kwargs) if not t.is_inference()])
        return result

    def run_in_graph(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not (is_grad_enabled() and any_requires_grad(*args, **kwargs)):
            return run(keyset, *args, **kwargs)
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        outputs = [t for t in written_by(args, kwargs) if t.is_floating_point()]
        if any(t.is_leaf and t.requires_grad for t in outputs):
            raise RuntimeError(f"{name}: cannot write to a leaf tensor that requires grad")

        def run_below() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return run(keyset, *args, **kwargs)

        if not places:
            return _InferenceOnly.apply(name, run_below, *inputs)
        result = run_below()
        for tensor in outputs:
            _Written.apply(name, tensor, *inputs)
        return None if result is None else _InferenceOnly.apply(name, lambda: result, *inputs)

    overload = name + (f".{schema.overload_name}" if schema.overload_name else "")
    if not is_of_integers(name):
        library.impl(overload, run_in_graph, "Autograd", with_keyset=True)
    if places:
        library.impl(overload, run, "ADInplaceOrView", with_keyset=True)
