"""Fixtures of several tests of `generate`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("transformers") else ["test_*"]


@pytest.fixture(autouse=True, scope="module")
def always_one_thread(one_thread: None) -> None:
    """Serves all tests of this folder."""


@pytest.fixture(scope="module")
def model(request):
    """Returns the model of the module's SUBJECT, else the module's own."""
    if hasattr(request.module, "SUBJECT"):
        from support.drafters import SUBJECTS

        return SUBJECTS[request.module.SUBJECT].model
    from support.models import tiny

    return tiny(0)


@pytest.fixture(scope="module")
def texts(request):
    """Returns greedy texts of the module's SUBJECT."""
    from support.drafters import SUBJECTS

    return SUBJECTS[request.module.SUBJECT].texts
