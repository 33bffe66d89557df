"""No test runs for ever: one that is over its time limit ends its process, which says where it was.

A thread of the C library watches over the time (faulthandler's), so that a loop in native code ends, too, even where it
holds Python's lock. It writes the Python stacks to the terminal and ends the process. Under pytest-xdist that is a
worker: the test is reported as failed, by its name, and another worker goes on with the rest.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest

SECONDS = 300.0
LONG_MARKS = {"slow": 4, "stats": 4}  # slow tests may take this many times as long

TERMINAL = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "end the process when a test takes longer (four times that where it is marked slow or stats); 0: never"
    parser.addoption("--time-limit", type=float, default=SECONDS, metavar="SECONDS", help=help)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TERMINAL] = os.dup(2)  # while a test runs, 2 is where pytest keeps what it writes


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[TERMINAL])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """From before the test's fixtures are made until they are cleared away."""
    limit = item.config.getoption("--time-limit")
    limit *= max((times for mark, times in LONG_MARKS.items() if item.get_closest_marker(mark)), default=1)
    if limit > 0:
        faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[TERMINAL])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
