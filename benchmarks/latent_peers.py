"""Attention over a latent cache (multi-head latent attention): `tree_attention` and its peers.

Sizes are DeepSeek-V3's: rows of 512 compressed and 64 rotated columns serve 128 query heads, whose queries have 128 +
64 columns before the projection is absorbed, and values 128.
"""

from __future__ import annotations

import ctypes
import functools
import importlib

import torch
import torch.nn.functional as F
from attention_problem import (
    L3_BYTES,
    LAYOUT,
    OURS,
    Problem,
    kv_bytes_of,
    lengths_of,
    paged_tree,
    paged_tree_causal,
    unsupported,
)
from carried import carried, loaded_by
from gpu_attention_peers import HAS_FLASHINFER, pages_of, workspace
from named_trees import nodes_of
from suite import Op, Shape, Way, check_mean_error, lacking_memory, peer
from torch import Tensor

RANK, ROTATED, NOPE, VALUE = 512, 64, 128, 128
ROW = RANK + ROTATED


class LatentProblem(Problem):
    """One call on a latent cache, and the same attention by heads.

    w_k [H, 128, 512] and w_v [H, 512, 128] expand a compressed row into a head's K and V; queries absorb w_k, so the
    op's output times w_v equals the heads' output.
    """

    is_latent = True
    head_dim_v = RANK

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__({**shape, "head_dim": ROW}, device)
        self.scale = (NOPE + ROTATED) ** -0.5
        self.w_v = self.random(self.heads, RANK, VALUE) * RANK**-0.5

    def queries(self, tokens: int) -> Tensor:
        self.w_k = self.random(self.heads, NOPE, RANK) * RANK**-0.5
        self.head_queries = self.random(tokens, self.heads, NOPE + ROTATED)
        absorbed = torch.einsum("thd,hdc->thc", self.head_queries[..., :NOPE], self.w_k)
        return torch.cat([absorbed, self.head_queries[..., NOPE:]], dim=-1)

    def values(self, k: Tensor) -> Tensor:
        return k[..., :RANK]

    def expanded(self, copy: int) -> tuple[Tensor, Tensor]:
        """Returns K [B, H, L, 192] and V [B, H, L, 128]."""
        compressed, rotated = self.gathered(copy)[0][:, 0].split([RANK, ROTATED], dim=-1)
        k = compressed.new_empty(self.batch, self.heads, self.max_length, NOPE + ROTATED)
        k[..., :NOPE] = torch.einsum("blc,hdc->bhld", compressed, self.w_k)
        k[..., NOPE:] = rotated[:, None]
        return k, torch.einsum("blc,hcd->bhld", compressed, self.w_v).contiguous()


@peer("pagedtree by heads")
def by_heads(p: LatentProblem) -> Way:
    way = paged_tree.make(p)
    return Way(lambda copy: torch.einsum("thc,hcv->thv", way.run(copy).float(), p.w_v.float()))


@peer("SDPA on expanded heads", like=by_heads, only_headline=True)
def sdpa_on_expanded_heads(p: LatentProblem) -> Way:
    """transformers caches expanded K and V."""
    kv_bytes = p.batch * p.max_length * p.heads * (NOPE + ROTATED + VALUE) * p.dtype.itemsize
    copies = 1 if kv_bytes >= 4 * L3_BYTES[p.device.type] else p.copies
    if reason := lacking_memory((copies + 1) * kv_bytes, p.device):
        raise ValueError(reason)
    caches = [p.expanded(copy) for copy in range(copies)]

    def plan() -> Tensor:
        return p.visible()[:, None]

    visible = plan()

    def run(copy: int) -> Tensor:
        q = p.head_queries.view(p.batch, -1, *p.head_queries.shape[1:]).transpose(1, 2)
        k, v = caches[copy % copies]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=p.scale).transpose(1, 2)

    return Way(run, plan)


@peer("SDPA on gathered rows")
def sdpa_on_gathered_rows(p: LatentProblem) -> Way:
    """All heads are queries of one, as `enable_gqa` would copy rows."""

    def plan() -> Tensor:
        return p.visible()[:, None].repeat_interleave(p.heads, dim=2)

    visible = plan()

    def run(copy: int) -> Tensor:
        k, v = p.gathered(copy)
        q = p.q.view(p.batch, 1, -1, ROW)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=p.scale).view(-1, p.heads, RANK)

    return Way(run, plan)


