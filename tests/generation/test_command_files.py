"""What `python -m pagedtree generate` reads: prompts, schemas, checkpoints; and the JSON that it lets a model write."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest
import torch

pytest.importorskip("transformers")

from command_case import calls_of_generate, check_refused, command_of
from generate_case import tiny
from tokenizers import Tokenizer, decoders, models, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

pytestmark = pytest.mark.usefixtures("one_thread")

# Where all logits are equal, the first token wins that a grammar allows: blanks as long as they may come.
TOKENS = [*' \n\t}]"', ', "', '": ', *"{[:,abcdefghij0123456789.-", "\r", "\ufeff", "<eos>"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}, "b": {"const": True}},
    "required": ["a"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint that likes blanks: a token for each character, and all logits equal."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    model = tiny(0, eos_token_id=len(TOKENS) - 1)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder)
    (folder / "prompt.txt").write_text("abc")
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    return folder


@pytest.fixture
def run(folder, capsys):
    return command_of(folder, capsys, 4)


@pytest.fixture
def calls(monkeypatch):
    return calls_of_generate(monkeypatch)


@pytest.mark.parametrize("source", ["file", "standard input"])
def test_line_ends_reach_the_model(run, calls, tmp_path, monkeypatch, source):
    data = b"\xef\xbb\xbfab\r\ncd\n\re\r\n"
    (tmp_path / "prompt.txt").write_bytes(data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run("--prompt", tmp_path / "prompt.txt" if source == "file" else "-").status == 0
    (prompt,) = calls[-1].prompts
    assert "".join(TOKENS[token] for token in prompt) == "ab\r\ncd\n\re\r\n"


def test_an_empty_prompt(folder, run, calls, tmp_path):
    """It is refused where the tokenizer makes no token of it, and fine where it puts one in front."""
    file = tmp_path / "empty.txt"
    for data in (b"", b"\xef\xbb\xbf"):
        file.write_bytes(data)
        message = f"--prompt: expected a text of at least one token, got {file}, which has none\n"
        check_refused(run, "--prompt", file, message=message)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos, other = len(TOKENS) - 1, tmp_path / "other"
    tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", eos)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(other)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other)
    assert run("--model", other, "--prompt", file).status == 0 and calls[-1].prompts == [[eos]]


@pytest.mark.parametrize("option", ["--prompt", "--json-schema", "--grammar"])
@pytest.mark.parametrize(
    ("name", "expected", "reason"),
    [
        ("nothing.txt", "a file that can be read", ": No such file or directory"),
        (".", "a file that can be read", ": Is a directory"),
        ("latin1.txt", "text in UTF-8", " with byte 0xe9 at offset 3"),
    ],
)
def test_files_that_cannot_be_read(run, tmp_path, option, name, expected, reason):
    """One line names the option and the file, before a checkpoint is loaded."""
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    message = f"python -m pagedtree generate: {option}: expected {expected}, got {tmp_path / name}{reason}\n"
    check_refused(run, option, tmp_path / name, message=message)


@pytest.mark.parametrize("option", ["--model", "--draft", "--drafter", "--medusa", "--eagle", "--block"])
def test_folders_that_are_not_there(run, tmp_path, option):
    """None of these is asked for on the hub."""
    file, is_model = tmp_path / "file", option in ("--model", "--draft")
    file.touch()
    kind = "a folder, a GGUF file or a name on the hub" if is_model else "a folder"
    for name in (tmp_path / "nowhere", "./nowhere", "../nowhere", "a/b/nowhere", "nowhere/"):
        check_refused(run, option, name, message=f"{option}: expected {kind}, got {name}, which does not exist\n")
    found = "another file" if is_model else "a file"
    check_refused(run, option, file, message=f"{option}: expected {kind}, got {file}, {found}\n")
    message = f"{option}: expected a checkpoint, got {tmp_path}, a folder without config.json\n"
    check_refused(run, option, tmp_path, message=message)


@pytest.mark.parametrize("option", ["--medusa", "--eagle"])
def test_heads_that_cannot_be_loaded(run, tmp_path, option):
    (tmp_path / "config.json").write_text("[]")
    check_refused(run, option, tmp_path, message=f"{option} {tmp_path}: ")


def gaps(text):
    """Lengths of the white space between the parts of a JSON text."""
    return [len(gap) for gap in re.findall(r"\s+", text)]


def test_white_space_of_json_is_bounded(folder, run, tmp_path):
    """A model that likes blanks comes to an end."""
    pytest.importorskip("xgrammar")
    schema = ["--json-schema", folder / "schema.json"]
    for limits, most in (([], 20), (["--max-whitespace", "3"], 3)):
        status, out, _ = run(*schema, *limits, count=400)
        assert status == 0 and json.loads(out)["a"] == [1, 1] and max(gaps(out[:-1])) == most
    status, out, _ = run(*schema, "--max-whitespace", "0", count=400)
    assert (status, out) == (0, '{"a": [1, 1]}\n')
    # A byte order mark and other line ends do not matter.
    (tmp_path / "schema.json").write_bytes(
        b"\xef\xbb\xbf" + json.dumps(SCHEMA, indent=1).replace("\n", "\r\n").encode()
    )
    assert run("--json-schema", tmp_path / "schema.json", "--max-whitespace", "0", count=400)[:2] == (0, out)
    (tmp_path / "grammar.ebnf").write_bytes('\ufeffroot ::= "a"\r\n  x\r\nx ::= "b"\r\n'.encode())
    assert run("--grammar", tmp_path / "grammar.ebnf")[:2] == (0, "ab\n")


def test_white_space_and_grammars_that_will_not_do(folder, run, tmp_path):
    pytest.importorskip("xgrammar")
    for options in (["--max-whitespace", "3"], ["--json-schema", folder / "schema.json", "--max-whitespace", "-1"]):
        message = f"--max-whitespace: expected 0 or more, with --json-schema, got {options[-1]}\n"
        check_refused(run, *options, message=message)
    (tmp_path / "wrong").write_text("root ::= é(", encoding="utf-8")
    for option in ("--json-schema", "--grammar"):
        message = f"{option}: expected what xgrammar can read, got {tmp_path / 'wrong'}: "
        check_refused(run, option, tmp_path / "wrong", message=message)
