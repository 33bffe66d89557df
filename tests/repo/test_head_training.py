"""examples/train_head.py: a head learns what is drafted, from any target, and nothing is done twice."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def folder(tmp_path):
    """A target of random weights: other sizes than the toy's, an output layer of its own, four times as many layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 2100, "hidden_size": 192, "intermediate_size": 128, "num_hidden_layers": 8}
    sizes |= {"num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 512}
    config = Qwen2Config(**sizes, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    for file in (EXAMPLES / "checkpoints" / "target").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    return tmp_path / "model"


def small_target(layers: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture
def arguments(folder, tmp_path):
    (tmp_path / "asked.txt").write_text("import os\n\ndef main():\nclass A:\n")
    (tmp_path / "tried.json").write_text('["import sys", {"messages": [{"role": "user", "content": "for x in"}]}]')
    options = {"target": folder, "out": tmp_path / "out", "prompts": tmp_path / "asked.txt"}
    options |= {"held-out": tmp_path / "tried.json", "max-new-tokens": 24, "steps": 3}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def test_a_head_is_trained_for_any_target(arguments, folder, tmp_path, capsys):
    import train_head
    from transformers import AutoModelForCausalLM

    from pagedtree.integrations.transformers import EagleDrafter, EagleHead, generate

    train_head.main(arguments)
    out = capsys.readouterr().out
    assert "6 texts" in out and "eagle: step 3  loss" in out
    assert "eagle: accepted drafts in a tree: prompts" in out and "n-gram tree: accepted drafts" in out
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    drafter = EagleDrafter(EagleHead.from_pretrained(tmp_path / "out" / "eagle", model))
    prompts = [[5, 6, 7], [300, 301, 302, 303]]
    plain, _ = generate(model, prompts, max_new_tokens=8)
    drafted, _ = generate(model, prompts, drafter=drafter, max_new_tokens=8)
    assert all(torch.equal(a, b) for a, b in zip(plain, drafted, strict=True))


def test_nothing_is_answered_or_read_twice(arguments, monkeypatch, capsys):
    import own_texts
    import train_head
    import training_text

    train_head.main(arguments)
    first = capsys.readouterr().out
    assert "answers: 6 of 6" in first and "read by the target: 1 of 1" in first
    monkeypatch.setattr(own_texts, "generate", None)
    monkeypatch.setattr(training_text, "_read", None)
    train_head.main(arguments)
    second = capsys.readouterr().out
    assert "answers:" not in second and "read by" not in second and "resumed at step 3" in second
    assert second.splitlines()[-1] == first.splitlines()[-1]
    with pytest.raises(ValueError, match=r"eagle\.pt: expected a run of the same steps, sizes and draft tokens"):
        train_head.main([*arguments, "--draft-vocab", "64"])


def test_a_run_ends_by_the_clock(arguments, monkeypatch, capsys):
    import train_head

    clock = iter(range(0, 10**6, 60))  # each look takes a minute
    monkeypatch.setattr(train_head.time, "monotonic", lambda: next(clock))
    train_head.main([*arguments, "--steps", "18", "--minutes", "20"])
    out = capsys.readouterr().out
    first = torch.load(Path(arguments[3]) / ".state" / "eagle.pt")
    assert 3 < first["step"] < 18 and first["minutes"] >= 20 and "eagle: accepted drafts" in out
    train_head.main([*arguments, "--steps", "18", "--minutes", "20"])
    assert torch.load(Path(arguments[3]) / ".state" / "eagle.pt")["step"] == first["step"]


def test_an_eagle_head_is_trained_as_it_drafts():
    """In pass m of training, the row of a root is what a head gives that drafts m tokens behind the token after it."""
    import train_head
    from training_text import layer_outputs

    target = small_target(layers=4)
    head = train_head.new_head(target, (0, 1, 2), torch.arange(0, 2048, 2), 160, (2, 1, 64)).requires_grad_(False)
    torch.nn.init.normal_(head.fc.weight, std=0.1)
    tokens = torch.randint(2048, (2, 13))
    features, _ = layer_outputs(target, (0, 1, 2), tokens[:, :-1])
    roots = torch.tensor([[0, 3, 7], [6, 0, 3]])
    first, *later = train_head.unrolled_states(head, tokens, features, roots)
    assert first.shape == (2, 12, 64) and len(later) == 3 and all(states.shape == (2, 3, 64) for states in later)

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    for text in (0, 1):
        for place, root in enumerate(roots[text].tolist()):
            states = head.fuse(features[text : text + 1, : root + 1])
            expected = [first[text, root], *(tensor[text, place] for tensor in later)]
            for row in expected:
                length = states.shape[1]
                out = head(tokens[text : text + 1, 1 : 1 + length], states, torch.arange(length), attend)
                torch.testing.assert_close(row, out[0, -1], rtol=1e-4, atol=1e-4)
                states = torch.cat([states, out[:, -1:]], dim=1)


def test_the_teacher_within_a_draft_vocabulary():
    from training_text import Batch

    likely = torch.tensor([[[4, 2, 0], [3, 4, 2]]])
    logits = torch.tensor([[[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]]])
    batch = Batch(torch.zeros(1, 3).long(), torch.zeros(1, 2, 1), likely, logits, torch.ones(1, 2).bool())
    tokens, probs = batch.teacher()
    assert tokens.tolist() == likely.tolist()
    torch.testing.assert_close(probs[0, 0], torch.tensor([2.0, 1.0, 0.0]).softmax(0))
    # A vocabulary of the tokens 2 and 4: 0 is left out, and where 3 was the likeliest there is nothing.
    tokens, probs = batch.teacher(torch.tensor([-1, -1, 0, -1, 1]))
    assert tokens[0, 0, :2].tolist() == [1, 0]
    torch.testing.assert_close(probs[0, 0, :2], torch.tensor([2.0, 1.0]).softmax(0))
    assert probs[0, 0, 2] == 0 and probs[0, 1].tolist() == [0, 0, 0]


def test_texts_are_learnt_up_to_their_ends(tmp_path):
    from own_texts import Text
    from training_text import Answers, layer_outputs

    target = small_target(layers=2)
    # The last one is all prompt; the one before it is cut off.
    texts = [Text(2, [30, 31, 32, 33, 34]), Text(3, [*range(10, 30)]), Text(9, [*range(50, 59)])]
    source = Answers(target, (0,), texts, tmp_path, batch_tokens=64, max_tokens=7)
    assert source.num_tokens == 3 + 5
    batch = source.batch(0)
    assert batch.tokens.tolist() == [[30, 31, 32, 33, 34, 0, 0, 0], [*range(10, 18)]]
    assert batch.is_learnt.tolist() == [[True] * 4 + [False] * 3, [True] * 7]
    features, logits = layer_outputs(target, (0,), batch.tokens[1:, :-1])
    torch.testing.assert_close(batch.features[1:], features, rtol=1e-2, atol=1e-2)  # they are kept in bfloat16
    assert batch.likely[1, :, 0].tolist() == logits[0].argmax(-1).tolist()
    for seed in range(20):
        places = batch.places(8, room=2, seed=seed)
        assert set(places[0].tolist()) <= {1, 2} and set(places[1].tolist()) <= {1, 2, 3, 4}
    with pytest.raises(ValueError, match="expected answers that begin within 7 tokens"):
        Answers(target, (0,), texts[2:], tmp_path, batch_tokens=64, max_tokens=7)


def test_prompts_are_read_from_files(tmp_path):
    from prompt_files import read_prompts

    said = [{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "a.json").write_text('["one", {"text": "two"}]')
    talk = [*said[1], {"role": "assistant", "content": "yes"}]
    (tmp_path / "a.jsonl").write_text('{"prompt": "one"}\n\n' + json.dumps({"messages": talk}))
    for name in ("a.txt", "a.json", "a.jsonl"):
        assert read_prompts(tmp_path / name) == [*said]
    wrong = {"[]": "expected prompts, got none", '{"prompt": "one"}': "expected a list of prompts, got dict"}
    wrong['["one", 2]'] = 'entry 2: expected a text, or an object with "messages", "prompt" or "text", got 2'
    for text, message in wrong.items():
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(ValueError, match=f"b.json.*{message}"):
            read_prompts(tmp_path / "b.json")


@pytest.mark.slow  # reads all of the standard library
def test_what_is_learnt_is_not_what_is_tried():
    from prompts.training import training_prompts
    from real_prompts import held_out

    learnt, tried = training_prompts(edits=60, summaries=40, stories=60), held_out()
    assert learnt == training_prompts(edits=60, summaries=40, stories=60)
    assert {prompt.kind for prompt in learnt} == {prompt.kind for prompt in tried}
    lines = {line.strip() for prompt in tried for line in prompt.text.splitlines() if len(line.strip()) > 40}
    assert not any(line.strip() in lines for prompt in learnt for line in prompt.text.splitlines())
