"""What `generate` refuses, and its smallest inputs."""

from __future__ import annotations

import inspect
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from generate_case import VOCAB, greedy, holds_in_a_child, lists, tiny
from transformers import BatchEncoding

from pagedtree import DraftTree, SamplingParams, TreeBatch, build_trees
from pagedtree.integrations.transformers import ModelDrafter, generate
from pagedtree.integrations.transformers.turns import in_turn

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return tiny(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"n": 0}, "n: expected at least 1, got 0"),
        ({"page_size": 0}, "page_size: expected at least 1, got 0"),
        ({"max_batch_tokens": 0}, "max_batch_tokens: expected at least 1, got 0"),
        ({"max_sequences": 0}, "max_sequences: expected at least 1, got 0"),
        ({"max_new_tokens": True}, "max_new_tokens: expected an integer, got True"),
        ({"num_pages": 1.5}, "num_pages: expected an integer, got 1.5"),
        ({"cuda_graph": "yes"}, "cuda_graph: expected True, False or None, got 'yes'"),
        ({"attention_mask": "x"}, r"attention_mask: expected zeros and ones \[B, L\]"),
        ({"stop_strings": 3}, "stop_strings: expected texts that are not empty, got 3"),
        (
            {"rule": "lucky"},
            "rule: expected one of auto, greedy, sampled, rejection, block, traversal, typical, got 'lucky'",
        ),
        ({"rule": "sampled"}, 'rule: expected params for every rule but "greedy"'),
        ({"seeds": [1, 2]}, r"seeds: expected 1 integers, got torch.int64 \[2\]"),
        ({"seeds": [0.5]}, "seeds: expected 1 integers, got torch.float32"),
        ({"input_ids": [[]]}, r"input_ids: expected at least one token .* got \[\] as prompt 0"),
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, r"input_ids: expected integers \[B, L\]"),
        ({"input_ids": torch.zeros(1, 3)}, r"input_ids: expected integers \[B, L\], got torch.float32"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask: expected none with a list"),
        (
            {"input_ids": torch.ones(1, 3, dtype=torch.int64), "attention_mask": torch.ones(1, 2)},
            r"attention_mask: expected \[1, 3\], got \[1, 2\]",
        ),
        ({"params": SamplingParams(top_p=torch.ones(3))}, r"params: expected top_p of 1 prompts, got \[3\]"),
        ({"params": SamplingParams(top_p=torch.ones(1, 3))}, r"params: expected top_p of 1 prompts, got \[1, 3\]"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: expected an integer, got 2.5"),
        (
            {"input_ids": [[1], [2, VOCAB]]},
            f"input_ids: expected ids of the model's {VOCAB} tokens, got 128 in prompt 1",
        ),
        ({"input_ids": torch.tensor([[-1, 2]])}, "input_ids: expected ids of .* got -1 in prompt 0"),
        ({"input_ids": [[1, 2.0]]}, r"input_ids: expected at least one token .* got \[1, 2.0\] as prompt 0"),
        ({"input_ids": [[1, True]]}, r"input_ids: expected at least one token .* got \[1, True\] as prompt 0"),
        ({"input_ids": torch.ones(1, 3, dtype=torch.bool)}, r"input_ids: expected integers .* got torch.bool"),
        ({"input_ids": [1, 2, 3]}, r"input_ids: expected a list of prompts, got a list of ids; .* pass \[input_ids\]"),
        ({"input_ids": "text"}, "input_ids: expected token ids, got text"),
        ({"input_ids": ["text"]}, "input_ids: expected token ids, got text"),
        ({"input_ids": {"ids": [[1]]}}, r"input_ids: expected input_ids and attention_mask in the dict, got \['ids'\]"),
        ({"input_ids": {"attention_mask": [[1]]}}, r"in the dict, got \['attention_mask'\]"),
        ({"input_ids": {"input_ids": [[1]], "pixel_values": 3}}, "expected input_ids and attention_mask in the dict"),
        ({"input_ids": {"input_ids": [[1, 2]], "token_type_ids": [[0, 1]]}}, "expected token_type_ids of 0"),
        ({"input_ids": {"input_ids": [1, 2], "token_type_ids": [0, 1]}}, "expected token_type_ids of 0"),
        ({"input_ids": {"input_ids": [[1, 2]], "attention_mask": 1}}, "attention_mask: expected an entry for each"),
        ({"input_ids": {"input_ids": [[1, 2]], "attention_mask": [[1]]}}, "attention_mask: expected an entry for each"),
        (
            {"input_ids": {"input_ids": [[1]]}, "attention_mask": torch.ones(1, 1)},
            "attention_mask: expected none beside a BatchEncoding",
        ),
        ({"eos_token_id": [1, 2.5]}, "eos_token_id: expected an integer, got 2.5"),
        ({"eos_token_id": torch.tensor([0.5])}, "eos_token_id: expected an integer, got 0.5"),
        ({"pad_token_id": 0.5}, "pad_token_id: expected an integer, got 0.5"),
        ({"stop_strings": "x"}, "tokenizer: expected the model's tokenizer with stop_strings, got NoneType"),
        ({"stop_strings": ["x", ""]}, r"stop_strings: expected texts that are not empty, got \['x', ''\]"),
    ],
)
def test_bad_arguments(model, change, message):
    arguments = {"input_ids": [[1, 2, 3]], "max_new_tokens": 4, **change}
    with pytest.raises(ValueError, match=message):
        generate(model, arguments.pop("input_ids"), **arguments)


