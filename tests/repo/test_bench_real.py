"""`bench real` to its end, on the toy in place of the real model: rows, the file, and that wrong texts are noticed."""

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "examples" / "checkpoints" / "target"
OURS = ["plain, not packed", "plain", "n-gram chain", "draft-model tree", "draft-model auto"]


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
    monkeypatch.setattr(bench_real, "PASS_ROWS", (1, 2))  # others take a third of the time
    monkeypatch.setattr(bench_real, "chat_ids", lambda tokenizer, text: tokenizer(text[-150:])["input_ids"])

    def main(*arguments, table=tmp_path / "real.json"):
        small = ["--dtypes", "float32", "--prompts", "2", "--max-new-tokens", "8"]
        small += ["--threads", str(torch.get_num_threads()), "--json", str(table)]
        monkeypatch.setattr(sys, "argv", ["bench_real.py", *small, *arguments])
        return bench_real.main(), json.loads(table.read_text())["rows"]

    return main


def test_rows(run):
    code, rows = run("--kinds", "edits", "stories", "--sequences", "1", "2")
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
        assert same == every == ("4" if row["kind"] == "all" else "2") and "largest_margin" not in row
        for figures in (row["tokens_per_second"], row["over_plain"]):
            assert figures == sorted(figures) and figures[0] > 0
        assert (row["way"] == "draft-model auto") == ("over_best" in row)
    assert all(row["over_plain"] == [1.0] * 3 for row in rows if row["way"] == "plain")
    assert any(row.get("tokens_per_step", 0) > 1.2 for row in rows if row["way"] == "draft-model tree")


def test_what_the_file_has_stays(run, monkeypatch, tmp_path, capsys):
    _, first = run("--kinds", "edits", "--sequences", "1", "--ways", "*chain")
    _, second = run("--kinds", "edits", "--sequences", "2", "--ways")
    assert second == [*first, second[-1]] and second[-1]["way"] == "plain" and second[-1]["sequences"] == 2
    _, third = run("--kinds", "edits", "--sequences", "1", "--ways", "*chain", "draft*", "--missing")
    assert third[1] == first[1] and [row["way"] for row in third] == [*OURS[1:], "plain"]
    assert run("--kinds", "edits", "--sequences", "1", "--ways", "*chain", "draft*", "--missing")[1] == third
    _, fourth = run("--kinds", "edits", "--sequences", "1", "--ways", "*chain")
    assert fourth[1]["rates"] != first[1]["rates"] and fourth[2:] == third[2:]
    with pytest.raises(SystemExit):
        run("--sequences", "1", "--max-new-tokens", "11")
    assert "has rows of max_new_tokens 8, got 11" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--sequences", "4")
    assert "--prompts: expected at least 4" in capsys.readouterr().err


def test_wrong_texts_are_an_error(run, monkeypatch):
    from pagedtree.generation import decode_step

    # Accepted rows stay where their nodes were.
    monkeypatch.setattr(decode_step.DecodeStep, "compact", lambda self: None)
    ways = ["--ways", "draft-model tree", "transformers"]
    code, rows = run("--kinds", "stories", "--sequences", "1", *ways)
    assert code == 1
    (wrong,) = [row for row in rows if row["texts_equal"] != "2/2"]
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


@pytest.fixture
def source(monkeypatch, tmp_path):
    """The toy as other libraries get it."""
    from transformers import AutoModelForCausalLM

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    model = AutoModelForCausalLM.from_pretrained(TARGET)
    return importlib.import_module("real_peers").Source(model, TARGET, TARGET, TARGET, tmp_path, 2)


def test_a_worker_answers_for_vllm(source, monkeypatch, tmp_path):
    real_peers = importlib.import_module("real_peers")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    # In place of vLLM: says what it was asked with, then ends.
    python.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([json.loads(sys.argv[2]), json.loads(input()), os.environ['OMP_NUM_THREADS']]))\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(real_peers, "VLLM", tmp_path)
    generate = real_peers.vllm(source, "NgramTreeDrafter", 15, max_depth=3)
    settings, asked, threads = generate([[1, 2], [3]], 7)
    assert settings["model"] == str(TARGET) and settings["additional_config"] == {"pagedtree": {"max_depth": 3}}
    assert settings["speculative_config"]["num_speculative_tokens"] == 15
    drafter = settings["speculative_config"]["model"]
    assert (ROOT / "python" / drafter.rpartition(".")[0].replace(".", "/")).with_suffix(".py").exists()
    assert asked == {"prompts": [[1, 2], [3]], "count": 7} and threads == "2"
    with pytest.raises((RuntimeError, BrokenPipeError)):
        generate([[1]], 1)


def test_libraries_that_are_not_installed_are_left_out(source, monkeypatch):
    real_peers = importlib.import_module("real_peers")
    monkeypatch.setattr(real_peers, "versions", lambda: {"vllm": "1", "openvino-genai": None, "llama-cpp-python": None})
    assert [*real_peers.ready(source)] == [name for name in real_peers.PEERS if name.startswith("vLLM")]
    assert not any(real_peers.takes_one(name) for name in real_peers.ready(source))


def test_other_libraries_get_the_same_weights_and_tokens(source):
    gguf = pytest.importorskip("gguf")
    path = source.gguf("BF16")
    written = path.stat().st_mtime_ns
    reader = gguf.GGUFReader(source.gguf("BF16"))
    assert path.stat().st_mtime_ns == written
    assert len(reader.get_field("tokenizer.ggml.tokens").data) == source.model.config.vocab_size
    assert reader.get_field("tokenizer.ggml.eos_token_id").contents() == source.end
    assert len(reader.tensors) == len([*source.model.named_parameters()])
