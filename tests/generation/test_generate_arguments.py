"""`generate` refuses bad arguments by name and serves its smallest inputs."""

from __future__ import annotations

import inspect
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.grammars import STOP, Brackets
from support.models import SAMPLING, VOCAB, greedy, holds_in_a_child, lists, tiny
from support.toy_texts import DRAFTERS
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel, LlamaForSequenceClassification
from transformers.generation import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pagedtree import DraftTree, SamplingParams, TreeBatch, build_trees
from pagedtree.integrations.transformers import ModelDrafter, TokenOptions, generate
from pagedtree.integrations.transformers.turns import in_turn
from pagedtree.integrations.transformers.whole_inputs import check_scales


def refused(message, error=ValueError, **arguments):
    return pytest.param(arguments, error, message, id=message)


def processors(message, *given):
    return refused(message, logits_processor=given)


def rule(message, name, drafter="none", params=SAMPLING):
    return refused(f"rule: .*{message}", rule=name, drafter=drafter, params=params)


def of_tokenizer(message, **entries):
    return refused(message, input_ids=entries)


def complete():
    matcher = Brackets()
    assert all(matcher.accept(token) for token in (1, 90, STOP))
    return matcher


REFUSED = [
    *[
        refused(f"{name}: expected at least 1, got 0", **{name: 0})
        for name in ("max_new_tokens", "n", "page_size", "max_batch_tokens", "max_sequences")
    ],
    refused("max_new_tokens: expected an integer, got True", max_new_tokens=True),
    refused("num_pages: expected an integer, got 1.5", num_pages=1.5),
    refused("cuda_graph: expected True, False or None, got 'yes'", cuda_graph="yes"),
    refused(r"seeds: expected 1 integers, got torch.int64 \[2\]", seeds=[1, 2]),
    refused("seeds: expected 1 integers, got torch.float32", seeds=[0.5]),
    refused("eos_token_id: expected an integer, got 2.5", eos_token_id=[1, 2.5]),
    refused("eos_token_id: expected an integer, got 0.5", eos_token_id=torch.tensor([0.5])),
    refused("pad_token_id: expected an integer, got 0.5", pad_token_id=0.5),
    refused(r"stop_strings: expected texts that are not empty, got \['x', ''\]", stop_strings=["x", ""]),
    refused("tokenizer: expected the model's tokenizer with stop_strings, got NoneType", stop_strings="x"),
    refused("generation_config: expected True or False, got int; True takes", TypeError, generation_config=3),
    # Prompts.
    refused(r"input_ids: expected at least one token .* got \[\] as prompt 0", input_ids=[[]]),
    refused(r"input_ids: expected at least one token .* got \[1, 2.0\] as prompt 0", input_ids=[[1, 2.0]]),
    refused(r"input_ids: expected at least one token .* got \[1, True\] as prompt 0", input_ids=[[1, True]]),
    refused(r"input_ids: expected integers \[B, L\]", input_ids=torch.zeros(3, dtype=torch.int64)),
    refused(r"input_ids: expected integers \[B, L\], got torch.float32", input_ids=torch.zeros(1, 3)),
    refused("input_ids: expected integers .* got torch.bool", input_ids=torch.ones(1, 3, dtype=torch.bool)),
    refused("input_ids: expected ids of the model's 128 tokens, got 128 in prompt 1", input_ids=[[1], [2, VOCAB]]),
    refused("input_ids: expected ids of .* got -1 in prompt 0", input_ids=torch.tensor([[-1, 2]])),
    refused(r"input_ids: expected a list of prompts, .* of ids; .* pass \[input_ids\]", input_ids=[1, 2, 3]),
    refused("input_ids: expected token ids, got text", input_ids="text"),
    refused("input_ids: expected token ids, got text;", input_ids=["text"]),
    of_tokenizer(r"input_ids: expected input_ids and attention_mask in the dict, got \['ids'\]", ids=[[1]]),
    of_tokenizer("expected input_ids and attention_mask in the dict", input_ids=[[1]], pixel_values=3),
    of_tokenizer("expected token_type_ids of 0", input_ids=[[1, 2]], token_type_ids=[[0, 1]]),
    of_tokenizer("attention_mask: expected an entry for each", input_ids=[[1, 2]], attention_mask=1),
    of_tokenizer("attention_mask: expected an entry for each token", input_ids=[[1, 2]], attention_mask=[[1]]),
    refused("expected none beside a BatchEncoding", input_ids={"input_ids": [[1]]}, attention_mask=torch.ones(1, 1)),
    refused(r"attention_mask: expected zeros and ones \[B, L\]", attention_mask="x"),
    refused("attention_mask: expected none with a list", attention_mask=torch.ones(1, 3)),
    refused(r"attention_mask: expected \[1, 3\]", input_ids=torch.ones(1, 3).long(), attention_mask=torch.ones(1, 2)),
    # Sampling and options.
    refused(r"params: expected top_p of 1 prompts, got \[3\]", params=SamplingParams(top_p=torch.ones(3))),
    refused(r"params: expected top_p of 1 prompts, got \[1, 3\]", params=SamplingParams(top_p=torch.ones(1, 3))),
    refused("params: expected repetition_penalty of", params=SamplingParams(repetition_penalty=torch.ones(3))),
    refused(r"options: bias\[0\]: expected ids in 0..127", options=TokenOptions(bias={VOCAB: 1.0})),
    refused(r"options: bias\[0\]\[3\]: expected a number, got NaN", options=TokenOptions(bias={3: float("nan")})),
    refused("options: bad_words.*at least one token", options=TokenOptions(bad_words=[[]])),
    refused("options: expected one value, or a list", TypeError, options={"bias": {1: 1.0}}),
    refused("options: expected TokenOptions or None, got int", TypeError, options=[1]),
    refused("options: expected a value for each of 1 prompts, got 2", options=[None, None]),
    refused("min_new_tokens: expected 0..max_new_tokens, 4, got 5", min_new_tokens=5),
    refused("min_new_tokens: expected a value for each of 1 prompts", min_new_tokens=[1, 1]),
    refused(
        "begin_suppress_tokens: expected none with min_new_tokens above 1",
        min_new_tokens=3,
        eos_token_id=1,
        options=TokenOptions(begin_suppress_tokens=[2]),
    ),
    refused(r"logprobs: expected None or 0\.\.128, got 129", logprobs=VOCAB + 1),
    refused('logprobs_mode: expected "raw" or "processed"', logprobs=1, logprobs_mode="cooked"),
    processors("draft trees can follow .*, got NoRepeatNGramLogitsProcessor", NoRepeatNGramLogitsProcessor(2)),
    processors("got function", lambda ids, scores: scores),
    processors(r"single tokens, .* got 1.0 for \[1, 2", SequenceBiasLogitsProcessor({(1, 2): 1.0})),
    processors("order.*Bias", RepetitionPenaltyLogitsProcessor(1.1), SequenceBiasLogitsProcessor({(1,): 1.0})),
    processors("in transformers' order", TopKLogitsWarper(3), TemperatureLogitsWarper(0.5)),
    processors("in transformers' order.*Suppress", TopKLogitsWarper(3), SuppressTokensLogitsProcessor([1])),
    processors("as transformers makes them", *[RepetitionPenaltyLogitsProcessor(1.1)] * 2),
    processors("as transformers makes them, got TopP", TopPLogitsWarper(0.5, min_tokens_to_keep=2)),
    processors("expected params with top_k, got None", TopKLogitsWarper(3)),
    processors("begin_index: expected the prompts' width", SuppressTokensAtBeginLogitsProcessor([1], 9)),
    processors("prompt_ignore_length: expected at most", RepetitionPenaltyLogitsProcessor(1.1, prompt_ignore_length=2)),
    refused("no .*, top_k, top_p beside", params=SamplingParams(top_p=0.5), logits_processor=[TopKLogitsWarper(3)]),
    # Rules and drafters.
    rule("expected one of auto, block, greedy, rejection, sampled, traversal, typical, got 'lucky'", "lucky"),
    rule("expected params for every rule but \"greedy\" .* got 'rejection' with None", "rejection", params=None),
    rule("expected params .* none for .* got 'greedy'", "greedy"),
    rule('"block" verifies chains, got a drafter whose trees branch', "block", "top-k tree"),
    rule("\"traversal\" weighs drafts that were drawn .* draft_law 'onehot'", "traversal", "top-k tree"),
    rule("drafts coupled to the noise .* alone, got 'rejection'", "rejection", "coupled tree"),
    rule("drafts coupled to the noise .* alone, got 'greedy'", "auto", "coupled tree", None),
    refused('"typical" takes no options', params=SamplingParams(presence_penalty=1.0), rule="typical"),
    refused('drafter: law "iid" draws by the params of `generate`, got None', drafter="iid tree"),
    refused("drafter: expected an object with propose", TypeError, drafter=3),
    # Grammars, and options of one sequence.
    refused("grammars: expected 1 matchers, one per sequence or None, got 2", grammars=[Brackets(), Brackets()]),
    refused("grammars: expected a matcher of its own for each sequence", grammars=[Brackets()] * 2, n=2),
    refused("grammars: expected a list with a matcher or None .* got Brackets", TypeError, grammars=Brackets()),
    refused("grammars: expected a GrammarMatcher or None as number 1, got int", TypeError, grammars=[None, 3], n=2),
    refused("texts that are not complete, got a complete one as number 0", grammars=[complete()]),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_bad_arguments(model, change, error, message):
    arguments = {"input_ids": [[1, 2, 3]], "max_new_tokens": 4, **change}
    if isinstance(arguments.get("drafter"), str):
        arguments["drafter"] = DRAFTERS[arguments["drafter"]](model, model)
    with pytest.raises(error, match=message):
        generate(model, **arguments)


WRONG_KINDS = [object(), 1.5, "x", b"x", -1, 3, 2**70, float("nan"), True, None, [], [object()], (1, 2), {}, {1: 2}]
WRONG_KINDS += [range(3), torch.ones(2), torch.ones(2, 2, dtype=torch.bool)]


@pytest.mark.parametrize("name", [name for name in inspect.signature(generate).parameters if name != "model"])
def test_any_kind_of_argument_is_taken_or_refused_by_name(model, name):
    for value in WRONG_KINDS:
        try:
            generate(model, **{"input_ids": [[1, 2]], "max_new_tokens": 2, name: value})
        except (TypeError, ValueError) as error:
            assert name in str(error), value


def test_tokenizer_outputs_are_prompts(model):
    prompts = [[5, 6, 7], [8, 9]]
    expected = [greedy(model, torch.tensor(prompt), 4) for prompt in prompts]
    padded, mask = [[5, 6, 7], [0, 8, 9]], [[1, 1, 1], [0, 1, 1]]
    for kind in (dict, BatchEncoding):
        texts = {"input_ids": prompts, "token_type_ids": [[0] * 3, [0] * 2]}
        sequences, _ = generate(model, kind(texts), max_new_tokens=4)
        assert lists(sequences) == expected
        sequences, _ = generate(model, kind({"input_ids": padded, "attention_mask": mask}), max_new_tokens=4)
        assert lists(sequences) == expected
        sequences, _ = generate(model, kind({"input_ids": padded[1], "attention_mask": mask[1]}), max_new_tokens=4)
        assert lists(sequences) == expected[1:]  # a single text
        assert lists(generate(model, kind({"input_ids": prompts[0]}), max_new_tokens=4)[0]) == expected[:1]
        for array in (torch.tensor, np.array):
            batch = {"input_ids": array(padded), "attention_mask": array(mask), "token_type_ids": array(mask) * 0}
            sequences, _ = generate(model, kind(batch), max_new_tokens=4)
            assert sequences.tolist() == [expected[0], [0, *expected[1]]]
    assert lists(generate(model, [np.array(prompt) for prompt in prompts], max_new_tokens=4)[0]) == expected


@pytest.mark.parametrize(("pad", "eos"), [(3, None), (3, [3]), (3, [4, 5]), (None, None)])
def test_padding_without_a_mask_is_transformers(model, pad, eos):
    """A pad token in a tensor is padding unless it also ends sequences."""
    prompts = torch.tensor([[3, 3, 5, 6, 7], [8, 9, 3, 10, 11]])
    expected = model.generate(prompts, max_new_tokens=6, do_sample=False, pad_token_id=pad, eos_token_id=eos)
    sequences, _ = generate(model, prompts, max_new_tokens=6, pad_token_id=pad, eos_token_id=eos or [])
    assert sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("held", ["model", "drafter"])
def test_a_call_waits_for_its_turn(held):
    """Otherwise the call that ends first would restore the model's own attention during the other."""
    model, prompt, texts = tiny(0), torch.tensor([5, 6, 7]), []
    drafter = ModelDrafter(tiny(1, num_hidden_layers=1), num_nodes=6, depth=2, width=2)

    def call():
        texts.extend(lists(generate(model, [prompt], drafter=drafter, max_new_tokens=12)[0]))

    thread = threading.Thread(target=call)
    with in_turn(model if held == "model" else drafter):
        thread.start()
        thread.join(timeout=0.2)
        assert thread.is_alive() and not texts
    thread.join(timeout=60)
    assert texts == [greedy(model, prompt, 12)]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_waits_for_no_thread_of_its_parent():
    model, prompt = tiny(0), torch.tensor([5, 6, 7])
    expected, runs, end = greedy(model, prompt, 12), threading.Event(), threading.Event()

    def call(callback=None):
        return lists(generate(model, [prompt], max_new_tokens=12, callback=callback)[0]) == [expected]

    thread = threading.Thread(target=call, args=(lambda *new: (runs.set(), end.wait(timeout=60))[0],))
    thread.start()
    assert runs.wait(timeout=60)
    is_right = holds_in_a_child(call)
    end.set()
    thread.join()
    assert is_right

    def fork(*new):  # within the thread that holds the turn
        forked.append(holds_in_a_child(call))
        return True

    forked = []
    call(fork)
    assert forked == [True]


def test_turns_end_and_nest():
    model, drafter, turns = object(), object(), []

    def take(*things):
        def run():
            with in_turn(*things):
                turns.append(things)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(timeout=0.2 if drafter in things and not turns else 30)
        return thread

    with in_turn(model, drafter):
        with in_turn(drafter):  # nested, as from a callback
            pass
        waits = take(drafter)
        assert waits.is_alive() and not turns
        take(object())
        assert len(turns) == 1
    waits.join(timeout=30)
    with pytest.raises(ZeroDivisionError), in_turn(model):
        _ = 1 / 0
    take(model, drafter)
    assert len(turns) == 3


class Weight(torch.Tensor):
    """Stands for a weight of torchao."""


PREPARES = {"prepare_inputs_for_generation": print}
PER_TENSOR = type("PerTensor", (), {})()


def having(thing, **fields):
    vars(thing).update(fields)
    return thing


QAT = "activation_fake_quantizer", having(torch.nn.Identity(), config=SimpleNamespace(granularity=PER_TENSOR))


def peft(**fields):
    return {"peft_config": {"default": SimpleNamespace(**fields)}}


def quantized(model, granularity, **fields):
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.data.as_subclass(Weight), requires_grad=False)
    having(layer.weight, act_quant_kwargs=SimpleNamespace(granularity=granularity), **fields)
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["model", "draft model"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}), ".* got those of torch.ao"),
        (lambda model: model.set_output_embeddings(torch.nn.Sequential(model.lm_head)) or model, ".* got a Sequential"),
        (lambda model: setattr(model, "__class__", type("C", (type(model),), PREPARES)) or model, "the pre.* print"),
        (lambda model: having(model, **PREPARES), "the prepare.* got print"),  # as peft's soft prompts do
        (lambda model: having(model, **peft(is_prompt_learning=True)), "no virtual tokens beside the ids"),
        (lambda model: having(model, **peft(alora_invocation_tokens=[5])), ".* looks for its alora_invocation_tokens"),
        (lambda model: having(model, **peft(peft_type="LILY")), ".* which mixes the tokens of a pass"),
        (lambda model: having(model, _prefill=print), "the _prefill of transformers, got print"),
        (lambda model: having(model.config, use_bidirectional_attention=True) and model, "causal layers, got a config"),
        (lambda model: quantized(model, PER_TENSOR), ".* a Weight with one dynamic scale "),
        (lambda model: setattr(model.lm_head, *QAT) or model, ".* a Linear with one dynamic scale "),
    ],
)
def test_layers_that_are_refused(model, kind, change, message):
    with pytest.raises(ValueError, match=f"model: expected {message}"):
        if kind == "model":
            generate(change(tiny(0)), [[5, 6]], max_new_tokens=2)
        else:
            generate(model, [[5, 6]], drafter=ModelDrafter(change(tiny(0))), max_new_tokens=2)


