"""Whole answers of a real model, SmolLM2-135M-Instruct, to 48 chat prompts of three kinds, by number of sequences.

python -m pagedtree bench real [--sequences 1 8] [--dtypes bfloat16 float32] [--kinds edits summaries stories]
    [--prompts 16] [--max-new-tokens 128] [--ways NAME ...] [--device cuda] [--json PATH]

Edits repeat the file that they were given, summaries quote from a text, stories repeat nothing. Each prompt, or group
of prompts that run as one batch, is answered in every way in turn, each time in another order; an answer ends where
the model ends it. A rate is that of a whole call, the prompt's reading included. A row has the quartiles over the
prompts of a kind; "all" has the tokens of all kinds over the seconds of all kinds.

"plain" is our generation without drafts. In it and with drafts the model's weights are packed before the clock starts,
a head's are not; "plain, not packed" and all of transformers' ways run on the weights as they are. All is greedy. Texts
are compared with transformers'. In half precision a pass over more tokens rounds in another way, and nearly tied tokens
part the texts; in float32 a different text is an error (exit code 1).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import machine_facts, save, seconds_of
from suite import Progress
from transformers import logging

from pagedtree.integrations.transformers import generate, packed_weights

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import real_model
from real_prompts import KINDS, chat_ids, held_out

PLAIN, NOT_PACKED, THEIRS, LOOKUP = "plain", "plain, not packed", "transformers", "transformers, prompt lookup"
PASS_ROWS = (1, 2, 4, 8, 16, 32, 64)
Tokens = list[list[int]]


class Ways:
    """The ways in which the model answers prompts; each gives the new tokens and how many passes a token took."""

    def __init__(self, dtype: torch.dtype, device: str, count: int) -> None:
        self.model, self.tokenizer = real_model.load(dtype, device)
        self.drafters, self.count = real_model.drafters(self.model), count
        self.every: dict[str, Callable[[Tokens], tuple[Tokens, float]]] = {
            THEIRS: self.theirs,
            LOOKUP: lambda batch: self.theirs(batch, prompt_lookup_num_tokens=8),
            NOT_PACKED: lambda batch: self.ours(batch, PLAIN),
        }
        self.every |= {name: lambda batch, name=name: self.ours(batch, name) for name in self.drafters}

    def theirs(self, batch: Tokens, **options: int) -> tuple[Tokens, float]:
        padded = self.tokenizer.pad({"input_ids": batch}, padding_side="left", return_tensors="pt").to(
            self.model.device
        )
        out = self.model.generate(**padded, do_sample=False, max_new_tokens=self.count, **options)
        end = self.model.generation_config.eos_token_id
        rows = out[:, padded["input_ids"].shape[1] :].tolist()
        return [row[: row.index(end) + 1] if end in row else row for row in rows], 0.0

    def ours(self, batch: Tokens, drafter: str) -> tuple[Tokens, float]:
        out, stats = generate(
            self.model, batch, drafter=self.drafters[drafter](), max_new_tokens=self.count, pack_weights=False
        )
        return [row[len(prompt) :].tolist() for row, prompt in zip(out, batch, strict=True)], stats.tokens_per_step

    def timed(self, name: str, batch: Tokens) -> tuple[Tokens, float, float]:
        """The texts, tokens a step, and seconds. Weights are packed before, as for many calls."""
        if name in (THEIRS, LOOKUP, NOT_PACKED):
            begin = time.perf_counter()
            texts, per_step = self.every[name](batch)
            return texts, per_step, time.perf_counter() - begin
        with packed_weights(self.model):
            begin = time.perf_counter()
            texts, per_step = self.every[name](batch)
            return texts, per_step, time.perf_counter() - begin

    def wanted(self, parts: list[str] | None, sequences: int) -> list[str]:
        """The names with one of these parts; plain decoding is always among them. Prompt lookup takes one sequence."""
        names = [name for name in self.every if name != LOOKUP or sequences == 1]
        return [name for name in names if parts is None or name == PLAIN or any(part in name for part in parts)]

    @torch.no_grad()
    def pass_ms(self) -> dict[int, float]:
        """Milliseconds of a pass over so many rows, the best of a few."""
        tokens = torch.zeros(1, max(PASS_ROWS), dtype=torch.int64, device=self.model.device)
        return {
            rows: min(seconds_of(lambda rows=rows: self.model(tokens[:, :rows]), self.model.device) for _ in range(6))
            * 1e3
            for rows in PASS_ROWS
        }


class Results:
    """What each way took of each prompt of one dtype and number of sequences."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.tokens: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.per_step: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.equal: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))

    def rows(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        found = [self._row(kind, name) for kind in self.seconds for name in self.names]
        if len(self.seconds) > 1:
            found += [self._row_of_all(name) for name in self.names]
        return [facts | row for row in found]

    def _row(self, kind: str, name: str) -> dict[str, Any]:
        seconds, plain = self.seconds[kind][name], self.seconds[kind][PLAIN]
        tokens, plain_tokens = self.tokens[kind][name], self.tokens[kind][PLAIN]
        rates = [count / each for count, each in zip(tokens, seconds, strict=True)]
        plain_rates = [count / each for count, each in zip(plain_tokens, plain, strict=True)]
        same = self.equal[kind][name]
        return {
            "kind": kind,
            "way": name,
            "tokens_per_second": quartiles(rates),
            "over_plain": quartiles([a / b for a, b in zip(rates, plain_rates, strict=True)]),
            "tokens_per_step": statistics.median(self.per_step[kind][name]),
            "texts_equal": f"{sum(same)}/{len(same)}",
        }

    def _row_of_all(self, name: str) -> dict[str, Any]:
        def rate(way: str) -> float:
            return sum(sum(of[way]) for of in self.tokens.values()) / sum(sum(of[way]) for of in self.seconds.values())

        same = [each for of in self.equal.values() for each in of[name]]
        return {
            "kind": "all",
            "way": name,
            "tokens_per_second": [rate(name)],
            "over_plain": [rate(name) / rate(PLAIN)],
            "texts_equal": f"{sum(same)}/{len(same)}",
        }


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values * 3
    return [float(q) for q in statistics.quantiles(values, n=4, method="inclusive")]


def measured(ways: Ways, sequences: int, args: argparse.Namespace, bar: Progress) -> Results:
    names, turn = ways.wanted(args.ways, sequences), 0
    results = Results(names)
    for kind in args.kinds:
        ids = [chat_ids(ways.tokenizer, prompt.text) for prompt in held_out(kind, args.prompts)]
        for first in range(0, len(ids), sequences):
            batch = ids[first : first + sequences]
            texts: dict[str, Tokens] = {}
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                bar.show(f"{sequences} sequences, {kind}, {name}")
                texts[name], per_step, seconds = ways.timed(name, batch)
                results.seconds[kind][name].append(seconds)
                results.tokens[kind][name].append(sum(map(len, texts[name])))
                results.per_step[kind][name].append(per_step)
                bar.clear()
            turn, bar.done = turn + 1, bar.done + 1
            theirs = texts.get(THEIRS, texts[PLAIN])
            for name in names:
                results.equal[kind][name] += [a == b for a, b in zip(texts[name], theirs, strict=True)]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--prompts", type=int, default=16, help="of each kind (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--ways", nargs="*", help="parts of the names of those wanted beside plain; default all")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="where to write; default benchmarks/results/real_DEVICE.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    facts = machine_facts() | {"arguments": {key: value for key, value in vars(args).items() if key != "json"}}
    facts |= {"model": real_model.NAME, "pass_ms": {}, "packed_pass_ms": {}}
    batches = sum(-(-args.prompts // count) for count in args.sequences) * len(args.kinds)
    bar, rows = Progress(len(args.dtypes) * batches), []
    for dtype in args.dtypes:
        ways = Ways(getattr(torch, dtype), args.device, args.max_new_tokens)
        facts["pass_ms"][dtype] = ways.pass_ms()
        with packed_weights(ways.model):
            facts["packed_pass_ms"][dtype] = ways.pass_ms()
        for name in ways.wanted(args.ways, 1):
            ways.timed(name, [[1, 2, 3]])  # what is done once
        for sequences in args.sequences:
            found = measured(ways, sequences, args, bar).rows({"dtype": dtype, "sequences": sequences})
            rows += found
            save(f"real_{args.device}", rows, facts, args.json)
            for row in found:
                rate, gain = statistics.median(row["tokens_per_second"]), statistics.median(row["over_plain"])
                print(
                    f"{dtype:9} {sequences:3} {row['kind']:10} {row['way']:28} {rate:8.1f} tokens/s {gain:5.2f} x plain"
                    f"  {row['texts_equal']} texts as transformers'",
                    flush=True,
                )
    whole = (row["texts_equal"].split("/") for row in rows if row["dtype"] == "float32")
    return 1 if any(same != every for same, every in whole) else 0


if __name__ == "__main__":
    sys.exit(main())