WRONG_KINDS = [
    object(), 1.5, "x", b"x", -1, 3, 2**70, float("nan"), True, None, [], [object()], (1, 2), {}, {1: 2}, range(3),
    torch.ones(2), torch.ones(2, 2, dtype=torch.bool),
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in inspect.signature(generate).parameters if name != "model"])
def test_any_kind_of_argument_is_taken_or_refused_by_name(model, name):
    for value in WRONG_KINDS:
        try:
            generate(model, **{"input_ids": [[1, 2]], "max_new_tokens": 2, name: value})
        except (TypeError, ValueError) as error:
            assert name in str(error), value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": {}}, "params: expected SamplingParams or None, got dict"),
        ({"callback": 3}, "callback: expected a function or None, got int"),
        ({"shards": 3}, "shards: expected VocabShards or None, got int"),
        ({"streamer": 3}, "streamer: expected a streamer of transformers or None, got int"),
        ({"logits_processor": 3}, "logits_processor: expected a list of transformers' processors or None, got int"),
    ],
)
def test_objects_of_another_type(model, change, message):
    with pytest.raises(TypeError, match=message):
        generate(model, [[1]], max_new_tokens=4, **change)


def test_what_tokenizers_return(model):
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
        assert lists(sequences) == expected[1:]  # of a single text
        assert lists(generate(model, kind({"input_ids": prompts[0]}), max_new_tokens=4)[0]) == expected[:1]
        for array in (torch.tensor, np.array):
            batch = {"input_ids": array(padded), "attention_mask": array(mask), "token_type_ids": array(mask) * 0}
            sequences, _ = generate(model, kind(batch), max_new_tokens=4)
            assert sequences.tolist() == [expected[0], [0, *expected[1]]]
    assert lists(generate(model, [np.array(prompt) for prompt in prompts], max_new_tokens=4)[0]) == expected


@pytest.mark.parametrize(("pad", "eos"), [(3, None), (3, [3]), (3, [4, 5]), (None, None)])
def test_padding_without_a_mask_is_transformers(model, pad, eos):
    """A pad token in a tensor is padding, unless it ends sequences, too."""
    prompts = torch.tensor([[3, 3, 5, 6, 7], [8, 9, 3, 10, 11]])
    expected = model.generate(prompts, max_new_tokens=6, do_sample=False, pad_token_id=pad, eos_token_id=eos)
    sequences, _ = generate(model, prompts, max_new_tokens=6, pad_token_id=pad, eos_token_id=eos or [])
    assert sequences.tolist() == expected.tolist()


def test_tensors_of_no_dimension(model):
    """They are what they hold."""
    prompt = torch.tensor([5, 6, 7])
    expected = greedy(model, prompt, 4)
    sequences, _ = generate(
        model, [prompt], max_new_tokens=torch.tensor(4), eos_token_id=torch.tensor(1), pad_token_id=torch.tensor(2)
    )
    assert lists(sequences) == [expected]
    token = greedy(model, prompt[:1], 4)
    assert lists(generate(model, [prompt[0]], max_new_tokens=4)[0]) == [token]
    drawn = [
        lists(generate(model, [prompt], max_new_tokens=4, params=SamplingParams(temperature=t), seeds=[3])[0])
        for t in (1.5, torch.tensor(1.5))
    ]
    assert drawn[0] == drawn[1] != [expected]


