"""`python -m pagedtree check`: arguments, and the run as a whole."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch

from pagedtree._engine import facts
from pagedtree.check import report, self_test
from pagedtree.check.case import Case, Measurement, Place
from pagedtree.check.cases import all_cases, is_chosen
from pagedtree.check.runner import FAILED, NOT_RUN, Row, run
from pagedtree.testing import backends

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 where a row failed or was not run; wrong usage exits with 2."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    place = _place(parser, arguments.device, arguments.backend)
    if arguments.engine is not None:
        return _self_test(parser, place, arguments)
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {arguments.json.absolute().parent}")
    cases = [case for case in all_cases(place) if is_chosen(case.name, arguments.only, arguments.quick)]
    if not cases:
        parser.error(f"--only: no row has {' or '.join(map(repr, arguments.only))} in its name; --list names them all")
    if arguments.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    begin, facts = time.perf_counter(), report.machine(place)
    print(report.heading(facts), flush=True)
    rows: list[Row] = []
    for _, group in groupby(_rows(cases[arguments.start :], place, arguments), key=lambda row: row.group):
        results = list(group)
        rows += results
        print(report.group_line(results), flush=True)
    seconds = time.perf_counter() - begin
    text = report.rows_text(place, rows)
    print(*([text] if text else []), report.summary(rows, seconds), sep="\n", flush=True)
    if arguments.json is not None:
        command = " ".join(["python -m pagedtree check", *argv])
        arguments.json.write_text(json.dumps(report.as_json(place, facts, rows, seconds, command), indent=1) + "\n")
    return int(any(row.status in (FAILED, NOT_RUN) for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pagedtree check",
        description="Compares every op on this machine with a second implementation, on difficult shapes, and "
        "measures ten calls.",
        epilog="Exit status: 0, or 1 where a row failed, or 2 for wrong usage.",
    )
    parser.add_argument("--device", help="cuda, cuda:1, cpu; default: cuda where there is one")
    parser.add_argument("--backend", choices=["cpu", "simt"], help="for the device cpu; default cpu")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="rows with this in their name")
    parser.add_argument(
        "--quick", action="store_true", help="a few rows of each op, for slow tools (compute-sanitizer)"
    )
    parser.add_argument("--list", action="store_true", help="name the rows, and run none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows to FILE, for a report")
    parser.add_argument("--verbose", action="store_true", help="name each row on stderr before it runs")
    parser.add_argument(
        "--engine", choices=["wgmma"], help="test this engine in a separate process, and keep the verdict"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of --engine: the time limit; default 120")
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)  # rows to leave out at the beginning
    return parser


def _place(parser: argparse.ArgumentParser, device_name: str | None, backend: str | None) -> Place:
    has_gpu = "cuda" in backends()
    try:
        device = torch.device(device_name or ("cuda" if has_gpu and backend is None else "cpu"))
    except RuntimeError:
        parser.error(f"--device: expected cuda, cuda:N or cpu, got {device_name}")
    if device.type == "cpu":
        if (backend or "cpu") not in backends():
            parser.error(f"--backend {backend}: this build has {', '.join(backends())}")
        return Place(torch.device("cpu"), backend or "cpu")
    if device.type != "cuda":
        parser.error(f"--device: expected cuda, cuda:N or cpu, got {device_name}")
    if backend is not None:
        parser.error("--backend: for the device cpu only")
    if not has_gpu:
        why = "this torch finds no GPU" if not torch.cuda.is_available() else "this build has no CUDA backend"
        parser.error(f"--device {device_name}: {why}")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        parser.error(f"--device {device_name}: there are {torch.cuda.device_count()} GPUs")
    return Place(torch.device("cuda", index), "cuda")


def _self_test(parser: argparse.ArgumentParser, place: Place, arguments: argparse.Namespace) -> int:
    for name in ("only", "quick", "list", "json", "verbose"):
        if getattr(arguments, name):
            parser.error(f"--engine: runs all of its rows, without --{name}")
    if not arguments.seconds > 0:
        parser.error(f"--seconds: expected a number above 0, got {arguments.seconds:g}")
    if place.backend == "cpu":
        parser.error("--engine wgmma: for the device cuda or the backend simt")
    facts_of_place = facts(place.backend, place.device)
    if facts_of_place.needs:
        parser.error(f"--engine wgmma: needs {facts_of_place.needs}")
    return self_test.run(place, facts_of_place, arguments.seconds)


def _rows(cases: Sequence[Case | Measurement], place: Place, arguments: argparse.Namespace) -> Iterator[Row]:
    """Returns one row per case; if one leaves the device unusable, a fresh process runs the others."""

    def started(name: str) -> None:
        if arguments.verbose:
            print(name, file=sys.stderr, flush=True)

    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    count, last = 0, ""
    for row in run(cases, place, started):
        count, last = count + 1, row.name
        yield row
    if count < len(cases):
        yield from _in_fresh_process(cases[count:], last, arguments, arguments.start + count)


def _in_fresh_process(
    cases: Sequence[Case | Measurement], lost_in: str, arguments: argparse.Namespace, start: int
) -> Iterable[Row]:
    print(f"  {lost_in} left the device unusable; the {len(cases)} rows after it run in a fresh process", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        options = [x for name in ("device", "backend") if (y := getattr(arguments, name)) for x in (f"--{name}", y)]
        options += [x for text in arguments.only for x in ("--only", text)]
        options += [f"--{name}" for name in ("quick", "verbose") if getattr(arguments, name)]
        command = [sys.executable, "-m", "pagedtree", "check", *options, "--start", str(start), "--json", str(path)]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        if path.exists():
            fields = Row.__dataclass_fields__
            rows = json.loads(path.read_text())["rows"]
            return [Row(**{name: value for name, value in row.items() if name in fields}) for row in rows]
    why = f"not run: {lost_in} left the device unusable, and the fresh process ended with status {ended}"
    return [Row(case.name, case.group, NOT_RUN, detail=why) for case in cases]
