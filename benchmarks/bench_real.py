"""Measures whole answers of a real model, SmolLM2-135M-Instruct, to 48 chat prompts of three kinds.

python -m pagedtree bench real [--sequences 1 2 4 8 16] [--dtypes bfloat16 float32]
    [--kinds edits summaries stories queue] [--prompts 16] [--max-new-tokens 128] [--ways NAME ...] [--missing]
    [--device cuda] [--json PATH]

Edits repeat the given file, summaries quote from a text, stories repeat nothing. Each batch is answered in every way in
turn, in random order; rates include the prompt. The queue has all prompts, at most --sequences at once, and is answered
TURNS times.

"plain" has no drafts; "chain" and "tree" draft equally many tokens; "auto" is `generate(tree="auto")` with a new
drafter for each call. Weights are packed beforehand, except for "plain, not packed" and transformers. Other libraries
run in bfloat16 (real_peers.py). On a GPU "captured" ways replay a CUDA graph.

Greedy texts are compared with plain decoding. In half precision, which rounds differently in passes over more tokens,
the margin of the logits is recorded; in float32 a difference is an error (exit code 1).

The file is written after each batch; a run replaces its rows and keeps others. --missing continues an interrupted run.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import RESULTS, machine_facts
from real_peers import Source, ready, takes_one, versions
from real_rows import PLAIN, QUEUE, Call, Difference, Key, Table
from suite import Progress

from pagedtree.generation.drafters import Drafter, NgramDrafter
from pagedtree.integrations.transformers import generate, packed_weights

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import real_model
from real_prompts import KINDS, Prompt, chat_ids, held_out

THEIRS, TURNS = "transformers", 3
Tokens = list[list[int]]
# The texts, tokens gained by a sequence in a pass (0: unknown), and seconds.
Answers = tuple[Tokens, float, float]
Maker = Callable[[], Drafter | None]


class Ways:
    """Ways to answer prompts, at most `sequences` at once. alone: ways for one sequence."""

    def __init__(self, dtype: torch.dtype, device: str, count: int, sequences: int, folder: Path) -> None:
        self.model, self.tokenizer = real_model.load(dtype, device)
        self.count, self.sequences = count, sequences
        self.every: dict[str, Callable[[Tokens], Answers]] = {
            THEIRS: self.theirs,
            f"{THEIRS}, prompt lookup": lambda batch: self.theirs(batch, prompt_lookup_num_tokens=8),
            f"{PLAIN}, not packed": lambda batch: self.ours(batch, is_packed=False),
        }
        self.alone = {f"{THEIRS}, prompt lookup"}
        for name, (make, tree) in drafting(self.model).items():
            self.every[name] = lambda batch, make=make, tree=tree: self.ours(batch, make, tree)  # type: ignore[misc]
            if device == "cuda" and name in (PLAIN, "n-gram tree", "EAGLE-3 tree"):
                self.every[f"{name}, captured"] = lambda batch, make=make: self.ours(batch, make, cuda_graph=True)  # type: ignore[misc]
        if device == "cpu" and dtype == torch.bfloat16:
            source = Source(self.model, real_model.checkpoint(), folder, torch.get_num_threads(), sequences)
            for name, generation in ready(source).items():
                self.every[name] = lambda batch, generation=generation: self.others(batch, generation)  # type: ignore[misc]
                self.alone |= {name} if takes_one(name) else set()

    def theirs(self, batch: Tokens, **options: int) -> Answers:
        padded = self.tokenizer.pad({"input_ids": batch}, padding_side="left", return_tensors="pt").to(
            self.model.device
        )
        begin = time.perf_counter()
        out = self.model.generate(**padded, do_sample=False, max_new_tokens=self.count, **options)
        seconds = time.perf_counter() - begin
        end = self.model.generation_config.eos_token_id
        rows = out[:, padded["input_ids"].shape[1] :].tolist()
        return [row[: row.index(end) + 1] if end in row else row for row in rows], 0.0, seconds

    def ours(
        self, batch: Tokens, make: Maker = lambda: None, tree: str | None = None, is_packed: bool = True, **how: Any
    ) -> Answers:
        drafter = make()
        networks = [net for net in getattr(drafter, "networks", ()) if isinstance(net, torch.nn.Module)]
        with packed_weights(self.model, *networks) if is_packed else nullcontext():
            begin = time.perf_counter()
            how |= {"max_new_tokens": self.count, "max_sequences": self.sequences}
            out, stats = generate(self.model, batch, drafter=drafter, tree=tree, **how)
            seconds = time.perf_counter() - begin
        new = [row[len(prompt) :].tolist() for row, prompt in zip(out, batch, strict=True)]
        return new, stats.tokens_per_step, seconds

    def others(self, batch: Tokens, generation: Callable[[Tokens, int], Tokens]) -> Answers:
        begin = time.perf_counter()
        return generation(batch, self.count), 0.0, time.perf_counter() - begin

    def wanted(self, patterns: list[str] | None, kind: str) -> list[str]:
        """Plain decoding always belongs to them."""
        names = [name for name in self.every if name not in self.alone or self.sequences == 1]
        if kind == QUEUE:
            names = [name for name in names if name not in self.alone and not name.startswith(THEIRS)]
        return [
            name
            for name in names
            if patterns is None or name == PLAIN or any(fnmatchcase(name, each) for each in patterns)
        ]

    @torch.no_grad()
    def differences(self, first: int, batch: Tokens, plain: Tokens, texts: Tokens) -> list[Difference]:
        """first: number of the batch's first prompt."""
        found = []
        for i, (prompt, expected, got) in enumerate(zip(batch, plain, texts, strict=True)):
            if expected == got:
                continue
            shared = min(len(expected), len(got))
            at = next((at for at in range(shared) if expected[at] != got[at]), shared)
            margin = None
            if at < shared:
                tokens = torch.tensor([prompt + expected[:at]], device=self.model.device)
                logits = self.model(tokens).logits[0, -1].float()
                margin = round(abs(float(logits[expected[at]] - logits[got[at]])), 5)
            found.append(Difference(first + i, at, margin))
        return found


