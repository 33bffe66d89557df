"""examples/train_head.py trains a head on a target's answers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def train_head(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_head

    return train_head


@pytest.fixture
def target():
    torch.manual_seed(0)
    sizes = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 6}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, eos_token_id=1)
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def test_a_head_is_trained_reproducibly(train_head, target, tmp_path, capsys):
    target.save_pretrained(tmp_path / "model")
    for file in (EXAMPLES / "checkpoints" / "target").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps(["import os\n\n", ["class A:\n", ["heapq.py", "merge"]]]))
    arguments = f"--target {tmp_path / 'model'} --prompts {asked} --held-out {asked} --max-new-tokens 24 --steps 3"
    for name in ("first", "second"):
        train_head.main([*arguments.split(), "--answers-only", "--out", str(tmp_path / name)])
    out = capsys.readouterr().out
    assert "answers: 4 of 4" in out and "step 3  loss" in out and "trees of the head: " in out
    first, second = (train_head.EagleHead.from_pretrained(tmp_path / name, target) for name in ("first", "second"))
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True))


def test_a_head_is_trained_as_it_drafts(train_head, target):
    """Training pass m gives roots the state of a head that drafts m tokens behind the next."""
    head = train_head.new_head(target, (0, 1, 2), torch.arange(0, 2048, 2), 160).requires_grad_(False)
    torch.nn.init.normal_(head.fc.weight, std=0.1)
    tokens, roots = torch.randint(2048, (1, 13)), torch.tensor([[0, 3, 7]])
    features = train_head.read_by(target, (0, 1, 2), 1, tokens[0]).features[None].float()
    first, *later = train_head.unrolled_states(head, tokens, features, roots)

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    for place, root in enumerate(roots[0].tolist()):
        states = head.fuse(features[:, : root + 1])
        for row in (first[0, root], *(states[0, place] for states in later)):
            length = states.shape[1]
            out = head(tokens[:, 1 : 1 + length], states, torch.arange(length), attend)
            torch.testing.assert_close(row, out[0, -1], rtol=1e-4, atol=1e-4)
            states = torch.cat([states, out[:, -1:]], dim=1)


def test_no_line_of_a_held_out_prompt_is_learnt(train_head):
    learnt = train_head.read_prompts(train_head.PROMPTS)
    assert 270 < len(learnt) <= 288  # later Pythons lack some modules
    lines = {line.strip() for prompt in train_head.held_out() for line in prompt.text.splitlines()}
    assert not any(len(line) > 40 and line.strip() in lines for prompt in learnt for line in prompt.splitlines())