def test_layers_that_look_alike_are_served():
    """Harmless adapters and per-row or constant scales are accepted."""
    model, prompt = tiny(0), torch.tensor([5, 6, 7])
    expected = greedy(model, prompt, 4)
    model.prepare_inputs_for_generation = model.prepare_inputs_for_generation
    having(quantized(model, object()), **peft(is_prompt_learning=False))
    assert lists(generate(model, [prompt], max_new_tokens=4)[0]) == [expected]
    check_scales(quantized(model, PER_TENSOR, act_quant_scale=torch.ones(())))


def test_token_types_that_are_embedded_are_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=64, n_head=1, n_layer=1)).eval()
    with pytest.raises(ValueError, match="input_ids: expected no token_type_ids, which GPT2LMHeadModel"):
        generate(model, {"input_ids": [[5, 6]], "token_type_ids": [[0, 0]]}, max_new_tokens=2)


class Proposes:
    def __init__(self, change):
        self.change = change

    def propose(self, tokens, lengths):
        trees = TreeBatch.from_trees([DraftTree.chain(2)] * lengths.shape[0])
        return self.change(torch.zeros(trees.parents.shape[0], dtype=torch.int64), trees)


def offsets(*values):
    return lambda tokens, trees: (tokens, replace(trees, cu_nodes=torch.tensor(values, dtype=torch.int32)), None)


