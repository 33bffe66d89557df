"""docs/integration.md: its server in a captured graph; its comparison finds mistakes."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from support import ROOT, python_blocks
from support.doubles import Graph, use_stand_in

import pagedtree as pt
from pagedtree.generation.paged_cache import PagedCache

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = ROOT / "docs" / "integration.md"
BLOCKS = python_blocks(PAGE)
(ALONE,) = (block for block in BLOCKS if "def alone" in block)
(TESTED,) = (block for block in BLOCKS if "class Tested" in block)
SERVER = [block for block in BLOCKS[: BLOCKS.index(TESTED)] if block != ALONE]
TEST, ASSERTED = TESTED.split("\nassert ")


@pytest.fixture(autouse=True)
def whole_trees():
    """Leaves the defaults, as the page shows."""


def run(blocks: list[str], *changes: tuple[str, str]) -> dict[str, Any]:
    """Runs the blocks with parts replaced; returns names."""
    program = "\n".join(blocks)
    for right, wrong in changes:
        assert right in program
        program = program.replace(right, wrong)
    names: dict[str, Any] = {}
    exec(compile(program, str(PAGE), "exec"), names)
    return names


def served(names: dict[str, Any], **options: Any) -> list[list[int]]:
    """Returns texts of the page's requests."""
    server = names["Tested"](names["model"], num_pages=16, params=names["sampled"], **options)
    return [request.tokens for request in names["serve"](server)]


# Keys: names in the page's table.
MISTAKES = {
    "no `compact_kv`": [("self.cache.compact(table, start, ", "(")],
    "seeds by place instead of request": [("[request.seed for request in requests]", "range(len(requests))")],
    "positions of the verification not `start`": [("positions=start)", "positions=seq_lens)")],
}


def symptoms() -> dict[str, list[str]]:
    section = PAGE.read_text(encoding="utf-8").partition("## Test your integration")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \| (right|wrong) \| (right|wrong) \| (?:`(\w+)` )?\|$", section, re.MULTILINE)
    return {name: cells for name, *cells in rows}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake, monkeypatch):
    """The page's test fails with its table's symptoms."""
    first_tree, alone, argument = symptoms()[mistake]
    monkeypatch.delenv("PAGEDTREE_CHECK", raising=False)
    names = run([*SERVER, TEST], *MISTAKES[mistake])
    assert not eval(ASSERTED, names)
    texts, plain = served(names, batch_size=1), names["plain"]
    end = len(names["prompts"][0]) + names["MAX_DEPTH"] + 1
    assert ["wrong", "right"][texts[0][:end] == plain[0][:end]] == first_tree
    assert ["wrong", "right"][texts == plain] == alone
    if argument:
        monkeypatch.setenv("PAGEDTREE_CHECK", "1")
        with pytest.raises(ValueError, match=f": {argument}"):
            run([*SERVER, TEST], *MISTAKES[mistake])


def test_requests_that_cannot_be_served_are_refused_alone():
    names = run([*SERVER, TESTED])
    request, server = names["Request"], names["Tested"](names["model"], num_pages=16, params=names["sampled"])
    wrong = [request([-1], 9), request([128], 9), request([], 9), request([7] * 9, 9), request([7], 9, 2**63)]
    wrong += [request([2**70], 9), request([7], 2**40)]
    running = [request([7], 16, seed) for seed in (-(2**63), 2**63 - 1)]
    for one in running:
        server.add(one)
    server.step()
    for one in wrong:
        with pytest.raises(ValueError, match="add: "):
            server.add(one)
    while server.running:
        server.step()
    assert [len(one.tokens) for one in running] == [16, 16] and len(server.free_rows) == 16


def test_the_server_shares_and_evicts(monkeypatch):
    """Value checks find nothing."""
    monkeypatch.setenv("PAGEDTREE_CHECK", "1")
    names = run([*SERVER, TESTED])
    shared, released = [], []
    fork, release = PagedCache.fork, PagedCache.release
    monkeypatch.setattr(PagedCache, "fork", lambda *given: shared.append(given[-1]) or fork(*given))
    monkeypatch.setattr(PagedCache, "release", lambda *given: released.append(given[-1]) or release(*given))
    assert served(names) == names["plain"]
    assert max(shared) > 0 and len(released) > len(names["prompts"])


def attention(step: tuple[Any, ...], options: dict[str, Any], *layer: Any) -> Any:
    return pt.tree_attention(*layer, *step, **options)


@pytest.mark.parametrize("is_right", [True, False])
def test_the_captured_server(monkeypatch, is_right):
    """One graph serves all steps, but misses a new tensor."""
    use_stand_in(monkeypatch)
    # The stand-in replays ops after prepared calls are freed.
    monkeypatch.setattr(pt, "PreparedAttention", lambda *step, **options: partial(attention, step, options))
    anew = ("self.page_table.fill_(-1)", "self.page_table = torch.full_like(self.page_table, -1)")
    names = run([*SERVER, TESTED], *([] if is_right else [anew]))
    assert (served(names, captured=True) == names["plain"]) == is_right
    assert Graph.replays > 0
