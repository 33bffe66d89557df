"""GGUF files as checkpoints: tiny ones, written here by gguf's own writer."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import threading

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

import gguf
from gguf_case import END, TEMPLATE, tiny_llama, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedtree.integrations.transformers import gguf as gguf_module
from pagedtree.integrations.transformers.gguf import dequantized, is_gguf

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("file") / "tiny.gguf", model, "Q8_0")


@pytest.fixture(scope="module")
def folder(file, tmp_path_factory):
    return dequantized(file, tmp_path_factory.mktemp("kept"))


def rounded(model, kind):
    """The weights that are in such a file, in the type that is kept."""
    dtype = {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)
    quantised = gguf.GGMLQuantizationType[kind]

    def through(tensor):
        if tensor.ndim == 1:
            return tensor
        return torch.from_numpy(
            np.array(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), quantised), quantised))
        )

    return {name: through(tensor).to(dtype) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_folder_has_the_weights_of_the_file(model, tmp_path, kind, capfd):
    folder = dequantized(write_gguf(tmp_path / "tiny.gguf", model, kind), tmp_path / "kept")
    told = capfd.readouterr().err
    assert told.splitlines() == [f"reading {tmp_path / 'tiny.gguf'} once; its weights will be kept in {folder}"]
    assert folder.parent == tmp_path / "kept" and folder.name.startswith("tiny-")
    found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    expected = rounded(model, kind)
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == expected[name].dtype for name in expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_folder_is_an_ordinary_checkpoint(file, folder):
    """Tokenizer, chat template and the token that ends a text are those of the file."""
    original = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("the theme", " the, a.", "<start>a<end>", "", "then\n"):
        ids = tokenizer(text)["input_ids"]
        assert ids == original(text)["input_ids"] and tokenizer.decode(ids) == original.decode(ids)
    messages = [{"role": "user", "content": "the"}]
    for options in ({"tokenize": False}, {"add_generation_prompt": True, "return_dict": False}):
        assert tokenizer.apply_chat_template(messages, **options) == original.apply_chat_template(messages, **options)
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token_id == original.eos_token_id
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == END
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_a_file_is_read_once(file, folder, model, monkeypatch, tmp_path, capfd):
    """Where its content has changed, under whatever name and time, it is read again."""
    assert dequantized(str(file), folder.parent) == folder and capfd.readouterr().err == ""
    other = write_gguf(tmp_path / file.name, tiny_llama(1), "Q8_0")
    assert other.stat().st_size == file.stat().st_size
    again = dequantized(other, folder.parent)
    assert again != folder and again.parent == folder.parent
    weights = [AutoModelForCausalLM.from_pretrained(path).lm_head.weight for path in (folder, again)]
    assert not torch.equal(*weights)
    # What another version of transformers wrote is not taken.
    monkeypatch.setattr(gguf_module.transformers, "__version__", "0.0")
    assert dequantized(file, folder.parent) not in (folder, again)


def test_interrupted_and_parallel_runs_leave_whole_folders(file, folder, monkeypatch, tmp_path):
    reader, cache = gguf_module._read, tmp_path / "kept"

    class Cut(AutoTokenizer):
        @staticmethod
        def save_pretrained(_):
            raise KeyboardInterrupt

    monkeypatch.setattr(gguf_module, "_read", lambda path: (reader(path)[0], Cut))
    with pytest.raises(KeyboardInterrupt):
        dequantized(file, cache)
    assert list(cache.iterdir()) == []

    def slower(path):
        """Another process has written the folder meanwhile."""
        shutil.copytree(folder, cache / folder.name)
        return reader(path)

    monkeypatch.setattr(gguf_module, "_read", slower)
    assert dequantized(file, cache) == cache / folder.name and list(cache.iterdir()) == [cache / folder.name]


def test_threads_read_a_file_once(file, monkeypatch, tmp_path, capfd):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    stream, found = sys.stderr, []
    threads = [threading.Thread(target=lambda: found.append(dequantized(file))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and {folder.parent for folder in found} == {tmp_path / ".cache" / "pagedtree"}
    assert len(set(found)) == 1 and sys.stderr is stream and capfd.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_missing_packages_are_named(file, monkeypatch, tmp_path, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else find(name, *more))
    with pytest.raises(ModuleNotFoundError, match=f"a GGUF file needs {package}: pip install gguf accelerate"):
        dequantized(file, tmp_path)


def test_files_that_will_not_do(file, model, tmp_path):
    """One line names the file, whatever the readers stumble over, and nothing is kept."""
    (tmp_path / "text").write_text("some text")
    (tmp_path / "empty").touch()
    content = file.read_bytes()
    for name, size in (("tensors", -1000), ("header", 1000), ("start", 5)):
        (tmp_path / f"cut_{name}").write_bytes(content[:size])
    write_gguf(tmp_path / "unknown", model, "F32", architecture="nonsense")
    write_gguf(tmp_path / "missing", model, "F32", leave_out=["model.layers.1.mlp.up_proj.weight"])
    reasons = {
        "nowhere": "which does not exist",
        ".": "a folder",
        "text": "which begins with b'some' and not with b'GGUF'",
        "empty": "which begins with b'' and not with b'GGUF'",
        **dict.fromkeys(("cut_tensors", "cut_header", "cut_start"), ""),
        "unknown": "nonsense",
        "missing": "missing_keys: ['model.layers.1.mlp.up_proj.weight']",
    }
    for name, reason in reasons.items():
        with pytest.raises(ValueError) as caught:
            dequantized(tmp_path / name, tmp_path / "kept")
        message = str(caught.value)
        assert message.startswith("path: expected ") and f"got {tmp_path / name}" in message and reason in message
        assert "\n" not in message
    assert not (tmp_path / "kept").exists() or list((tmp_path / "kept").iterdir()) == []
    assert [is_gguf(tmp_path / name) for name in (*reasons, file)] == [False] * 4 + [True] * 6
