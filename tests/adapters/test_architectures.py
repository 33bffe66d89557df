"""Every causal architecture of transformers: `generate` returns the model's own text, or a reasoned refusal."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from support.architectures import KEPT, LENGTHS, NAMES, check_same, outcome, tiny_model
from support.models import IS_5, greedy, lists, prompts_of, tiny
from transformers.masking_utils import and_masks, causal_mask_function, or_masks, sliding_window_causal_mask_function

from pagedtree.generation.drafters import NgramDrafter
from pagedtree.generation.fixed_step import FixedStep
from pagedtree.generation.scheduler import GeneratedSequence
from pagedtree.integrations.transformers import ModelDrafter, generate, tree_generate
from pagedtree.integrations.transformers.attention import attention_forward
from pagedtree.integrations.transformers.packed_pass import PackedMask
from pagedtree.integrations.transformers.rotary import check_rotation
from pagedtree.integrations.transformers.tensor_parallel import _repeat_kv_heads

pytestmark = pytest.mark.usefixtures("one_thread")

# Layers with and without a window, windows that only masks have, common architectures.
WINDOWS = [name for name in ("exaone4", "exaone_moe", "kolibri1", "phimoe", "qwen2_moe") if name in NAMES and IS_5]
SERVED = [*WINDOWS, *(name for name in ("exaone4", "gemma2", "phi3", "gpt2") if name not in WINDOWS)]
SERVED += [name for name in ("gemma4_text",) if name in NAMES]  # heads of 512 columns among others
INTERFACE = "expected layers that use transformers' attention interface, .* has its own"
REFUSED = {
    "bart": "expected a forward that takes position_ids, that of BartForCausalLM does not",
    "blt": "expected each layer to run once in a pass, got layer_idx 0 again",
    "deepseek_v32": "expected a decoder of full or sliding attention layers, got (indexed|deepseek_sparse)_attention",
    "deepseek_v4": "decoder of full .*, got compressed_sparse_attention, heavily_compressed_attention",
    "diffllama": "expected each layer to run once in a pass",
    "doge": "expected layers that hand the attention_mask of transformers to the attention as it is, got another one",
    "git": "expected causal layers, some with a sliding window, got one that asks for another mask",
    "glm_moe_dsa": "expected a decoder of full or sliding attention layers, got (indexed|deepseek_sparse)_attention",
    "hrm_text": "expected each layer to run once in a pass, got layer_idx 0 again",
    "llama4_text": "expected a decoder of full or sliding attention layers, got chunked_attention",
    "minicpm3": "expected latent attention of kv_lora_rank 512 and qk_rope_head_dim 64, .* kv_lora_rank 256 and",
    "moshi": "expected masks of the config's sliding_window 9, .*, got masks without a window from MoshiForCausalLM",
    **dict.fromkeys(("bloom", "falcon", "openai-gpt", "trocr", "xglm"), INTERFACE),
}
SEEN_IN_A_PASS = ("blt", "diffllama", "doge", "git", "hrm_text", "moshi")


@pytest.mark.parametrize("name", SERVED)
def test_text_is_that_of_the_model(name):
    assert outcome(name) == "same"


def test_layers_that_share_keys():
    """transformers 5.23 shares keys between layers, 5.17 through its cache."""
    by_cache = any(hasattr(module, "kv_shared_layer_index") for module in tiny_model("gemma3n_text").modules())
    shared = "refused: model: expected layers that share keys without transformers' cache" if by_cache else "same"
    assert outcome("gemma3n_text").startswith(shared)


@pytest.mark.skipif(not IS_5, reason="transformers 4.57 writes some of them otherwise")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    """Models are refused before the first pass wherever that suffices."""
    refused, prompts = tiny_model(name), prompts_of(LENGTHS)
    passes = []
    refused.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match=REFUSED[name]):
        generate(refused, prompts, max_new_tokens=2)
    assert len(passes) == (name in SEEN_IN_A_PASS)
    with pytest.raises(ValueError, match=REFUSED[name]):
        generate(tiny(0), prompts, drafter=ModelDrafter(refused), max_new_tokens=2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i > 1 else []) for i, name in enumerate(WINDOWS)]
)
def test_other_ways_to_generate(name):
    served, prompts = tiny_model(name), [prompt.clamp(min=4) for prompt in prompts_of(LENGTHS)]
    expected = [greedy(served, prompt) for prompt in prompts]
    texts = {"custom_generate": [greedy(served, prompt, custom_generate=tree_generate) for prompt in prompts]}
    served.set_attn_implementation("pagedtree")
    texts["generate"] = [greedy(served, prompt) for prompt in prompts]
    for way, got in texts.items():
        for text, right in zip(got, expected, strict=True):
            check_same(served, text, right, f"{name}, {way}")


LIMIT, COUNT = 40, 12
ROPES = {
    "longrope": {"short_factor": [1.0] * 16 + [2.0] * 16, "long_factor": [3.0] * 16 + [8.0] * 16},
    "dynamic": {"factor": 8.0},
}


def rotated(name):
    """Makes a model whose rotary frequencies change after 40 tokens."""
    rope, longest = {"rope_type": name, **ROPES[name]}, 128 if name == "longrope" else LIMIT + 1
    sizes = {"original_max_position_embeddings": LIMIT, "max_position_embeddings": longest}
    return tiny(0, rope_theta=1e3, rope_scaling=rope, **sizes)


BELOW, ABOVE = (5, 17, 1 + LIMIT - COUNT), (41, 50, 44)


@pytest.mark.parametrize(("name", "lengths"), [("longrope", BELOW), ("dynamic", BELOW), ("longrope", ABOVE)])
def test_frequencies_of_one_side(name, lengths):
    """Chunks, evictions, and nodes past the limit leave the text unchanged."""
    model, prompts = rotated(name), prompts_of(lengths)
    expected = [greedy(model, prompt, COUNT) for prompt in prompts]
    assert max(map(len, expected)) - 1 == LIMIT or lengths is ABOVE
    greedy(model, prompts_of([70])[0], 2)  # sets the frequencies of a long text
    for drafter in (NgramDrafter(8), ModelDrafter(model, depth=3)):
        options = {"drafter": drafter, "max_batch_tokens": 32, "n": 2, "num_pages": 12, "page_size": 8}
        texts, stats = generate(model, prompts, max_new_tokens=COUNT, **options)
        assert lists(texts) == [text for text in expected for _ in range(2)]
        assert stats.evictions > 0 or lengths is ABOVE
        assert stats.mean_accepted > 1.0 or isinstance(drafter, NgramDrafter)


MIXED = [
    ("longrope", (30,), r"at most 41 tokens, .*\"longrope\" .* after 40, got prompts of 30 to 30 tokens, and 42 with"),
    ("longrope", (10, 50), r"at most 41 tokens, or only prompts of more than 40, .* of 10 to 50 tokens, and 62 with"),
    ("dynamic", (45, 50), r"at most 41 tokens, as .*\"dynamic\" .* after 40, .* ask for fewer"),
]


@pytest.mark.parametrize(("name", "lengths", "message"), MIXED)
def test_frequencies_that_would_change_are_refused(name, lengths, message, monkeypatch):
    """Draft models are exempt: their drafts change no text."""
    model, other, prompts = rotated(name), tiny(0), prompts_of(lengths)
    texts, _ = generate(other, prompts, drafter=ModelDrafter(model), max_new_tokens=COUNT)
    assert lists(texts) == [greedy(other, prompt, COUNT) for prompt in prompts]
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model reads a text"))
    with pytest.raises(ValueError, match=f"input_ids, max_new_tokens: expected texts of {message}"):
        generate(model, prompts, max_new_tokens=COUNT)
    monkeypatch.setattr(FixedStep, "captures", False)
    for target, drafter, what in ((model, None, "model"), (other, ModelDrafter(model), "drafter")):
        with pytest.raises(ValueError, match=f'cuda_graph: {what}: .* never change, got rope type "{name}"'):
            generate(target, prompts_of([5]), drafter=drafter, max_new_tokens=2, cuda_graph=True)


def test_limits_of_several_layers():
    model, text = rotated("longrope"), GeneratedSequence(0, 0, [1] * 50, 60)
    assert check_rotation(model, [text], is_recurrent=False) == 60
    first, other = ({"rope_type": "longrope", "original_max_position_embeddings": count} for count in (LIMIT, 50))
    model.config.rope_parameters = {"full_attention": first, "other": other}
    for rope, is_recurrent, message in (
        ({}, False, "at most 41 tokens, or only prompts of more than 50, "),
        ({"original_max_position_embeddings": 9}, True, "at most 10 tokens, as"),  # a pass ends where outcomes diverge
        ({"rope_type": "dynamic"}, False, "at most 41 tokens, as"),
    ):
        other.update(rope)
        with pytest.raises(ValueError, match=f"expected texts of {message}"):
            check_rotation(model, [text], is_recurrent)


class Layer(torch.nn.Module):
    layer_idx, is_causal, sliding_window = 0, True, 2


@pytest.mark.parametrize(("options", "window"), [({}, 2), ({"sliding_window": None}, 0), ({"sliding_window": 3}, 3)])
def test_a_window_of_none_is_no_window(options, window):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 6, 64)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask = mask.triu(1 - window) if window else mask
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
    torch.testing.assert_close(attention_forward(Layer().eval(), q, k, v, None, **options)[0], expected)


@pytest.mark.parametrize("window", [1, 2, 9, 4096])
def test_masks_that_a_packed_pass_knows(window):
    masks = PackedMask(5, torch.device("cpu"))
    full = masks.of_layers(causal_mask_function, None)
    cut = masks.of_layers(sliding_window_causal_mask_function(window), window)
    assert (masks.window_of(full), masks.window_of(cut), masks.has_windows) == (0, window, True)
    assert masks.window_of(cut[:, :, :, :7]) == window  # as some layers slice it
    for other in (None, cut.clone(), masks.tokens, cut.float(), cut[0] | cut):
        with pytest.raises(
            ValueError, match=r"attention_mask of transformers to the attention as it is, got (none|another)"
        ):
            masks.window_of(other)


@pytest.mark.parametrize("window", [2, 9, 4096])
def test_masks_that_a_packed_pass_does_not_know(window):
    """Chunks, full visibility, blocks from a table, and a window plus the first key are unknown."""
    block_ids = torch.arange(3)
    chunks = sliding_window_causal_mask_function(window)
    chunks = and_masks(chunks, lambda b, h, q, kv: kv // window == q // window)
    blocks = and_masks(causal_mask_function, lambda b, h, q, kv: block_ids[q] == block_ids[kv])
    with_first = or_masks(sliding_window_causal_mask_function(window), lambda b, h, q, kv: kv == 0)
    masks = PackedMask(5, torch.device("cpu"))
    for function, size in (
        (chunks, window),
        (lambda b, h, q, kv: q >= 0, None),
        (blocks, None),
        (with_first, window),
        (sliding_window_causal_mask_function(window), window + 1),
    ):
        with pytest.raises(ValueError, match="got one that asks for another mask"):
            masks.of_layers(function, size)


def test_a_layer_that_sees_another_mask_is_refused():
    biased = tiny(0)
    attention = biased.model.layers[1].self_attn
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "attention_mask": kwargs["attention_mask"] + torch.randn(1)}),
        with_kwargs=True,
    )
    with pytest.raises(ValueError, match=r"got another one: a bias of the layer's own, or a mask that it makes"):
        generate(biased, [[1, 2, 3]], max_new_tokens=2)


@pytest.mark.skipif("gemma4_text" not in NAMES, reason="transformers 4.57 has no such model")
def test_heads_that_differ_from_layer_to_layer_are_not_repeated():
    """The refusal comes before any change."""
    with pytest.raises(ValueError, match=r"heads of each layer.*, got 2 for .* of \[\(2, 1, 64\), \(2, 1, 512\)\]"):
        _repeat_kv_heads(tiny_model("gemma4_text"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture(name):
    """Outcomes are the documented ones; `PYTHONPATH=tests python -m support.architectures` records new ones."""
    got, record = outcome(name), json.loads(KEPT.read_text(encoding="utf-8"))
    if transformers.__version__ == record["transformers"]:
        assert got == record["outcomes"][name]
