"""vLLM with and without draft trees, on the toy's model and prompts: accepted length, tokens per second, same output.

    make test-engines ENGINE=vllm SELECT="-k many"     # makes the environment
    PYTHONPATH=python OMP_NUM_THREADS=1 build/engines-vllm/bin/python benchmarks/bench_vllm.py [--rounds 3] [--json P]

Each round starts every engine anew, in turn, so that a slow spell of the machine hits all alike. An engine's fastest
pass counts, by the clock and by the process's CPU time, which tells more where others compute beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "engines")]

TREE_NODES, CHAIN = 16, 5


def engines() -> dict[str, dict[str, Any]]:
    from vllm_case import DRAFT, tree_options

    ours = {"attention_backend": "CUSTOM"}
    lookup = {"method": "ngram", "num_speculative_tokens": CHAIN, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    draft = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": CHAIN}
    return {
        "vLLM": {},
        "vLLM, our attention": ours,
        "n-gram tree": tree_options("ngram", TREE_NODES, max_branches=6, max_depth=8),
        "draft-model tree": tree_options("model", TREE_NODES, depth=5, width=3),
        "Medusa tree": tree_options("medusa", TREE_NODES),
        "EAGLE-3 tree": tree_options("eagle", TREE_NODES, depth=5, width=3),
        "vLLM, n-gram chain": {"speculative_config": lookup},
        "vLLM, draft-model chain": {"speculative_config": draft},
    }


def timed(call: Callable[[], list[list[int]]], passes: int = 4) -> tuple[list[list[int]], float, float]:
    """What the call returns, and its least seconds and CPU seconds over some passes."""
    seconds, cpu_seconds = [], []
    for _ in range(passes):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        result = call()
        seconds.append(time.perf_counter() - begin)
        cpu_seconds.append(time.process_time() - cpu_begin)
    return result, min(seconds), min(cpu_seconds)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One engine in this process: its row, and the tokens."""
    from stdlib_text import prompts as stdlib_prompts
    from transformers import AutoTokenizer
    from vllm_case import TARGET, SamplingParams, engine, generate, metrics_of

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts = [tokenizer.encode(text) for text in stdlib_prompts(args.prompts)]
    params = SamplingParams(temperature=0, max_tokens=args.max_new_tokens, ignore_eos=True)
    options = {"max_num_seqs": args.prompts, "max_model_len": 1024, "enable_prefix_caching": False}
    with engine(**engines()[args.engine], **options) as llm:
        generate(llm, prompts, SamplingParams(temperature=0, max_tokens=8))  # warm-up
        before = metrics_of(llm)
        outputs, seconds, cpu_seconds = timed(lambda: generate(llm, prompts, params))
        after = metrics_of(llm)
    counted = [f"vllm:spec_decode_num_{what}" for what in ("accepted_tokens", "drafts", "draft_tokens")]
    hits, drafts, nodes = (after.get(key, 0) - before.get(key, 0) for key in counted)
    num_tokens = sum(map(len, outputs))
    return {
        "engine": args.engine,
        "accepted_length": hits / max(drafts, 1),
        "draft_tokens_per_step": nodes / max(drafts, 1),
        "tokens_per_second": num_tokens / seconds,
        "tokens_per_cpu_second": num_tokens / cpu_seconds,
        "outputs": outputs,
    }


def measure_all(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Every engine in a process of its own: what one leaves behind would slow the next. Yields the rows so far."""
    rows: dict[str, dict[str, Any]] = {}
    expected: list[list[int]] = []
    for _ in range(args.rounds):
        for name in engines():
            command = [sys.executable, __file__, "--engine", name, *sys.argv[1:]]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row = json.loads(done.stdout.splitlines()[-1])
            outputs = row.pop("outputs")
            expected = expected or outputs
            old = rows.get(name, {"identical": True})
            for key in ("tokens_per_second", "tokens_per_cpu_second"):
                row[key] = max(row[key], old.get(key, 0.0))
            rows[name] = row | {"identical": old["identical"] and outputs == expected}
            print(rows[name], flush=True)
            yield list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="where to write; default benchmarks/results/vllm.json")
    parser.add_argument("--engine", help="measure this one alone, in this process, and print its row")
    args = parser.parse_args()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    if args.engine:
        print(json.dumps(measure(args)))
        return 0
    import vllm
    from measure import machine_facts, save

    facts = machine_facts() | {"vllm": vllm.__version__, "dtype": "float32", "prompts": args.prompts,
                               "max_new_tokens": args.max_new_tokens, "rounds": args.rounds}  # fmt: skip
    for rows in measure_all(args):
        save("vllm", rows, facts, args.json)
    return 0 if all(row["identical"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
