"""`python -m pagedtree check`: are the ops right on this machine, and how fast?

`case` defines a row, `cases` has them all, `runner` runs them, `report` prints the results.
"""

from pagedtree.check.command import main

__all__ = ["main"]
