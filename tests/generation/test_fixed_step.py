"""The decode step in fixed buffers behind `generate(cuda_graph=True)`.

The reference is the ordinary engine or, on a GPU, the uncaptured step, as other shapes may round half precision another
way.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.drafters import Oracle, Subject
from support.models import HYBRIDS, IS_5, LENGTHS, NEW_TOKENS, SAMPLING, VOCAB, generated, prompts_of, tiny, tiny_hybrid
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from pagedtree import Draft, SamplingParams, build_trees
from pagedtree.generation.decode_step import DecodeStep, Policy
from pagedtree.generation.drafters import Drafter, NgramDrafter
from pagedtree.generation.drafters.base import as_drafter
from pagedtree.generation.fixed_step import FixedStep
from pagedtree.generation.logprobs import LogprobReader
from pagedtree.generation.rules import Sampling, check_rule
from pagedtree.generation.scheduler import GeneratedSequence
from pagedtree.generation.token_options import TokenOptions, option_rows
from pagedtree.integrations.transformers import ModelDrafter, PagedCache, load_drafter
from pagedtree.integrations.transformers.model import TransformersModel
from pagedtree.testing import backends, use_backend

DEVICE = "cuda" if "cuda" in backends() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


@pytest.fixture(autouse=True)
def uncaptured(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(FixedStep, "captures", False)


FULL = Subject(lambda: tiny(0).to(DEVICE, DTYPE))


@pytest.fixture
def model():
    return FULL.model


CHECKPOINTS = Path(__file__).parents[2] / "examples" / "checkpoints"


DRAWN = {
    "draft chain": {"law": "iid", "num_nodes": 4, "depth": 3, "width": 1},
    "drawn tree": {"law": "swor", "num_nodes": 9, "branching": [3, 2]},
    "coupled tree": {"law": "coupled", "num_nodes": 9, "branching": [3, 2]},
}
NAMES = ["none", "ngram chain", "medusa", "medusa best first", "draft model", "itself", "EAGLE"]
if IS_5:  # transformers 4.57 writes MTP layers otherwise
    NAMES += ["MTP"]
CASES = [
    *[(name, None, "auto") for name in (*NAMES, "ngram")],
    *[(name, SAMPLING, "auto") for name in (*NAMES[:7], *DRAWN, "ngram")],
    ("ngram", SAMPLING, "rejection"),
    ("draft chain", SAMPLING, "block"),
    ("drawn tree", SAMPLING, "traversal"),
    ("medusa", SAMPLING, "typical"),
]


def drafter_of(subject, name):
    """The subjects' n-gram drafter has a memory, which a captured step cannot have."""
    if name == "ngram":
        return NgramDrafter(12)
    return ModelDrafter(subject.draft_model, **DRAWN[name]) if name in DRAWN else subject.drafter(name)


def both(model, drafter, prompts=None, **options):
    """Runs the ordinary engine (on a GPU: the uncaptured step) and the fixed step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FixedStep, "captures", False)
        plain, plain_stats = generated(model, drafter(), prompts, cuda_graph=DEVICE == "cuda", **options)
    fixed, stats = generated(model, drafter(), prompts, cuda_graph=True, **options)
    return plain, plain_stats, fixed, stats


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "params", "rule"), CASES)
def test_same_text_as_the_ordinary_engine(model, name, params, rule):
    drafter, options = lambda: drafter_of(FULL, name), {"params": params, "rule": rule, "page_size": 7}
    plain, plain_stats, fixed, stats = both(model, drafter, prompts_of(LENGTHS)[:3], **options)
    assert fixed == plain
    assert [s.accepted for s in stats.sequences] == [s.accepted for s in plain_stats.sequences]
    if name == "itself" and params is None:
        assert stats.mean_accepted > 1.0
    if DEVICE == "cpu" and name == "none":  # the fixed step also runs rows of idle sequences
        assert stats.packed_tokens > plain_stats.packed_tokens


COMING = ["drawn tree", "EAGLE", *[pytest.param(name, marks=pytest.mark.slow) for name in ("medusa", "draft model")]]


@pytest.mark.parametrize("name", COMING)
def test_sequences_come_and_go(model, name):
    """Ordinary passes and replays alternate: prompts in chunks, few pages, EOS, several outcomes."""
    prompts = prompts_of((9, 40, 13, 1, 8, 30), seed=2)
    options = {"params": SAMPLING, "n": 2, "page_size": 2}
    options["eos_token_id"] = generated(model, None, prompts, **options)[0][3][-8]
    few = {"num_pages": 50, "max_batch_tokens": 24}
    expected, _, fixed, stats = both(model, lambda: drafter_of(FULL, name), prompts, **options, **few)
    assert fixed == expected and stats.evictions > 0
    if DEVICE == "cpu":
        assert stats.sequences[3].finish_reason == "eos"
        assert expected == generated(model, None, prompts, **options)[0]


def test_trained_head_reads_accepted_features():
    """Accepted tokens are read with their features, or acceptance would differ."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "target").to(DEVICE)
    prompts = [list(b"import os\n\n\ndef read("), list(b"class Log:\n"), list(b"for line in ")]
    options = {"count": 40, "page_size": 3, "tree": None}
    plain, stats, fixed, found = both(
        model, lambda: load_drafter(CHECKPOINTS / "eagle", model, num_nodes=9, depth=4, width=3), prompts, **options
    )
    assert fixed == plain and stats.mean_accepted > 1
    assert [s.accepted for s in found.sequences] == [s.accepted for s in stats.sequences]


