"""A real model edits a file, with and without draft trees; then other kinds of text.

    python examples/demo.py [--device cuda] [--dtype float32] [--prompts 2] [--max-new-tokens 96] [--json PATH]

The model, SmolLM2-135M-Instruct, first answers one chat prompt without drafts and with n-gram trees. The table then has
the median over a few prompts of each kind of text: edits repeat the given file, summaries quote from a text, stories
repeat nothing. All is greedy. In float32 a text other than plain decoding's is an error (exit code 1); in half
precision, which rounds differently in passes over more tokens, the first difference is shown with the margin of the two
likeliest tokens.

Without this model, examples/toy.py shows the small models of this folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

import real_model
import torch
import toy
import transformers
from live import compare_live, first_difference
from real_prompts import DEMO, KINDS, Prompt, chat_ids, held_out
from torch import Tensor

from pagedtree.integrations.transformers import generate, packed_weights
from pagedtree.integrations.transformers.cli import is_fast

ASKED = {"edits": "a file, changed", "summaries": "a text, quoted", "stories": "nothing is given"}


class Demo:
    def __init__(self, args: argparse.Namespace, dtype: torch.dtype) -> None:
        self.args, self.dtype = args, dtype
        self.model, self.tokenizer = real_model.load(dtype, args.device)
        self.drafters = real_model.drafters(self.model)
        self.is_wrong = False

    def decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def ids(self, prompt: Prompt) -> Tensor:
        return torch.tensor(chat_ids(self.tokenizer, prompt.text), device=self.args.device)

    def differs(self, plain: Tensor, drafted: Tensor, where: str) -> bool:
        """Returns True if two texts of a prompt differ, and prints where."""
        if torch.equal(plain, drafted):
            return False
        print(f"  {where}: first difference: {first_difference([plain], [drafted], self.model)}")
        self.is_wrong = True
        return True

    def live(self) -> None:
        prompt = next(each for each in held_out() if each.name == DEMO)
        ids = self.ids(prompt)
        print(f"\none sequence, a prompt of {len(ids)} tokens:")
        print(textwrap.indent(shortened(prompt.text), "    | "))
        ways = {name: self.drafters[name] for name in ("plain", "n-gram tree")}
        plain, drafted = compare_live(self.model, ids, ways, self.decode, max_new_tokens=self.args.live_tokens)
        self.differs(plain, drafted, "one sequence")
        print("its answer:")
        print(textwrap.indent(shortened(self.decode(drafted[len(ids) :].tolist())), "    | "), flush=True)

    def table(self) -> list[dict[str, Any]]:
        """Returns a row for each kind and drafter, and prints each kind when it is complete."""
        names, rows = list(self.drafters), []
        print(
            f"\nthree kinds of text, the median over {self.args.prompts} prompts of each, one after the other, at most"
            f" {self.args.max_new_tokens} tokens;\ntokens per second, and the ratio to plain decoding:\n"
        )
        print(f"{'':28}" + "".join(f"{name:>20}" for name in names) + "   same texts")
        for kind in KINDS:
            print(f"  {kind} ...", file=sys.stderr)
            found = self.rows_of(kind)
            cells = (f"{row['tokens_per_second']:8.0f} {row['over_plain']:5.2f} x" for row in found)
            same = sum(row["same_texts"] for row in found[1:]), self.args.prompts * (len(found) - 1)
            label = f"{kind} ({ASKED[kind]})"
            print(f"{label:28}" + "".join(f"{cell:>20}" for cell in cells) + f"   {same[0]} of {same[1]}", flush=True)
            rows += found
        return rows

    def rows_of(self, kind: str) -> list[dict[str, Any]]:
        rates, gains, steps, same = (defaultdict[str, list[float]](list) for _ in range(4))
        for prompt in held_out(kind, self.args.prompts):
            ids, plain = self.ids(prompt), None
            for name, make in self.drafters.items():
                (text,), stats = generate(self.model, [ids], drafter=make(), max_new_tokens=self.args.max_new_tokens)
                plain = text if plain is None else plain
                rates[name].append(stats.num_tokens / stats.wall_time)
                gains[name].append(rates[name][-1] / rates["plain"][-1])
                steps[name].append(stats.tokens_per_step)
                same[name].append(not self.differs(plain, text, f"{kind}, {prompt.name}, {name}"))
        return [
            {
                "kind": kind,
                "drafter": name,
                "tokens_per_second": statistics.median(rates[name]),
                "over_plain": statistics.median(gains[name]),
                "tokens_per_step": statistics.median(steps[name]),
                "same_texts": int(sum(same[name])),
            }
            for name in self.drafters
        ]


def shortened(text: str, lines: int = 14) -> str:
    every = text.strip().splitlines()
    if len(every) <= lines:
        return "\n".join(every)
    half = lines // 2
    return "\n".join([*every[:half], f"[{len(every) - 2 * half} more lines]", *every[-half:]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16 where it is fast"
    )
    parser.add_argument("--prompts", type=int, default=2, help="of each kind (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--live-tokens", type=int, default=400, help="at most, of the answer that comes first")
    parser.add_argument("--json", type=Path, help="write the table here too")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    try:
        real_model.checkpoint()
    except ModuleNotFoundError as error:
        print(f"{error}. Here are the small models of examples/checkpoints instead.\n", flush=True)
        return toy.main(["--device", args.device])
    is_half = args.device != "cpu" or is_fast(torch.bfloat16)
    dtype = getattr(torch, args.dtype or ("bfloat16" if is_half else "float32"))
    demo = Demo(args, dtype)
    size = sum(weight.numel() for weight in demo.model.parameters()) / 1e6
    name = str(dtype).removeprefix("torch.")
    threads = f", {torch.get_num_threads()} threads" if args.device == "cpu" else ""
    print(f"{real_model.NAME}: {size:.0f} million parameters, {name}, {args.device}{threads}")
    heads = [network for make in demo.drafters.values() for network in getattr(make(), "networks", ())]
    with packed_weights(demo.model, *heads):
        generate(demo.model, [[1, 2, 3]], max_new_tokens=2)  # warm-up
        demo.live()
        rows = demo.table()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if demo.is_wrong and dtype == torch.float32:
        print("output differs from plain decoding", file=sys.stderr)
        return 1
    if demo.is_wrong:
        print(
            f"In {name} wider passes round differently, so texts can diverge at near-ties;\n--dtype float32 gives the"
            " same texts."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
