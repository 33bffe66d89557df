"""`generate(rule=...)` and the engine: greedy text, any batch, evictions, and what does not fit together."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from generate_case import LENGTHS, NEW_TOKENS, SAMPLING, greedy, lists, prompts_of, tiny
from toy_text_case import DRAFTERS, PROMPT, TOY

from pagedtree import SamplingParams
from pagedtree.integrations.transformers import ModelDrafter, generate

pytestmark = pytest.mark.usefixtures("one_thread")

IN_ANY_BATCH = [("sampled", "coupled tree"), ("rejection", "swor tree"), ("traversal", "iid tree")]
FITTING = [("sampled", "coupled tree"), ("rejection", "n-gram"), ("rejection", "swor tree"), ("block", "top-k chain"),
           ("block", "iid chain"), ("traversal", "iid tree"), ("traversal", "swor tree")]  # fmt: skip


@pytest.fixture(scope="module")
def toy():
    return tiny(0, **TOY)


@pytest.fixture(scope="module")
def model():
    return tiny(0)


@pytest.fixture(scope="module")
def draft_model():
    return tiny(1, num_hidden_layers=1)


@pytest.fixture(scope="module")
def greedy_texts(model):
    return [greedy(model, prompt) for prompt in prompts_of(LENGTHS)]


@pytest.mark.parametrize(("rule", "drafter"), FITTING)
def test_temperature_0_is_greedy(model, draft_model, greedy_texts, rule, drafter):
    prompts = prompts_of(LENGTHS)
    for draft in (draft_model, model):
        sequences, stats = generate(
            model, prompts, drafter=DRAFTERS[drafter](model, draft), max_new_tokens=NEW_TOKENS, rule=rule,
            params=SamplingParams(temperature=0.0),
        )  # fmt: skip
        assert lists(sequences) == greedy_texts
    assert stats.mean_accepted > 1.0 or drafter == "n-gram"


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [  # in the core suite each law once; the other rules differ within the verify ops alone
        pytest.param(*case, marks=[] if case in IN_ANY_BATCH else pytest.mark.slow)
        for case in [*FITTING, ("typical", "top-k tree")]
    ],
)
def test_rules_in_any_batch(model, draft_model, rule, drafter):
    """The same seeds give the same text, in any batch; with few pages too, where evictions may change it."""
    prompts = prompts_of(LENGTHS)

    def texts(prompts, seeds, **options):
        sequences, stats = generate(
            model, prompts, drafter=DRAFTERS[drafter](model, draft_model), max_new_tokens=14, params=SAMPLING,
            rule=rule, n=2, seeds=seeds, page_size=7, **options,
        )  # fmt: skip
        return lists(sequences), stats

    whole, _ = texts(prompts, range(8))
    alone = [texts([prompt], range(2 * b, 2 * b + 2))[0] for b, prompt in enumerate(prompts)]
    assert whole == [text for pair in alone for text in pair]
    few = {"num_pages": 14, "max_batch_tokens": 16}
    (evicted, stats), (again, _) = texts(prompts, range(8), **few), texts(prompts, range(8), **few)
    assert evicted == again and stats.evictions > 0
    assert [len(text) for text in evicted] == [len(text) for text in whole]
    eos = whole[0][len(prompts[0]) + 9]
    ended, stats = texts(prompts, range(8), eos_token_id=eos)
    for text, full, prompt in zip(ended, whole, [prompt for prompt in prompts for _ in range(2)], strict=True):
        end = full.index(eos, len(prompt)) + 1 if eos in full[len(prompt) :] else len(full)
        assert text == full[:end]
    assert stats.sequences[0].finish_reason == "eos"


@pytest.mark.parametrize(
    ("rule", "drafter", "params", "message"),
    [
        ("lucky", "none", SAMPLING, "rule: expected one of auto, greedy, sampled, .* got 'lucky'"),
        ("rejection", "none", None, "rule: expected params for every rule but \"greedy\" .* got 'rejection' with None"),
        ("greedy", "none", SAMPLING, "rule: expected params .* none for .* got 'greedy'"),
        ("block", "top-k tree", SAMPLING, 'rule: "block" verifies chains, got a drafter whose trees branch'),
        ("block", "iid tree", SAMPLING, 'rule: "block" verifies chains'),
        ("block", "Medusa", SAMPLING, 'rule: "block" verifies chains'),
        (
            "traversal",
            "top-k tree",
            SAMPLING,
            "rule: \"traversal\" weighs drafts that were drawn .* draft_law 'onehot'",
        ),
        ("traversal", "none", SAMPLING, 'rule: "traversal" weighs drafts that were drawn'),
        ("rejection", "coupled tree", SAMPLING, "rule: drafts coupled to the noise .* alone, got 'rejection'"),
        ("auto", "coupled tree", None, "rule: drafts coupled to the noise .* alone, got 'greedy'"),
        ("auto", "iid tree", None, 'drafter: law "iid" draws by the params of `generate`, got None'),
    ],
)
def test_what_does_not_fit_is_refused(toy, rule, drafter, params, message):
    with pytest.raises(ValueError, match=message):
        generate(toy, [PROMPT], drafter=DRAFTERS[drafter](toy, toy), max_new_tokens=2, params=params, rule=rule)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"law": "lucky"}, "law: expected one of topk, iid, swor, coupled, got 'lucky'"),
        ({"branching": [2]}, 'branching: expected None under law "topk"'),
        ({"law": "iid", "branching": []}, r"branching: expected levels of at least 1 child each, got \[\]"),
        ({"law": "iid", "branching": [2, 0]}, r"branching: expected levels of at least 1 child each, got \[2, 0\]"),
    ],
)
def test_bad_draft_laws(toy, options, message):
    with pytest.raises(ValueError, match=message):
        ModelDrafter(toy, **options)
