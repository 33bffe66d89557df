"""The peers of recurrent layers' benchmark, on small layers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return importlib.import_module("recurrent_peers")


def problem_of(peers: ModuleType, **change: object):
    shape = peers.STEP.base | {"batch": 2, "key_heads": 2, "value_heads": 4, "head_dim": 16, "dtype": "float32"}
    return peers.Problem(shape | change, torch.device("cpu"))


@pytest.mark.parametrize("rule", ["gated delta", "kimi delta"])
@pytest.mark.parametrize("tree", ["binary 12", "chain 70", "chain 1"])
@pytest.mark.parametrize("name", ["OnChain", "StatePerNode", "RecurrentLoop", "CausalChunk"])
def test_peers_give_the_ops_result(peers: ModuleType, name: str, tree: str, rule: str) -> None:
    peer = getattr(peers, name)
    if reason := peer.absent():
        pytest.skip(reason)
    problem = problem_of(peers, tree=tree, rule=rule)
    ours, theirs = peers.STEP.peers[0](problem), peer(problem)
    peers.check(problem, ours, theirs)
    if tree == "binary 12":
        theirs.takes_chain = not theirs.takes_chain
        with pytest.raises(importlib.import_module("suite").Mismatch, match="of that of the output"):
            peers.check(problem, ours, theirs)


@pytest.mark.parametrize("rule", ["gated delta", "kimi delta"])
@pytest.mark.parametrize("name", ["PrefillByLoop", "PrefillByChunk"])
def test_peers_of_prompts_give_the_ops_result(peers: ModuleType, name: str, rule: str) -> None:
    peer = getattr(peers, name)
    if reason := peer.absent():
        pytest.skip(reason)
    small = {"batch": 2, "tokens": 70, "key_heads": 2, "value_heads": 4, "head_dim": 16, "dtype": "float32"}
    problem = peers.Prefill(peers.PREFILL.base | small | {"rule": rule}, torch.device("cpu"))
    ours, theirs = peers.PREFILL.peers[0](problem), peer(problem)
    peers.check(problem, ours, theirs)
    problem.g *= 2  # which the peer has seen, too
    peers.check(problem, ours, theirs)
    problem.v = -problem.v
    with pytest.raises(importlib.import_module("suite").Mismatch, match="of that of the output"):
        peers.check(problem, ours, theirs)


def test_a_state_that_was_not_advanced_is_noticed(peers: ModuleType) -> None:
    problem = problem_of(peers, tree="binary 12")
    ours, theirs = peers.STEP.peers[0](problem), peers.StatePerNode(problem)
    peers.check(problem, ours, theirs)
    problem.path = problem.path[:-1]  # which the op has already
    with pytest.raises(importlib.import_module("suite").Mismatch, match="of that of the state"):
        peers.check(problem, ours, theirs)


def test_what_moves_of_the_states(peers: ModuleType) -> None:
    problem = problem_of(peers, tree="binary 12")
    state = 4 * 2 * 4 * 16 * 16
    assert problem.initial.nbytes == state == peers.state_bytes(problem.shape)
    assert problem.notes["state_traffic"] == {
        "pagedtree": {"read": 2 * state, "written": state},
        "a state per node": {"read": 12 * state, "written": 12 * state},
    }
    assert problem.path == [0, 1, 3, 7] and problem.copies == 16
