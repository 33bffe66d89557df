"""Functions that the SGLang adapter fills in on CPUs, without SGLang."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch

from pagedtree.integrations.sglang import on_cpu


def test_last_slots() -> None:
    table = torch.tensor([[5, 6, 7], [8, 9, 4]], dtype=torch.int32)
    found = on_cpu.last_loc(table, torch.tensor([1, 0, 1]), torch.tensor([2, 0, 3]))
    assert found.tolist() == [9, -1, 4]


def test_filters_of_probabilities() -> None:
    probs = torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]])
    result = on_cpu.top_k_renorm(probs, torch.tensor([2, 1, 2**30], dtype=torch.int32))
    torch.testing.assert_close(result, torch.tensor([[0.625, 0, 0.375, 0], [0.25] * 4, [0.1, 0.2, 0.3, 0.4]]))
    result = on_cpu.top_p_renorm(probs, torch.tensor([0.5, 0.3, 0.71]))
    torch.testing.assert_close(result, torch.tensor([[1.0, 0, 0, 0], [0.25] * 4, [0, 2 / 9, 3 / 9, 4 / 9]]))


def test_requests_that_sample_are_not_verified_greedily(monkeypatch) -> None:
    names = dict.fromkeys(on_cpu.SAMPLING)
    utils = SimpleNamespace(**{**names, "top_k_renorm_prob": len})
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative", SimpleNamespace(eagle_utils=utils))

    def original(*, is_all_greedy: bool, is_cpu: bool, is_hip: bool) -> bool:
        return is_all_greedy or is_cpu or is_hip

    ask = dict(is_cpu=True, is_hip=False)
    assert on_cpu.verify_uses_greedy(original, is_all_greedy=True, **ask)
    assert not on_cpu.verify_uses_greedy(original, is_all_greedy=False, **ask)
    assert on_cpu.verify_uses_greedy(original, is_all_greedy=False, is_cpu=False, is_hip=True)
    assert utils.top_k_renorm_prob is len  # existing functions stay
    assert utils.top_p_renorm_prob is on_cpu.top_p_renorm
    assert utils.tree_speculative_sampling_target_only is on_cpu.tree_speculative_sampling_target_only