class FlashMlaCall(ctypes.Structure):
    """FlashMlaCall of flashmla_kernel.cu."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("batch", "queries", "heads", "pages", "table_stride", "parts")),
        *((name, ctypes.c_int64) for name in ("page_stride", "row_stride")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "out", "lse", "lse_parts", "out_parts")),
        *((name, ctypes.c_void_p) for name in ("page_table", "lengths", "schedule", "splits", "stream")),
        ("scale", ctypes.c_float),
    )


@functools.cache
def flash_mla_library() -> ctypes.CDLL:
    return ctypes.CDLL(str(carried("flashmla_kernel.so")))


@peer("FlashMLA (causal)", when=loaded_by(flash_mla_library), like=paged_tree_causal)
def flash_mla(p: LatentProblem) -> Way:
    p.expect_same_dtype()
    if (p.page_size, p.dtype) != (64, torch.bfloat16):
        raise ValueError("compiled for pages of 64 and bfloat16")
    library, queries = flash_mla_library(), p.tree.num_nodes
    processors = torch.cuda.get_device_properties(p.device).multi_processor_count
    parts = max(processors // -(-queries * p.heads // 64), 1)
    lse, lse_parts = (p.q.new_empty(n, queries * p.heads, dtype=torch.float32) for n in (p.batch, p.batch + parts))
    out, out_parts = p.q.new_empty(*p.q.shape[:2], RANK), lse_parts.new_empty(*lse_parts.shape, RANK)
    schedule, splits = (p.seq_lens.new_empty(n) for n in (parts * 8, p.batch + 1))
    tensors = {"q": p.q, "out": out, "lse": lse, "lse_parts": lse_parts, "out_parts": out_parts, "schedule": schedule}
    tensors |= {"page_table": p.page_table, "lengths": p.seq_lens, "splits": splits}
    call = FlashMlaCall(p.batch, queries, p.heads, len(p.k[0]), p.page_table.stride(0), parts, *p.k[0].stride()[:2])
    call.scale = p.scale
    for name, tensor in tensors.items():
        setattr(call, name, tensor.data_ptr())

    def launch(name: str) -> None:
        call.stream = torch.cuda.current_stream().cuda_stream
        getattr(library, name)(ctypes.byref(call))

    def run(copy: int) -> Tensor:
        call.k = p.k[copy].data_ptr()
        launch("flashmla_run")
        return out

    plan = functools.partial(launch, "flashmla_plan")
    plan()
    return Way(run, plan)


@peer("FlashInfer MLA (causal)", when=HAS_FLASHINFER, like=paged_tree_causal)
def flashinfer_mla(p: LatentProblem) -> Way:
    """A row's parts are separate tensors."""
    wrapper = importlib.import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(workspace(p))
    offsets, indices, _ = pages_of(p)
    sizes = p.heads, RANK, ROTATED, p.page_size, True, p.scale, p.dtype, p.cache_dtype

    def plan() -> None:
        wrapper.plan(p.trees.cu_nodes, offsets, indices, p.seq_lens, *sizes)

    def run(copy: int) -> Tensor:
        return wrapper.run(*(part for x in (p.q, p.k[copy][:, :, 0]) for part in x.split([RANK, ROTATED], -1)))

    plan()
    return Way(run, plan)


# The op --------------------------------------------------------------------------------------------------------------


def memory_of(shape: Shape) -> int:
    """Counts caches, dense K and V, SDPA's mask and scores; expanded heads count themselves."""
    lengths = lengths_of(shape)
    rows = nodes_of(shape["tree"]) * int(shape["heads"].split("/")[0])
    dense = max(lengths) * len(lengths) * (4 * ROW + 12 * rows)
    return max(kv_bytes_of(shape, ROW), 2 * L3_BYTES["cpu"]) * 2 + dense


def check(problem: LatentProblem, ours: Way, theirs: Way) -> None:
    expected = ours.run(0).float()
    check_mean_error("output", expected, theirs.run(0).reshape(expected.shape).float(), 0.03)


LATENT_ATTENTION = Op(
    name="latent_attention",
    base={"batch": 4, "length": 4096, "tree": "binary 8", "heads": "128/1", "page_size": 64, **LAYOUT},
    axes={
        "batch": [1, 16],
        "length": [1024, 16384],
        "tree": ["chain 1", "chain 4", "binary 32", "EAGLE-2 60"],
        "heads": ["16/1", "32/1"],
        "page_size": [1, 16],
        "dtype": ["float16"],
        "cache": ["fp8"],
        "lengths": ["ragged"],
    },
    headline=[
        {"batch": 8, "length": 2048, "tree": "chain 1"},
        {"batch": 1, "length": 16384, "tree": "binary 16", "heads": "16/1"},
    ],
    quick={"batch": 1, "length": 1024, "heads": "16/1"},
    problem=LatentProblem,
    peers=[*OURS, sdpa_on_expanded_heads, sdpa_on_gathered_rows, flash_mla, flashinfer_mla],
    memory=memory_of,
    check=check,
    unsupported=unsupported,
)
OPS = [LATENT_ATTENTION]
