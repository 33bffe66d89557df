"""The command `python -m pagedtree generate`: chat templates, GGUF files, and what it takes from checkpoints."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from block_case import block_model
from command_case import calls_of_generate, check_refused, command_of
from generate_case import VOCAB, tiny, tiny_eagle
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from pagedtree.integrations.transformers import MedusaHeads, command_models
from pagedtree.integrations.transformers.chat import chat_prompt, turn_ends

pytestmark = pytest.mark.usefixtures("one_thread")

SPECIAL = ["<s>", "<start>", "<end>"]
NAMES = [*SPECIAL, "user", "system", "assistant", *(f"w{i}" for i in range(VOCAB - 6))]
IDS = {name: i for i, name in enumerate(NAMES)}
TEMPLATE = (
    "<s>{% for message in messages %}<start>{{ message['role'] }} {{ message['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant {% endif %}"
)
REFUSING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE


def ids(text):
    return [IDS[word] for word in text.replace(">", "> ").replace("<", " <").split()]


@pytest.fixture(scope="module")
def model():
    return tiny(0, bos_token_id=0)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """A checkpoint whose tokenizer puts <s> in front of a text, and drafters for it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    words = Tokenizer(models.WordLevel(IDS, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", additional_special_tokens=SPECIAL[1:])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    block_model(model).save_pretrained(folder / "block", dtype=torch.float32)
    tiny_eagle(model).save_pretrained(folder / "eagle", dtype=torch.float32)
    MedusaHeads(128, 3, model.lm_head).save_pretrained(folder / "medusa")
    (folder / "prompt.txt").write_text("w7 w8\n\n")
    return folder


@pytest.fixture
def run(folder, capsys):
    return command_of(folder, capsys, 4)


@pytest.fixture
def calls(monkeypatch):
    return calls_of_generate(monkeypatch)


@pytest.fixture
def template(folder):
    """Sets another template, for the time of a test; None takes it away."""
    file = folder / "chat_template.jinja"

    def template(text):
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)

    yield template
    file.write_text(TEMPLATE)


def test_chat_puts_the_prompt_into_the_template(run, calls, monkeypatch):
    """With one <s>, the template's; line breaks at the end of the message are no part of it."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w9\r\n")))
    for options, prompt in (
        ([], "<s>w7 w8"),
        (["--chat"], "<s><start>user w7 w8<end><start>assistant"),
        (["--chat", "--system", "w5"], "<s><start>system w5<end><start>user w7 w8<end><start>assistant"),
        (["--chat", "--prompt", "-"], "<s><start>user w9<end><start>assistant"),
    ):
        assert run(*options).status == 0 and calls[-1].prompts == [ids(prompt)]


def test_the_templates_end_ends_the_text(folder, run, calls, model, template):
    """Beside the EOS tokens of the generation config, which may lack it."""
    assert len(run().out.split()) == 4
    GenerationConfig(eos_token_id=IDS["w3"]).save_pretrained(folder)
    try:
        run()
        assert calls[-1].eos_token_id == [IDS["w3"]]
        run("--chat")
        assert calls[-1].eos_token_id == [IDS["w3"], IDS["<end>"]]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        # What is not special, not there, or hidden says nothing.
        for text, ends in ((" w4 ", []), ("", []), ("<start>", [IDS["<start>"]])):
            tokenizer.chat_template = TEMPLATE.replace("<end>\n", text)
            assert turn_ends(tokenizer) == ends
        tokenizer.chat_template = "<s>{{ messages[0]['content'] }}<end>"
        assert turn_ends(tokenizer) == []
    finally:
        model.generation_config.save_pretrained(folder)


def test_templates_that_will_not_do(run, template):
    check_refused(run, "--system", "w5", message="--system: needs --chat\n")
    template(REFUSING)
    assert run("--chat").status == 0
    refusal = "the tokenizer's template refuses messages of system and user: no system role\n"
    check_refused(run, "--chat", "--system", "w5", message=refusal)
    template(None)
    check_refused(run, "--chat", message="expected a tokenizer with a chat template, got one without\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", "refuses messages of user: .*concatenate str"),
        ("{% for t in tools %}{{ t }}{% endfor %}", "refuses messages of user: 'NoneType' object is not iterable"),
        ("{{ strftime_later() }}", "refuses messages of user: 'strftime_later' is undefined"),
        ("{% for m in messages %}{{ m", "refuses messages of user: unexpected end of template"),
        ("{{ raise_exception('two\nlines') }}", "refuses messages of user: two lines$"),
        ({"rag": TEMPLATE, "tool": TEMPLATE}, "refuses messages of user: .*multiple chat templates"),
        ("<s>{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}<end>{% endfor %}", "the user's"),
        ("{# nothing #}", "expected a template that has the user's message, got one without"),
        ("<s>w7", "expected a template that has the user's message, got one without"),
        ("<s>{{ messages[-1].content }}", None),
        ("<s>{{ messages[-1].content | upper | trim }}", None),
    ],
)
def test_templates_that_fail_or_leave_a_message_out(folder, text, message):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = text
    if message is not None:
        with pytest.raises(ValueError, match=f"^chat: .*{message}") as error:
            chat_prompt(tokenizer, "w7 w8")
        assert "\n" not in str(error.value)
        return
    assert chat_prompt(tokenizer, "w7 w8")
    with pytest.raises(ValueError, match="a template that has the system's message"):
        chat_prompt(tokenizer, "w7 w8", "w5")


def test_drafters_have_their_own_sizes(folder, run, calls):
    """Unless an option says otherwise."""
    _, plain, _ = run(count=12)
    for options, nodes, depth, chain in (
        (["--draft", folder], 16, 4, 5),
        (["--eagle", folder / "eagle"], 16, 5, 6),
        (["--ngram"], 32, 16, 16),
        (["--medusa", folder / "medusa"], 16, 3, None),
        (["--block", folder / "block"], 16, 5, 16),
    ):
        assert run(*options, count=12)[:2] == (0, plain)
        drafter = calls[-1].drafter
        assert (drafter.max_nodes, drafter.max_depth, drafter.is_chain) == (nodes, depth, False)
        run(*options, "--num-nodes", "7")
        assert calls[-1].drafter.max_nodes == 7
        law = ["--draft-law", "iid"] if "--draft" in options else []
        for extras, deepest in (([], nodes - 1), (["--num-nodes", "4"], 3)) if chain else ():
            assert run(*options, *law, "--rule", "block", "--temperature", "0.9", *extras).status == 0
            assert calls[-1].drafter.is_chain and calls[-1].drafter.max_depth <= deepest


def test_options_set_the_sizes_of_trees(folder, run, calls):
    sizes = ["--num-nodes", "9", "--depth", "3", "--width", "2"]
    for options in (["--draft", folder], ["--eagle", folder / "eagle"], ["--block", folder / "block"], ["--ngram"]):
        assert run(*options, *sizes)[0] == 0
        drafter = calls[-1].drafter
        widths = [getattr(drafter, name, 2) for name in ("width", "max_branches")]
        assert (drafter.max_nodes, drafter.max_depth, *widths) == (9, 3, 2, 2)
        assert getattr(drafter, "num_children", [2] * 3) == [2] * 3
        assert run(*options, "--width", "1", "--num-nodes", "4")[0] == 0
        assert calls[-1].drafter.is_chain and calls[-1].drafter.max_depth == 3
        check_refused(run, *options, "--width", "0", message="--width: expected at least 1, got 0\n")
    for option in ("--depth", "--width"):
        check_refused(run, "--medusa", folder / "medusa", option, "2", message="not with --medusa")


AVX512 = ["portable", "avx2", "avx512"]


@pytest.mark.parametrize(
    ("own", "isas", "used"),
    [
        ("float32", AVX512, "float32"),
        ("bfloat16", ["portable", "avx2"], "float32"),
        ("bfloat16", AVX512, "bfloat16"),
        ("bfloat16", [*AVX512, "amx"], "bfloat16"),
        ("float16", [*AVX512, "amx"], "float32"),
    ],
)
def test_dtype_is_the_checkpoints_where_the_cpu_is_fast(folder, run, calls, tmp_path, monkeypatch, own, isas, used):
    monkeypatch.setattr(command_models, "_C", SimpleNamespace(available_isas=lambda: isas))
    tiny(0).to(getattr(torch, own)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    status, _, error = run("--model", tmp_path, "--draft", folder)
    assert status == 0 and calls[-1].model.dtype == calls[-1].drafter.model.dtype == getattr(torch, used)
    assert f"dtype: {used}{'' if used == own else f', because {own} is slow on this CPU'}\n" in error
    status, _, error = run("--model", tmp_path, "--dtype", "bfloat16")
    assert status == 0 and calls[-1].model.dtype == torch.bfloat16 and "dtype: bfloat16\n" in error


@pytest.fixture
def gguf_file(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from gguf_case import tiny_llama, write_gguf

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "prompt.txt").write_text("the theme")
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama(), "Q8_0")


def test_gguf_file(run, calls, gguf_file, tmp_path):
    """As --model and --draft; it is read once."""
    options = ["--model", gguf_file, "--prompt", tmp_path / "prompt.txt", "--chat", "--dtype", "float32"]
    status, plain, error = run(*options, count=12)
    assert status == 0 and f"reading {gguf_file} once; " in error
    (checkpoint,) = (tmp_path / "cache" / "pagedtree").iterdir()
    assert json.loads((checkpoint / "config.json").read_text())["model_type"] == "llama"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    message = [{"role": "user", "content": "the theme"}]
    expected = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert calls[-1].prompts == [expected] and calls[-1].eos_token_id[0] == 2
    status, out, error = run(*options, "--draft", gguf_file, count=12)
    assert (status, out) == (0, plain) and "reading" not in error
    assert calls[-1].drafter.model.config.name_or_path == str(checkpoint)


def test_gguf_files_that_will_not_do(run, gguf_file, monkeypatch, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf_file.read_bytes()[:-1000])
    check_refused(run, "--model", cut, message=f"--model {cut}: path: expected a GGUF file")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "gguf" else find(name, *more))
    message = f"--model {gguf_file}: a GGUF file needs gguf: pip install gguf accelerate\n"
    check_refused(run, "--model", gguf_file, message=message)
