"""The command `python -m pagedtree generate`: drafters, sampling, options, grammars and the checkpoint's own wishes."""

from __future__ import annotations

import copy
import sys

import pytest
import torch

pytest.importorskip("transformers")

from command_case import PROMPT, check_refused, command_of
from generate_case import VOCAB, generated, greedy, tiny, tiny_eagle
from tokenizer_case import words
from transformers import GenerationConfig

from pagedtree import SamplingParams
from pagedtree.integrations.transformers import MedusaHeads, TokenOptions
from pagedtree.integrations.transformers import cli as cli_module

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return tiny(0)


@pytest.fixture(scope="module")
def checkpoints(model, tmp_path_factory):
    """A target, a draft, Medusa heads and an EAGLE-3 head over words w0, w1, ..., and a prompt."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, kind in (("target", model), ("draft", tiny(0, num_hidden_layers=1))):
        kind.save_pretrained(folder / name)
        words(VOCAB).save_pretrained(folder / name)
    MedusaHeads(128, 3, model.lm_head).save_pretrained(folder / "medusa")
    tiny_eagle(model).save_pretrained(folder / "eagle")
    (folder / "prompt.txt").write_text(" ".join(f"w{token}" for token in PROMPT))
    return folder


@pytest.fixture
def run(checkpoints, capsys):
    return command_of(checkpoints, capsys, 12, "target")


@pytest.fixture
def configured(checkpoints, run):
    """Runs the command with these fields in generation_config.json; returns tokens and what it says of the fields."""

    def configured(fields, *options):
        GenerationConfig(**fields).save_pretrained(checkpoints / "target")
        outcome = run("--ngram", *options)
        told = [line for line in outcome.err.splitlines() if line.startswith("generation_config.json: ")]
        assert outcome.status == 0, outcome.err
        return outcome.tokens, "".join(told)

    yield configured
    GenerationConfig().save_pretrained(checkpoints / "target")


def drawn(model, *, count=12, **options):
    """The new tokens of `generate` itself, without the model's generation config."""
    texts, stats = generated(model, None, [PROMPT], count, generation_config=False, **options)
    return [text[len(PROMPT) :] for text in texts], stats


def sampled(model, **params):
    return drawn(model, params=SamplingParams(**params))[0][0]


def expected(model, **fields):
    other = copy.copy(model)
    other.generation_config = GenerationConfig(**fields)
    return greedy(other, torch.tensor(PROMPT), 12)[len(PROMPT) :]


@pytest.mark.parametrize(
    "drafts",
    [
        [],
        ["--ngram"],
        ["--draft", "draft"],
        ["--medusa", "medusa"],
        ["--eagle", "eagle"],
        ["--drafter", "eagle"],
        ["--drafter", "medusa", "--num-nodes", "8"],
    ],
)
def test_the_models_own_text(model, checkpoints, run, drafts):
    drafts = [checkpoints / option if option in ("draft", "medusa", "eagle") else option for option in drafts]
    outcome = run(*drafts, "--page-size", "4")
    assert outcome.status == 0 and outcome.tokens == expected(model)
    assert "12 tokens in" in outcome.err and "tokens per sequence and step" in outcome.err


