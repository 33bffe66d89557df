"""The model of whole calls: its parts counted by hand; and no call gets worse by it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import predict_calls
import pytest
from predict_calls import KV_TILE_BYTES, Call, even
from sm_model import B200, H200

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
GROWTH = 1.10
RECORDED = json.loads((RESULTS / "calls_predicted_h200.json").read_text())
LOAD, NEAR_LOAD = (latency + predict_calls.AROUND_A_LOAD for latency in (H200.l2_latency, predict_calls.L1_LATENCY))


def found_now() -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["call"], row["engine"]): row for row in predict_calls.call_rows(H200, RECORDED["tiles"])}


def test_no_call_gets_worse() -> None:
    """The plan is made and replayed anew, with the tiles as they were recorded."""
    found, recorded = found_now(), {(row["call"], row["engine"]): row for row in RECORDED["rows"]}
    assert [*found] == [*recorded], "record the calls anew: tools/README.md"
    keys = ("us", "balance", "idle", "kv_reads", "empty_pieces")
    worse = [
        f"{call}, {engine}: {key} {found[call, engine][key]}, recorded {row[key]}"
        for (call, engine), row in recorded.items()
        for key in keys
        if found[call, engine][key] > row[key] * GROWTH
    ]
    assert worse == []


@pytest.mark.parametrize("engine", ["mma.sync", "wgmma"])
@pytest.mark.parametrize("nodes", [64, 128, 256])
def test_memory_is_read_once(nodes: int, engine: str) -> None:
    """By 2, 4 and 8 row tiles of each head, and evenly."""
    (found,) = predict_calls.launches_of(H200, even(32, 8192, nodes), engine)
    assert found["kv_reads"] <= 1.15 and found["balance"] <= 1.15 and found["sharers"] == nodes * 4 // 128


def test_tiles_are_those_of_the_tables() -> None:
    """Where both were predicted under the same conditions: keys from L2, as many CTAs on an SM as fit."""
    simulated = json.loads((RESULTS / "predicted_h200.json").read_text())["rows"]
    bounds = json.loads((RESULTS / "wgmma_bounds_h200.json").read_text())["rows"]
    tiles = {(tile["engine"], tile["instance"]): tile for tile in RECORDED["tiles"]}
    compared = 0
    for row in simulated:
        tile = tiles.get(("mma.sync", row["instance"]))
        if tile and row["source"] == "l2":
            assert row["cycles"] in (tile["l2"][row["ctas"] - 1], tile["l2"][row["ctas"] - 1] // 2), row["instance"]
            compared += 1
    for row in bounds:
        tile = tiles.get(("wgmma", f"{row.get('dtypes')}-{row.get('head_dim')}-{row.get('rows')}"))
        if tile and row.get("kernel") == "wgmma" and row["tile"] == row["rows"]:
            cycles = max(cycles for unit, cycles in row["cycles"].items() if unit != "memory")
            assert tile["l2"][0] == round(cycles)
            compared += 1
    assert compared == 4


def launch(**changes: Any) -> dict[str, Any]:
    replayed = {"steps": [(1, 1, 1, 1)], "most_row_tiles": 1, "most_pieces": 0}
    replayed |= {key: changes.pop(key) for key in [*changes] if key in replayed}
    fields = {"engine": "mma.sync", "m_tile": 64, "ctas_per_sm": 2, "cut_row_tiles": 0, "pieces": 0}
    return {**fields, **changes, "replayed": replayed}


def test_steps_take_the_longer_of_tiles_and_memory() -> None:
    tile = {"l2": [1000, 1500], "memory": [2000, 2500]}
    near = launch(steps=[(3, 264, 0, 2)])
    assert predict_calls.main_cycles(H200, near, tile) == 3 * 1500
    # Of one tile in four from memory, a few bytes: the mean of the tiles' times.
    mixed = launch(steps=[(2, 4, 1, 1)])
    assert predict_calls.main_cycles(H200, mixed, tile) == 2 * 1250
    far = launch(steps=[(5, 264, 264, 2)])
    seconds = 5 * 264 * KV_TILE_BYTES / (H200.memory_gb_per_s * 1e9 * H200.read_share)
    assert predict_calls.main_cycles(H200, far, tile) == pytest.approx(seconds * H200.ghz * 1e9)


def test_edges_are_of_the_cta_with_the_most_row_tiles() -> None:
    stored = 64 * 128 * 4 / H200.l2_bytes
    last = predict_calls.LAST_INSTRUCTIONS * predict_calls.ONCE_CYCLES
    assert predict_calls.edge_cycles(H200, launch()) == last + 2 * stored
    assert predict_calls.edge_cycles(H200, launch(most_row_tiles=4)) == pytest.approx(
        3 * (2 * LOAD + 3 * NEAR_LOAD + stored / 2) / 2 + last + 2 * stored
    )
    alone = launch(most_row_tiles=4, engine="wgmma", ctas_per_sm=1)
    assert predict_calls.edge_cycles(H200, alone) == pytest.approx(
        3 * (LOAD + 3 * NEAR_LOAD + stored / 2) + last + stored
    )


def test_the_join_takes_cuts_in_turns() -> None:
    """64 rows of 128 columns are 16 CTAs a cut, of which 792 fit on the GPU."""
    find, next_one = predict_calls.JOIN_INSTRUCTIONS * predict_calls.ONCE_CYCLES, 2 * LOAD
    assert predict_calls.join_cycles(H200, [launch()]) == find
    few = launch(cut_row_tiles=8, most_pieces=33, pieces=100)
    assert predict_calls.join_cycles(H200, [few]) == find + 5 * LOAD
    more = launch(cut_row_tiles=100, most_pieces=2, pieces=100)
    assert predict_calls.join_cycles(H200, [more]) == find + 2 * next_one + 3 * LOAD
    many = launch(cut_row_tiles=8, most_pieces=33, pieces=26400)  # the bytes of the pieces take longer
    reading = 26400 * 64 * 130 * 4 / H200.l2_bytes / 132
    assert predict_calls.join_cycles(H200, [many]) == pytest.approx(find + reading)


def test_the_floor_reads_what_is_seen_once() -> None:
    tokens = Call("", [1], [6400])
    (found,) = predict_calls.launches_of(H200, tokens, "mma.sync")
    moved = 8 * 100 * KV_TILE_BYTES + 2 * 32 * 128 * 2 + 4 * 400
    assert predict_calls.floor_us(H200, tokens, [found]) == pytest.approx(moved / 4.8e6)
    windowed = replace(tokens, window=64)
    (found,) = predict_calls.launches_of(H200, windowed, "mma.sync")
    assert predict_calls.floor_us(H200, windowed, [found]) < 0.02 * moved / 4.8e6
    prompt = even(1, 4096, 4096)
    (found,) = predict_calls.launches_of(H200, prompt, "mma.sync")
    tiles = 8 * sum(-(-32 * (m + 1) // 64) for m in range(128))  # 32 queries a row tile
    assert predict_calls.floor_us(H200, prompt, [found]) == pytest.approx(tiles * 128 * 64 * 512 / 989e6)


def test_machines_whose_l2_is_unknown() -> None:
    with pytest.raises(ValueError, match=r"calls are predicted for .*, not for B200"):
        next(predict_calls.call_rows(B200, []))


def test_a_call_without_tiles_is_left_out() -> None:
    tiles = [tile for tile in RECORDED["tiles"] if tile["instance"] == "bf16-128-16"]
    rows = list(predict_calls.call_rows(H200, tiles))
    assert rows and all(row["engine"] == "mma.sync" and "T 1" in row["call"] for row in rows)
