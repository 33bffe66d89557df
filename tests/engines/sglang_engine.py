"""Runs SGLang on CPU tensors with pagedtree's attention: `sglang_engine.py OPTIONS...`, each JSON of one engine.

Prints a line of JSON for each engine: the generated ids of every prompt, and the tokens per verification. It is a
program of its own since SGLang starts processes, and ends all of its group where one of them fails.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS = ROOT / "examples" / "checkpoints"
STANDINS = Path(__file__).parent / "sglang_standins"
SETTINGS = {"model_path": str(CHECKPOINTS / "target"), "device": "cpu", "dtype": "float32", "log_level": "error"}
SETTINGS |= {"attention_backend": "pagedtree", "max_total_tokens": 8192, "max_running_requests": 8}


def prompts() -> list[list[int]]:
    """Returns eight pieces of the 16 lines above in tokens; half of them repeat their beginning, for n-grams."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(CHECKPOINTS / "target" / "tokenizer.json"))
    ids = tokenizer.encode(Path(__file__).read_text(encoding="utf-8"), add_special_tokens=False).ids
    pieces = [ids[17 * n : 30 * n + 9] for n in range(8)]
    return [[0, *piece, *(piece[: len(piece) // 2] if n % 2 else [])] for n, piece in enumerate(pieces)]


def run(options: dict) -> dict:
    import sglang

    copies, graphs = options.pop("copies", None), options.pop("graphs", "")
    os.environ["CAPTURED_GRAPHS"] = graphs  # the file that sglang_standins.captured_graphs writes
    sampling = {"ignore_eos": True, "temperature": 0, "max_new_tokens": 24, **options.pop("sampling", {})}
    flags = {"disable_cuda_graph": not graphs, "skip_tokenizer_init": True, "mem_fraction_static": 0.8}
    engine = sglang.Engine(**{**SETTINGS, **flags, **options})
    try:
        texts = prompts() if copies is None else [prompts()[3]] * copies
        outs = engine.generate(input_ids=texts, sampling_params=sampling)
    finally:
        engine.shutdown()
    return {
        "ids": [out["output_ids"] for out in outs],
        "lengths": [out["meta_info"].get("spec_accept_length") for out in outs],
    }


def environment() -> dict[str, str]:
    path = [str(STANDINS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(path)}


def main() -> None:
    os.environ.update(environment())  # of the processes that SGLang starts
    sys.path.insert(0, str(STANDINS))
    for options in sys.argv[1:]:
        print(json.dumps(run(json.loads(options))), flush=True)


if __name__ == "__main__":
    main()
