"""Benchmarks time no peer with another result."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_a_peer_with_another_result_is_not_timed(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    suite = importlib.import_module("suite")

    class Doubling(suite.Problem):
        """Doubles vectors."""

        copies = 2

        def make(self):
            self.data, self.seen = torch.arange(self.shape["size"]), []
            self.bytes = 8 * self.shape["size"]

        def op(self, copy):
            self.seen.append(copy)
            return 2 * self.data

        def torch_ops(self, copy):
            return self.data + self.data

    wrong = suite.peer("wrong")(lambda problem: suite.Way(lambda copy: problem.data))
    broken = suite.peer("broken")(lambda problem: problem.shape["width"])
    peers = [suite.ours, suite.torch_ops, wrong, broken]
    op = suite.Op("double", {"size": 8}, {}, {}, Doubling, memory=lambda shape: 100 * shape["size"], peers=peers)
    settings = suite.Settings(torch.device("cpu"), 0.001, bandwidth=1e9, flop_rate=1e9, min_repeats=3)
    row = suite.measured(suite.points(op)[0], settings)
    assert row["wrong"] == {"wrong": "the first result differs"} and row["absent"] == {"broken": "KeyError: 'width'"}
    assert set(row["timings"]) == {"pagedtree", "torch ops"}
