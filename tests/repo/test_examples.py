"""The programs of examples/ run, and the demo notices when output is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    return demo


def run_demo(demo, monkeypatch, tmp_path, *arguments):
    table = tmp_path / "table.json"
    small = ["--prompts", "2", "--max-new-tokens", "10", "--live-tokens", "20"]
    small += ["--json", str(table), "--picture", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["demo.py", *small, *arguments])
    return demo.main(), json.loads(table.read_text())


def test_demo_is_exact(demo, monkeypatch, tmp_path, capsys):
    code, rows = run_demo(demo, monkeypatch, tmp_path)
    assert code == 0
    assert len(rows) == 21 and all(row["identical"] for row in rows[:14])
    assert [row["drafter"] for row in rows[14:] if row["identical"] is not None] == ["coupled tree, sampled"]
    assert rows[-1]["identical"]
    assert any(row["accepted_length"] > 0.5 for row in rows)
    out = capsys.readouterr().out
    assert out.index("one sequence:") < out.index("both texts are the same") < out.index("tokens/step  ")
    assert "draft-model tree" in out and "drawn tree, traversal" in out and "typical is lossy" in out
    assert (tmp_path / "run.svg").read_text().startswith("<svg") and (tmp_path / "run.html").exists()


def test_demo_fails_on_wrong_output(demo, monkeypatch, tmp_path, capsys):
    from pagedtree.generation import engine

    # Accepted rows stay where their draft nodes were.
    monkeypatch.setattr(engine, "compact_kv", lambda *args, **kwargs: None)
    load = demo.load

    def load_trees(args):  # a chain's accepted rows are where they belong
        *models, drafters = load(args)
        return *models, {name: drafters[name] for name in ("plain", "draft-model tree")}

    monkeypatch.setattr(demo, "load", load_trees)
    code, rows = run_demo(demo, monkeypatch, tmp_path)
    assert code == 1 and not all(row["identical"] for row in rows)
    out = capsys.readouterr().out
    assert "THE TEXTS DIFFER" in out and "first difference" in out


@pytest.mark.slow
def test_four_ranks_write_the_text_of_one(tmp_path):
    table = tmp_path / "table.json"
    command = [sys.executable, str(EXAMPLES / "tensor_parallel.py"), "--prompts", "1", "--max-new-tokens", "6"]
    done = subprocess.run([*command, "--json", str(table)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(table.read_text())
    assert [(row["rule"], row["draft_ranks"]) for row in rows] == [
        (rule, size) for size in (1, 2) for rule in ("greedy", "sampled", "rejection")
    ]
    assert all(row["identical"] and row["proposal_ms_per_token"] > 0 for row in rows)
    assert all(row["bytes_sent"] < row["bytes_to_gather"] for row in rows)
    assert any(row["accepted"] > 0.5 for row in rows)


@pytest.mark.slow
def test_tiny_models_train(tmp_path):
    command = [sys.executable, str(EXAMPLES / "train_tiny.py"), "all", "--steps", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    command = [sys.executable, str(EXAMPLES / "train_block.py"), "--steps", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "level 7" in done.stdout, done.stderr
    files = (*(f"{name}/model.safetensors" for name in ("target", "draft", "block")), "medusa/medusa.safetensors")
    for name in files:
        assert (tmp_path / name).stat().st_size > 0
    command = [sys.executable, str(EXAMPLES / "train_eagle.py"), "--steps", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "eagle/model.safetensors").stat().st_size > 0
    assert done.stdout.count("on the target's greedy continuations") == 4
