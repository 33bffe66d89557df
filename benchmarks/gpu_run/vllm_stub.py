"""Makes a package `vllm` of its Triton attention, filters and Gumbel sampler, with only the modules that these import.

python vllm_stub.py WHEEL FOLDER    # FOLDER/vllm; of vLLM 0.32
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

REAL = [
    "v1/attention/ops/triton_attention_helpers.py",
    "v1/attention/ops/triton_unified_attention.py",
    "v1/worker/gpu/sample/gumbel.py",
    "v1/sample/ops/topk_topp_triton.py",
    "model_executor/warmup/jit_warmup.py",
    "model_executor/warmup/jit_warmup_triton_helper.py",
]
STUBS = {
    "envs.py": "VLLM_BATCH_INVARIANT = False\n",
    "logger.py": "import logging\n\ninit_logger = logging.getLogger\n",
    "triton_utils/__init__.py": "import triton as triton\nimport triton.language as tl\n\nHAS_TRITON = True\n",
    "utils/gpu_sync_debug.py": "from contextlib import nullcontext as gpu_sync_allowed\n",
    "utils/math_utils.py": "from triton import next_power_of_2\n",
    "utils/platform_utils.py": """\
import torch


def num_compute_units(device=0):
    return torch.cuda.get_device_properties(device).multi_processor_count
""",
    "platforms/__init__.py": """\
import torch


class Hopper:
    def fp8_dtype(self):
        return torch.float8_e4m3fn

    def is_cuda_alike(self):
        return True

    def is_device_capability_family(self, capability):
        return capability == 90


current_platform = Hopper()
""",
    "v1/kv_cache_interface.py": """\
from enum import IntEnum

KVQuantMode = IntEnum(
    "KVQuantMode",
    ["NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD", "NVFP4"],
    start=0,
)
""",
}


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        files = STUBS | {name: wheel.read(f"vllm/{name}").decode() for name in REAL}
    package = Path(sys.argv[2]) / "vllm"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in path.relative_to(package).parents:
            (package / folder / "__init__.py").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