def rootless(tokens, trees):
    cu_nodes = torch.tensor([0, 2, 2], dtype=torch.int32)
    trees = build_trees(torch.tensor([-1, 0], dtype=torch.int32), cu_nodes, max_nodes=2, max_depth=1)
    return torch.tensor([-1, 7]), trees, None


PROPOSALS = [
    (lambda tokens, trees: None, TypeError, "draft_tokens, a TreeBatch and draft_probs or None, got NoneType"),
    (lambda tokens, trees: (trees, tokens), TypeError, r"as a Tensor and a TreeBatch, got \(TreeBatch, Tensor\)"),
    (lambda tokens, trees: (tokens / 2, trees), ValueError, "integers as draft_tokens, got torch.float32"),
    (lambda tokens, trees: (tokens, trees, 3), TypeError, "draft_probs as a Tensor or None, got int"),
    (lambda tokens, trees: (tokens, trees, tokens), ValueError, r"draft_probs \[M, V\], got torch.int64 \[6\]"),
    (lambda tokens, trees: (tokens, trees, torch.ones(5, VOCAB)), ValueError, "draft_probs of 6 nodes"),
    (lambda tokens, trees: (tokens, trees, torch.ones(5, VOCAB), tokens[:2]), ValueError, r"draft_rows as .*, got"),
    (lambda tokens, trees: (tokens.to("meta"), trees), ValueError, "draft_tokens on cpu, got meta"),
    (lambda tokens, _: (tokens[:1], TreeBatch.from_trees([DraftTree.chain(0)])), ValueError, "2 trees .*, got 1 trees"),
    (rootless, ValueError, "trees of at least a root, got none for sequence 1"),
    (offsets(0, -3, 6), ValueError, r"cu_nodes that ascend from 0 to at most 6, got \[0, -3, 6\]"),
    (offsets(-1, 3, 6), ValueError, "cu_nodes that ascend"),
    (offsets(0, 3, 7), ValueError, "cu_nodes that ascend"),
]


