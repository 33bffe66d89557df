"""`python -m pagedtree generate` follows the checkpoint's generation_config.json where no option says otherwise."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("transformers")

from generate_case import VOCAB, greedy, lists, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast

from pagedtree import SamplingParams
from pagedtree.integrations.transformers import generate
from pagedtree.tools import cli

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def model():
    return tiny(0)


@pytest.fixture
def command(model, tmp_path, capsys):
    """Runs the command on a checkpoint with these fields; returns status, tokens and standard error."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    (tmp_path / "prompt.txt").write_text(" ".join(f"w{token}" for token in PROMPT))
    model.save_pretrained(tmp_path)

    def command(fields, *options):
        GenerationConfig(**fields).save_pretrained(tmp_path)
        status = cli.main(
            ["generate", "--model", str(tmp_path), "--prompt", str(tmp_path / "prompt.txt"), "--device", "cpu",
             "--max-new-tokens", "12", "--ngram", *options]
        )  # fmt: skip
        captured = capsys.readouterr()
        told = [line for line in captured.err.splitlines() if line.startswith("generation_config.json: ")]
        return status, [int(word[1:]) for word in captured.out.split()], "".join(told), captured.err

    return command


def sampled(model, **params):
    """As `generate` draws by itself."""
    rows, _ = generate(model, [PROMPT], max_new_tokens=12, params=SamplingParams(**params), generation_config=False)
    return lists(rows)[0][len(PROMPT) :]


def expected(model, **fields):
    other = copy.copy(model)
    other.generation_config = GenerationConfig(**fields)
    return greedy(other, tensor(PROMPT), 12)[len(PROMPT) :]


FILE = {"repetition_penalty": 1.5, "suppress_tokens": [3, 5], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
OPTIONS = {"repetition_penalty": 1.5, "suppress_tokens": [3, 5]}


def test_greedy_text(model, command):
    plain = expected(model)
    status, tokens, told, _ = command({})
    assert (status, tokens, told) == (0, plain, "")
    status, tokens, told, _ = command(OPTIONS)
    assert (status, told) == (0, "generation_config.json: repetition_penalty=1.5, suppress_tokens=[3, 5]")
    assert tokens == expected(model, **OPTIONS) != plain
    assert command(OPTIONS, "--no-generation-config")[:3] == (0, plain, "")
    for options in (["--temperature", "0"], ["--rule", "greedy"], ["--rule", "greedy", "--temperature", "0"]):
        assert command(FILE, *options)[1] == tokens
    _, tokens, told, _ = command({"eos_token_id": [plain[3]], "min_length": 17})
    assert told.endswith(": min_length=17") and len(tokens) >= 9
    _, tokens, told, _ = command({"eos_token_id": [plain[3]], "min_length": 17}, "--min-new-tokens", "0")
    assert (tokens, told) == (plain[: plain.index(plain[3]) + 1], "")


def test_sampled_text(model, command):
    filters = {"temperature": 0.6, "top_p": 0.9, "top_k": 50}
    fields = {**FILE, "suppress_tokens": None}
    assert command(fields)[1] == sampled(model, **filters, repetition_penalty=1.5)
    assert command(fields, "--no-generation-config")[1] == expected(model)
    _, tokens, told, _ = command(fields, "--temperature", "0.9", "--top-k", "0")  # the others stay
    assert tokens == sampled(model, temperature=0.9, top_p=0.9, repetition_penalty=1.5)
    assert told == "generation_config.json: do_sample=True, top_p=0.9, repetition_penalty=1.5"
    assert command(fields, "--repetition-penalty", "1")[1] == sampled(model, **filters)
    greedy_fields = {"repetition_penalty": 1.5}
    _, tokens, _, _ = command(greedy_fields, "--temperature", "0.9")  # neither top_k nor top_p
    assert tokens == sampled(model, temperature=0.9, repetition_penalty=1.5)
    again = command(fields, "--seed", "0", "--n", "1")[1]
    assert again == command(fields)[1] != command(fields, "--seed", "1")[1]


def test_other_rules_at_temperature_0(model, command):
    tokens = command(FILE, "--temperature", "0", "--rule", "rejection")[1]
    assert tokens == expected(model, **OPTIONS)
    status, _, _, err = command(OPTIONS, "--rule", "typical", "--temperature", "0.8")
    assert status == 2 and "generation_config sets suppress_tokens: " in err and "--no-generation-config" in err


@pytest.mark.parametrize("option", ["--top-p=0.9", "--top-k=3", "--min-p=0.1", "--seed=1"])
def test_sampling_options_need_a_temperature(command, option):
    assert command(FILE, option)[0] == 0
    for fields, more in ((OPTIONS, []), (FILE, ["--temperature=0"]), (FILE, ["--no-generation-config"])):
        with pytest.raises(SystemExit) as exit_:
            command(fields, option, *more)
        assert exit_.value.code == 2


def test_what_has_no_counterpart_is_refused(command):
    status, tokens, _, err = command({"no_repeat_ngram_size": 2})
    assert status == 2 and not tokens and "got no_repeat_ngram_size=2" in err and "--no-generation-config" in err
    assert command({"no_repeat_ngram_size": 2}, "--no-generation-config")[0] == 0
