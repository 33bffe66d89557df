"""The FlashAttention adapter against flash-attn's sources, without an import."""

from __future__ import annotations

import inspect

import pytest
from package_sources import Sources, own_parameters

from pagedtree.integrations import flash_attn

SOURCES = Sources("flash_attn")


@pytest.mark.parametrize("name", flash_attn.__all__)
def test_functions_take_the_same_arguments(name) -> None:
    theirs = SOURCES.parameters("flash_attn_interface.py", name)
    ours = list(own_parameters(getattr(flash_attn, name)).items())
    assert ours[: len(theirs)] == list(theirs.items())
    # The rest are FlashAttention 3's names, keywords here.
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert all(parameters[key].kind is inspect.Parameter.KEYWORD_ONLY for key, _ in ours[len(theirs) :])