def drafting(model: Any) -> dict[str, tuple[Maker, str | None]]:
    """The demo's drafters with fixed and chosen trees."""
    found: dict[str, tuple[Maker, str | None]] = {}
    for name, make in real_model.drafters(model).items():
        if name == PLAIN:
            found[PLAIN] = make, None
            found["n-gram chain"] = lambda: NgramDrafter(8, max_branches=1), None
            continue
        drafter = name.removesuffix(" tree")
        chosen = NgramDrafter if drafter == "n-gram" else make  # its default has more nodes than pay in every step
        found |= {f"{drafter} tree": (make, None), f"{drafter} auto": (chosen, "auto")}
    return found


def batches(kind: str, prompts: int, sequences: int) -> list[list[Prompt]]:
    """The queue is one batch, reordered each turn."""
    found = held_out(None if kind == QUEUE else kind, prompts)
    if kind == QUEUE:
        return [random.Random(turn).sample(found, len(found)) for turn in range(TURNS)]
    return [found[first : first + sequences] for first in range(0, len(found), sequences)]


def measured(ways: Ways, args: argparse.Namespace, table: Table, bar: Progress) -> None:
    dtype, order = str(ways.model.dtype).removeprefix("torch."), random.Random(0)
    for kind in args.kinds:
        names, first = ways.wanted(args.ways, kind), 0
        for number, prompts in enumerate(batches(kind, args.prompts, ways.sequences)):
            keys = {name: Key(dtype, ways.sequences, kind, name) for name in names}
            lacking = [name for name in names if not (args.missing and table.has(keys[name], number))]
            chosen = [name for name in names if lacking and (name in lacking or name == PLAIN)]
            batch = [chat_ids(ways.tokenizer, prompt.text) for prompt in prompts]
            answers = dict[str, Answers]()
            for name in order.sample(chosen, len(chosen)):
                bar.show(f"{dtype}, {ways.sequences} sequences, {kind}, {name}")
                answers[name] = ways.every[name](batch)
                bar.clear()
            bar.done += 1
            if not chosen:
                continue
            rates = {name: sum(map(len, texts)) / seconds for name, (texts, _, seconds) in answers.items()}
            for name in chosen:
                texts, per_step, _ = answers[name]
                different = ways.differences(first, batch, answers[PLAIN][0], texts)
                gain = rates[name] / rates[PLAIN]
                table.add(keys[name], number, Call(len(texts), rates[name], gain, per_step, different))
            first += len(batch)
            table.write(args.json, f"real_{args.device}")


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'':52}{'tokens/s':>9}   x plain (95 % interval)   x best of fixed and plain   texts of plain")
    for row in rows:
        low, middle, high = row["over_plain"]
        name = f"{row['dtype']:9}{row['sequences']:3} {row['kind']:10}{row['way']:29}"
        best = "{1:.2f} ({0:.2f} to {2:.2f})".format(*row["over_best"]) if "over_best" in row else ""
        print(
            f"{name}{row['tokens_per_second'][1]:9.1f}   {middle:5.2f} ({low:.2f} to {high:.2f})   {best:28}"
            f"{row['texts_equal']:>8}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--kinds", nargs="+", choices=(*KINDS, QUEUE), default=[*KINDS])
    parser.add_argument("--prompts", type=int, default=16, help="of each kind (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--ways", nargs="*", help='those wanted beside plain, as "n-gram tree", "*auto"; default all')
    parser.add_argument("--missing", action="store_true", help="only what the file does not have yet")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path, help="the file; default benchmarks/results/real_DEVICE.json")
    args = parser.parse_args()
    if args.prompts < max(args.sequences):
        parser.error(f"--prompts: expected at least {max(args.sequences)}, as many as --sequences, got {args.prompts}")
    args.json = args.json or RESULTS / f"real_{args.device}.json"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    facts = machine_facts() | {"model": real_model.NAME, "max_new_tokens": args.max_new_tokens}
    facts["versions"] = {"transformers": transformers.__version__} | versions()
    try:
        table = Table.opened(args.json, facts)
    except ValueError as error:
        parser.error(f"--json: {error}")
    each = product(args.kinds, args.sequences)
    bar = Progress(len(args.dtypes) * sum(len(batches(kind, args.prompts, count)) for kind, count in each))
    for dtype, sequences in product(args.dtypes, args.sequences):
        with tempfile.TemporaryDirectory() as folder:
            ways = Ways(getattr(torch, dtype), args.device, args.max_new_tokens, sequences, Path(folder))
            for name in dict.fromkeys(name for kind in args.kinds for name in ways.wanted(args.ways, kind)):
                ways.every[name]([[1, 2, 3] * 8])  # set-up
            measured(ways, args, table, bar)
    rows = [row for row in table.rows() if row["dtype"] in args.dtypes and row["sequences"] in args.sequences]
    show(rows)
    whole = (row["texts_equal"].split("/") for row in rows if row["dtype"] == "float32")
    return 1 if any(same != every for same, every in whole) else 0


if __name__ == "__main__":
    sys.exit(main())
