"""The FlashInfer adapter against the sources of FlashInfer's wheel, without an import."""

from __future__ import annotations

import pytest
from package_sources import Sources, own_parameters

from pagedtree.integrations import flashinfer
from pagedtree.integrations.flashinfer import mla
from pagedtree.integrations.flashinfer.paged import HINTS
from pagedtree.integrations.flashinfer.planning import TYPES

SOURCES = Sources("flashinfer")
WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"


def test_functions_take_the_same_arguments() -> None:
    for path, name in (
        ("sampling.py", "chain_speculative_sampling"),
        ("page.py", "append_paged_kv_cache"),
        ("page.py", "append_paged_mla_kv_cache"),
        ("page.py", "get_batch_indices_positions"),
        ("page.py", "get_seq_lens"),
        ("cascade.py", "merge_state"),
        ("cascade.py", "merge_state_in_place"),
        ("cascade.py", "merge_states"),
    ):
        theirs = SOURCES.parameters(path, name, last=True)
        assert list(own_parameters(getattr(flashinfer, name)).items()) == list(theirs.items()), name


def test_plan_takes_the_same_arguments() -> None:
    theirs = SOURCES.parameters("prefill.py", f"{WRAPPER}.plan")
    ours = own_parameters(flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan)
    assert list(ours.items()) == list(theirs.items())[: len(ours)]
    assert set(theirs) >= HINTS | {*TYPES}
    # Others are refused unless they have their default, which must be false.
    assert not any(default for name, default in theirs.items() if name not in HINTS | {*TYPES} | set(ours))


def test_run_takes_the_same_arguments() -> None:
    theirs = SOURCES.parameters("prefill.py", f"{WRAPPER}.run", last=True)
    ours = own_parameters(flashinfer.BatchPrefillWithPagedKVCacheWrapper.run)
    assert ours.items() <= theirs.items()
    assert all(default is None for name, default in theirs.items() if name not in ours)


@pytest.mark.parametrize("name", ["forward", "forward_return_lse"])
def test_older_names_take_the_same_arguments(name) -> None:
    theirs = SOURCES.parameters("prefill.py", f"{WRAPPER}.{name}")
    ours = own_parameters(getattr(flashinfer.BatchPrefillWithPagedKVCacheWrapper, name))
    assert list(ours.items())[: len(theirs)] == list(theirs.items())
    text = SOURCES.text("prefill.py")
    assert "begin_forward = plan" in text and "run_return_lse = functools.partialmethod(run, return_lse=True)" in text


def test_latent_wrapper_takes_the_same_arguments() -> None:
    path, wrapper = "mla/_batch_mla/_wrapper.py", mla.BatchMLAPagedAttentionWrapper
    for name in ("plan", "run"):
        theirs = SOURCES.parameters(path, f"{wrapper.__name__}.{name}", last=True)
        ours = own_parameters(getattr(wrapper, name))
        assert set(ours) <= set(theirs)
        positional = [key for key in ours if key not in ("query", "kv_cache")]
        assert positional == list(theirs)[: len(positional)], name
    # plan() refuses others unless they are false; these are dropped before.
    plan = SOURCES.parameters(path, f"{wrapper.__name__}.plan", last=True)
    defaults = {key: value for key, value in plan.items() if key not in own_parameters(wrapper.plan)}
    assert not any(value not in ("none", "default") and value for value in defaults.values())


def test_constructor_takes_the_same_arguments() -> None:
    theirs = SOURCES.parameters("prefill.py", f"{WRAPPER}.__init__")
    assert list(theirs)[:3] == list(own_parameters(flashinfer.BatchPrefillWithPagedKVCacheWrapper.__init__))
    assert not any(default for name, default in list(theirs.items())[3:] if name != "backend")


def test_masks_are_packed_with_the_lowest_bit_first() -> None:
    assert 'bitorder="little"' in SOURCES.text("prefill.py")
