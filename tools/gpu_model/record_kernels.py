"""What the compiled attention kernels use, kept in benchmarks/results/kernels.json; needs cuobjdump, no GPU.

python tools/gpu_model/record_kernels.py [--library PATH] [--json PATH]
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from measure import machine_facts, save

from pagedtree import explain
from pagedtree.cubin import cuda_library, read_kernels

# fp16 and bf16 differ in the type of the instructions only.
INSTANCE = re.compile(r"attention_kernel<Instance<__nv_bfloat16, (\w+), (\d+), (\d+), (\d+)> >")
CACHE_TYPES = {"__nv_bfloat16": ("bf16", 2), "Float8E4M3": ("e4m3", 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write; default benchmarks/results/kernels.json")
    parser.add_argument("--library", type=Path, help="such as that of `make build-all`; default the package's own")
    args = parser.parse_args()
    library = args.library or cuda_library()
    if library is None:
        print("this build has no CUDA library", file=sys.stderr)
        return 1
    instances: dict[tuple[int, int, int, str], dict[str, int]] = {}
    for kernel in read_kernels(library):
        if match := INSTANCE.match(kernel.name):
            assert kernel.stack_bytes == 0, kernel
            key = int(match[2]), int(match[4]), int(match[3]), match[1]
            instances.setdefault(key, {})[kernel.architecture] = kernel.registers
    rows = []
    for (head_dim, head_dim_v, m_tile, cache_type), registers in sorted(instances.items()):
        name, kv_bytes = CACHE_TYPES[cache_type]
        sizes = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": head_dim, "head_dim_v": head_dim_v}
        (launch,) = explain([m_tile], [4096], kv_bytes=kv_bytes, **sizes).launches
        assert launch.m_tile == m_tile
        rows.append(
            {
                "head_dim": head_dim,
                "head_dim_v": head_dim_v,
                "m_tile": m_tile,
                "cache": name,
                "warps": f"{launch.row_warps} x {launch.key_warps} x {launch.column_warps}".removesuffix(" x 1"),
                "keys_per_stage": launch.keys_per_stage,
                "stages": launch.stages,
                "shared_bytes": launch.shared_bytes,
                "ctas_per_sm": launch.ctas_per_sm,
                "registers": registers,
            }
        )
    build = {"architectures": list(rows[0]["registers"]), "library_bytes": library.stat().st_size}
    save("kernels", rows, machine_facts() | build, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