def test_the_default_device_is_one_that_runs(checkpoints, run, monkeypatch):
    """A GPU that this build cannot use is not the default."""
    monkeypatch.setattr(cli_module, "backends", lambda: ["cpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cli_module._parser().get_default("device") == "cpu"
    check_refused(run, "--device", "cuda:1", message="--device cuda:1: needs a GPU and a build with CUDA")


def test_progress(checkpoints, run, monkeypatch):
    """A line for each tenth of the tokens, unless a single text on a terminal shows it by itself; on a terminal one
    line, written anew."""

    def counts(err):
        return [int(line.split()[0]) for line in err.replace("\r", "\n").splitlines() if " of at most " in line]

    status, out, err = run()
    assert status == 0 and f"loading {checkpoints / 'target'}\n" in err and counts(err)[-1] == 12
    assert "\r1 of" not in err and "device: cpu\n" in err
    status, _, err = run("--n", "3")
    assert status == 0 and len(counts(err)) == 10 and counts(err)[-1] == 36 and counts(err) == sorted(counts(err))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, _, err = run()
    assert status == 0 and counts(err) == list(range(1, 13)) and "\r12 of at most 12 tokens, " in err
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run()[:2] == (0, out) and not counts(run().err)


REFUSED = [
    (["--cuda-graph"], "cuda_graph: expected a model on a CUDA device, got one on cpu"),
    (["--ngram", "--medusa", "x"], "not allowed with argument --ngram"),
    (["--grammar", "x", "--json-schema", "y"], "not allowed with argument --grammar"),
    (["--ngram", "--rule", "traversal", "--temperature", "0.9"], "weighs drafts that were drawn"),
    (["--temperature=-1"], "temperature"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_is_refused(run, options, message):
    check_refused(run, *options, message=message)


@pytest.mark.parametrize("sampling", [[], ["--temperature=0.9", "--min-p=0.1"]])
def test_request_options(model, run, sampling):
    """Penalties without sampling, and with it; bad words, the least length, log-probabilities."""
    options = ["--repetition-penalty", "1.3", "--frequency-penalty", "0.5", "--bad-word", "w9", "--bad-word", "w1 w4"]
    outputs = ["--min-new-tokens", "3", "--logprobs", "2", "--presence-penalty", "1"]
    outcome = run(*options, *outputs, *sampling, "--ngram")
    fields = {"temperature": 0.9, "min_p": 0.1} if sampling else {"temperature": 0.0}
    params = SamplingParams(**fields, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=1.0)
    words = TokenOptions(bad_words=[[9], [1, 4]])
    (new,), stats = drawn(model, params=params, min_new_tokens=3, options=words, logprobs=2)
    assert outcome.status == 0 and outcome.tokens == new
    lines = [line.split() for line in outcome.err.splitlines() if "  rank " in line]
    found = stats.sequences[0].logprobs
    assert [line[0] for line in lines] == [f"'w{token}'" for token in new]
    assert [line[3] for line in lines] == [str(rank) for rank in found.ranks]
    assert [float(line[1]) for line in lines] == pytest.approx(found.logprobs, abs=1e-3)


def test_grammars(checkpoints, run):
    pytest.importorskip("xgrammar")
    (checkpoints / "words.ebnf").write_text('root ::= "w1" ("w2" | "w3") "w4"\n')
    outcome = run("--grammar", checkpoints / "words.ebnf", "--n", "2")
    texts = [text.split()[1:] for text in outcome.out.split("--- outcome ")[1:]]
    assert outcome.status == 0 and "grammars: " in outcome.err
    assert all(text in (["w1", "w2", "w4"], ["w1", "w3", "w4"]) for text in texts) and len(texts) == 2


@pytest.mark.parametrize("option", ["--grammar", "--json-schema"])
def test_what_a_grammar_needs(checkpoints, run, monkeypatch, option):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    check_refused(run, option, checkpoints / "prompt.txt", message=f"{option} needs xgrammar: pip install xgrammar")


# The checkpoint's generation_config.json ------------------------------------------------------------------------------

OPTIONS = {"repetition_penalty": 1.5, "suppress_tokens": [3, 5]}
SAMPLED = {"repetition_penalty": 1.5, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
FILE = {**SAMPLED, **OPTIONS}


def test_greedy_text_of_a_config(model, configured):
    plain = expected(model)
    assert configured({}) == (plain, "")
    tokens, told = configured(OPTIONS)
    assert told == "generation_config.json: repetition_penalty=1.5, suppress_tokens=[3, 5]"
    assert tokens == expected(model, **OPTIONS) != plain
    assert configured(OPTIONS, "--no-generation-config") == (plain, "")
    for options in (["--temperature", "0"], ["--rule", "greedy"], ["--temperature", "0", "--rule", "rejection"]):
        assert configured(FILE, *options)[0] == tokens
    eos = {"eos_token_id": [plain[3]], "min_length": 17}
    tokens, told = configured(eos)
    assert told.endswith(": min_length=17") and len(tokens) >= 9
    assert configured(eos, "--min-new-tokens", "0") == (plain[: plain.index(plain[3]) + 1], "")


def test_sampled_text_of_a_config(model, configured):
    """An option replaces the field of its name, the others stay."""
    filters = {"temperature": 0.6, "top_p": 0.9, "top_k": 50}
    assert configured(SAMPLED)[0] == sampled(model, **filters, repetition_penalty=1.5)
    assert configured(SAMPLED, "--no-generation-config")[0] == expected(model)
    tokens, told = configured(SAMPLED, "--temperature", "0.9", "--top-k", "0")
    assert tokens == sampled(model, temperature=0.9, top_p=0.9, repetition_penalty=1.5)
    assert told == "generation_config.json: do_sample=True, top_p=0.9, repetition_penalty=1.5"
    assert configured(SAMPLED, "--repetition-penalty", "1")[0] == sampled(model, **filters)
    tokens, _ = configured({"repetition_penalty": 1.5}, "--temperature", "0.9")  # neither top_k nor top_p
    assert tokens == sampled(model, temperature=0.9, repetition_penalty=1.5)
    again, _ = configured(SAMPLED, "--seed", "0", "--n", "1")
    assert again == configured(SAMPLED)[0] != configured(SAMPLED, "--seed", "1")[0]


@pytest.mark.parametrize("option", ["--top-p=0.9", "--top-k=3", "--min-p=0.1", "--seed=1", "--seed=0"])
def test_sampling_options_need_a_temperature(run, configured, option):
    assert configured(FILE, option)
    for switches in (["--temperature", "0"], ["--no-generation-config"]):
        check_refused(run, option, *switches, message=f"{option.split('=')[0]}: needs --temperature above 0")


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"no_repeat_ngram_size": 2}, [], "got no_repeat_ngram_size=2"),
        (OPTIONS, ["--rule", "typical", "--temperature", "0.8"], "generation_config sets suppress_tokens: "),
    ],
)
def test_configs_that_are_refused(checkpoints, run, configured, fields, options, message):
    assert configured(fields, "--no-generation-config")
    check_refused(run, "--ngram", *options, message=message)
    check_refused(run, "--ngram", *options, message="--no-generation-config")
