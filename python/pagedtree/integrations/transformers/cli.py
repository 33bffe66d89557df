"""`python -m pagedtree generate`: completes a prompt with a checkpoint, with or without drafts."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedtree import SamplingParams
from pagedtree.generation.drafters import Drafter, EagleDrafter, EagleHead, MedusaDrafter, MedusaHeads, NgramDrafter
from pagedtree.generation.drafters.grown import DRAFT_LAWS
from pagedtree.generation.logprobs import TokenLogprobs
from pagedtree.generation.rules import RULES
from pagedtree.generation.token_options import TokenOptions
from pagedtree.grammars import GrammarMatcher
from pagedtree.integrations.transformers.draft_model import ModelDrafter
from pagedtree.integrations.transformers.generate import generate
from pagedtree.integrations.transformers.generate_arguments import eos_tokens
from pagedtree.integrations.transformers.generation_config import ConfigFields, config_fields
from pagedtree.testing import backends

__all__ = ["main"]

FILTERS = ("temperature", "top_p", "top_k", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
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
        rule, params = _sampling(parser, args, _config_fields(model, args))
        drafter = _drafter(model, args)
        grammars = _grammars(parser, model, tokenizer, args)
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
            rule=rule,
            cuda_graph=args.cuda_graph,
            callback=printer.add,
            options=TokenOptions(bad_words=_bad_words(tokenizer, args.bad_word) or None),
            min_new_tokens=args.min_new_tokens,
            grammars=grammars,
            logprobs=args.logprobs,
            generation_config=not args.no_generation_config,
        )
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    printer.finish()
    for i, sequence in enumerate(stats.sequences):
        if sequence.logprobs is not None:
            _print_logprobs(tokenizer, printer.tokens[i], sequence.logprobs)
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
    drafts.add_argument("--eagle", metavar="PATH", help="folder of an EAGLE-3 head, as SGLang and vLLM load it")
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
    parser.add_argument(
        "--min-new-tokens",
        type=int,
        help="tokens before the end-of-text token may come (default: the checkpoint's, or 0)",
    )
    parser.add_argument("--bad-word", action="append", default=[], metavar="TEXT", help="may not come; may be repeated")
    parser.add_argument(
        "--repetition-penalty", type=float, help="divides what was there before (default: the checkpoint's, or 1 = off)"
    )
    parser.add_argument("--presence-penalty", type=float, help="subtracted from what was generated (default 0)")
    parser.add_argument("--frequency-penalty", type=float, help="subtracted each time that it was (default 0)")
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="tells each token's log-probability, rank and the N most likely"
    )
    grammars = parser.add_mutually_exclusive_group()
    grammars.add_argument("--json-schema", metavar="FILE", help="the text is JSON of this schema; needs xgrammar")
    grammars.add_argument("--grammar", metavar="FILE", help="the text follows this EBNF grammar; needs xgrammar")
    parser.add_argument(
        "--no-generation-config",
        action="store_true",
        help="leave out what the checkpoint's generation_config.json asks for",
    )
    parser.add_argument(
        "--temperature", type=float, help="0 = greedy (default: the checkpoint's where it samples, else greedy)"
    )
    sampling = parser.add_argument_group(
        "sampling", "only with a temperature above 0; the defaults are the checkpoint's where it samples"
    )
    sampling.add_argument("--top-p", type=float, help="else 1 = off")
    sampling.add_argument("--top-k", type=int, help="else 0 = off")
    sampling.add_argument("--min-p", type=float, help="else 0 = off")
    sampling.add_argument("--seed", type=int, help="seed of the first outcome (default 0); each next one adds 1")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page (default %(default)s)")
    parser.add_argument("--num-pages", type=int, help="pages in the cache (default: enough)")
    parser.add_argument(
        "--device", default="cuda" if "cuda" in backends() else "cpu", help="default: cuda where it can run, else cpu"
    )
    parser.add_argument("--cuda-graph", action="store_true", help="replay a CUDA graph of the decode step")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on cpu, else the checkpoint's")
    return parser


def _config_fields(model: Any, args: argparse.Namespace) -> ConfigFields:
    """What the checkpoint asks for and no option replaces; says so on standard error."""
    if args.no_generation_config:
        return ConfigFields()
    given = {name: getattr(args, name) for name in (*FILTERS, *PENALTIES, "min_new_tokens")}
    given["stop_strings"] = args.stop
    found = config_fields(model, rule="greedy" if args.temperature == 0 else args.rule, given=given)
    if found.values:
        print(f"generation_config.json: {found}", file=sys.stderr)
    return found


def _sampling(
    parser: argparse.ArgumentParser, args: argparse.Namespace, config: ConfigFields
) -> tuple[str, SamplingParams | None]:
    """Rule and params, None = as the config says; ends the program where an option would have no effect."""
    if not (config.is_sampled if args.temperature is None else args.temperature):
        for name in ("top_p", "top_k", "min_p", "seed"):
            if getattr(args, name) is not None:
                parser.error(f"--{name.replace('_', '-')}: needs --temperature above 0; without it decoding is greedy")
    given = {name: getattr(args, name) for name in (*FILTERS, *PENALTIES) if getattr(args, name) is not None}
    if not given:
        return args.rule, None
    if given == {"temperature": 0.0} and args.rule in ("auto", "greedy"):
        return "greedy", None
    return args.rule, dataclasses.replace(config.params() or SamplingParams(temperature=0.0), **given)


def _bad_words(tokenizer: Any, words: list[str]) -> list[list[int]]:
    """Each text as tokens, also with a space in front: most tokenizers have other tokens for that."""
    texts = [text for word in words for text in (word, f" {word.lstrip()}")]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def _grammars(
    parser: argparse.ArgumentParser, model: Any, tokenizer: Any, args: argparse.Namespace
) -> list[GrammarMatcher] | None:
    """A matcher for each outcome."""
    path = args.json_schema or args.grammar
    if path is None:
        return None
    try:
        import xgrammar

        from pagedtree.integrations.xgrammar import XGrammarMatcher
    except ModuleNotFoundError as error:
        parser.error(f"--{'json-schema' if args.json_schema else 'grammar'} needs {error.name}: pip install xgrammar")
    text = Path(path).read_text(encoding="utf-8")
    vocab_size, stops = model.config.get_text_config().vocab_size, eos_tokens(model, None)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stops or None)
    compiler = xgrammar.GrammarCompiler(info)
    try:
        compiled = compiler.compile_json_schema(text) if args.json_schema else compiler.compile_grammar(text)
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from None
    return [XGrammarMatcher(xgrammar.GrammarMatcher(compiled), info.vocab_size) for _ in range(args.n)]


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
        return MedusaDrafter(heads, args.num_nodes)
    if args.eagle:
        width, depth = (1, args.num_nodes - 1) if args.rule == "block" else (4, 5)
        head = EagleHead.from_pretrained(args.eagle, model)
        return EagleDrafter(head, num_nodes=args.num_nodes, depth=depth, width=width)
    if args.ngram:
        return NgramDrafter(args.num_nodes, max_branches=1 if args.rule == "block" else 4)
    return None


def _print_logprobs(tokenizer: Any, tokens: list[int], found: TokenLogprobs) -> None:
    """A line for each token, on standard error."""
    columns = zip(tokens, found.logprobs, found.ranks, found.top_tokens, found.top_logprobs, strict=True)
    for token, logprob, rank, top, their in columns:
        others = ", ".join(
            f"{tokenizer.decode([t])!r} {math.exp(value):.3f}" for t, value in zip(top, their, strict=True)
        )
        print(f"{tokenizer.decode([token])!r:16} {logprob:8.3f}  rank {rank}  {others}", file=sys.stderr)


class _Printer:
    """Prints a single outcome as it comes. Several outcomes are printed at the end.

    How far they are is told on standard error, unless the text itself tells it on a terminal.
    """

    def __init__(self, tokenizer: Any, num_sequences: int, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[list[int]] = [[] for _ in range(num_sequences)]
        self.printed = ""
        self.max_tokens, self.tenths, self.started = max_tokens, 0, time.perf_counter()
        self.shows_progress = num_sequences > 1 or not sys.stdout.isatty()
        self.is_live = sys.stderr.isatty()  # one line is written again and again there, else ten lines in all

    def add(self, sequence: int, tokens: list[int]) -> None:
        self.tokens[sequence] += tokens
        if self.shows_progress:
            self._show_progress()
        if len(self.tokens) > 1:
            return
        text = self._text(sequence)
        # The bytes of one character may be spread over several tokens.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[len(self.printed) :], end="", flush=True)
            self.printed = text

    def _show_progress(self) -> None:
        count = sum(map(len, self.tokens))
        is_next_tenth = 10 * count // self.max_tokens > self.tenths
        self.tenths = 10 * count // self.max_tokens
        if self.is_live or is_next_tenth:
            rate = count / max(time.perf_counter() - self.started, 1e-9)
            begin, end = ("\r", "") if self.is_live else ("", "\n")
            line = f"{begin}{count} of at most {self.max_tokens} tokens, {rate:.1f} tokens/s"
            print(line, end=end, file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self.shows_progress and self.is_live:
            print(file=sys.stderr)
        if len(self.tokens) == 1:
            print(self._text(0)[len(self.printed) :])
            return
        for sequence in range(len(self.tokens)):
            print(f"--- outcome {sequence}\n{self._text(sequence)}")

    def _text(self, sequence: int) -> str:
        text: str = self.tokenizer.decode(self.tokens[sequence], skip_special_tokens=True)
        return text
