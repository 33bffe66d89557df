"""One vLLM engine in a separate process, for real_peers.py.

build/engines-vllm/bin/python benchmarks/vllm_worker.py '{"model": FOLDER, "dtype": "bfloat16", ...}'

The argument has options of `LLM`. An input line has prompts as tokens and their most new tokens; the output line has
the new tokens.
"""

from __future__ import annotations

import json
import os
import sys

# Other output goes to standard error.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
if "pagedtree." in sys.argv[1]:
    os.environ["PAGEDTREE_PLUGINS"] = "vllm"


def main() -> None:
    from vllm import LLM, SamplingParams

    # Otherwise prefix caching would know prompts from batches of another size.
    llm = LLM(**{"max_model_len": 2048, "enable_prefix_caching": False} | json.loads(sys.argv[1]))
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=asked["count"])
        prompts = [{"prompt_token_ids": tokens} for tokens in asked["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        print(json.dumps([[*output.outputs[0].token_ids] for output in outputs]), file=answers, flush=True)


if __name__ == "__main__":
    main()
