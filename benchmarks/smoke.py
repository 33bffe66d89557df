"""One step of a small batch, op by op, on `--device` or `--backend simt`, each result compared with the CPU backend's.

Small enough to run under compute-sanitizer. Exits with 1 where a result differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

import pagedtree as pt
from pagedtree.testing import use_backend

PAGE_SIZE = 16
HEADS, KV_HEADS = 8, 2


def steps(device: torch.device, dtype: torch.dtype, head_dim: int, fp8: bool) -> dict[str, Any]:
    """What each op gives for fixed inputs."""
    generator = torch.Generator().manual_seed(head_dim)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    trees = pt.TreeBatch.from_trees([pt.DraftTree.full([3, 2, 2]), pt.DraftTree.chain(5), pt.DraftTree.chain(0)])
    trees = pt.build_trees(
        trees.parents.to(device), trees.cu_nodes.to(device), max_nodes=trees.max_nodes, max_depth=trees.max_depth
    )
    total = trees.parents.shape[0]
    start = torch.tensor([100, 7, 0], dtype=torch.int32, device=device)
    table = torch.randperm(30, generator=generator).view(3, 10).int().to(device)
    positions, seq_lens, offsets, slots = pt.prepare_step(trees, table, start, PAGE_SIZE, total_q=total)
    cache_dtype = torch.float8_e4m3fn if fp8 else dtype
    caches = [random(30, PAGE_SIZE, KV_HEADS, head_dim).to(cache_dtype) for _ in range(2)]
    scales = {"k_scale": torch.tensor(0.5, device=device), "v_scale": torch.tensor(2.0, device=device)} if fp8 else {}
    pt.append_kv(random(total, KV_HEADS, head_dim), random(total, KV_HEADS, head_dim), *caches, slots, **scales)
    found: dict[str, Any] = {"prepare_step": [positions, seq_lens, offsets, slots], "append_kv": list(caches)}
    q = random(total, HEADS, head_dim)
    attend = {"tree_attention": trees.mask, "causal": None}
    for name, mask in attend.items():
        found[name] = list(pt.tree_attention(q, *caches, table, seq_lens, offsets, mask, return_lse=True, **scales))
    logits, drafts = random(total, 1000), torch.randint(1000, (total,), generator=generator).to(device)
    drafts[1] = logits[0].float().argmax()
    seeds, roots = torch.arange(3, device=device), start.long()
    verdict = pt.verify_greedy(logits, drafts, trees)
    sampled = pt.verify_sampled(logits, drafts, trees, pt.SamplingParams(top_k=50), seeds=seeds, positions=roots)
    draft_probs = (logits.cpu().float() / 2).softmax(-1).to(device)  # not the same bits on all devices
    weighed = {
        "rejection": (pt.verify_rejection, "swor"),
        "block": (pt.verify_block, "iid"),
        "traversal": (pt.verify_traversal, "iid"),
        "onehot": (pt.verify_rejection, "onehot"),
    }
    for name, (rule, law) in weighed.items():
        probs = {"draft_probs": draft_probs} if law != "onehot" else {}
        weigh = {"draft_law": law, "seeds": seeds, "positions": roots, **probs}
        found[name] = list(rule(logits, drafts, trees, pt.SamplingParams(top_p=0.9), **weigh))
    found["typical"] = list(pt.verify_typical(logits, drafts, trees, pt.SamplingParams()))
    found["verify_greedy"] = [verdict.accept_index, verdict.num_accepted, verdict.tokens, verdict.status]
    found["verify_sampled"] = [sampled.accept_index, sampled.num_accepted, sampled.tokens, sampled.status]
    found["compact_kv"] = [pt.compact_kv(caches, table, start, verdict.accept_index, verdict.num_accepted), *caches]
    committed = pt.commit(verdict, trees, start)
    found["commit"] = [committed.start, committed.last_token, committed.accept_rows]
    return found


def worst_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        x, y = a.cpu().double(), b.cpu().double()
        same = (x == y) | (x.isnan() & y.isnan())
        worst = max(
            worst, float(torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=torch.inf).max()) if a.numel() else 0
        )
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "simt"], help="for the device cpu")
    args = parser.parse_args()
    run: Callable[..., dict[str, Any]] = steps
    failed = 0
    for dtype, head_dim, fp8 in [
        (torch.bfloat16, 128, False),
        (torch.float16, 64, False),
        (torch.bfloat16, 256, False),
        (torch.bfloat16, 128, True),
    ]:
        expected = run(torch.device("cpu"), dtype, head_dim, fp8)
        with use_backend(args.backend):
            found = run(torch.device(args.device), dtype, head_dim, fp8)
        for op, ours in found.items():
            difference = worst_difference(ours, expected[op])
            good = difference <= (0.05 if "attention" in op or op == "causal" else 0.0)
            failed += not good
            case = f"{str(dtype).removeprefix('torch.')} {head_dim}{' fp8' if fp8 else ''}"
            print(f"{'ok' if good else 'WRONG':6} {op:16} {case:20} difference {difference:.3g}", flush=True)
    return failed > 0


if __name__ == "__main__":
    raise SystemExit(main())