def test_params_of_each_prompt_are_those_of_all_its_outcomes(model):
    prompts, temperatures = [[5, 6, 7], [8, 9]], [0.01, 3.0]
    params = SamplingParams(temperature=torch.tensor(temperatures))
    sequences, _ = generate(model, prompts, max_new_tokens=8, params=params, n=2, seeds=[1, 2, 3, 4])
    alone = []
    for b, temperature in enumerate(temperatures):
        own = SamplingParams(temperature=temperature)
        alone += lists(
            generate(model, prompts[b : b + 1], max_new_tokens=8, params=own, n=2, seeds=[2 * b + 1, 2 * b + 2])[0]
        )
    assert lists(sequences) == alone
    assert alone[0] == alone[1] == greedy(model, torch.tensor(prompts[0]), 8) and alone[2] != alone[3]


def test_the_generation_config_says_what_is_not_given():
    model = tiny(0)
    prompt, padded = torch.tensor([20, 30, 40, 50]), torch.tensor([[3, 3, 20, 30, 40, 50]])
    text = greedy(model, prompt, 6)
    with_threes = greedy(model, padded[0], 6)
    assert with_threes[6:9] != text[4:7]
    model.generation_config.pad_token_id = 3
    assert generate(model, padded, max_new_tokens=6)[0].tolist() == [[3, 3, *text]]
    assert generate(model, padded, max_new_tokens=6, pad_token_id=9)[0].tolist() == [with_threes]
    model.generation_config.eos_token_id = text[6]
    assert lists(generate(model, [prompt], max_new_tokens=6)[0]) == [text[:7]]
    assert lists(generate(model, [prompt], max_new_tokens=6, eos_token_id=[])[0]) == [text]


def test_two_threads_with_one_model_take_turns():
    """Without turns the call that ends first gives the model its own attention back in the middle of the other."""
    model, draft = tiny(0), tiny(1, num_hidden_layers=1)
    prompt = torch.tensor([5, 6, 7])
    expected = greedy(model, prompt, 12)
    drafter = ModelDrafter(draft, num_nodes=6, depth=2, width=2)
    first_runs, second_runs = threading.Event(), threading.Event()
    active, outcomes = [], {}

    def watch(name):
        def callback(sequence, tokens):
            active.append(name)
            first_runs.set()
            if len(active) <= 3:
                second_runs.wait(timeout=0.1)  # lets the other go on, if it may

        return callback

    def call(name, drafter):
        if name == "second":
            assert first_runs.wait(timeout=30)
        try:
            sequences, _ = generate(model, [prompt], drafter=drafter, max_new_tokens=12, callback=watch(name))
            outcomes[name] = sequences[0].tolist()
        except Exception as error:
            outcomes[name] = error
        second_runs.set()

    threads = [threading.Thread(target=call, args=each) for each in (("first", drafter), ("second", None))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert outcomes == {"first": expected, "second": expected}
    assert active == sorted(active)  # all of the first, then all of the second
    assert model.config._attn_implementation == draft.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_waits_for_no_thread_of_its_parent():
    """One is in the middle of a call with the same model, which has our attention then."""
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

    def fork(*new):  # by the thread that has the turn: the call within it nests, as one in a callback
        forked.append(holds_in_a_child(call))
        return True

    forked = []
    call(fork)
    assert forked == [True]


def test_turns_end_and_nest():
    model, drafter = object(), object()
    taken = []

    def take(*things):
        with in_turn(*things):
            taken.append(things)

    with in_turn(model, drafter):
        with in_turn(drafter):  # a call of its own from a callback
            pass
        thread = threading.Thread(target=take, args=(drafter,))
        thread.start()
        thread.join(timeout=0.2)
        assert thread.is_alive() and not taken
        take(object())
    thread.join(timeout=30)
    assert len(taken) == 2
    with pytest.raises(ZeroDivisionError), in_turn(model):
        _ = 1 / 0
    thread = threading.Thread(target=take, args=(model, drafter))
    thread.start()
    thread.join(timeout=30)
    assert len(taken) == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["model", "draft model"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}),
            r"layers that treat each token by itself, got those of torch.ao.quantization \(quantize_dynamic",
        ),
        (
            lambda model: model.set_output_embeddings(torch.nn.Sequential(model.lm_head)) or model,
            "an embedding and an output layer with a weight, got a Sequential",
        ),
    ],
)
def test_layers_that_are_refused(model, kind, change, message):
    with pytest.raises(ValueError, match=f"model: expected {message}"):
        if kind == "model":
            generate(change(tiny(0)), [[5, 6]], max_new_tokens=2)
        else:
            generate(model, [[5, 6]], drafter=ModelDrafter(change(tiny(0))), max_new_tokens=2)


