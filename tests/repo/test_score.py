"""examples/score.py: the scores themselves, and one run on the toy's checkpoint."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def score(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("score")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("    return path\n", 1.0),
        ("    return path\n    return (\n", 0.5),
        ("    return path\nx = 1\nif x:\n\n", 0.5),
        ("return path\n", 0.0),
        ("", 0.0),
        ("    return '\0'\n", 0.0),
    ],
)
def test_python_score_is_the_share_of_lines_that_parse(score, completion, expected):
    assert score.python_score("def read(path):\n", completion) == expected


def test_log_prob_score_is_the_mean_over_generated_tokens(score):
    class Uniform:
        def __call__(self, tokens):
            return type("Output", (), {"logits": torch.zeros(*tokens.shape, 5)})

    assert score.log_prob_score(Uniform(), torch.arange(5), 2) == pytest.approx(-math.log(5))


def test_an_unknown_score_is_refused(score):
    for name in ("fluency", "contains:", "contains"):
        with pytest.raises(SystemExit, match="--score"):
            score.scorer(name, None, None, "", 0)


@pytest.mark.skipif(not (EXAMPLES / "checkpoints").exists(), reason="the checkpoints are in the repository only")
def test_a_run_is_repeatable_and_its_mean_is_that_of_single_runs(score, capsys):
    options = ["--score", "contains:e", "--max-new-tokens", "12"]
    mean = score.main([*options, "--n", "3", "--seed", "5", "--show"])
    assert "mean of 3" in capsys.readouterr().out
    assert mean == pytest.approx(sum(score.main([*options, "--n", "1", "--seed", str(s)]) for s in (5, 6, 7)) / 3)
