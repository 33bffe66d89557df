"""`bench real` on the toy in place of the real model: wrong texts are an error; rows are kept and compared."""

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "examples" / "checkpoints" / "target"


def test_wrong_texts_are_an_error(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import bench_real
    import real_model
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pagedtree.generation import decode_step
    from pagedtree.integrations.transformers import ModelDrafter

    def load(dtype, device):
        return AutoModelForCausalLM.from_pretrained(TARGET, dtype=dtype).eval(), AutoTokenizer.from_pretrained(TARGET)

    def drafters(model):
        draft = AutoModelForCausalLM.from_pretrained(TARGET.parent / "draft", dtype=model.dtype).eval()
        return {"plain": lambda: None, "draft-model tree": lambda: ModelDrafter(draft, num_nodes=16, depth=5, width=3)}

    monkeypatch.setattr(real_model, "load", load)
    monkeypatch.setattr(real_model, "drafters", drafters)
    monkeypatch.setattr(bench_real, "PASS_ROWS", (1, 2))  # others take a third of the time
    monkeypatch.setattr(bench_real, "chat_ids", lambda tokenizer, text: tokenizer(text[-150:])["input_ids"])

    # Accepted rows stay where their nodes were.
    monkeypatch.setattr(decode_step.DecodeStep, "compact", lambda self: None)
    table = tmp_path / "real.json"
    small = ["--dtypes", "float32", "--prompts", "2", "--max-new-tokens", "8", "--kinds", "stories", "--sequences", "1"]
    small += ["--ways", "draft-model tree", "transformers", "--threads", str(torch.get_num_threads())]
    monkeypatch.setattr(sys, "argv", ["bench_real.py", *small, "--json", str(table)])
    assert bench_real.main() == 1
    (wrong,) = [row for row in json.loads(table.read_text())["rows"] if row["texts_equal"] != "2/2"]
    assert wrong["way"] == "draft-model tree" and wrong["largest_margin"] > 0
    prompt, token, margin = wrong["differences"][0]
    assert 0 <= prompt < 2 and 0 <= token < 8 and 0 < margin <= wrong["largest_margin"]


def test_chosen_trees_beside_the_best_of_the_others(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    rows = importlib.import_module("real_rows")
    conditions = {"processor": "x", "threads": 2, "torch": "2", "model": "m", "max_new_tokens": 9, "commit": "abc"}
    conditions |= {"pass_ms": {}, "packed_pass_ms": {}, "versions": {"other": "1"}}
    table = rows.Table(conditions)
    gains = {"plain": (1, 1, 1), "n-gram chain": (2, 0.5, 3), "n-gram tree": (4, 0.5, 2), "n-gram auto": (2, 0.9, 3.3)}
    for way, figures in gains.items():
        for batch, gain in enumerate(figures):
            different = [rows.Difference(2 * batch + 1, 5, 0.25)] if way == "n-gram tree" else []
            key = rows.Key("bfloat16", 2, "edits", way)
            table.add(key, batch, rows.Call(2, 10 * gain, gain, 0.0, different))
    table.write(tmp_path / "x.json", "real_x")
    kept = rows.Table.opened(tmp_path / "x.json", conditions | {"commit": "def", "versions": {"other": None}})
    assert kept.facts["versions"] == {"other": "1"}  # of the run that had it
    assert kept.calls == table.calls and kept.facts["commit"] == "abc, def"
    auto = next(row for row in kept.rows() if row["way"] == "n-gram auto")
    assert auto["over_best"] == [0.5, 0.9, 1.1] and auto["over_plain"] == [0.9, 2, 3.3]
    tree = next(row for row in kept.rows() if row["way"] == "n-gram tree")
    assert tree["texts_equal"] == "3/6" and tree["largest_margin"] == 0.25 and "over_best" not in tree
    del kept.calls[rows.Key("bfloat16", 2, "edits", "n-gram tree")][2]
    assert kept.rows()[-1]["over_best"] == [0.5, 0.7, 0.9]  # batches that all of them have
