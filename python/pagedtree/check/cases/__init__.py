"""The cases, one module per family of ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pagedtree.check.case import Case, Measurement, Place
from pagedtree.check.cases import (
    attention,
    cache,
    capture,
    drafting,
    fitting,
    instructions,
    instructions_sm90,
    options,
    rates,
    recurrent,
    rope,
    rules,
    shards,
    step,
    trees,
    verification,
)

__all__ = ["all_cases", "is_chosen"]

# This stands in the names of a few rows of each op, which take a hundredth of the time of all rows.
QUICK = (
    "instructions/", "slot_mapping/page 7", "append_kv/page 7/packed/D 5",
    "5 and 2 heads/halves/fp16 to fp8, scalar", "5 and 2 heads/pairs/bf16 to fp8, head scale, fp32",
    "compact_kv/page 7", "prepare_step/page 7", "mask_words/bf16",
    "tree_attention/page 7/bf16", "heads/page 7", "latent/page 7/bf16/", "/ragged",
    "/tile 16/bf16/D 128", "/tile 128/bf16 on fp8/D 128",
    "/into a given tensor/fp16", "/without lse/bf16", "attention_plan/mixed", "merge_states/bf16/D 64",
    "sample/bf16/V 129", "swor/fp16/V 129", "coupled/fp16/V 129", "/iid/cool",
    "typical/bf16/V 40/all", "/two ranks/plain", "/two ranks/iid/plain", "topk/fp16",
    "40 candidates, 17", "commit/EOS a", "medusa_propose/paths/fp16",
    "token_logprobs/options/everything", "verify_rejection/options/everything",
    "/trees/bf16/gdn", "/trees/bf16/kda", "/trees/bf16/4 taps",
)  # fmt: skip


def all_cases(place: Place) -> Iterator[Case | Measurement]:
    """Returns every row. Captures come last: a failed one may disturb others."""
    for family in (
        instructions,
        instructions_sm90,
        trees,
        cache,
        rope,
        step,
        attention,
        verification,
        options,
        rules,
        shards,
        drafting,
        fitting,
        recurrent,
    ):
        yield from family.cases()
    yield from rates.measurements()
    yield from capture.cases(place)


def is_chosen(name: str, only: Sequence[str], quick: bool) -> bool:
    return (not only or any(text in name for text in only)) and (not quick or any(text in name for text in QUICK))
