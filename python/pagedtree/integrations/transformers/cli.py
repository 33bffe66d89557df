"""`python -m pagedtree generate`: completes a prompt with a checkpoint, with or without drafts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedtree import SamplingParams
from pagedtree.generation.drafters import Drafter, MedusaDrafter, MedusaHeads, NgramDrafter, medusa_tree
from pagedtree.generation.drafters.model import DRAFT_LAWS
from pagedtree.generation.rules import RULES
from pagedtree.integrations.transformers.draft_model import ModelDrafter
from pagedtree.integrations.transformers.generate import generate
from pagedtree.testing import backends

__all__ = ["main"]

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and "cuda" not in backends():
        print(f"{parser.prog}: --device {args.device}: needs a GPU and a build with CUDA", file=sys.stderr)
        return 2
    print(f"device: {args.device}", file=sys.stderr)
    try:
        params = _params(parser, args)
        text = sys.stdin.read() if args.prompt == "-" else Path(args.prompt).read_text(encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = _load(args.model, args)
        drafter = _drafter(model, args)
        printer = _Printer(tokenizer, num_sequences=args.n, max_tokens=args.n * args.max_new_tokens)
        _, stats = generate(
            model,
            [tokenizer(text)["input_ids"]],
            drafter=drafter,
            max_new_tokens=args.max_new_tokens,
            params=params,
            seeds=range(args.seed or 0, (args.seed or 0) + args.n),
            page_size=args.page_size,
            num_pages=args.num_pages,
            n=args.n,
            stop_strings=args.stop,
            tokenizer=tokenizer,
            rule=args.rule,
            cuda_graph=args.cuda_graph,
            callback=printer.add,
        )
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    printer.finish()
    print(stats.summary(), file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pagedtree generate",
        description="Completes a prompt, in fewer passes with drafts. The text goes to stdout, progress and statistics"
        " to stderr.",
    )
    parser.add_argument("--model", required=True, help="checkpoint of the target (a folder or a name on the hub)")
    parser.add_argument("--prompt", required=True, metavar="FILE", help="text file; - for standard input")
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument("--draft", metavar="PATH", help="checkpoint of a smaller model of the same tokenizer")
    drafts.add_argument("--medusa", metavar="PATH", help="folder of Medusa heads (config.json, medusa.safetensors)")
    drafts.add_argument("--ngram", action="store_true", help="draft from the text itself (prompt lookup)")
    parser.add_argument(
        "--draft-law", choices=DRAFT_LAWS, default="topk", help="how --draft chooses tokens (default %(default)s)"
    )
    parser.add_argument(
        "--rule", choices=RULES, default="auto", help="how drafts are verified; all but typical are lossless"
    )
    parser.add_argument("--num-nodes", type=int, default=16, help="nodes of a draft tree (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default %(default)s")
    parser.add_argument("--n", type=int, default=1, help="outcomes of the prompt (default %(default)s)")
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends the text where it occurs; may be repeated"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    sampling = parser.add_argument_group("sampling", "only with --temperature above 0")
    sampling.add_argument("--top-p", type=float, help="default 1 = off")
    sampling.add_argument("--top-k", type=int, help="default 0 = off")
    sampling.add_argument("--seed", type=int, help="seed of the first outcome (default 0); each next one adds 1")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page (default %(default)s)")
    parser.add_argument("--num-pages", type=int, help="pages in the cache (default: enough)")
    parser.add_argument(
        "--device", default="cuda" if "cuda" in backends() else "cpu", help="default: cuda where it can run, else cpu"
    )
    parser.add_argument("--cuda-graph", action="store_true", help="replay a CUDA graph of the decode step")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on cpu, else the checkpoint's")
    return parser


def _params(parser: argparse.ArgumentParser, args: argparse.Namespace) -> SamplingParams | None:
    """How to sample, None = greedy; ends the program where an option would have no effect."""
    if args.temperature != 0.0:
        top_p = 1.0 if args.top_p is None else args.top_p
        return SamplingParams(temperature=args.temperature, top_k=args.top_k or 0, top_p=top_p)
    for name in ("top_p", "top_k", "seed"):
        if getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')}: needs --temperature above 0; without it decoding is greedy")
    return None


def _load(path: str, args: argparse.Namespace) -> Any:
    print(f"loading {path}", file=sys.stderr)
    dtype = DTYPES[args.dtype or ("float32" if args.device == "cpu" else "auto")]
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(args.device).eval()


def _drafter(model: Any, args: argparse.Namespace) -> Drafter | None:
    if args.draft:
        width = 1 if args.rule == "block" else 4
        depth = args.num_nodes - 1 if args.rule == "block" else 4
        return ModelDrafter(
            _load(args.draft, args), law=args.draft_law, num_nodes=args.num_nodes, depth=depth, width=width
        )
    if args.medusa:
        heads = MedusaHeads.from_pretrained(args.medusa, model)
        return MedusaDrafter(heads, medusa_tree(heads.num_heads, args.num_nodes))
    if args.ngram:
        return NgramDrafter(args.num_nodes, max_branches=1 if args.rule == "block" else 4)
    return None


class _Printer:
    """Prints a single outcome as it comes. Several outcomes are printed at the end, and until then how far they are."""

    def __init__(self, tokenizer: Any, num_sequences: int, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[list[int]] = [[] for _ in range(num_sequences)]
        self.printed = ""
        self.max_tokens, self.tenths = max_tokens, 0

    def add(self, sequence: int, tokens: list[int]) -> None:
        self.tokens[sequence] += tokens
        if len(self.tokens) > 1:
            self._show_progress()
            return
        text = self._text(sequence)
        # The bytes of one character may be spread over several tokens.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[len(self.printed) :], end="", flush=True)
            self.printed = text

    def _show_progress(self) -> None:
        """Writes one line for each tenth of the tokens that there may be."""
        count = sum(map(len, self.tokens))
        if 10 * count // self.max_tokens > self.tenths:
            self.tenths = 10 * count // self.max_tokens
            print(f"{count} of at most {self.max_tokens} tokens", file=sys.stderr)

    def finish(self) -> None:
        if len(self.tokens) == 1:
            print(self._text(0)[len(self.printed) :])
            return
        for sequence in range(len(self.tokens)):
            print(f"--- outcome {sequence}\n{self._text(sequence)}")

    def _text(self, sequence: int) -> str:
        text: str = self.tokenizer.decode(self.tokens[sequence], skip_special_tokens=True)
        return text
