"""explain(): a call's schedule and floor, without a GPU."""

from __future__ import annotations

from itertools import product

import pytest

from pagedtree import explain

SIZES = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}


def test_a_sequence_cut_among_ctas() -> None:
    """One sequence of 16 x 4 rows per KV head and 8192 + 16 keys."""
    cost = explain([16], [8208], **SIZES, num_sms=2)
    (launch,) = cost.launches
    assert launch.sequences == (0,)
    assert (launch.m_tile, launch.row_warps, launch.key_warps, launch.keys_per_stage) == (64, 2, 2, 64)
    # Masks take 2 KB, Q 16, a stage 2 * 64 rows of 256 bytes and an address: 2 fit half of 227 KB.
    assert (launch.stages, launch.ctas_per_sm) == (2, 2)
    assert launch.shared_bytes == 2048 + 64 * 128 * 2 + 2 * 2 * 64 * (256 + 8)
    # 8 row tiles of 129 + 2 form 4 ranges, split between row tiles.
    assert (launch.row_tiles, launch.kv_tiles, launch.ranges) == (8, 8 * 129, 4)
    assert (launch.cut_row_tiles, launch.pieces) == (0, 0)
    assert cost.bytes == 2 * 8208 * 8 * 128 * 2 + 2 * 16 * 32 * 128 * 2 + 4 * 513
    assert cost.flops == 4 * 16 * 8208 * 32 * 128
    assert cost.executed_flops == 4 * 16 * (129 * 64) * 32 * 128
    assert cost.floor_seconds == pytest.approx(cost.bytes / 4.8e12)

    # 3 SMs have 6 ranges, split at 4/3, 8/3, 4, 16/3 and 20/3 row tiles: four tiles have two partial results.
    (launch,) = explain([16], [8208], **SIZES, num_sms=3).launches
    assert (launch.ranges, launch.cut_row_tiles, launch.pieces) == (6, 4, 8)
    assert launch.bytes == cost.bytes + 2 * 8 * 64 * (128 + 2) * 4


