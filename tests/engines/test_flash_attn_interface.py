"""The FlashAttention adapter against the sources of flash-attn, which are read and never imported."""

from __future__ import annotations

import pytest
from package_sources import Sources, own_parameters

from pagedtree.integrations import flash_attn

SOURCES = Sources("flash_attn")


@pytest.mark.parametrize("name", flash_attn.__all__)
def test_functions_take_the_same_arguments(name) -> None:
    theirs = SOURCES.parameters("flash_attn_interface.py", name)
    assert list(own_parameters(getattr(flash_attn, name)).items()) == list(theirs.items())