def test_bad_drafters(model):
    class Short:
        def propose(self, tokens, lengths):
            return torch.tensor([-1]), TreeBatch.from_trees([DraftTree.chain(0)]), None

    class Rootless:
        def propose(self, tokens, lengths):
            cu_nodes = torch.tensor([0, 2, 2], dtype=torch.int32)
            trees = build_trees(torch.tensor([-1, 0], dtype=torch.int32), cu_nodes, max_nodes=2, max_depth=1)
            return torch.tensor([-1, 7]), trees, None

    with pytest.raises(ValueError, match="drafter: expected trees of at least a root, got none for sequence 1"):
        generate(model, [[1], [2]], drafter=Rootless(), max_new_tokens=4)
    with pytest.raises(TypeError, match="drafter: expected an object with propose"):
        generate(model, [[1]], drafter=3, max_new_tokens=4)
    with pytest.raises(ValueError, match="drafter: expected 2 trees and one token per node, got 1 trees"):
        generate(model, [[1], [2]], drafter=Short(), max_new_tokens=4)

    class Chains:
        """Its proposal, changed."""

        def __init__(self, change):
            self.change = change

        def propose(self, tokens, lengths):
            trees = TreeBatch.from_trees([DraftTree.chain(2)] * lengths.shape[0])
            return self.change(torch.zeros(trees.parents.shape[0], dtype=torch.int64), trees)

    def offsets(values):
        return lambda tokens, trees: (tokens, replace(trees, cu_nodes=torch.tensor(values, dtype=torch.int32)), None)

    for change, error, message in (
        (lambda tokens, trees: None, TypeError, "draft_tokens, a TreeBatch and draft_probs or None, got NoneType"),
        (lambda tokens, trees: (trees, tokens), TypeError, r"as a Tensor and a TreeBatch, got \(TreeBatch, Tensor\)"),
        (lambda tokens, trees: (tokens / 2, trees), ValueError, "integers as draft_tokens, got torch.float32"),
        (lambda tokens, trees: (tokens, trees, 3), TypeError, "draft_probs as a Tensor or None, got int"),
        (lambda tokens, trees: (tokens, trees, tokens), ValueError, r"draft_probs \[M, V\], got torch.int64 \[6\]"),
        (lambda tokens, trees: (tokens, trees, torch.ones(5, VOCAB)), ValueError, "draft_probs of 6 nodes"),
        (
            lambda tokens, trees: (tokens, trees, torch.ones(5, VOCAB), tokens[:2]),
            ValueError,
            r"draft_rows as integers \[6\], got torch.int64 \[2\]",
        ),
        (lambda tokens, trees: (tokens.to("meta"), trees), ValueError, "draft_tokens on cpu, got meta"),
        (offsets([0, -3, 6]), ValueError, r"cu_nodes that ascend from 0 to at most 6, got \[0, -3, 6\]"),
        (offsets([-1, 3, 6]), ValueError, "cu_nodes that ascend"),
        (offsets([0, 3, 7]), ValueError, "cu_nodes that ascend"),
        (offsets([0, 3, -6]), ValueError, "cu_nodes that ascend"),
    ):
        with pytest.raises(error, match=f"drafter: expected .*{message}"):
            generate(model, [[1], [2]], drafter=Chains(change), max_new_tokens=4)
    # The model is as it was, also after a failure.
    assert model.config._attn_implementation != "pagedtree"


def test_bad_models(model):
    with pytest.raises(ValueError, match=r"evaluation mode.*model.eval\(\)"):
        generate(tiny(0).train(), [[1]], max_new_tokens=4)
    with pytest.raises(ValueError, match=r"expected a head_dim in 64, .* got 32"):
        generate(tiny(0, head_dim=32), [[1]], max_new_tokens=4)


def test_no_prompts(model):
    assert generate(model, [], max_new_tokens=4)[0] == []
    assert generate(model, torch.zeros((0, 3), dtype=torch.int64), max_new_tokens=4)[0].shape == (0, 3)


def test_not_finite_logits_are_reported():
    broken = tiny(0)
    broken.lm_head.weight.data.fill_(float("nan"))
    with pytest.warns(UserWarning, match="sequence 0: the model's logits have NaN"):
        generate(broken, [[1]], max_new_tokens=2)