def test_prefill() -> None:
    """Compute-bound: 600 x 8 rows of one head fill 75 tiles of 64 at head size 256, e4m3."""
    cost = explain([600], [600], num_q_heads=8, num_kv_heads=1, head_dim=256, page_size=7, kv_bytes=1)
    (launch,) = cost.launches
    assert (launch.m_tile, launch.keys_per_stage, launch.row_tiles, launch.kv_tiles) == (64, 32, 75, 75 * 10)
    visible = sum(-(-min(8 * (m + 1), 600) // 64) for m in range(75))
    assert launch.ranges == 132 < (visible + 75) // 3 < 2 * 132
    unsplit = 2 * 600 * 256 + 2 * 600 * 8 * 256 * 2 + 4 * 86
    assert cost.bytes == unsplit + 2 * launch.pieces * 64 * (256 + 2) * 4
    assert cost.flops == 4 * 600 * 600 * 8 * 256
    # Row tile i has queries 8 i to 8 i + 7: eight see one KV tile, the next eight two.
    assert visible == 8 * sum(range(1, 10)) + 3 * 10
    assert cost.executed_flops == 4 * 64 * 64 * 256 * visible
    assert cost.floor_seconds == pytest.approx(max(cost.bytes / 4.8e12, cost.executed_flops / 989e12))


def test_a_window() -> None:
    """The last 16 + 100 - 1 keys of each head span three KV tiles."""
    cost = explain([16], [8208], **SIZES, window=100, num_sms=2)
    assert cost.bytes == 2 * 115 * 8 * 128 * 2 + 2 * 16 * 32 * 128 * 2 + 4 * 8
    assert cost.flops == 4 * 16 * 100 * 32 * 128
    assert cost.executed_flops == 4 * 16 * (3 * 64) * 32 * 128
    assert explain([16], [8208], **SIZES, window=2**62, num_sms=2) == explain([16], [8208], **SIZES, num_sms=2)


def test_balance_and_idle_ctas() -> None:
    even = explain([16], [8208], **SIZES, num_sms=2)
    assert (even.balance, even.idle, even.launches[0].idle) == (1.0, 0, 0)
    # Six CTAs split 8 row tiles of 129 KV tiles at multiples of 4/3 row tiles.
    uneven = explain([16], [8208], **SIZES, num_sms=3)
    assert 1.0 < uneven.balance < 1.02 and uneven.balance == uneven.launches[0].balance
    # No key is visible.
    blind = explain([1] * 4, [0] * 4, **SIZES)
    assert (blind.balance, blind.idle, blind.kv_reads) == (1.0, blind.launches[0].ranges, 1.0)
    # Row tiles of 32 and 33 KV tiles have 11 ranges, 5 by wgmma.
    for engine in ("mma.sync", "wgmma"):
        assert (
            explain([5, 16, 64], [700, 90_000, 2049], **SIZES, window=2048, max_seqlen_q=64, engine=engine).balance
            < 1.1
        )
    mixed = explain([1] * 30 + [500] * 2, [4096] * 32, **SIZES, max_seqlen_q=500)
    small, large = mixed.launches
    assert min(small.balance, large.balance) < mixed.balance < max(small.balance, large.balance)
    assert mixed.idle == small.idle + large.idle


@pytest.mark.parametrize("kv_bytes", [1, 2])
@pytest.mark.parametrize("latent", [False, True])
def test_reads_of_keys_and_values(kv_bytes: int, latent: bool) -> None:
    """One SM rereads the keys for each row tile; L2 keeps the most recent."""
    sizes = {"head_dim": 576, "head_dim_v": 512} if latent else {"head_dim": 256}
    call = {"num_q_heads": 64, "num_kv_heads": 1, **sizes, "latent": latent, "kv_bytes": kv_bytes, "num_sms": 1}
    keys = 4096 * kv_bytes * (576 if latent else 512)
    (launch,) = explain([4], [4096], **call, l2_bytes=keys).launches
    assert launch.ranges == launch.ctas_per_sm and launch.row_tiles in (4, 8)
    alone = explain([4], [4096], **call, l2_bytes=0)
    assert explain([4], [4096], **call, l2_bytes=keys).kv_reads == 1.0
    assert alone.kv_reads == launch.row_tiles  # no concurrent reads are shared
    least = launch.row_tiles // launch.ctas_per_sm
    assert least <= explain([4], [4096], **call, l2_bytes=keys // 2).kv_reads <= launch.row_tiles


def test_large_calls_take_no_longer() -> None:
    """Groups of neighbours: exact for even work, else an estimate."""
    assert 1.0 <= explain([2**18], [2**18], **SIZES).balance < 1.15
    many = explain([1] * 20_000, [64] * 20_000, **SIZES)
    assert many.kv_reads == 1.0 and many.balance < 1.01
    assert explain([2**30], [2**31 - 1], **SIZES).kv_reads > 1


@pytest.mark.parametrize("queries", [1, 5])  # tiles of 16 and 32 rows
@pytest.mark.parametrize(("head_dim", "most"), [(64, 4), (96, 3), (128, 2)])
def test_small_tiles_have_more_ctas(head_dim: int, most: int, queries: int) -> None:
    """Shared memory bounds the CTAs: two stages and four warps' outputs each."""
    for shared, kv_bytes in product((99 << 10, 163 << 10, 227 << 10), (1, 2)):
        call = {**SIZES, "head_dim": head_dim, "num_sms": 10, "kv_bytes": kv_bytes, "max_shared_bytes": shared}
        (launch,) = explain([queries], [2**20], **call).launches
        stage = 64 * 2 * (head_dim * kv_bytes + 8)
        of_output = -(-launch.m_tile * head_dim * (4 * 4 - 2) // stage)  # overlaps Q
        least = launch.shared_bytes + 1024 - (launch.stages - max(of_output, 2)) * stage
        assert launch.ctas_per_sm == min(most, (shared + 1024) // least)
        assert kv_bytes == 1 or launch.ranges == 10 * launch.ctas_per_sm


LATENT = {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "latent": True}


def test_wide_values() -> None:
    """Four warps divide V's columns, latent or not."""
    for sizes in (LATENT, {**LATENT, "latent": False}, {**LATENT, "head_dim": 512}, {**LATENT, "engine": "wgmma"}):
        (launch,) = explain([2], [4096], **sizes).launches
        assert (launch.engine, launch.m_tile, launch.keys_per_stage) == ("mma.sync", 32, 32)
        assert (launch.row_warps, launch.key_warps, launch.column_warps) == (1, 1, 4)
        # Half of 227 KB holds 1 KB, 32 x 32 floats, Q and two stages.
        assert (launch.stages, launch.ctas_per_sm, launch.shared_bytes) == (2, 2, 1024 + 4096 + 3 * 32 * 1152)
    (launch,) = explain([1], [4096], **LATENT, kv_bytes=1).launches
    assert (launch.m_tile, launch.stages, launch.ctas_per_sm) == (16, 4, 2)


@pytest.mark.parametrize(("shared", "m_tile", "ctas"), [(99, 16, 1), (163, 32, 1), (227, 32, 2)])
@pytest.mark.parametrize("kv_bytes", [1, 2])
def test_wide_tiles_follow_the_shared_memory(shared: int, m_tile: int, ctas: int, kv_bytes: int) -> None:
    """99 KB are too small for 32 rows and a 16-bit cache, and plans ignore the dtype."""
    call = {**LATENT, "kv_bytes": kv_bytes, "max_shared_bytes": shared << 10}
    (launch,) = explain([9], [4096], **call).launches
    assert launch.m_tile == m_tile and launch.ctas_per_sm >= ctas
    assert launch.ctas_per_sm * (launch.shared_bytes + 1024) <= (shared << 10) + 1024
    lists = explain([1, 500], [500] * 2, **call, max_seqlen_q=500).launches
    assert [launch.m_tile for launch in lists] == [m_tile, m_tile]


def test_mixed_batches_take_two_lists() -> None:
    """63 decode rows keep small tiles despite a prefill chunk's 128 rows."""
    queries, keys = [1] * 63 + [512], [4096] * 64
    cost = explain(queries, keys, **SIZES, max_seqlen_q=512)
    small, large = cost.launches
    assert (small.m_tile, small.sequences) == (32, tuple(range(63)))
    assert (large.m_tile, large.sequences) == (128, (63,))
    assert small.kv_tiles == 63 * 8 * 64 and large.kv_tiles == 16 * 8 * 64
    assert small.executed_flops == 63 * 8 * 4096 * 32 * 4 * 128
    assert cost.bytes == small.bytes + large.bytes
    floors = [max(x.bytes / 4.8e12, x.executed_flops / 989e12) for x in (small, large)]
    assert cost.floor_seconds == pytest.approx(sum(floors))
    # One list if all lengths equal the hint, or for a short hint.
    for lengths, hint, m_tile in (([17] * 64, 17, 128), (queries, 8, 32), (queries, 1, 16)):
        (single,) = explain(lengths, keys, **SIZES, max_seqlen_q=hint).launches
        assert (single.sequences, single.m_tile) == (tuple(range(64)), m_tile)
    small, large = explain([8, 9, 0, 1], [50] * 4, **SIZES, max_seqlen_q=9).launches  # 32 and 36 rows
    assert (small.sequences, large.sequences) == ((0, 3), (1,))


def test_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    """wgmma has tiles of 64 and 128 rows."""
    wgmma = {**SIZES, "engine": "wgmma"}
    (launch,) = explain([16], [8208], **wgmma).launches
    monkeypatch.setenv("PAGEDTREE_ENGINE", "wgmma")
    assert explain([16], [8208], **SIZES).launches == (launch,)
    assert (launch.engine, launch.m_tile, launch.row_warps, launch.keys_per_stage) == ("wgmma", 64, 4, 64)
    # Half of 227 KB holds 4 KB, Q and five stages of K or V, 16 KB each.
    assert (launch.stages, launch.ctas_per_sm, launch.shared_bytes) == (5, 2, 4096 + 6 * 64 * 256)
    (launch,) = explain([200], [8208], **{**wgmma, "head_dim": 256}, kv_bytes=1).launches
    assert (launch.m_tile, launch.row_warps, launch.ctas_per_sm) == (128, 8, 1)
    assert (launch.stages, launch.shared_bytes) == (4, 5120 + 128 * 512 + 4 * 64 * 512)  # e4m3 decoded to 16 bits
    for sizes, query in (({}, 8), ({"head_dim": 192}, 100)):  # 32 rows; a head size without wgmma
        (launch,) = explain([query], [8208], **{**wgmma, **sizes}).launches
        assert launch.engine == "mma.sync"


def test_latent() -> None:
    """DeepSeek-V3 reads a row of 576 columns once, as key and value of 128 heads."""
    sizes = {"num_q_heads": 128, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "page_size": 64}
    cost = explain([4] * 8, [8192] * 8, **sizes, latent=True)
    (launch,) = cost.launches
    keys, queries = 8 * 8192, 8 * 4
    assert launch.m_tile * launch.row_tiles == queries * 128 and launch.kv_tiles == launch.row_tiles * 128
    joined = 2 * launch.pieces * launch.m_tile * (512 + 2) * 4
    assert cost.bytes == keys * 576 * 2 + queries * 128 * (576 + 512) * 2 + 4 * keys // 64 + joined
    assert cost.flops == cost.executed_flops == 2 * 4 * keys * 128 * (576 + 512)
    # A separate V adds 512 columns a key, but no arithmetic.
    for changes, extra in (({}, keys * 512 * 2), ({"latent": True, "kv_bytes": 1}, -keys * 576)):
        (other,) = explain([4] * 8, [8192] * 8, **sizes, **changes).launches
        joined_there = 2 * other.pieces * other.m_tile * (512 + 2) * 4
        assert other.bytes - joined_there == cost.bytes - joined + extra and other.executed_flops == cost.flops


def test_empty() -> None:
    cost = explain([], [], **SIZES)
    assert (cost.launches, cost.bytes, cost.flops, cost.floor_seconds) == ((), 0, 0, 0)
    cost = explain([0, 2], [7, 0], **SIZES)
    (launch,) = cost.launches
    assert (launch.sequences, launch.row_tiles, launch.kv_tiles, cost.flops) == ((1,), 8, 8, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_q_heads": 31}, "num_q_heads: expected a multiple of num_kv_heads, got 31 and 8"),
        ({"head_dim": 80}, "head_dim and head_dim_v: expected one of"),
        ({"kv_bytes": 4}, "kv_bytes: expected 1 or 2, got 4"),
        ({"window": -1}, "window: expected 0..9223372036854775807, got -1"),
        ({"l2_bytes": -1}, "l2_bytes: expected 0..9223372036854775807, got -1"),
        ({"num_sms": 2**31 - 2}, r"num_sms: expected 1\.\.65536, got 2147483646"),
        ({"num_sms": 0}, r"num_sms: expected 1\.\.65536, got 0"),
        ({"page_size": 0}, "page_size: expected 1..2147483647, got 0"),
        ({"max_shared_bytes": 1000}, "max_shared_bytes: expected 101376.."),
        ({"engine": "tcgen05"}, "engine: expected one of"),
        ({"engine": "wgmma", "max_shared_bytes": 163 * 1024}, "max_shared_bytes: expected at least 232448 for wgmma"),
        ({"seq_lens": [1, 2]}, "seq_lens: expected 1 entries"),
        ({"query_lens": [-1]}, "query_lens: expected 0"),
        ({"head_dim": 576, "head_dim_v": 128}, r"head_dim and head_dim_v: expected one of .*, got \(576, 128\)"),
        ({"latent": True}, "num_kv_heads: expected 1 for a latent cache, got 8"),
    ],
)
def test_refusals(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"explain: {message}"):
        explain(**{"query_lens": [1], "seq_lens": [10], **SIZES, **changes})
