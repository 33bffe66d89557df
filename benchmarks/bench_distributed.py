"""Verification of vocabularies in parts: what the ranks exchange, and how long it takes, beside gathering the logits.
Then drafting on fewer ranks than the target: examples/tensor_parallel.py, milliseconds per proposed token.

    python -m pagedtree bench distributed [--ranks 1 2 4] [--vocab 32000 128256] [--nodes 64 256] [--json PATH]

The ranks are processes of this machine that talk by gloo, so times tell how the two ways compare and nothing of a
network of GPUs; bytes are what each rank sends around a ring, and for 8 ranks they are computed from the same words.
"gathered" is an all-gather of the logits and the whole op on every rank.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import machine_facts, save

import pagedtree
from pagedtree import DraftTree, SamplingParams, TreeBatch, distributed
from pagedtree.distributed import Traffic, VocabShards

PLAIN, FILTERED = SamplingParams(temperature=0.8), SamplingParams(temperature=0.8, top_k=50, top_p=0.9)
NODES_OF_A_TREE, CHILDREN = 32, 4
COMPUTED_RANKS = 8
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "tensor_parallel.py"


def calls(whole: torch.Tensor, shards: VocabShards) -> dict[str, tuple[Callable[[], Any], Callable[..., Any]]]:
    """Name -> (on this rank's columns, on all columns)."""
    nodes = whole.shape[0]
    tree = DraftTree([-1] + [(i - 1) // CHILDREN for i in range(1, NODES_OF_A_TREE)])
    trees = TreeBatch.from_trees([tree] * (nodes // NODES_OF_A_TREE))
    drafts = whole.argmax(dim=1).roll(1)
    at = torch.arange(trees.batch_size)
    streams = {"seeds": at, "positions": at}
    drawn = {"draft_law": "swor", "draft_probs": whole.float().softmax(dim=1)}
    own = shards.own(whole).contiguous()
    rules: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
        "greedy": ("verify_greedy", (), {}),
        "sampled": ("verify_sampled", (PLAIN,), streams),
        "sampled, top-k, top-p": ("verify_sampled", (FILTERED,), streams),
        "rejection, swor": ("verify_rejection", (PLAIN,), streams | drawn),
    }

    def pair(op: str, params: tuple[Any, ...], options: dict[str, Any]) -> tuple[Callable[[], Any], Callable[..., Any]]:
        return (
            lambda: getattr(distributed, op)(own, drafts, trees, *params, **options, shards=shards),
            lambda logits: getattr(pagedtree, op)(logits, drafts, trees, *params, **options),
        )

    return {name: pair(*rule) for name, rule in rules.items()}


def median_ms(function: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return sorted(times)[repeats // 2] * 1e3


def bench_rank(rank: int, num_ranks: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    rows = []
    for vocab in args.vocab:
        shards = VocabShards(vocab // num_ranks + (rank < vocab % num_ranks))
        for nodes in args.nodes:
            whole = torch.randn(nodes, vocab, generator=torch.Generator().manual_seed(0)).bfloat16() * 3
            own = shards.own(whole).contiguous()
            parts = [torch.empty(nodes, size, dtype=torch.bfloat16) for size in shards.sizes]
            for name, (sharded, unsharded) in calls(whole, shards).items():
                shards.traffic = Traffic()
                sharded()
                traffic = shards.traffic

                def gathered(unsharded: Callable[..., Any] = unsharded, own: torch.Tensor = own) -> None:
                    dist.all_gather(parts, own)  # noqa: B023
                    unsharded(torch.cat(parts, dim=1))  # noqa: B023

                row: dict[str, Any] = {"rule": name, "vocab": vocab, "nodes": nodes, "ranks": num_ranks}
                row |= {"exchanges": traffic.exchanges, "bytes_sent": traffic.bytes_sent(num_ranks)}
                row["bytes_to_gather"] = shards.gather_bytes(nodes, whole.dtype)
                row["bytes_sent_8"] = traffic.bytes_sent(COMPUTED_RANKS)
                row["bytes_to_gather_8"] = nodes * vocab * 2 * (COMPUTED_RANKS - 1) // COMPUTED_RANKS
                row |= {"ms": median_ms(sharded, args.repeats), "gathered_ms": median_ms(gathered, args.repeats)}
                rows.append(row)
    if rank == 0:
        torch.save(rows, f"{folder}/rows.pt")
    dist.barrier()
    dist.destroy_process_group()


def drafting(num_ranks: int) -> list[dict[str, Any]]:
    """The example's rows: each rule with the draft on 1 rank and on 2."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.json"
        sizes = [str(size) for size in (1, 2) if num_ranks % size == 0]
        options = ["--ranks", str(num_ranks), "--draft-ranks", *sizes, "--prompts", "3", "--max-new-tokens", "20"]
        subprocess.run([sys.executable, str(EXAMPLE), *options, "--json", str(table)], check=True)
        return json.loads(table.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 128256])
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 256], help=f"multiples of {NODES_OF_A_TREE}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="where to write; default benchmarks/results/distributed.json")
    args = parser.parse_args()
    facts = machine_facts() | {"arguments": {key: value for key, value in vars(args).items() if key != "json"}}
    rows = []
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            start: Callable[..., Any] = mp.start_processes
            start(bench_rank, args=(num_ranks, args, folder), nprocs=num_ranks, start_method="spawn")
            rows += torch.load(f"{folder}/rows.pt", weights_only=False)
    print("rule                    vocab nodes ranks  KiB sent to gather    ms gathered ms | 8 ranks: KiB to gather")
    for row in rows:
        kib = [row[key] / 1024 for key in ("bytes_sent", "bytes_to_gather", "bytes_sent_8", "bytes_to_gather_8")]
        print(
            f"{row['rule']:<22} {row['vocab']:6d} {row['nodes']:5d} {row['ranks']:5d} {kib[0]:9.1f} {kib[1]:9.0f}"
            f" {row['ms']:5.1f} {row['gathered_ms']:11.1f} | {kib[2]:12.1f} {kib[3]:9.0f}"
        )
    facts["drafting"] = drafting(max(args.ranks))
    save("distributed", rows, facts, args.json)


if __name__ == "__main__":
    main()
