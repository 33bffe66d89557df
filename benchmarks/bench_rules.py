"""How many draft tokens each rule of verification accepts, for each way to draft, on the toy's models.

python benchmarks/bench_rules.py [--json PATH] [--prompts 40] [--max-new-tokens 64] [--temperature 0.8] [--top-p 0.95]

For each drafter the held-out prompts of the demo are completed once, under rule "sampled". Every rule judges the trees
of that run, several times each with other coins, so that rules are compared on the same trees. Intervals are of 95 %,
by bootstrap over the prompts. Drafts that are coupled to the noise of "sampled" depend on that very noise, so they are
judged only once.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import machine_facts, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedtree import SamplingParams
from pagedtree.generation.rules import Sampling
from pagedtree.integrations.transformers import ModelDrafter, StepResult, generate

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from stdlib_text import prompts as stdlib_prompts  # noqa: E402

RESAMPLES = 4000


@dataclass(frozen=True)
class Case:
    """A drafter, and the rules that judge its trees."""

    shape: str
    law: str
    rules: tuple[str, ...]
    drafter: dict[str, Any]


CHAIN = {"num_nodes": 5, "depth": 4, "width": 1}
DRAWN_TREE = {"num_nodes": 22, "branching": (3, 2, 1, 1)}
CASES = [
    Case("chain of 4", "topk", ("sampled", "rejection", "block", "typical"), CHAIN),
    Case("chain of 4", "iid", ("sampled", "rejection", "block"), CHAIN),
    Case("chain of 4", "coupled", ("sampled",), CHAIN),
    Case("tree of 21", "topk", ("sampled", "rejection", "typical"), {"num_nodes": 22, "depth": 4, "width": 3}),
    Case("tree of 21", "iid", ("sampled", "rejection", "traversal"), DRAWN_TREE),
    Case("tree of 21", "swor", ("sampled", "rejection", "traversal"), DRAWN_TREE),
    Case("tree of 21", "coupled", ("sampled",), DRAWN_TREE),
]


class Judge:
    """Adds up, for each rule and prompt, the trees judged and the draft tokens accepted."""

    def __init__(self, case: Case, params: SamplingParams, repeats: int, num_prompts: int) -> None:
        self.case, self.repeats = case, 1 if case.law == "coupled" else repeats
        self.samplings = [Sampling(rule, params, torch.empty(0)) for rule in case.rules]
        self.generator = torch.Generator().manual_seed(0)
        self.trees = np.zeros(num_prompts)
        self.accepted: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(num_prompts))

    def __call__(self, result: StepResult) -> None:
        decoded = [sequence.index for sequence in result.sequences[result.num_read :]]
        self.trees[decoded] += 1
        law = "onehot" if self.case.law == "topk" else self.case.law
        for sampling in self.samplings:
            for _ in range(self.repeats):
                verdict = result.verdict
                if law != "coupled":
                    seeds = torch.randint(2**62, result.start.shape, generator=self.generator)
                    verdict = replace(sampling, seeds=seeds).verify(result.logits, result.draft, law, result.start)
                counts = verdict.num_accepted[result.num_read :].double().numpy()
                self.accepted[sampling.rule][decoded] += counts / self.repeats

    def rows(self) -> list[dict[str, Any]]:
        picks = np.random.default_rng(0).integers(len(self.trees), size=(RESAMPLES, len(self.trees)))
        trees = self.trees[picks].sum(1)

        def estimate(accepted: np.ndarray) -> list[float]:
            low, high = np.quantile(accepted[picks].sum(1) / trees, [0.025, 0.975])
            return [float(accepted.sum() / self.trees.sum()), float(low), float(high)]

        return [
            {
                "shape": self.case.shape,
                "law": self.case.law,
                "rule": rule,
                "trees": int(self.trees.sum()),
                "accepted": estimate(accepted),
                "over_rejection": estimate(accepted - self.accepted["rejection"])
                if "rejection" in self.accepted and rule != "rejection"
                else None,
            }
            for rule, accepted in self.accepted.items()
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write; default benchmarks/results/rules.json")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--repeats", type=int, default=4, help="how often a rule judges a tree (default %(default)s)")
    args = parser.parse_args()

    folder = EXAMPLES / "checkpoints"
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval() for name in ("target", "draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    batch = [tokenizer(text).input_ids for text in stdlib_prompts(args.prompts)]
    params = SamplingParams(temperature=args.temperature, top_p=args.top_p)
    facts = machine_facts() | {"arguments": vars(args)}
    rows = []
    for case in CASES:
        judge = Judge(case, params, args.repeats, len(batch))
        drafter = ModelDrafter(draft, law=case.law, **case.drafter)
        generate(target, batch, drafter=drafter, max_new_tokens=args.max_new_tokens, params=params, on_step=judge)
        for row in judge.rows():
            print(f"{row['shape']:12} {row['law']:8} {row['rule']:10} {row['accepted'][0]:.3f}", flush=True)
            rows.append(row)
    save("rules", rows, facts, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
