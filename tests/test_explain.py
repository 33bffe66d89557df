"""explain(): the schedule and the floor of a call, without a GPU."""

from __future__ import annotations

import pytest

from pagedtree import explain

SIZES = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}


def test_one_long_sequence_is_cut() -> None:
    cost = explain([16], [8192 + 16], **SIZES)
    assert (cost.m_tile, cost.row_tiles, cost.kv_tiles) == (64, 8, 8 * 129)
    assert cost.cut_row_tiles == 8 and 8 < cost.pieces <= 2 * cost.ranges
    assert cost.ranges == min(2 * 132, 8 * (129 + 2) // 6)
    keys = 2 * 8208 * 8 * 128 * 2
    assert keys < cost.bytes < 1.5 * keys
    assert cost.flops == 4 * 16 * 8208 * 32 * 128
    assert cost.executed_flops == cost.flops * 129 * 64 // 8208
    assert cost.floor_seconds == pytest.approx(cost.bytes / 4.8e12)


@pytest.mark.parametrize(
    ("queries", "head_dim", "m_tile"),
    [(1, 128, 16), (4, 128, 16), (5, 64, 32), (9, 96, 64), (17, 128, 128), (500, 128, 128), (1, 256, 32), (9, 192, 64)],
)
def test_tile_follows_the_rows(queries: int, head_dim: int, m_tile: int) -> None:
    for kv_bytes in (1, 2):
        for shared in (99 << 10, 163 << 10, 227 << 10):
            cost = explain([queries] * 3, [500] * 3, **{**SIZES, "head_dim": head_dim}, kv_bytes=kv_bytes,
                           max_shared_bytes=shared)  # fmt: skip
            assert cost.m_tile == m_tile
            assert cost.row_warps * cost.key_warps in (4, 8)
            assert 2 <= cost.stages <= 4
            assert cost.ctas_per_sm * (cost.shared_bytes + 1024) <= shared + 1024


def test_short_sequences_are_not_cut() -> None:
    cost = explain([1] * 64, [100] * 64, **SIZES)
    assert (cost.cut_row_tiles, cost.pieces) == (0, 0)
    assert (cost.row_tiles, cost.kv_tiles) == (64 * 8, 64 * 8 * 2)


def test_empty() -> None:
    cost = explain([], [], **SIZES)
    assert (cost.row_tiles, cost.bytes, cost.flops, cost.floor_seconds) == (0, 0, 0, 0)
    cost = explain([0, 2], [7, 0], **SIZES)
    assert (cost.row_tiles, cost.kv_tiles, cost.flops) == (8, 8, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_q_heads": 31}, "`num_q_heads` must be a multiple of num_kv_heads, got 31 and 8"),
        ({"head_dim": 80}, "`head_dim` must be one of"),
        ({"kv_bytes": 4}, "`kv_bytes` must be 1 or 2, got 4"),
        ({"page_size": 0}, "`page_size` must be at least 1, got 0"),
        ({"max_shared_bytes": 1000}, "`max_shared_bytes` must be at least"),
        ({"seq_lens": [1, 2]}, "`seq_lens` must have 1 entries"),
        ({"query_lens": [-1]}, "`query_lens` must be in"),
    ],
)
def test_refusals(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"explain: {message}"):
        explain(**{"query_lens": [1], "seq_lens": [10], **SIZES, **changes})
