"""`python -m pagedtree generate`: completes a prompt with a checkpoint, with or without drafts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import logging

from pagedtree import _C, SamplingParams
from pagedtree._arguments import refusal
from pagedtree.generation.drafters import Drafter, NgramDrafter
from pagedtree.integrations.transformers.generate import generate
from pagedtree.integrations.transformers.generation_config import ConfigFields, config_fields
from pagedtree.integrations.transformers.model import ModelDrafter
from pagedtree.integrations.transformers.mtp import load_drafter
from pagedtree.testing import backends

FILTERS = ("temperature", "top_k", "top_p", "min_p")
# Statistics that are no fields of `GenerationStats`.
RATES = ("num_tokens", "time_to_first_token", "tokens_per_second", "decode_tokens_per_second", "tokens_per_step")
# Our CPU kernels of these names need instructions for products of bfloat16. With them, torch is fast in it, too.
BF16_ISAS = {"avx512", "amx"}


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _run(args)
        print(end="", flush=True)  # there is no sys.stdout where the caller closed it
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as of `| head`; Python flushes stdout once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pagedtree generate",
        description="Completes a prompt, in fewer passes with drafts. The text goes to stdout, statistics to stderr.",
    )
    add, drafts = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    sampling = parser.add_argument_group("sampling", "default: the checkpoint's generation_config.json").add_argument
    add("--model", required=True, metavar="FOLDER", help="checkpoint of the target")
    add("--prompt", metavar="TEXT", help="default: standard input")
    drafts("--draft", metavar="FOLDER", help="checkpoint of a smaller model of the same tokenizer")
    drafts("--drafter", metavar="FOLDER", help="draft head of any format that load_drafter reads")
    drafts("--ngram", action="store_true", help="draft from the text itself (prompt lookup)")
    add("--max-new-tokens", type=int, default=128, help="default %(default)s")
    add("--n", type=int, default=1, help="outcomes of the prompt (default %(default)s)")
    sampling("--temperature", type=float, help="0 = greedy")
    sampling("--top-k", type=int, help="0 = off")
    sampling("--top-p", type=float, help="1 = off")
    sampling("--min-p", type=float, help="0 = off")
    sampling("--seed", type=int, help="seed of the first outcome (default 0); each next one adds 1")
    add("--no-generation-config", action="store_true", help="ignore generation_config.json, but for its EOS tokens")
    devices = [name for name in ("cuda", "cpu") if name in backends()]
    add("--device", choices=devices, default=devices[0], help="default %(default)s")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, help="default: the checkpoint's, on a CPU float32 where it is slow")
    add("--json", action="store_true", help="print texts and statistics as JSON")
    return parser


def _run(args: argparse.Namespace) -> None:
    text = _text(args.prompt)
    for name in ("model", "draft", "drafter"):
        folder = getattr(args, name)
        if folder is not None and not Path(folder, "config.json").is_file():
            raise refusal(f"--{name}", "a folder with config.json", folder)
    logging.disable_progress_bar()
    tokenizer = _loaded("--model", args.model, AutoTokenizer.from_pretrained)
    prompt = tokenizer(text)["input_ids"]
    if not prompt:
        raise refusal("--prompt", "a text of at least one token", "one of none")
    model = _loaded("--model", args.model, AutoModelForCausalLM.from_pretrained, dtype=args.dtype or "auto")
    if args.dtype is None and args.device == "cpu" and not is_fast(model.dtype):
        model = model.float()
    model = model.to(args.device).eval()
    config = ConfigFields()
    if not args.no_generation_config:
        given = {name: getattr(args, name) for name in FILTERS}
        config = config_fields(model, rule="greedy" if args.temperature == 0 else "auto", given=given)
    followed = f", generation_config.json: {config}" if config.values else ""
    print(f"device: {args.device}, dtype: {model.dtype}{followed}", file=sys.stderr)
    is_live = args.n == 1 and not args.json
    sequences, stats = generate(
        model,
        [prompt],
        drafter=_drafter(args, model),
        max_new_tokens=args.max_new_tokens,
        params=_params(args, config),
        seeds=range(args.seed or 0, (args.seed or 0) + args.n),
        n=args.n,
        tokenizer=tokenizer,
        generation_config=not args.no_generation_config,
        streamer=_Printer(tokenizer, skip_prompt=True, skip_special_tokens=True) if is_live else None,
    )
    texts = [tokenizer.decode(sequence[len(prompt) :], skip_special_tokens=True) for sequence in sequences]
    if args.json:
        found = {name: getattr(stats, name) for name in RATES} | dataclasses.asdict(stats)
        print(json.dumps({"texts": texts, "statistics": found}))
        return
    for i, text in enumerate(texts if not is_live else ()):
        print(f"--- outcome {i}\n{text}")
    print(stats.summary(), file=sys.stderr)


class _Printer(TextStreamer):
    def end(self) -> None:
        if not self.next_tokens_are_prompt:  # a refused call prints no line
            super().end()


def _text(prompt: str | None) -> str:
    """Returns the prompt, with unchanged line ends and without a byte order mark."""
    try:
        return (sys.stdin.buffer.read() if prompt is None else os.fsencode(prompt)).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refusal("--prompt", "UTF-8", f"byte 0x{error.object[error.start]:02x}") from None


def _loaded(option: str, folder: str, load: Callable[..., Any], *rest: Any, **options: Any) -> Any:
    """Loads from the folder; names option and folder if that fails, whatever a reader of files stumbles over."""
    try:
        return load(folder, *rest, **options)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise refusal(option, "a checkpoint that can be loaded", f"{folder}: {reason}") from error


def _drafter(args: argparse.Namespace, model: Any) -> Drafter | None:
    if args.draft is not None:
        draft = _loaded("--draft", args.draft, AutoModelForCausalLM.from_pretrained, dtype=model.dtype)
        return ModelDrafter(draft.to(args.device).eval())
    if args.drafter is not None:
        drafter: Drafter = _loaded("--drafter", args.drafter, load_drafter, model)
        return drafter
    return NgramDrafter() if args.ngram else None


def _params(args: argparse.Namespace, config: ConfigFields) -> SamplingParams | None:
    """Returns the options over the config's own params; None = the config's."""
    if not (config.is_sampled if args.temperature is None else args.temperature):
        for name in (*FILTERS[1:], "seed"):
            if getattr(args, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise refusal(option, "--temperature above 0 with it", "greedy decoding")
    given = {name: getattr(args, name) for name in FILTERS if getattr(args, name) is not None}
    return dataclasses.replace(config.params() or SamplingParams(temperature=0.0), **given) if given else None


def is_fast(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 or (dtype == torch.bfloat16 and not BF16_ISAS.isdisjoint(_C.available_isas()))
