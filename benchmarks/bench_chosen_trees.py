"""What chains, fixed trees and `generate(tree="auto")` gain and cost beside plain decoding, on the toy's models.

python -m pagedtree bench chosen_trees [--batch 1 2 4 8 16 32 64] [--max-new-tokens 96] [--pairs 16]
    [--texts 16] [--drafters NAME ...] [--device cuda] [--json PATH]

Trees that do not pay shall cost next to nothing, which rounds of whole generations are too coarse to show. Each
generation therefore runs beside one of plain decoding, the two taking turns step by step (lockstep.py), and as many of
plain decoding beside itself tell what the machine adds. Each pair has other texts, as those of one small batch may all
be easy to guess or all hard, and small batches have so many pairs that `--texts` of them are seen. The drafter keeps
what it learnt from pair to pair ("auto") or starts anew in each ("auto from scratch").
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from typing import Any

from bench_end_to_end import PLAIN, Candidate, Tokens, arguments, prepare
from lockstep import Player, in_lockstep
from measure import median_interval, save
from suite import Progress

# Pairs up to the first tokens for each one of whole texts, as one step scatters more than a hundred do.
FIRST_TOKENS = 4


def in_pairs(
    target: Any, batches: list[Tokens], run: dict[str, Candidate], run_first: dict[str, Candidate]
) -> list[dict[str, Any]]:
    """What each gives over plain decoding: speed, and with chosen trees the time to the first token.

    batches: the texts of each pair. run_first: candidates for two tokens.
    """
    names = [name for name in run if name.startswith("pagedtree")]
    chosen = [name for name in names if name == PLAIN or ", auto" in name]
    speed, first_token, drafted = defaultdict(list), defaultdict(list), defaultdict(list)

    def pair(run: dict[str, Candidate], name: str, turn: int) -> tuple[Player, Player]:
        batch = batches[turn % len(batches)]
        both = [
            lambda on_step, name=name: run[name](on_step=on_step, batch=batch)  # type: ignore[misc]
            for name in (PLAIN, name)
        ]
        return in_lockstep(target, *both) if turn % 2 else in_lockstep(target, *both[::-1])[::-1]  # type: ignore[return-value]

    for turn in range(len(batches)):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            plain, other = pair(run, name, turn)
            stats = other.result[1]
            speed[name].append(plain.seconds / other.seconds)
            drafted[name].append(stats.drafted_steps / stats.steps)
            if name not in chosen:
                continue
            firsts = [pair(run_first, name, turn + again) for again in range(FIRST_TOKENS)]
            first_token[name].append(
                statistics.geometric_mean(
                    sum(other.first_tokens.values()) / sum(plain.first_tokens.values()) for plain, other in firsts
                )
            )
    return [
        {
            "batch": len(batches[0]),
            "name": name,
            "pairs": speed[name],
            "over_plain": median_interval(speed[name]),
        }
        | (
            {
                "first_token_over_plain": median_interval(first_token[name]),
                "drafted_steps": statistics.median(drafted[name]),
            }
            if name in chosen
            else {}
        )
        for name in names
    ]


def main() -> int:
    parser = arguments(__doc__, "chosen_trees")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--texts", type=int, default=16, help="how many of them are seen at least, by more pairs")
    args = parser.parse_args()
    target, texts, candidates_of, facts = prepare(args, args.texts)
    facts |= {"threads": 1} if args.device == "cpu" else {}  # each generation of a pair has one thread
    bar, rows = Progress(len(args.batch)), []
    for batch_size in args.batch:
        bar.show(f"batch {batch_size}")
        run, run_first = candidates_of(batch_size, args.max_new_tokens), candidates_of(batch_size, 2)
        pairs = max(args.pairs, -(-args.texts // batch_size))
        batches = [[texts[(i * batch_size + j) % len(texts)] for j in range(batch_size)] for i in range(pairs)]
        rows += (found := in_pairs(target, batches, run, run_first))
        bar.clear()
        bar.done += 1
        for row in found:
            figures = [row["over_plain"], *(row[key] for key in ("first_token_over_plain",) if key in row)]
            speed, *first_token = (f"{middle:.3f} ({low:.3f} to {high:.3f})" for low, middle, high in figures)
            rest = "".join(f", first token {figure} x" for figure in first_token)
            print(f"{row['batch']:4} {row['name']:55} {speed} x plain{rest}", flush=True)
    save(f"chosen_trees_{args.device}", rows, facts, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
