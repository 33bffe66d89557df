"""Threads that use the same model or drafter take turns."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_changed = threading.Condition()
_owners: dict[int, int] = {}  # thread by id of the object that it uses


@contextmanager
def in_turn(*things: object) -> Iterator[None]:
    """Excludes other threads from such blocks with any of these things or their modules, all locked at once."""
    modules = [module for thing in things if isinstance(thing, nn.Module) for module in thing.modules()]
    ids, thread = {id(thing) for thing in (*things, *modules)}, threading.get_ident()
    with _changed:
        _changed.wait_for(lambda: all(_owners.get(thing, thread) == thread for thing in ids))
        new_ids = [thing for thing in ids if thing not in _owners]  # a block around this one may hold some already
        _owners.update(dict.fromkeys(new_ids, thread))
    try:
        yield
    finally:
        with _changed:
            for thing in new_ids:
                del _owners[thing]
            _changed.notify_all()


def _forget_others() -> None:
    """Releases other threads' blocks in a forked process, where those threads do not exist."""
    global _changed
    _changed = threading.Condition()
    for thing in [thing for thing, thread in _owners.items() if thread != threading.get_ident()]:
        del _owners[thing]


os.register_at_fork(after_in_child=_forget_others)
