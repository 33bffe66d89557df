"""A decode step in fixed buffers, independent of the host: replayed as a CUDA graph or, without a GPU, called again."""

from __future__ import annotations

import pytest
from support.devices import slow_on_simt

from pagedtree.check.cases.capture import KINDS, STEPS, Engine, captured


@slow_on_simt
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_replays_equal_eager_steps(backend, device, kind):
    """One captured step serves other prompts, lengths, trees, seeds, temperatures."""
    seeds = (1, 2)
    engine = Engine(device, seeds[0], *kind)
    replay = captured(engine, device)
    accepted = 0
    for seed in seeds:
        eager = Engine(device, seed, *kind)
        engine.load(eager)
        for i in range(STEPS):
            for member in (eager, engine):
                member.prepare(i)
            eager.step()
            replay()
        expected = eager.results()
        for name, tensor in engine.results().items():
            assert tensor.equal(expected[name]), name
        accepted += int(eager.accepted)
        assert int(eager.start.min()) >= STEPS
    assert accepted > 5
