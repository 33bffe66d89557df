"""`bench real` to its end, on the toy in place of the real model: its rows, and that it notices wrong texts."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "examples" / "checkpoints" / "target"
OURS = ["plain, not packed", "plain", "draft-model tree"]


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import bench_real
    import real_model
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pagedtree.integrations.transformers import ModelDrafter

    def load(dtype, device):
        return AutoModelForCausalLM.from_pretrained(TARGET, dtype=dtype).eval(), AutoTokenizer.from_pretrained(TARGET)

    def drafters(model):
        draft = AutoModelForCausalLM.from_pretrained(TARGET.parent / "draft", dtype=model.dtype).eval()
        return {"plain": lambda: None, "draft-model tree": lambda: ModelDrafter(draft, num_nodes=16, depth=5, width=3)}

    monkeypatch.setattr(real_model, "load", load)
    monkeypatch.setattr(real_model, "drafters", drafters)
    monkeypatch.setattr(bench_real, "chat_ids", lambda tokenizer, text: tokenizer(text[-150:])["input_ids"])

    def main(*arguments):
        table = tmp_path / "real.json"
        small = ["--prompts", "3", "--max-new-tokens", "10", "--threads", str(torch.get_num_threads())]
        monkeypatch.setattr(sys, "argv", ["bench_real.py", *small, *arguments, "--json", str(table)])
        return bench_real.main(), json.loads(table.read_text())["rows"]

    return main


def test_rows(run):
    code, rows = run("--dtypes", "float32", "--kinds", "edits", "stories", "--sequences", "1", "2")
    assert code == 0
    found = [(row["sequences"], row["kind"], row["way"]) for row in rows]
    alone = ["transformers", "transformers, prompt lookup", *OURS]
    assert found == [
        (sequences, kind, way)
        for sequences, ways in ((1, alone), (2, ["transformers", *OURS]))
        for kind in ("edits", "stories", "all")
        for way in ways
    ]
    for row in rows:
        same, every = row["texts_equal"].split("/")
        assert same == every == ("6" if row["kind"] == "all" else "3")
        assert row["tokens_per_second"] == sorted(row["tokens_per_second"]) and row["tokens_per_second"][0] > 0
    assert all(row["over_plain"] == [1.0] * len(row["over_plain"]) for row in rows if row["way"] == "plain")
    assert any(row.get("tokens_per_step", 0) > 1.2 for row in rows if row["way"] == "draft-model tree")


def test_wrong_texts_are_an_error(run, monkeypatch):
    from pagedtree.generation import engine

    monkeypatch.setattr(engine, "compact_kv", lambda *args, **kwargs: None)  # accepted rows stay where their nodes were
    code, rows = run("--dtypes", "float32", "--kinds", "stories", "--sequences", "1", "--ways", "draft", "transformers")
    assert code == 1
    assert {row["way"] for row in rows if row["texts_equal"] != "3/3"} == {"draft-model tree"}
