"""What calls of the ops cost the host where there is nothing to do: single calls, and all those of a step of 32 layers.

python benchmarks/bench_host.py [--json PATH] [--seconds 40]

The batch has no sequence and no token, so that what is left is the check of arguments, the results' memory and
PyTorch's dispatch: what a step costs beside its kernels where no CUDA graph holds it. One thread, inference mode; calls
take turns. Beside them are torch.empty, and scaled_dot_product_attention (SDPA) of one query and one key, which does
next to nothing, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from measure import interleaved, machine_facts, save
from torch import Tensor

import pagedtree as pt

LAYERS = 32
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, VOCAB = 4, 2, 64, 16, 8
CALLS = 50  # of one sample, so that the clock itself does not count
Call = Callable[[], Any]


class Step:
    """A step of a model over an empty batch, as in docs/integration.md; prepared: by the forms that check once."""

    def __init__(self) -> None:
        pool = torch.zeros(LAYERS, 2, 4, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.layers = [(pool[i, 0], pool[i, 1]) for i in range(LAYERS)]
        self.caches = [cache for pair in self.layers for cache in pair]
        self.trees = pt.TreeBatch.from_trees([])
        self.page_table, self.start = torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        self.q, self.k = torch.zeros(0, HEADS, HEAD_DIM), torch.zeros(0, KV_HEADS, HEAD_DIM)
        self.logits, self.tokens = torch.zeros(0, VOCAB), torch.zeros(0, dtype=torch.int64)
        self.out, self.lse = torch.empty_like(self.q), torch.zeros(0, HEADS)
        self.compact = pt.PreparedCompaction(self.caches)
        self.sizes: dict[str, Any] = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        self.sizes |= {"page_size": PAGE_SIZE, "max_seqlen_q": 1}
        _, self.seq_lens, self.offsets, self.slots = self.prepare()
        self.plan = self.planned()
        self.attend = pt.PreparedAttention(*self.batch, plan=self.plan)
        self.verdict = pt.verify_greedy(self.logits, self.tokens, self.trees)

    @property
    def batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.page_table, self.seq_lens, self.offsets, self.trees.mask

    def prepare(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return pt.prepare_step(self.trees, self.page_table, self.start, PAGE_SIZE, total_q=0)

    def planned(self) -> Tensor:
        return pt.attention_plan(self.seq_lens, self.offsets, **self.sizes)

    def moves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.page_table, self.start, self.verdict.accept_index, self.verdict.num_accepted

    def call_attention(self, **options: Any) -> Any:
        return pt.tree_attention(self.q, *self.layers[0], *self.batch, plan=self.plan, **options)

    def run(self, prepared: bool) -> None:
        """All ops of the step."""
        self.prepare()
        plan = self.planned()
        attend = pt.PreparedAttention(*self.batch, plan=plan) if prepared else None
        for k_cache, v_cache in self.layers:
            pt.append_kv(self.k, self.k, k_cache, v_cache, self.slots)
            if attend is not None:
                attend(self.q, k_cache, v_cache)
            else:
                pt.tree_attention(self.q, k_cache, v_cache, *self.batch, plan=plan)
        verdict = pt.verify_greedy(self.logits, self.tokens, self.trees)
        self.compact(*self.moves()) if prepared else pt.compact_kv(self.caches, *self.moves())
        pt.commit(verdict, self.trees, self.start)


def calls_of(step: Step) -> dict[tuple[str, str], Call]:
    """What is timed, by its name and its form: "" or "prepared"."""
    one = torch.zeros(1, 1, 1, HEAD_DIM)
    q, (k_cache, v_cache) = step.q, step.layers[0]
    step_name = f"all ops of a step, {LAYERS} layers"
    return {
        ("torch.empty", ""): lambda: torch.empty(4),
        ("SDPA, one key", ""): lambda: torch.nn.functional.scaled_dot_product_attention(one, one, one),
        ("tree_attention", ""): step.call_attention,
        ("tree_attention", "prepared"): lambda: step.attend(q, k_cache, v_cache),
        ("tree_attention, out given", ""): lambda: step.call_attention(out=step.out),
        ("tree_attention, out given", "prepared"): lambda: step.attend(q, k_cache, v_cache, out=step.out),
        ("append_kv", ""): lambda: pt.append_kv(step.k, step.k, k_cache, v_cache, step.slots),
        (f"compact_kv, {2 * LAYERS} caches", ""): lambda: pt.compact_kv(step.caches, *step.moves()),
        (f"compact_kv, {2 * LAYERS} caches", "prepared"): lambda: step.compact(*step.moves()),
        ("merge_states", ""): lambda: pt.merge_states(q, step.lse, q, step.lse),
        ("prepare_step", ""): step.prepare,
        ("attention_plan", ""): step.planned,
        ("verify_greedy", ""): lambda: pt.verify_greedy(step.logits, step.tokens, step.trees),
        ("commit", ""): lambda: pt.commit(step.verdict, step.trees, step.start),
        (step_name, ""): lambda: step.run(False),
        (step_name, "prepared"): lambda: step.run(True),
    }


def repeat(call: Call) -> None:
    """Results go before the next call, as a step's layers let them go."""
    for _ in range(CALLS):
        call()


def measured(seconds: float) -> list[dict[str, Any]]:
    with torch.inference_mode():
        calls = calls_of(Step())
        samples = {" | ".join(key): lambda _, call=call: repeat(call) for key, call in calls.items()}
        timings = interleaved(samples, budget=seconds)
    rows = []
    for (call, form), timing in zip(calls, timings.values(), strict=True):
        median, spread = (seconds / CALLS * 1e6 for seconds in (timing.median, timing.spread))
        rows.append({"call": call, "form": form, "us": median, "spread_us": spread, "repeats": timing.repeats})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write; default benchmarks/results/host_cpu.json")
    parser.add_argument("--seconds", type=float, default=40.0, help="for all calls together (default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine_facts() | {"arguments": {"seconds": args.seconds}}
    rows = measured(args.seconds)
    for row in rows:
        print(f"{row['call']:40} {row['form']:9} {row['us']:8.1f} us ({row['spread_us']:.1f})")
    save("host_cpu", rows, facts, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
