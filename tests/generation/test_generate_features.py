"""The target's features that `generate` hands to drafters."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from support.drafters import Oracle
from support.models import generated, greedy, prompts_of, tiny, tiny_of

from pagedtree.generation.drafters import Drafter

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (5, 21, 1, 34)


class Recorder(Drafter):
    """Records features by sequence and position."""

    def __init__(self, oracle, layers):
        self.oracle, self.feature_layers = oracle, layers
        self.max_nodes = oracle.tree.num_nodes
        self.kept, self.forgotten, self.rows = {}, 0, None

    def propose(self, tokens, lengths):
        return self.oracle.propose(tokens, lengths)

    def read(self, rows):
        self.rows = rows
        for sequence, position, features in rows.known():
            self.keep(sequence, position, features)

    def observe(self, result):
        for sequence, position, features in self.rows.accepted(result):
            self.keep(sequence, position, features)

    def keep(self, sequence, position, features):
        rows = self.kept.setdefault(sequence.index, {})
        assert position in (0, sequence.shared_len) or position - 1 in rows
        rows.update((position + i, row) for i, row in enumerate(features))

    def forget(self, sequence):
        if len(sequence.tokens) < sequence.max_length:
            self.forgotten += 1
            del self.kept[sequence.index]


FEW_PAGES = {"n": 3, "page_size": 4, "num_pages": 40}


FEATURES = [("full", {"max_batch_tokens": 6, "page_size": 3}), ("full", {"page_size": 7, "num_pages": 14})]
FEATURES += [("full", FEW_PAGES), ("window", {}), ("softcap", {}), ("sinks", {})]


@pytest.mark.parametrize(("name", "options"), FEATURES)
def test_features_are_those_of_transformers(name, options):
    model, layers = tiny_of(name, num_hidden_layers=4), (2, 0)
    prompts = prompts_of(LENGTHS, seed=3)
    texts = [greedy(model, prompt) for prompt in prompts]
    drafter = Recorder(Oracle(texts, hit=0.7), layers)
    sequences, stats = generated(model, drafter, prompts, **options)
    n = options.get("n", 1)
    assert sequences == [text for text in texts for _ in range(n)]
    if "num_pages" in options:
        assert drafter.forgotten > 0
    assert stats.mean_accepted > 0.5
    for i, text in enumerate(sequences):
        with torch.no_grad():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer + 1][0] for layer in layers], dim=1)
        rows = drafter.kept[i]
        shared = (len(prompts[i // n]) - 1) // options.get("page_size", 16) * options.get("page_size", 16)
        # No pass has read the newest token, and another outcome received the features of shared tokens.
        assert set(range(shared, len(text) - 1)) <= set(rows) <= set(range(len(text) - 1))
        for position, row in rows.items():
            torch.testing.assert_close(row, expected[position], rtol=1e-3, atol=1e-3)


def test_layers_that_the_model_lacks_are_refused():
    model = tiny(0)
    for layers in ((2,), (-1, 0)):
        with pytest.raises(ValueError, match=r"feature_layers: expected layers of 0\.\.1"):
            generated(model, Recorder(Oracle([[1]], hit=1.0), layers), prompts_of((5,)), 2)
