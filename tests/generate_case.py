"""Tiny random models, their own texts, and drafters of any quality."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from pagedtree import DraftTree, SamplingParams, TreeBatch, build_trees, sample
from pagedtree.generation.drafters import EagleHead, MedusaHeads
from pagedtree.integrations.transformers import PagedCache, generate

IS_5 = int(transformers.__version__.split(".")[0]) >= 5
VOCAB = 128
# No token ends, begins or pads a text.
NO_TOKENS = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
NEW_TOKENS = 20
LENGTHS = (5, 17, 1, 33)
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.2,  # less, and greedy text repeats one token
    **NO_TOKENS,
}
SAMPLING = SamplingParams(temperature=0.8, top_p=0.95)

# Mistral's window; Gemma 2's softcap, alternating windows; gpt-oss's sinks, alternating windows.
MODELS = {
    "full": (LlamaForCausalLM, LlamaConfig, {}),
    "window": (MistralForCausalLM, MistralConfig, {"sliding_window": 9}),
    "softcap": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 3.0,
            "tie_word_embeddings": False,  # tied, every token predicts itself
            "attn_implementation": "eager",
        },
    ),
    "sinks": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "sliding_window": 9,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "attn_implementation": "eager",
        },
    ),
}


def tiny(seed: int, kind=LlamaForCausalLM, config=LlamaConfig, **options):
    torch.manual_seed(seed)
    return kind(config(**{**TINY, **options})).eval()


def gpt2(num_positions, seed=0):
    """Builds a model of `num_positions`."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": num_positions}
    config = GPT2Config(**sizes, initializer_range=0.2, eos_token_id=None, bos_token_id=None)
    return GPT2LMHeadModel(config).eval()


def tiny_of(name: str, **options):
    """Builds one of MODELS with its own attention."""
    kind, config, fields = MODELS[name]
    model = tiny(0, kind, config, **fields, **options)
    if name == "sinks":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


def tiny_eagle(model):
    """Builds a random EAGLE-3 head on two layers; it drafts even tokens."""
    torch.manual_seed(2)
    hidden = model.config.hidden_size
    sizes = {"hidden_size": hidden, "intermediate_size": 64, "num_attention_heads": hidden // 64, "vocab_size": VOCAB}
    head = EagleHead(sizes, model.model.embed_tokens, model.lm_head, (0, 1), torch.arange(0, VOCAB, 2))
    return head.to(model.lm_head.weight).eval()


def tiny_heads(model, num_heads=3, std=0.05):
    heads = MedusaHeads(model.config.hidden_size, num_heads, model.lm_head)
    torch.nn.init.normal_(heads.weight, std=std, generator=torch.Generator().manual_seed(3))
    return heads.to(model.lm_head.weight)


def words(count):
    """Builds a tokenizer of w0, w1, ... between blanks."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def greedy(model, prompt, count=NEW_TOKENS, **options):
    return model.generate(prompt[None], max_new_tokens=count, do_sample=False, **options)[0].tolist()


def seeded(model, prompt, seed, params=SAMPLING, count=NEW_TOKENS):
    """Decodes by `sample` on the model's own attention; a list of seeds returns a list of texts."""
    seeds = torch.tensor(seed).view(-1)
    rows = prompt.expand(len(seeds), -1)
    for _ in range(count):
        with torch.no_grad():
            logits = model(rows).logits[:, -1]
        positions = torch.full_like(seeds, rows.shape[1] - 1)
        rows = torch.cat([rows, sample(logits, params, seeds=seeds, positions=positions)[:, None]], dim=1)
    return rows.tolist() if isinstance(seed, list) else rows[0].tolist()


def lists(sequences):
    return [sequence.tolist() for sequence in sequences]


def generated(model, drafter=None, prompts=None, count=NEW_TOKENS, **options):
    """Returns `generate`'s texts as lists, by default for LENGTHS, and statistics."""
    prompts = prompts_of(LENGTHS) if prompts is None else prompts
    sequences, stats = generate(model, prompts, drafter=drafter, max_new_tokens=count, **options)
    return lists(sequences), stats


def poisoned_caches(monkeypatch):
    """Fills new caches with NaN; returns the set of (K shape, has V)."""
    layer, shapes = PagedCache.layer, set()

    def poisoned(cache, index, k, v):
        is_new = index not in cache._layers
        pair = layer(cache, index, k, v)
        shapes.add((tuple(pair[0].shape[2:]), pair[1] is not None))
        for tensor in pair if is_new else ():
            if tensor is not None:
                tensor.fill_(float("nan"))
        return pair

    monkeypatch.setattr(PagedCache, "layer", poisoned)
    return shapes


def room_of(result):
    """Returns each sequence's greatest node depth: its last token is never read."""
    starts = result.start[: len(result.sequences)].tolist()  # without idle rows
    return [s.max_length - 2 - start for s, start in zip(result.sequences, starts, strict=True)]


class Oracle:
    """Knows the texts: a node's last child is right with probability `hit`."""

    tree = DraftTree.full([2, 2, 1])

    def __init__(self, texts, hit):
        self.texts, self.hit = texts, hit
        self.generator = torch.Generator().manual_seed(1)

    def propose(self, tokens, lengths):
        draft_tokens = []
        for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
            text = max(self.texts, key=lambda text: common_prefix(text, row[:length]))
            guess = torch.randint(VOCAB, (self.tree.num_nodes,), generator=self.generator).tolist()
            node = 0
            for token in text[length : length + self.tree.max_depth]:
                node = max(i for i in range(self.tree.num_nodes) if self.tree.parents[i] == node)
                if torch.rand((), generator=self.generator) < self.hit:
                    guess[node] = token
            draft_tokens += guess
        trees = TreeBatch.from_trees([self.tree] * lengths.shape[0])
        return torch.tensor(draft_tokens, dtype=torch.int32), trees, None


def holds_in_a_child(check):
    """Returns check() of a forked, single-threaded process, within a minute."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Hostile:
    """Drafts malformed trees of varying shape, with invalid tokens but valid roots."""

    max_nodes = 8

    def __init__(self):
        self.generator = torch.Generator().manual_seed(2)

    def propose(self, tokens, lengths):
        sizes = torch.randint(1, self.max_nodes + 1, lengths.shape, generator=self.generator)
        parents = torch.cat([torch.randint(-2, 6, (size,), generator=self.generator) for size in sizes.tolist()])
        cu_nodes = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        parents[cu_nodes[:-1]] = -1
        trees = build_trees(parents.int(), cu_nodes.int(), max_nodes=self.max_nodes, max_depth=3)
        return torch.randint(-5, 2 * VOCAB, parents.shape, generator=self.generator), trees, None


def check_the_model_is_as_it_was(model):
    """Checks the model within a call and after a failure."""
    tokens = prompts_of((9,))[0][None]
    with torch.no_grad():
        expected = model(tokens).logits
    outputs = []

    def callback(sequence, new):
        with torch.no_grad():
            outputs.append(model(tokens).logits)
        if len(outputs) == 2:
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        generate(model, tokens, max_new_tokens=4, callback=callback)
    with torch.no_grad():
        outputs.append(model(tokens).logits)
    for logits in outputs:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
