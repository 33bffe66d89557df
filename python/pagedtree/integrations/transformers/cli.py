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
from pagedtree.integrations.transformers.drafters import Drafter, MedusaDrafter, NgramDrafter
from pagedtree.integrations.transformers.generate import generate
from pagedtree.integrations.transformers.medusa import MedusaHeads, medusa_tree
from pagedtree.integrations.transformers.model_drafter import DRAFT_LAWS, ModelDrafter
from pagedtree.integrations.transformers.rules import RULES
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
        text = sys.stdin.read() if args.prompt == "-" else Path(args.prompt).read_text(encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = _load(args.model, args)
        params = None
        if args.temperature > 0.0:
            params = SamplingParams(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
        printer = _Printer(tokenizer, num_sequences=args.n)
        _, stats = generate(
            model,
            [tokenizer(text)["input_ids"]],
            drafter=_drafter(model, args),
            max_new_tokens=args.max_new_tokens,
            params=params,
            seeds=range(args.seed, args.seed + args.n),
            page_size=args.page_size,
            num_pages=args.num_pages,
            n=args.n,
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
        description="Completes a prompt, in fewer passes with drafts. The text goes to stdout, statistics to stderr.",
    )
    parser.add_argument("--model", required=True, help="checkpoint of the target (a folder or a name on the hub)")
    parser.add_argument("--prompt", required=True, metavar="FILE", help="text file; - for standard input")
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument("--draft", metavar="PATH", help="checkpoint of a smaller model of the same vocabulary")
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
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0, help="0 = off (default)")
    parser.add_argument("--seed", type=int, default=0, help="of the first outcome, the next has one more")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page (default %(default)s)")
    parser.add_argument("--num-pages", type=int, help="pages in the cache (default: enough)")
    parser.add_argument(
        "--device", default="cuda" if "cuda" in backends() else "cpu", help="default: cuda where it can run, else cpu"
    )
    parser.add_argument("--cuda-graph", action="store_true", help="replay a CUDA graph of the decode step")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on cpu, else the checkpoint's")
    return parser


def _load(path: str, args: argparse.Namespace) -> Any:
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
    """Prints one outcome as it comes; of several, each when all are there."""

    def __init__(self, tokenizer: Any, num_sequences: int) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[list[int]] = [[] for _ in range(num_sequences)]
        self.printed = ""

    def add(self, sequence: int, tokens: list[int]) -> None:
        self.tokens[sequence] += tokens
        text = self._text(sequence)
        # The bytes of one character may be spread over several tokens.
        if len(self.tokens) == 1 and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[len(self.printed) :], end="", flush=True)
            self.printed = text

    def finish(self) -> None:
        if len(self.tokens) == 1:
            print(self._text(0)[len(self.printed) :])
            return
        for sequence in range(len(self.tokens)):
            print(f"--- outcome {sequence}\n{self._text(sequence)}")

    def _text(self, sequence: int) -> str:
        text: str = self.tokenizer.decode(self.tokens[sequence], skip_special_tokens=True)
        return text
