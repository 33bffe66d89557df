"""The marker `each_value`: of a test's combinations of parameters, the core suite runs few that have every value once.

It has every value on each backend and each kind of model. All combinations run in `make test-all`.
"""

from __future__ import annotations

from collections import defaultdict

import pytest


@pytest.hookimpl(tryfirst=True)  # before the cases that are marked slow are taken out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases = defaultdict[str, list[pytest.Function]](list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "each_value" in marks and "slow" not in marks:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_test in cases.values():
        sample = of_each_value(of_test)
        for item in of_test:
            if item not in sample:
                item.add_marker(pytest.mark.slow)


def of_each_value(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Returns some of the cases of a test, which together have every value of every parameter that the cases have.

    The one with most values that no other has yet is next, the first one of those with as many.
    """
    values = {}
    for case in cases:
        texts = {name: repr(value) for name, value in case.callspec.params.items()}
        place = tuple(texts.get(name) for name in ("backend", "target", "isa", "kind"))
        values[case] = {(place, *value) for value in texts.items()}
    missing, found = set().union(*values.values()), []
    while missing:
        found.append(max(cases, key=lambda case: len(values[case] & missing)))
        missing -= values[found[-1]]
    return found