class NoConstants(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy), f"{func.__name__} of values of the host"
        return func(*args, **(kwargs or {}))


class AnyValue(TorchDispatchMode):
    """Returns 0 for each value that is read before the step is captured."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return 0 if func.overloadpacket.__name__ == "_local_scalar_dense" else func(*args, **(kwargs or {}))


class NoHost(TorchDispatchMode):
    """Refuses reads, sizes made from values, and host tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select"), name
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        assert all(x.device.type == "meta" for x in tensors), f"{name} with a tensor of the host"
        return result


@pytest.fixture
def no_values():
    """Creates tensors without values, whose reading raises."""
    with torch.device("meta"), torch.no_grad():
        yield


def step_without_host(model, drafter, sampling, requests=None, reader=None, is_recurrent=False):
    """Runs a step for three of at most four sequences without the host; returns it, its option rows, its history."""
    sequences = [GeneratedSequence(index, index, [1, 2, 3], max_length=20) for index in range(3)]
    with AnyValue():
        drafter.begin(4, sampling)
    history = torch.zeros((4, 20), dtype=torch.int64)
    cache = PagedCache(20, 4, torch.device("meta"), is_recurrent)
    packed = TransformersModel(model)
    rows = None if requests is None else requests(sequences)
    policy = Policy(sampling, [0], options=rows, logprobs=reader)
    step = FixedStep(DecodeStep(packed, cache, drafter, policy), history, sequences, 4)
    with packed.use():
        step.run()  # makes caches and constants, as before a capture
        with NoHost(), NoConstants():
            step.run()
    drafter.end()
    return step, rows, history


def seeded_by_zeros(rule, params):
    return Sampling(rule, params, torch.zeros(3, dtype=torch.int64))


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "params", "rule"), CASES)
def test_the_step_stays_on_the_device(no_values, name, params, rule):
    subject = Subject(lambda: tiny(0).to(torch.bfloat16))
    with AnyValue():
        drafter = as_drafter(drafter_of(subject, name))
    rule = check_rule(rule, params, drafter.draft_law, drafter.is_chain)
    step, *_ = step_without_host(subject.model, drafter, seeded_by_zeros(rule, params))
    assert step._report.shape == (4, step._result.trees.max_depth + 4)


