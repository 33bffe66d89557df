"""Averages a score over n seeded outcomes of one prompt.

python examples/score.py --n 16 --score python
python examples/score.py --prompt-file prompt.txt --score contains:return --temperature 0.6

The outcomes share the prompt's cache pages. The same seed gives the same outcomes with any drafter.
"""

from __future__ import annotations

import argparse
import ast
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedtree import SamplingParams
from pagedtree.integrations.transformers import NgramDrafter, generate

CHECKPOINT = Path(__file__).parent / "checkpoints" / "target"
PROMPT = 'def read_lines(path):\n    """Return the lines of the file at path."""\n'


def python_score(prompt: str, completion: str) -> float:
    """The share of the completion's lines up to which the whole text parses as Python."""
    lines = completion.splitlines(keepends=True)
    for kept in range(len(lines), 0, -1):
        try:
            ast.parse(prompt + "".join(lines[:kept]))
        except (SyntaxError, ValueError):  # ValueError: a NUL character
            continue
        return kept / len(lines)
    return 0.0


@torch.no_grad()
def log_prob_score(model: Any, sequence: torch.Tensor, prompt_length: int) -> float:
    """The mean log-probability (nats) of the generated tokens under the model at temperature 1, without filters."""
    log_probs = model(sequence[None]).logits[0, prompt_length - 1 : -1].float().log_softmax(-1)
    return log_probs.gather(1, sequence[prompt_length:, None]).mean().item()


def scorer(name: str, model: Any, tokenizer: Any, prompt: str, prompt_length: int) -> Callable[[torch.Tensor], float]:
    """The score of a whole sequence of tokens: "python", "logprob" or "contains:TEXT"."""

    def completion(sequence: torch.Tensor) -> str:
        return tokenizer.decode(sequence[prompt_length:], skip_special_tokens=True)

    if name == "python":
        return lambda sequence: python_score(prompt, completion(sequence))
    if name == "logprob":
        return lambda sequence: log_prob_score(model, sequence, prompt_length)
    kind, _, text = name.partition(":")
    if kind == "contains" and text:
        return lambda sequence: float(text in completion(sequence))
    raise SystemExit(f"--score: expected python, logprob or contains:TEXT, got {name}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=str(CHECKPOINT), help="checkpoint folder or name (default: the toy's target)"
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default=PROMPT)
    prompt.add_argument("--prompt-file", type=Path)
    parser.add_argument("--score", default="python", help="python, logprob or contains:TEXT")
    parser.add_argument("--n", type=int, default=8, help="outcomes")
    parser.add_argument("--seed", type=int, default=0, help="of the first outcome; the next ones count up")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--show", action="store_true", help="print each outcome")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> float:
    args = parse_arguments(argv)
    prompt = args.prompt_file.read_text() if args.prompt_file else args.prompt
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = tokenizer.encode(prompt)
    score = scorer(args.score, model, tokenizer, prompt, len(tokens))
    sequences, stats = generate(
        model,
        [tokens],
        drafter=NgramDrafter(),
        max_new_tokens=args.max_new_tokens,
        params=SamplingParams(temperature=args.temperature, top_p=args.top_p),
        seeds=range(args.seed, args.seed + args.n),
        n=args.n,
    )
    scores = [score(sequence) for sequence in sequences]
    for seed, (sequence, value) in enumerate(zip(sequences, scores, strict=True), args.seed):
        print(f"seed {seed:4d}  {args.score} {value:8.4f}")
        if args.show:
            print(tokenizer.decode(sequence[len(tokens) :], skip_special_tokens=True))
    mean = statistics.fmean(scores)
    error = statistics.stdev(scores) / args.n**0.5 if args.n > 1 else float("nan")
    print(f"mean of {args.n}: {mean:.4f}, standard error {error:.4f}")
    print(stats.summary())
    return mean


if __name__ == "__main__":
    main()
