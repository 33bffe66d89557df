"""One engine of vLLM in a process of its own, for real_peers.py.

build/engines-vllm/bin/python benchmarks/vllm_worker.py '{"model": FOLDER, "dtype": "bfloat16", ...}'

The argument has the options of `LLM`. A line of standard input has prompts as tokens and how many new tokens each gets
at most; the answer to it, on standard output, has the new tokens.
"""

from __future__ import annotations

import json
import os
import sys

# Whatever else is written to standard output goes to standard error.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
if "pagedtree." in sys.argv[1]:
    os.environ["PAGEDTREE_PLUGINS"] = "vllm"


def main() -> None:
    from vllm import LLM, SamplingParams

    # Without prefix caching: else the engine would know the prompts from batches of another size.
    llm = LLM(**{"max_model_len": 2048, "enable_prefix_caching": False} | json.loads(sys.argv[1]))
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=asked["count"])
        prompts = [{"prompt_token_ids": tokens} for tokens in asked["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        print(json.dumps([[*output.outputs[0].token_ids] for output in outputs]), file=answers, flush=True)


if __name__ == "__main__":
    main()