@pytest.mark.skipif(not IS_5, reason="transformers 4.57 writes these models otherwise")
@pytest.mark.parametrize("name", [name for name in HYBRIDS if name != "kimi_linear"])  # refused without values
def test_recurrent_layers_stay_on_the_device(no_values, monkeypatch, name):
    """transformers asks whether a stream captures before it reads mask values."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model = tiny_hybrid(name).to(torch.bfloat16)
    step, *_ = step_without_host(model, NgramDrafter(8), seeded_by_zeros("greedy", None), is_recurrent=True)
    assert step._report.shape[0] == 4 and step.cache.states.num_states == 3


@pytest.mark.each_value
@pytest.mark.parametrize("is_processed", [None, False, True])
@pytest.mark.parametrize("temperature", [0.8, torch.tensor([0.0, 1.0, 0.7])])
def test_request_options_stay_on_the_device(no_values, is_processed, temperature):
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to("meta")
    params = SamplingParams(temperature=temperature, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5)
    rules = TokenOptions(bias={3: 1.0}, allowed_tokens=range(9), bad_words=[[1], [2, 3]])
    reader = None if is_processed is None else LogprobReader(3, is_processed)

    def rows_of(sequences):
        return option_rows(sequences, [rules] * 3, [7], [2] * 3, params, VOCAB, torch.device("meta"))

    model, sampling = tiny(0).to(torch.bfloat16), seeded_by_zeros("sampled", params)
    step, requests, history = step_without_host(model, NgramDrafter(8), sampling, rows_of, reader)
    before = {name: tensor for name, tensor in step.options.tensors().items() if tensor is not None}
    requests.refresh(step.options, [0, 2, 3, 3], history, [4, 5, 0, 0])
    assert len(before) == 11 and all(getattr(step.options, name) is tensor for name, tensor in before.items())
    if reader is not None:
        tokens = 4, step._result.trees.max_depth + 1
        assert [t.shape for t in step._found] == [tokens, tokens, (*tokens, 3), (*tokens, 3)]


def test_buffers_are_not_made_anew(model, monkeypatch):
    """The host writes `start` once a batch."""
    places, uploads, run = [], set(), FixedStep.run

    def noted(step):
        tensors = [step.rows.tensor, step.start.tensor, step.page_table.tensor, step.history, *step.cache.tensors()]
        tensors += [step.drafter._tables[step.batch_size].tensor, *step.drafter.cache.tensors()]
        places.append((step.rows.tensor.shape[0], tuple(tensor.data_ptr() for tensor in tensors)))
        uploads.add(tuple(step.start._host.tolist()))
        run(step)

    if FixedStep.captures:
        pytest.skip("a captured graph could not do otherwise")
    monkeypatch.setattr(FixedStep, "run", noted)
    drafter = ModelDrafter(FULL.draft_model, num_nodes=6)
    generated(model, drafter, prompts_of((5, 9, 3)), 80, page_size=2, cuda_graph=True)
    assert len(places) > 10
    assert len(set(places)) == len(uploads) == len({size for size, _ in places})


@pytest.mark.skipif("simt" not in backends(), reason="a build without simt")
@pytest.mark.parametrize("params", [None, replace(SAMPLING, repetition_penalty=1.5, frequency_penalty=0.5)])
def test_the_cuda_kernels_under_it(monkeypatch, params):
    """simt executes the kernels that a graph would hold."""
    monkeypatch.setattr(FixedStep, "captures", False)
    small = tiny(0, num_hidden_layers=1).to(torch.float16)
    phrase = [3, 9, 4, 7]
    words = {"params": params, "count": 5}
    if params is not None:
        words |= {"options": TokenOptions(bias={9: 1.0}, bad_words=[[4]]), "logprobs": 2, "logprobs_mode": "processed"}
    prompts = [[*phrase, *phrase], [5, *phrase, 5]]
    with use_backend("simt"):
        texts, stats = generated(small, NgramDrafter(4), prompts, page_size=4, cuda_graph=True, **words)
    expected, plain = generated(small, None, prompts, **words)
    assert texts == expected
    for one, other in zip(stats.sequences, plain.sequences, strict=True):
        if one.logprobs is not None:
            pair = torch.tensor([one.logprobs.logprobs, other.logprobs.logprobs])
            torch.testing.assert_close(pair[0], pair[1], atol=1e-2, rtol=0.0)  # float16


def test_refuses_options_that_cannot_be_captured(monkeypatch, model):
    for message, keywords in (
        (r"cuda_graph: expected a drafter of NoDrafter, .* got Oracle", {"drafter": Oracle([[1, 2, 3]], 1.0)}),
        ("cuda_graph: expected a drafter of NoDrafter, .* got BlockDrafter", {"drafter": FULL.drafter("block")}),
        (r"cuda_graph: expected NgramDrafter\(remember=0\), .* got 3", {"drafter": NgramDrafter(4, remember=3)}),
        ("share_prefix: expected None or False with cuda_graph", {"share_prefix": True}),
    ):
        with pytest.raises(ValueError, match=message):
            generated(model, cuda_graph=True, **keywords)
    monkeypatch.setattr(FixedStep, "captures", True)
    with pytest.raises(ValueError, match="cuda_graph: expected a model on a CUDA device, got one on cpu"):
        generated(tiny(0), cuda_graph=True)


class Repeats(Drafter):
    max_nodes, is_chain, is_capturable = 4, True, True

    def propose(self, tokens, lengths):
        last = tokens.gather(1, lengths.long().clamp(min=1)[:, None] - 1)
        batch = lengths.shape[0]
        parents = torch.arange(-1, 3, dtype=torch.int32, device=tokens.device).repeat(batch)
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=tokens.device) * 4
        return Draft(last.repeat(1, 4).flatten(), build_trees(parents, offsets, max_nodes=4, max_depth=3))


def test_custom_drafter_in_fixed_steps(model):
    prompts = [[5, 5, 5, 5], [1, 2, 3]]
    plain, _, fixed, stats = both(model, Repeats, prompts)
    assert fixed == plain and stats.steps <= NEW_TOKENS

    class Changed(Repeats):  # does not declare it
        pass

    class ChangedLookup(NgramDrafter):
        pass

    for drafter in (Changed(), ChangedLookup(4)):
        with pytest.raises(ValueError, match=f"cuda_graph: expected .* got {type(drafter).__name__}"):
            generated(model, drafter, prompts, cuda_graph=True)
