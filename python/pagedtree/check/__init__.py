"""`python -m pagedtree check`: are the ops right on this machine, and how fast? It is the first thing to run there.

`case` says what a row is, `cases` has them all, `runner` runs them, `report` writes what came of it.
"""

from pagedtree.check.command import main

__all__ = ["main"]
