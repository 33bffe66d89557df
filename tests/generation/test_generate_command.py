"""The command `python -m pagedtree generate`, on tiny checkpoints of words w0, w1, ..."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from support.models import VOCAB, generated, tiny, tiny_eagle, words
from transformers import GenerationConfig

from pagedtree import SamplingParams
from pagedtree.generation.stats import GenerationStats, SequenceStats
from pagedtree.integrations.transformers import cli as command
from pagedtree.tools import cli

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TEXT = " ".join(f"w{token}" for token in PROMPT)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, kind in (("target", model), ("draft", tiny(0, num_hidden_layers=1))):
        kind.save_pretrained(folder / name)
        words(VOCAB).save_pretrained(folder / name)
    tiny_eagle(model).save_pretrained(folder / "eagle")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("[]")
    return folder


@pytest.fixture
def run(folder, capsys, monkeypatch):
    """Returns status, tokens or other output, and standard error."""
    monkeypatch.chdir(folder)
    GenerationConfig().save_pretrained("target")

    def run(*options):
        capsys.readouterr()
        arguments = ["--model", "target", "--prompt", TEXT, "--device", "cpu", "--max-new-tokens", "12", *options]
        try:
            status = cli.main(["generate", *arguments])
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return status, [int(word[1:]) for word in out.split()] if out.startswith("w") else out, err

    return run


def expected(model, **options):
    texts, _ = generated(model, None, [PROMPT], 12, generation_config=False, **options)
    return [text[len(PROMPT) :] for text in texts]


@pytest.mark.parametrize("drafts", ["", "--ngram", "--draft draft", "--drafter eagle"])
def test_command_prints_greedy_text(model, run, drafts):
    status, tokens, err = run(*drafts.split())
    assert (status, [tokens]) == (0, expected(model))
    assert "device: cpu, dtype: torch.float32\n" in err and "12 tokens in" in err


def test_outcomes_and_json(model, run):
    filters = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in filters.items()]
    texts = expected(model, n=3, params=SamplingParams(**filters), seeds=[5, 6, 7])
    status, out, _ = run(*options, "--seed", "5", "--n", "3")
    outcomes = [part.split()[1:] for part in out.split("--- outcome ")[1:]]
    assert status == 0 and outcomes == [[f"w{token}" for token in text] for text in texts]
    status, out, _ = run(*options, "--seed", "5", "--n", "3", "--ngram", "--json")
    found = json.loads(out)
    assert status == 0 and [text.split() for text in found["texts"]] == outcomes
    assert found["statistics"]["num_tokens"] == 36 and len(found["statistics"]["sequences"]) == 3
    assert found["statistics"]["decode_tokens_per_second"] > 0


def test_generation_config(model, run):
    """Options replace fields; --no-generation-config ignores all."""
    GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.5).save_pretrained("target")
    sampled = lambda **fields: expected(model, params=SamplingParams(repetition_penalty=1.5, **fields))[0]  # noqa: E731
    status, tokens, err = run()
    assert (status, tokens) == (0, sampled(temperature=0.6, top_p=0.9, top_k=50)) and "temperature=0.6" in err
    assert run("--temperature", "0.9", "--top-k", "0")[1] == sampled(temperature=0.9, top_p=0.9)
    assert run("--temperature", "0")[1] == sampled(temperature=0.0)
    assert run("--no-generation-config")[1] == expected(model)[0]
    assert run("--seed", "1")[1] != tokens
    GenerationConfig(no_repeat_ngram_size=2).save_pretrained("target")
    status, out, err = run("--ngram")
    assert (status, out) == (2, "") and "got no_repeat_ngram_size=2" in err and "--no-generation-config" in err


@pytest.mark.parametrize(("isa", "own", "used"), [("avx2", "bfloat16", "float32"), ("amx", "bfloat16", "bfloat16")])
def test_dtype_is_the_checkpoints_where_the_cpu_is_fast(run, monkeypatch, tmp_path, isa, own, used):
    monkeypatch.setattr(command, "_C", SimpleNamespace(available_isas=lambda: ["portable", isa]))
    tiny(0).to(getattr(torch, own)).save_pretrained(tmp_path)
    words(VOCAB).save_pretrained(tmp_path)
    assert f"dtype: torch.{used}\n" in run("--model", str(tmp_path))[2]
    assert "dtype: torch.float16\n" in run("--model", str(tmp_path), "--dtype", "float16")[2]


REFUSED = [
    ("--model nowhere", "--model: expected a folder with config.json, got nowhere"),
    ("--model broken", "--model: expected a checkpoint that can be loaded, got broken: "),
    ("--drafter target", "--drafter: expected a checkpoint that can be loaded, got target: "),
    ("--prompt \udce9", "--prompt: expected UTF-8, got byte 0xe9"),
    ("--prompt=", "--prompt: expected a text of at least one token"),
    ("--ngram --draft draft", "argument --draft: not allowed with argument --ngram"),
    ("--n 0", "n: expected at least 1, got 0"),
    ("--temperature=-1", "temperature"),
    ("--temperature 1 --seed 99999999999999999999", "seeds: expected 1 integers"),
    ("--top-p 0.9", "--top-p: expected --temperature above 0"),
    ("--temperature 0 --seed 0", "--seed: expected --temperature above 0"),
    ("--device tpu", "argument --device: invalid choice"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refusals(run, options, message):
    status, out, err = run(*options.split())
    assert (status, out) == (2, "") and message in err.splitlines()[-1] and "Traceback" not in err, err


def test_interruptions(run, monkeypatch):
    """Ctrl-C and a reader that leaves end the program with one line; a closed stdout is harmless."""
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patches:
        patches.setattr(sys, "stdout", os.fdopen(writer, "w"))
        status, _, err = run()
        assert status == 141 and err.count("\n") == 1
        sys.stdout.close()  # flushes
        patches.setattr(sys, "stdout", None)
        assert run()[0] == 0
    monkeypatch.setattr(command, "generate", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    status, out, err = run()
    assert (status, out) == (130, "") and err.count("\n") == 1


def test_prompt_on_standard_input(monkeypatch):
    """Line ends reach the model, a byte order mark does not."""
    data = b"\xef\xbb\xbfw3\r\nw1\n\r\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert command._text(None) == "w3\r\nw1\n\r\n"


def test_rate_is_that_of_decoding():
    stats = GenerationStats(wall_time=4.0, sequences=[SequenceStats(num_tokens=11, time_to_first_token=3.0)])
    assert stats.decode_tokens_per_second == 10.0 and stats.tokens_per_second == 2.75
    assert stats.summary().startswith("11 tokens in 4.00 s: first token after 3000 ms, then 10.0 tokens/s\n")
