"""Whole generations on a target whose steps take the time of reading its weights, as those of large models do.

python -m pagedtree bench wide [--batch 1 2 4 8 16] [--max-new-tokens 96] [--rounds 3] [--drafters NAME ...]
    [--peers NAME ...] [--device cuda] [--json PATH]

The toy's target, widened to 260 M parameters in bf16 with the same outputs (wide_target.py): it stands in for the cost
of a larger model. How many drafts are accepted is the toy's models' affair. Each drafter makes chains, fixed trees of
16 nodes, and trees chosen by `generate(tree="auto")` with a drafter that starts anew in each round. transformers'
assisted generation and prompt lookup, and other libraries where they are installed (wide_peers.py), take one sequence.

Candidates take turns, each round in another order; tokens per second are the median over the rounds, prompts included.
All is greedy. In bf16 a pass over more rows rounds in another way, so that texts may part from plain decoding's where
two tokens are nearly tied: where, and how nearly, is reported.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_end_to_end import (
    CHECKPOINTS,
    PLAIN,
    Candidate,
    Maker,
    Tokens,
    arguments,
    by_batch_size,
    drafters,
    facts_of,
    in_rounds,
    loaded,
    ways,
)
from live import first_difference
from measure import save, seconds_of
from wide_peers import Models, ready
from wide_target import for_wide, widened


def candidates(
    target: Any,
    draft: Any,
    tokenizer: Any,
    batch: Tokens,
    count: int,
    makers: dict[str, tuple[Maker, Maker]],
    hidden_size: int,
) -> dict[str, Candidate]:
    """hidden_size: of the target that the drafters are made for."""
    theirs, ours = ways(target, tokenizer, batch, count)
    found: dict[str, Candidate] = {"transformers": theirs}
    if len(batch) == 1:
        found["transformers, assisted"] = lambda: theirs(assistant_model=draft)
        found["transformers, prompt lookup"] = lambda: theirs(prompt_lookup_num_tokens=8)
    found[PLAIN] = ours
    for name, (chain, tree) in makers.items():
        for label, make, chosen in (("chain", chain, None), ("tree", tree, None), ("tree, auto", tree, "auto")):
            found[f"pagedtree, {name} {label}"] = lambda make=make, chosen=chosen: ours(  # type: ignore[misc]
                for_wide(make(), hidden_size), chosen
            )
    return found


@torch.no_grad()
def pass_times(target: Any) -> dict[int, float]:
    """Milliseconds of a pass over so many rows, the best of a few: from where on arithmetic is what it takes."""
    tokens = torch.zeros(1, 128, dtype=torch.int64, device=target.device)
    return {
        rows: min(seconds_of(lambda rows=rows: target(tokens[:, :rows]), target.device) for _ in range(6)) * 1e3
        for rows in (1, 2, 4, 8, 16, 32, 64, 128)
    }


def main() -> int:
    parser = arguments(__doc__, "wide")
    parser.set_defaults(batch=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--peers", nargs="*", help="the same of other libraries than transformers")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    narrow, draft, tokenizer, prompts = loaded(args, torch.bfloat16)
    target = widened(narrow)
    makers = drafters(narrow, draft, args.drafters)
    facts = facts_of(args) | {
        "dtype": "bf16",
        "parameters": sum(weight.numel() for weight in target.parameters()),
        "pass_ms": pass_times(target),
    }

    def candidates_of(batch: Tokens, count: int) -> dict[str, Candidate]:
        return candidates(target, draft, tokenizer, batch, count, makers, narrow.config.hidden_size)

    with tempfile.TemporaryDirectory() as folder:
        models = Models(target, draft, CHECKPOINTS / "target" / "tokenizer.json", Path(folder), args.threads)
        peers, facts["absent"] = ready(models, args.peers, args.device) if 1 in args.batch else ({}, {})

        def rows_of(batch_size: int) -> list[dict[str, Any]]:
            batch = prompts[:batch_size]

            def explain(plain: Tokens, tokens: Tokens) -> str:
                both = ([torch.tensor(a + b) for a, b in zip(batch, given, strict=True)] for given in (plain, tokens))
                return first_difference(*both, target)

            run = candidates_of(batch, args.max_new_tokens)
            for name, peer in peers.items() if batch_size == 1 else ():
                run[name] = lambda peer=peer: (peer(batch[0], args.max_new_tokens), None)  # type: ignore[misc]
            return in_rounds(batch_size, run, args.rounds, explain)

        for warm_up in candidates_of(prompts[:1], 4).values():
            warm_up()
        by_batch_size(args.batch, rows_of, lambda rows: save(f"wide_{args.device}", rows, facts, args.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
