"""The command `python -m pagedtree generate`."""

from __future__ import annotations

import json
import sys

import pytest
import torch

pytest.importorskip("transformers")

from generate_case import VOCAB, lists, tiny, tiny_eagle
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pagedtree import SamplingParams
from pagedtree.integrations.transformers import MedusaHeads, TokenOptions, generate
from pagedtree.integrations.transformers import cli as cli_module
from pagedtree.tools import cli

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def model():
    return tiny(0)


@pytest.fixture(scope="module")
def checkpoints(model, tmp_path_factory):
    """A target, a draft, Medusa heads and an EAGLE-3 head over words w0, w1, ..., and a prompt."""
    folder = tmp_path_factory.mktemp("checkpoints")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name, kind in (("target", model), ("draft", tiny(0, num_hidden_layers=1))):
        kind.save_pretrained(folder / name)
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / name)
    MedusaHeads(128, 3, model.lm_head).save_pretrained(folder / "medusa")
    tiny_eagle(model).save_pretrained(folder / "eagle")
    (folder / "prompt.txt").write_text(" ".join(f"w{token}" for token in PROMPT))
    return folder


def run_command(folder, capsys, *options):
    status = cli.main(
        ["generate", "--model", str(folder / "target"), "--prompt", str(folder / "prompt.txt"), "--device", "cpu",
         "--max-new-tokens", "12", *options]
    )  # fmt: skip
    captured = capsys.readouterr()
    return status, captured.out, captured.err


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
def test_command_prints_the_models_own_text(model, checkpoints, capsys, drafts):
    drafts = [str(checkpoints / option) if option in ("draft", "medusa", "eagle") else option for option in drafts]
    prompt = torch.tensor([PROMPT])
    expected = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, 8:].tolist()
    status, out, err = run_command(checkpoints, capsys, *drafts, "--page-size", "4")
    assert status == 0
    assert out.split() == [f"w{token}" for token in expected]
    assert "12 tokens in" in err and "tokens per sequence and step" in err


def test_command_samples_several_outcomes(model, checkpoints, capsys):
    options = ["--n", "3", "--temperature", "0.9", "--top-p", "0.9", "--seed", "5"]
    status, out, _ = run_command(checkpoints, capsys, *options, "--ngram")
    params = SamplingParams(temperature=0.9, top_p=0.9)
    expected, _ = generate(model, [PROMPT], max_new_tokens=12, params=params, n=3, seeds=[5, 6, 7])
    texts = out.split("--- outcome ")[1:]
    assert status == 0
    assert [text.split()[1:] for text in texts] == [[f"w{token}" for token in row[8:]] for row in lists(expected)]


@pytest.mark.parametrize(("rule", "law"), [("block", "iid"), ("traversal", "swor"), ("rejection", "topk")])
def test_command_takes_a_rule(checkpoints, capsys, rule, law):
    drafts = ["--draft", str(checkpoints / "draft"), "--draft-law", law, "--num-nodes", "5"]
    status, out, err = run_command(checkpoints, capsys, *drafts, "--rule", rule, "--temperature", "0.9")
    assert status == 0 and len(out.split()) == 12 and "12 tokens in" in err
    status, _, err = run_command(checkpoints, capsys, *drafts, "--rule", rule)
    assert status == 2 and "rule: expected params" in err
    status, _, err = run_command(checkpoints, capsys, "--ngram", "--rule", "traversal", "--temperature", "0.9")
    assert status == 2 and "weighs drafts that were drawn" in err


