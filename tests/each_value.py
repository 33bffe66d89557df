"""The marker `each_value`: the core suite runs few combinations, with every value on each backend and kind of model.

`make test-all` runs all.
"""

from __future__ import annotations

from collections import defaultdict

import pytest


@pytest.hookimpl(tryfirst=True)  # before slow cases are deselected
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
    """Returns cases with every value of every parameter; the first of those with most new values is next."""
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
