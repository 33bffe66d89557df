"""`bench real` on the toy in place of the real model: wrong texts are an error."""

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