def test_command_runs_where_it_can(checkpoints, capsys, monkeypatch):
    """A GPU that this build cannot use is not the default."""
    monkeypatch.setattr(cli_module, "backends", lambda: ["cpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = ["generate", "--model", str(checkpoints / "target"), "--prompt", str(checkpoints / "prompt.txt")]
    assert cli.main([*arguments, "--max-new-tokens", "1"]) == 0
    assert "device: cpu" in capsys.readouterr().err
    assert cli.main([*arguments, "--device", "cuda:1"]) == 2
    assert "--device cuda:1: needs a GPU and a build with CUDA" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--top-p=0.9", "--top-k=3", "--seed=1", "--seed=0"])
def test_command_refuses_sampling_options_without_temperature(checkpoints, capsys, option):
    for temperature in ([], ["--temperature", "0"]):
        with pytest.raises(SystemExit) as exit_:
            run_command(checkpoints, capsys, option, *temperature)
        assert exit_.value.code == 2
        assert f"{option.split('=')[0]}: needs --temperature above 0" in capsys.readouterr().err
    status, _, err = run_command(checkpoints, capsys, "--temperature=-1")
    assert status == 2 and "temperature" in err


def test_command_shows_progress(checkpoints, capsys, monkeypatch):
    """A line for each tenth of the tokens, unless a single text on a terminal shows it by itself; on a terminal one
    line, written anew."""

    def counts(err):
        return [int(line.split()[0]) for line in err.replace("\r", "\n").splitlines() if " of at most " in line]

    status, out, err = run_command(checkpoints, capsys)
    assert status == 0 and f"loading {checkpoints / 'target'}\n" in err and counts(err)[-1] == 12
    assert "\r1 of" not in err
    status, _, err = run_command(checkpoints, capsys, "--n", "3")
    assert status == 0 and len(counts(err)) == 10 and counts(err)[-1] == 36 and counts(err) == sorted(counts(err))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, _, err = run_command(checkpoints, capsys)
    assert status == 0 and counts(err) == list(range(1, 13)) and "\r12 of at most 12 tokens, " in err
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    status, again, err = run_command(checkpoints, capsys)
    assert status == 0 and not counts(err) and again == out


def test_command_stops_at_a_text(checkpoints, capsys):
    _, whole, _ = run_command(checkpoints, capsys)
    words = whole.split()
    stop = f"{words[4]} {words[5]}"
    status, out, _ = run_command(checkpoints, capsys, "--stop", "nowhere", "--stop", stop)
    assert status == 0 and out.split() == words[: next(i for i in range(12) if stop in " ".join(words[:i]))]


def test_command_reports_what_it_cannot_read(checkpoints, capsys):
    status, _, err = run_command(checkpoints, capsys, "--cuda-graph")
    assert status == 2 and "cuda_graph: expected a model on a CUDA device, got one on cpu" in err
    status, _, err = run_command(checkpoints, capsys, "--prompt", str(checkpoints / "nothing.txt"))
    assert status == 2 and "nothing.txt" in err
    status, _, err = run_command(checkpoints, capsys, "--medusa", str(checkpoints / "nowhere"))
    assert status == 2 and "nowhere" in err
    with pytest.raises(SystemExit):
        run_command(checkpoints, capsys, "--ngram", "--medusa", str(checkpoints / "medusa"))
    assert json.loads((checkpoints / "medusa" / "config.json").read_text())["num_heads"] == 3


def test_command_takes_request_options(model, checkpoints, capsys):
    """Penalties without sampling, and with it; bad words, the least length, log-probabilities."""
    options = ["--repetition-penalty", "1.3", "--frequency-penalty", "0.5", "--bad-word", "w9", "--bad-word", "w1 w4"]
    more = ["--min-new-tokens", "3", "--logprobs", "2", "--presence-penalty", "1"]
    for sampling, params in (([], {"temperature": 0.0}), (["--temperature=0.9", "--min-p=0.1"], {"min_p": 0.1})):
        status, out, err = run_command(checkpoints, capsys, *options, *more, *sampling, "--ngram")
        given = {"temperature": 0.9, **params, "repetition_penalty": 1.3, "frequency_penalty": 0.5}
        expected, stats = generate(
            model, [PROMPT], max_new_tokens=12, params=SamplingParams(**given, presence_penalty=1.0), min_new_tokens=3,
            options=TokenOptions(bad_words=[[9], [1, 4]]), logprobs=2,
        )  # fmt: skip
        new = expected[0].tolist()[len(PROMPT) :]
        assert status == 0 and out.split() == [f"w{token}" for token in new]
        lines = [line.split() for line in err.splitlines() if "  rank " in line]
        found = stats.sequences[0].logprobs
        assert [line[0] for line in lines] == [f"'w{token}'" for token in new]
        assert [line[3] for line in lines] == [str(rank) for rank in found.ranks]
        assert [float(line[1]) for line in lines] == pytest.approx(found.logprobs, abs=1e-3)


def test_command_follows_a_grammar(checkpoints, capsys, monkeypatch):
    pytest.importorskip("xgrammar")
    (checkpoints / "words.ebnf").write_text('root ::= "w1" ("w2" | "w3") "w4"\n')
    (checkpoints / "wrong.ebnf").write_text("root ::= (")
    (checkpoints / "schema.json").write_text('{"const": 1}')
    status, out, err = run_command(checkpoints, capsys, "--grammar", str(checkpoints / "words.ebnf"), "--n", "2")
    texts = [text.split()[1:] for text in out.split("--- outcome ")[1:]]
    assert status == 0 and "grammars: " in err
    assert all(text in (["w1", "w2", "w4"], ["w1", "w3", "w4"]) for text in texts) and len(texts) == 2
    status, _, err = run_command(checkpoints, capsys, "--grammar", str(checkpoints / "wrong.ebnf"))
    assert status == 2 and "wrong.ebnf: " in err
    with pytest.raises(SystemExit):
        run_command(checkpoints, capsys, "--grammar", "x", "--json-schema", "y")


@pytest.mark.parametrize("option", ["--grammar", "--json-schema"])
def test_command_tells_what_a_grammar_needs(checkpoints, capsys, monkeypatch, option):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(SystemExit):
        run_command(checkpoints, capsys, option, str(checkpoints / "prompt.txt"))
    assert f"{option} needs xgrammar: pip install xgrammar" in capsys.readouterr().err
