"""`generate(rule=...)` and the engine: greedy text, any batch, evictions."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from generate_case import LENGTHS, SAMPLING, generated, greedy, prompts_of, tiny
from toy_text_case import DRAFTERS

from pagedtree import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

IN_ANY_BATCH = [("sampled", "coupled tree"), ("rejection", "swor tree"), ("traversal", "iid tree")]
FITTING = [
    *IN_ANY_BATCH,
    *[("rejection", "n-gram"), ("block", "top-k chain"), ("block", "iid chain"), ("traversal", "swor tree")],
]


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
    for draft in (draft_model, model):
        made = DRAFTERS[drafter](model, draft)
        texts, stats = generated(model, made, rule=rule, params=SamplingParams(temperature=0.0))
        assert texts == greedy_texts
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
        made, fixed = DRAFTERS[drafter](model, draft_model), {"params": SAMPLING, "n": 2, "page_size": 7}
        return generated(model, made, prompts, 14, rule=rule, seeds=seeds, **fixed, **options)

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
