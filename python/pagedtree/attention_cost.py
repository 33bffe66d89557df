"""Cost model of `tree_attention` on CUDA, computed on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedtree._arguments import checked, refusal
from pagedtree._engine import chosen_engine

__all__ = ["explain"]

ENGINES = ("mma.sync", "wgmma")


@dataclass(frozen=True)
class AttentionLaunch:
    """One launch of the attention kernel.

    Attributes:
        sequences: batch indices.
        engine: "mma.sync" or "wgmma", the matrix instructions.
        m_tile: rows of a tile.
        row_warps, key_warps, column_warps: warps of a CTA along rows, keys of a stage, and V's columns.
        keys_per_stage, stages: the ring in shared memory. A stage holds K and V of its keys, or one of the two (with
            wgmma or column_warps).
        shared_bytes: of a CTA. ctas_per_sm: resident CTAs per multiprocessor.
        row_tiles, kv_tiles: tiles of rows; tiles of 64 keys over all of them.
        ranges: parts of the work, one per CTA. sharers: CTAs that read the same keys at once, for different row tiles.
        cut_row_tiles: row tiles split at a range boundary, into `pieces` partial results.
        balance: maximum over mean of the KV tiles per CTA with a visible key; 1.0 is even. idle: CTAs without one.
        kv_reads: bytes of K and V read from memory over their size; above 1 where CTAs reread keys.
        bytes: minimum traffic: keys within the window once per KV head, q, out, page table, and the pieces, written and
            read.
        executed_flops: tensor core flops, over whole tiles with a visible key.
    """

    sequences: tuple[int, ...]
    engine: str
    m_tile: int
    row_warps: int
    key_warps: int
    column_warps: int
    keys_per_stage: int
    stages: int
    shared_bytes: int
    ctas_per_sm: int
    row_tiles: int
    kv_tiles: int
    ranges: int
    sharers: int
    cut_row_tiles: int
    pieces: int
    balance: float
    idle: int
    kv_reads: float
    bytes: int
    executed_flops: int


@dataclass(frozen=True)
class AttentionCost:
    """Work, traffic and schedule of one call; returned by `explain`.

    Attributes:
        launches: none without queries, else one or two: sequences of at most 32 rows (query tokens x heads of a KV
            head) get small tiles, the others large ones.
        balance, kv_reads: of the launches, run one after the other. idle, bytes, executed_flops: their sums.
        flops: of the actual rows; each query counts all keys of its sequence, or of its window.
        floor_seconds: sum over launches of max(bytes / bandwidth, executed_flops / rate): a lower bound on the time.
    """

    launches: tuple[AttentionLaunch, ...]
    balance: float
    idle: int
    kv_reads: float
    bytes: int
    flops: int
    executed_flops: int
    floor_seconds: float


@checked()
def explain(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    latent: bool = False,
    page_size: int = 16,
    kv_bytes: int = 2,
    max_seqlen_q: int | None = None,
    window: int = 0,
    num_sms: int = 132,
    max_shared_bytes: int = 227 * 1024,
    l2_bytes: int = 50_000_000,
    bandwidth: float = 4.8e12,
    flops_per_second: float = 989e12,
    engine: str | None = None,
) -> AttentionCost:
    """Returns schedule, traffic and floor time of a `tree_attention` call on CUDA.

    Needs no GPU: simulates the CTAs in lockstep, one KV tile of 64 keys each at a time.

    Args:
        query_lens, seq_lens: one entry per sequence; seq_lens count all keys, new tokens included.
        num_q_heads, num_kv_heads, head_dim, page_size: as in the call; head_dim is K's.
        head_dim_v: V's, default head_dim. latent: whether v_cache is a view of k_cache, whose rows are read once.
        kv_bytes: bytes per element of the cache: 2, or 1 for float8_e4m3fn.
        max_seqlen_q: the hint of the call; default ceil(T / B). window: attention window in tokens; 0: none.
        num_sms, max_shared_bytes, l2_bytes: the device's multiprocessors, shared memory per CTA, and L2. bandwidth,
            flops_per_second: its peaks in bytes and flops per second; default: nominal H200.
        engine: "mma.sync", or "wgmma" for the tiles that support it. Default: this machine's choice (PAGEDTREE_ENGINE).

    Raises ValueError for sizes that `tree_attention` refuses or that have no tiles (16, 32).
    """
    from pagedtree import _C  # the ops do without it

    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    sizes = [pair for pair in _C.HEAD_DIMS if pair[0] >= 64]
    if (pair := (head_dim, head_dim_v)) not in sizes:
        raise refusal("head_dim and head_dim_v", f"one of {sizes}", pair)
    _check_batch(query_lens, seq_lens, num_q_heads, num_kv_heads, latent, kv_bytes)
    _check_bounds(page_size, num_sms, max_shared_bytes, window, l2_bytes)
    if max_seqlen_q is None:
        max_seqlen_q = -(-sum(query_lens) // max(1, len(query_lens)))
    schedules = _C.explain_attention(
        list(query_lens), list(seq_lens), num_q_heads, num_kv_heads, head_dim, head_dim_v, latent, kv_bytes,
        max_seqlen_q, window, num_sms, max_shared_bytes, l2_bytes, _engine_of(engine, max_shared_bytes),
    )  # fmt: skip
    launches = []
    keys_seen = sum(n * min(s, window or s) for n, s in zip(query_lens, seq_lens, strict=True))  # by all queries
    most, mean, left_memory, different = 0, 0.0, 0.0, 0
    for schedule in schedules:
        replayed = schedule.pop("replayed")
        most += replayed["most_tiles"]
        mean += replayed["tiles"] / schedule["ranges"]
        different += replayed["different"]
        left_memory += replayed["different"] * schedule["kv_reads"]
        keys = [min(seq_lens[b], window + query_lens[b] - 1 if window else seq_lens[b]) for b in schedule["sequences"]]
        traffic = sum(keys) * num_kv_heads * (head_dim if latent else head_dim + head_dim_v) * kv_bytes
        traffic += sum(query_lens[b] for b in schedule["sequences"]) * num_q_heads * (head_dim + head_dim_v) * 2
        traffic += 4 * sum(-(-s // page_size) for s in keys)
        traffic += 2 * schedule["pieces"] * schedule["m_tile"] * (head_dim_v + 2) * 4
        executed = replayed["tiles"] * 64 * schedule["m_tile"] * 2 * (head_dim + head_dim_v)
        launches.append(AttentionLaunch(bytes=traffic, executed_flops=executed, **schedule))
    return AttentionCost(
        launches=tuple(launches),
        balance=most / mean if mean else 1.0,
        idle=sum(launch.idle for launch in launches),
        kv_reads=left_memory / different if different else 1.0,
        bytes=sum(launch.bytes for launch in launches),
        flops=2 * keys_seen * num_q_heads * (head_dim + head_dim_v),
        executed_flops=sum(launch.executed_flops for launch in launches),
        floor_seconds=sum(max(x.bytes / bandwidth, x.executed_flops / flops_per_second) for x in launches),
    )


def _check_batch(
    query_lens: Sequence[int], seq_lens: Sequence[int], num_q_heads: int, num_kv_heads: int, latent: bool, kv_bytes: int
) -> None:
    if len(query_lens) != len(seq_lens):
        raise refusal("seq_lens", f"{len(query_lens)} entries", len(seq_lens))
    for name, lengths in (("query_lens", query_lens), ("seq_lens", seq_lens)):
        if any(not 0 <= n < 2**31 for n in lengths) or sum(query_lens) >= 2**31:
            raise refusal(name, "0..2^31 - 1, the queries in total too", list(lengths))
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise refusal("num_q_heads", "a multiple of num_kv_heads", f"{num_q_heads} and {num_kv_heads}")
    if latent and num_kv_heads != 1:
        raise refusal("num_kv_heads", "1 for a latent cache", num_kv_heads)
    if kv_bytes not in (1, 2):
        raise refusal("kv_bytes", "1 or 2", kv_bytes)


def _check_bounds(page_size: int, num_sms: int, max_shared_bytes: int, window: int, l2_bytes: int) -> None:
    for name, size, least, most in (
        ("page_size", page_size, 1, 2**31 - 1),
        ("num_sms", num_sms, 1, 2**16),
        ("max_shared_bytes", max_shared_bytes, 99 * 1024, 2**31 - 1),
        ("window", window, 0, 2**63 - 1),
        ("l2_bytes", l2_bytes, 0, 2**63 - 1),
    ):
        if not least <= size <= most:
            raise refusal(name, f"{least}..{most}", size)


def _engine_of(engine: str | None, max_shared_bytes: int) -> str:
    engine = engine or chosen_engine()[0]
    if engine not in ENGINES:
        raise refusal("engine", f"one of {ENGINES}", repr(engine))
    if engine == "wgmma" and max_shared_bytes < 227 * 1024:
        raise refusal("max_shared_bytes", f"at least {227 * 1024} for wgmma", max_shared_bytes)
    return engine
