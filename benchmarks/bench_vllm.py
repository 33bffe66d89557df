"""vLLM with and without draft trees, on the demo's model and prompts: accepted length, tokens a second, same output.

    make test-engines ENGINE=vllm SELECT="-k many"     # makes the environment
    PYTHONPATH=python OMP_NUM_THREADS=1 build/engines-vllm/bin/python benchmarks/bench_vllm.py [--rounds 3] [--json P]

Each round starts every engine anew, in turn, so that a slow spell of the machine hits all alike. An engine's fastest
pass counts, by the clock and by the process's CPU time, which tells more where others compute beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
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
        "vLLM, n-gram chain": {"speculative_config": lookup},
        "vLLM, draft-model chain": {"speculative_config": draft},
        "n-gram tree": tree_options("ngram", TREE_NODES, max_branches=6, max_depth=8),
        "draft-model tree": tree_options("model", TREE_NODES, depth=5, width=3),
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


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    from stdlib_text import prompts as stdlib_prompts
    from transformers import AutoTokenizer
    from vllm_case import TARGET, SamplingParams, engine, generate, metrics_of

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts = [tokenizer.encode(text) for text in stdlib_prompts(args.prompts)]
    params = SamplingParams(temperature=0, max_tokens=args.max_new_tokens, ignore_eos=True)
    rows: dict[str, dict[str, Any]] = {}
    expected: list[list[int]] = []
    for _ in range(args.rounds):
        for name, options in engines().items():
            with engine(**options, max_num_seqs=args.prompts, max_model_len=1024, enable_prefix_caching=False) as llm:
                generate(llm, prompts, SamplingParams(temperature=0, max_tokens=8))  # warm-up
                before = metrics_of(llm)
                outputs, seconds, cpu_seconds = timed(lambda llm=llm: generate(llm, prompts, params))
                after = metrics_of(llm)
            expected = expected or outputs
            num_tokens = sum(map(len, outputs))
            counted = [f"vllm:spec_decode_num_{what}" for what in ("accepted_tokens", "drafts", "draft_tokens")]
            hits, drafts, nodes = (after.get(key, 0) - before.get(key, 0) for key in counted)
            row = rows.setdefault(name, {"engine": name, "tokens_per_second": 0.0, "tokens_per_cpu_second": 0.0})
            row["tokens_per_second"] = max(row["tokens_per_second"], num_tokens / seconds)
            row["tokens_per_cpu_second"] = max(row["tokens_per_cpu_second"], num_tokens / cpu_seconds)
            row["accepted_length"] = hits / max(drafts, 1)
            row["draft_tokens_per_step"] = nodes / max(drafts, 1)
            row["identical"] = row.get("identical", True) and outputs == expected
            print(row, flush=True)
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="where to write; default benchmarks/results/vllm.json")
    args = parser.parse_args()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import vllm
    from measure import machine_facts, save

    facts = machine_facts() | {"vllm": vllm.__version__, "dtype": "float32", "prompts": args.prompts,
                               "max_new_tokens": args.max_new_tokens, "rounds": args.rounds}  # fmt: skip
    rows = measure(args)
    save("vllm", rows, facts, args.json)
    return 0 if all(row["identical"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
