"""The rows of bench_real.py, in one file over many runs.

A row has a dtype, a number of sequences, a kind of prompts and a way of decoding. Its lists have one entry for each
batch; other figures are medians of these lists between the bounds of their 95 % interval.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from measure import median_interval, write_json

__all__ = ["ALL", "PLAIN", "QUEUE", "Call", "Difference", "Key", "Table"]

PLAIN, ALL, QUEUE = "plain", "all", "queue"
# Runs that differ in these facts need separate files.
CONDITIONS = ("processor", "threads", "torch", "model", "max_new_tokens")

Row = dict[str, Any]


class Key(NamedTuple):
    dtype: str
    sequences: int
    kind: str
    way: str


class Difference(NamedTuple):
    """The first difference of a text from plain decoding.

    margin: the distance of the two next tokens' logits; None if one text only ends earlier.
    """

    prompt: int
    token: int
    margin: float | None


@dataclass(frozen=True)
class Call:
    """One way's answers to one batch.

    gain: tokens per second over plain decoding in the same turn. per_step: a sequence's tokens per pass, 0 if unknown.
    """

    texts: int
    rate: float
    gain: float
    per_step: float
    differences: list[Difference]


@dataclass
class Table:
    """`calls` has each row's calls by batch number within a kind."""

    facts: dict[str, Any]
    calls: dict[Key, dict[int, Call]] = field(default_factory=dict)

    @classmethod
    def opened(cls, path: Path, facts: dict[str, Any]) -> Table:
        """Reads the file's rows.

        Raises:
            ValueError: the rows were measured under other conditions.
        """
        table = cls(facts)
        if not path.exists():
            return table
        kept = json.loads(path.read_text())
        for name in CONDITIONS:
            if (theirs := kept["machine"].get(name)) != facts[name]:
                raise ValueError(
                    f"{path} has rows of {name} {theirs}, got {facts[name]}: delete it or choose another one"
                )
        commits = [*str(kept["machine"]["commit"]).split(", "), str(facts["commit"])]
        facts["commit"] = ", ".join(dict.fromkeys(commits))
        new = {key: value for key, value in facts["versions"].items() if value is not None}
        facts["versions"] = facts["versions"] | kept["machine"]["versions"] | new
        for row in kept["rows"]:
            if row["kind"] != ALL:
                table.calls[Key(*(row[name] for name in Key._fields))] = _calls(row)
        return table

    def has(self, key: Key, batch: int) -> bool:
        return batch in self.calls.get(key, {})

    def add(self, key: Key, batch: int, call: Call) -> None:
        figures = {name: float(f"{getattr(call, name):.4g}") for name in ("rate", "gain", "per_step")}
        self.calls.setdefault(key, {})[batch] = replace(call, **figures)

    def write(self, path: Path, name: str) -> None:
        write_json(path, {"benchmark": name, "machine": self.facts, "rows": self.rows()})

    def rows(self) -> list[Row]:
        """Each kind precedes all kinds, by number of sequences."""
        places: dict[tuple[str, int], None] = dict.fromkeys((key.dtype, key.sequences) for key in sorted(self.calls))
        found = []
        for place in places:
            mine = {key: calls for key, calls in self.calls.items() if key[:2] == place}
            kinds, ways = (dict.fromkeys(getattr(key, name) for key in mine) for name in ("kind", "way"))
            for kind in kinds:
                keys = [key for way in ways if (key := Key(*place, kind, way)) in mine]
                found += [self._row(key, [key]) | _lists(mine[key]) for key in keys]
            kinds.pop(QUEUE, None)
            for way in ways if len(kinds) > 1 else ():
                keys = [Key(*place, kind, way) for kind in kinds]
                if all(key in mine for key in keys):
                    found.append(self._row(Key(*place, ALL, way), keys))
        return found

    def _row(self, named: Key, keys: list[Key]) -> Row:
        calls = [call for key in keys for call in self.calls[key].values()]
        known = [call.per_step for call in calls if call.per_step]
        texts, different = sum(call.texts for call in calls), [each for call in calls for each in call.differences]
        row: Row = named._asdict()
        row["tokens_per_second"] = _interval([call.rate for call in calls])
        row["over_plain"] = _interval([call.gain for call in calls])
        for name, others in (("over_best", self._best), ("over_stock", self._stock)):
            if ratios := [ratio for key in keys for ratio in self._over(key, others(key))]:
                row[name] = _interval(ratios)
        if known:
            row["tokens_per_step"] = round(statistics.median(known), 3)
        row["texts_equal"] = f"{texts - len(different)}/{texts}"
        if margins := [each.margin for each in different if each.margin is not None]:
            row["largest_margin"] = max(margins)
        return row

    def _best(self, key: Key) -> list[Key]:
        """Chosen trees compete with plain decoding, chains and fixed trees."""
        drafter, _, way = key.way.rpartition(" ")
        fixed = [key._replace(way=f"{drafter} {other}") for other in ("chain", "tree")]
        fixed = [other for other in fixed if other in self.calls]
        return [key._replace(way=PLAIN), *fixed] if way == "auto" and fixed else []

    def _stock(self, key: Key) -> list[Key]:
        engine, comma, _ = key.way.partition(", ")
        stock = key._replace(way=engine)
        return [stock] if comma and engine != PLAIN and stock in self.calls else []

    def _over(self, key: Key, others: list[Key]) -> list[float]:
        rivals = [self.calls[other] for other in others]
        return [
            call.gain / max(rival[batch].gain for rival in rivals)
            for batch, call in self.calls[key].items()
            if rivals and all(batch in rival for rival in rivals)
        ]


def _interval(values: list[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in median_interval(values)]


def _lists(calls: dict[int, Call]) -> Row:
    in_order = dict(sorted(calls.items()))
    return {
        "batches": [*in_order],
        "texts": [call.texts for call in in_order.values()],
        "rates": [call.rate for call in in_order.values()],
        "gains": [call.gain for call in in_order.values()],
        "per_step": [call.per_step for call in in_order.values()],
        "differences": [[*each] for call in in_order.values() for each in call.differences],
    }


def _calls(row: Row) -> dict[int, Call]:
    of_batch: dict[int, list[Difference]] = {batch: [] for batch in row["batches"]}
    for each in row["differences"]:
        of_batch[each[0] // max(row["texts"])].append(Difference(*each))
    columns = zip(*(row[name] for name in ("batches", "texts", "rates", "gains", "per_step")), strict=True)
    return {batch: Call(texts, *figures, of_batch[batch]) for batch, texts, *figures in columns}