@pytest.mark.parametrize(("change", "error", "message"), PROPOSALS)
def test_bad_drafters(model, change, error, message):
    with pytest.raises(error, match=f"drafter: expected .*{message}"):
        generate(model, [[1], [2]], drafter=Proposes(change), max_new_tokens=4)
    assert model.config._attn_implementation != "pagedtree"  # also after a failure


def test_bad_models(model):
    with pytest.raises(ValueError, match=r"evaluation mode.*model.eval\(\)"):
        generate(tiny(0).train(), [[1]], max_new_tokens=4)
    with pytest.raises(ValueError, match="evaluation mode"):
        ModelDrafter(tiny(0).train())
    with pytest.raises(ValueError, match=r"expected a head_dim in 16, .* got 48"):
        generate(tiny(0, head_dim=48), [[1]], max_new_tokens=4)
    for other, message in (
        (None, "transformers, got NoneType"),
        ("gpt2", "transformers, got str"),
        (torch.nn.DataParallel(model), r"transformers, got DataParallel; pass its \.module"),
        (model.model, "with its output layer, got LlamaModel"),
        (LlamaForSequenceClassification(model.config), "with its output layer, got LlamaForSequenceClassification"),
        (tiny(0).double(), r"float16 or bfloat16, got torch\.float64"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^generate: model: expected .*{message}"):
            generate(other, [[1]], max_new_tokens=4)


def test_no_prompts(model):
    assert generate(model, [], max_new_tokens=4)[0] == []
    assert generate(model, torch.zeros((0, 3), dtype=torch.int64), max_new_tokens=4)[0].shape == (0, 3)


def test_not_finite_logits_are_reported():
    broken = tiny(0)
    broken.lm_head.weight.data.fill_(float("nan"))
    with pytest.warns(UserWarning, match="sequence 0: the model's logits have NaN"):
        generate(broken, [[1]], max_new_tokens=2)
