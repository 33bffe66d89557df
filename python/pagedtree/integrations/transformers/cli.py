"""`python -m pagedtree generate`: completes a prompt with a checkpoint, with or without drafts."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer
from transformers.utils import logging

from pagedtree import SamplingParams
from pagedtree.generation.drafters.grown import DRAFT_LAWS
from pagedtree.generation.logprobs import TokenLogprobs
from pagedtree.generation.rules import RULES
from pagedtree.generation.token_options import TokenOptions
from pagedtree.grammars import GrammarMatcher
from pagedtree.integrations.transformers.chat import chat_prompt, turn_ends
from pagedtree.integrations.transformers.command_files import check_checkpoint, errors_of, model_folder, read_text
from pagedtree.integrations.transformers.command_models import DTYPES, NUM_NODES, drafter_of, load_model
from pagedtree.integrations.transformers.generate import generate
from pagedtree.integrations.transformers.generate_arguments import eos_tokens
from pagedtree.integrations.transformers.generation_config import ConfigFields, config_fields
from pagedtree.integrations.transformers.packed_weights import packed_weights
from pagedtree.integrations.transformers.printer import Printer
from pagedtree.testing import backends

__all__ = ["main"]

# Options that `generate` has by the same names.
PASSED = ("max_new_tokens", "n", "page_size", "num_pages", "min_new_tokens", "logprobs", "cuda_graph")
FILTERS = ("temperature", "top_p", "top_k", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
# White space in front of a part of a JSON text: a line break, and four levels of four blanks are indented.
MAX_WHITESPACE = 20


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and "cuda" not in backends():
        print(f"{parser.prog}: --device {args.device}: needs a GPU and a build with CUDA", file=sys.stderr)
        return 2
    print(f"device: {args.device}", file=sys.stderr)
    try:
        text, grammar = _read(args)
        args.model = model_folder("--model", args.model)
        with errors_of("--model", args.model):
            tokenizer = AutoTokenizer.from_pretrained(args.model)
        prompt = _prompt(tokenizer, text, args)
        logging.disable_progress_bar()
        model = load_model("--model", args.model, args)
        eos_ids = list(dict.fromkeys([*eos_tokens(model, None), *(turn_ends(tokenizer) if args.chat else [])]))
        rule, params = _sampling(parser, args, _config_fields(model, args))
        drafter = drafter_of(model, args)
        grammars = _grammars(parser, model, tokenizer, eos_ids, grammar, args)
        printer = Printer(tokenizer, num_sequences=args.n, max_tokens=args.n * args.max_new_tokens)
        networks = [network for network in getattr(drafter, "networks", ()) if isinstance(network, nn.Module)]
        # Packing takes as long as 20 passes gain; in float32 it slows down passes of one or two tokens.
        is_fast = model.dtype == torch.bfloat16 or drafter is not None or args.n >= 4
        with packed_weights(model, *networks) if is_fast and args.max_new_tokens >= 64 else nullcontext():
            _, stats = generate(
                model,
                [prompt],
                drafter=drafter,
                params=params,
                seeds=range(args.seed or 0, (args.seed or 0) + args.n),
                eos_token_id=eos_ids,
                stop_strings=args.stop,
                tokenizer=tokenizer,
                rule=rule,
                callback=printer.add,
                options=TokenOptions(bad_words=_bad_words(tokenizer, args.bad_word) or None),
                grammars=grammars,
                generation_config=not args.no_generation_config,
                **{name: getattr(args, name) for name in PASSED},
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
    add = parser.add_argument
    drafts, grammar = (parser.add_mutually_exclusive_group().add_argument for _ in range(2))
    sampling = parser.add_argument_group(
        "sampling", "only with a temperature above 0; the defaults are the checkpoint's where it samples"
    ).add_argument
    add("--model", required=True, help="checkpoint of the target: a folder, a GGUF file or a name on the hub")
    add("--prompt", required=True, metavar="FILE", help="text file; - for standard input")
    add("--chat", action="store_true", help="the prompt is a user's message, put into the tokenizer's chat template")
    add("--system", metavar="TEXT", help="a system message in front of it; needs --chat")
    drafts("--draft", metavar="PATH", help="checkpoint of a smaller model of the same tokenizer, as --model")
    drafts("--drafter", metavar="FOLDER", help="folder of a draft head, of any format that load_drafter reads")
    drafts("--medusa", metavar="PATH", help="folder of Medusa heads (config.json, medusa.safetensors)")
    drafts("--eagle", metavar="PATH", help="folder of an EAGLE-3 head, as SGLang and vLLM load it")
    drafts("--block", metavar="PATH", help="folder of a block drafter (DFlash)")
    drafts("--ngram", action="store_true", help="draft from the text itself (prompt lookup)")
    add("--draft-law", choices=DRAFT_LAWS, default="topk", help="how --draft chooses tokens (default %(default)s)")
    add("--rule", choices=RULES, default="auto", help="how drafts are verified; all but typical are lossless")
    add("--num-nodes", type=int, help=f"nodes of a draft tree with its root (default {NUM_NODES}, of n-grams 32)")
    add("--depth", type=int, help="most draft tokens in a row (default: the drafter's own)")
    add("--width", type=int, help="most guesses for a place (default: the drafter's own); 1 = chains")
    add("--max-new-tokens", type=int, default=128, help="default %(default)s")
    add("--n", type=int, default=1, help="outcomes of the prompt (default %(default)s)")
    add("--stop", action="append", metavar="TEXT", help="ends the text where it occurs; may be repeated")
    add("--min-new-tokens", type=int, help="tokens before an end-of-text token (default: the checkpoint's, or 0)")
    add("--bad-word", action="append", default=[], metavar="TEXT", help="may not come; may be repeated")
    add("--repetition-penalty", type=float, help="divides what came before (default: the checkpoint's, or 1 = off)")
    add("--presence-penalty", type=float, help="subtracted from what was generated (default 0)")
    add("--frequency-penalty", type=float, help="subtracted each time that it was (default 0)")
    add("--logprobs", type=int, metavar="N", help="tells each token's log-probability, rank and the N most likely")
    grammar("--json-schema", metavar="FILE", help="the text is JSON of this schema; needs xgrammar")
    grammar("--grammar", metavar="FILE", help="the text follows this EBNF grammar; needs xgrammar")
    blanks = f"most white space between two parts of the JSON text (default {MAX_WHITESPACE} characters; 0 = one line)"
    add("--max-whitespace", type=int, metavar="N", help=blanks)
    add("--no-generation-config", action="store_true", help="leave out what generation_config.json asks for")
    add("--temperature", type=float, help="0 = greedy (default: the checkpoint's where it samples, else greedy)")
    sampling("--top-p", type=float, help="else 1 = off")
    sampling("--top-k", type=int, help="else 0 = off")
    sampling("--min-p", type=float, help="else 0 = off")
    sampling("--seed", type=int, help="seed of the first outcome (default 0); each next one adds 1")
    add("--page-size", type=int, default=16, help="tokens per page (default %(default)s)")
    add("--num-pages", type=int, help="pages in the cache (default: enough)")
    device = "cuda" if "cuda" in backends() else "cpu"
    add("--device", default=device, help="default: cuda where it can run, else cpu")
    add("--cuda-graph", action="store_true", help="replay a CUDA graph of the decode step")
    add("--dtype", choices=DTYPES, help="default: the checkpoint's, on a CPU float32 where it is slow")
    return parser


def _config_fields(model: Any, args: argparse.Namespace) -> ConfigFields:
    if args.no_generation_config:
        return ConfigFields()
    options = {name: getattr(args, name) for name in (*FILTERS, *PENALTIES, "min_new_tokens")}
    options["stop_strings"] = args.stop
    config = config_fields(model, rule="greedy" if args.temperature == 0 else args.rule, given=options)
    if config.values:
        print(f"generation_config.json: {config}", file=sys.stderr)
    return config


def _sampling(
    parser: argparse.ArgumentParser, args: argparse.Namespace, config: ConfigFields
) -> tuple[str, SamplingParams | None]:
    """Returns rule and params, None = from the config; ends the program if an option would have no effect."""
    if not (config.is_sampled if args.temperature is None else args.temperature):
        for name in ("top_p", "top_k", "min_p", "seed"):
            if getattr(args, name) is not None:
                parser.error(f"--{name.replace('_', '-')}: needs --temperature above 0; without it decoding is greedy")
    fields = {name: getattr(args, name) for name in (*FILTERS, *PENALTIES) if getattr(args, name) is not None}
    if not fields:
        return args.rule, None
    if fields == {"temperature": 0.0} and args.rule in ("auto", "greedy"):
        return "greedy", None
    return args.rule, dataclasses.replace(config.params() or SamplingParams(temperature=0.0), **fields)


def _bad_words(tokenizer: Any, words: list[str]) -> list[list[int]]:
    """Returns each text as tokens, also with a leading space: most tokenizers have other tokens for that."""
    texts = [text for word in words for text in (word, f" {word.lstrip()}")]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def _read(args: argparse.Namespace) -> tuple[str, str | None]:
    if args.max_whitespace is not None and (args.json_schema is None or args.max_whitespace < 0):
        raise ValueError(f"--max-whitespace: expected 0 or more, with --json-schema, got {args.max_whitespace}")
    if args.system is not None and not args.chat:
        raise ValueError("--system: needs --chat")
    for name in ("model", "draft", "drafter", "medusa", "eagle", "block"):
        if getattr(args, name) is not None:
            check_checkpoint(f"--{name}", getattr(args, name), of_model=name in ("model", "draft"))
    files = {"--json-schema": args.json_schema, "--grammar": args.grammar}
    grammar = next((read_text(option, path) for option, path in files.items() if path is not None), None)
    return read_text("--prompt", args.prompt, stdin=True), grammar


def _prompt(tokenizer: Any, text: str, args: argparse.Namespace) -> list[int]:
    if args.chat:
        with errors_of("--chat", args.model):
            return chat_prompt(tokenizer, text, args.system)
    prompt: list[int] = tokenizer(text)["input_ids"]
    if not prompt:
        raise ValueError(f"--prompt: expected a text of at least one token, got {args.prompt}, which has none")
    return prompt


def _grammars(
    parser: argparse.ArgumentParser,
    model: Any,
    tokenizer: Any,
    stops: list[int],
    text: str | None,
    args: argparse.Namespace,
) -> list[GrammarMatcher] | None:
    if text is None:
        return None
    option, path = ("--json-schema", args.json_schema) if args.json_schema else ("--grammar", args.grammar)
    try:
        import xgrammar

        from pagedtree.integrations.xgrammar import XGrammarMatcher
    except ModuleNotFoundError as error:
        parser.error(f"{option} needs {error.name}: pip install xgrammar")
    vocab_size = model.config.get_text_config().vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stops or None)
    compiler = xgrammar.GrammarCompiler(info)
    most = MAX_WHITESPACE if args.max_whitespace is None else args.max_whitespace
    try:
        if args.json_schema:
            compiled = compiler.compile_json_schema(text, any_whitespace=most > 0, max_whitespace_cnt=most or None)
        else:
            compiled = compiler.compile_grammar(text)
    except (RuntimeError, UnicodeError) as error:  # the latter where the message has a part of a character
        message = " ".join(str(error).split())
        raise ValueError(f"{option}: expected what xgrammar can read, got {path}: {message}") from None
    return [XGrammarMatcher(xgrammar.GrammarMatcher(compiled), info.vocab_size) for _ in range(args.n)]


def _print_logprobs(tokenizer: Any, tokens: list[int], found: TokenLogprobs) -> None:
    columns = zip(tokens, found.logprobs, found.ranks, found.top_tokens, found.top_logprobs, strict=True)
    for token, logprob, rank, top, logprobs in columns:
        line = ", ".join(
            f"{tokenizer.decode([t])!r} {math.exp(value):.3f}" for t, value in zip(top, logprobs, strict=True)
        )
        print(f"{tokenizer.decode([token])!r:16} {logprob:8.3f}  rank {rank}  {line}", file=sys.stderr)
