"""`python -m pagedtree check` passes, and finds planted errors."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedtree
from pagedtree import RequestOptions
from pagedtree._ops import ops
from pagedtree.check import command, runner
from pagedtree.check.case import CPU, Case, Measurement, Place, equal, relative, within
from pagedtree.check.cases import all_cases, is_chosen
from pagedtree.check.runner import FAILED, NOT_APPLICABLE, NOT_RUN, OK, Row, run_row
from pagedtree.testing import backends
from pagedtree.tools import cli

SIMT = Place(torch.device("cpu"), "simt")
WITHOUT_CUDA = pytest.mark.skipif("cuda" in backends(), reason="there is a GPU")
PLACES = [pytest.param(CPU, id="cpu")]
if "simt" in backends():
    PLACES.append(pytest.param(SIMT, id="simt"))


def public_ops() -> list[str]:
    """Returns names like "tree_attention.out"."""
    names = [
        name.removeprefix("pagedtree::") for name in torch._C._dispatch_get_all_op_names() if "pagedtree::" in name
    ]
    return sorted(name for name in names if not name.startswith("_"))


@lru_cache
def every_case(place: Place) -> list[Any]:
    """Returns all rows with expectations cached."""

    def kept(case: Case | Measurement) -> Case | Measurement:
        if not isinstance(case, Case):
            return case
        expected = case.expected or (lambda: case.run(CPU))
        if case.against.startswith("the op without"):  # may hold a planted error
            return case
        return replace(case, loops=case.loops and lru_cache(case.loops), expected=lru_cache(expected))

    return [kept(case) for case in all_cases(place)]


def cases_of(op: str, place: Place) -> list[Case]:
    return [
        case
        for case in every_case(place)
        if isinstance(case, Case) and op in case.ops and (case.backends is None or place.backend in case.backends)
    ]


@pytest.fixture(autouse=True)
def kept_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "all_cases", every_case)


def run_check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main(["check", *arguments])
    return status, capsys.readouterr().out


def options(place: Place) -> list[str]:
    return ["--device", "cpu", "--backend", place.backend]


# Completeness ---------------------------------------------------------------------------------------------------------


either_length = pytest.mark.parametrize(
    "quick", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["quick", "all"]
)


@either_length
def test_everything_passes_on_the_cpu(capsys, tmp_path, quick):
    arguments = ["--device", "cpu", "--json", str(tmp_path / "found.json")]
    status, text = run_check(capsys, *arguments, *(["--quick"] if quick else []))
    assert status == 0, text
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["machine"]["pagedtree"] == pagedtree.__version__ and found["machine"]["torch"] == torch.__version__
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == [case.name for case in every_case(CPU) if is_chosen(case.name, [], quick)]
    assert found["counts"]["ok"] == sum(row["status"] == OK for row in rows.values()) > (40 if quick else 500)
    against = {row["against"] for row in rows.values() if row["status"] == OK}
    assert against <= {
        "plain loops",
        "what a plan is",
        "the portable instruction set",
        "the whole vocabulary on the CPU backend",
        "the op without options on logits that plain loops have processed",
    }
    assert rows["instructions/ex2"]["status"] == NOT_APPLICABLE
    assert rows["instructions/ex2"]["detail"].startswith("only on ")


def test_measured_and_inapplicable_rows_are_not_passed(capsys, tmp_path):
    path = tmp_path / "found.json"
    status, text = run_check(capsys, "--device", "cpu", "--only", "capture/", "--only", "rates/", "--json", str(path))
    assert status == 0, text
    found = json.loads(path.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert found["counts"]["measured"] == 11 and "rates/attention, decode" in rows
    captured = rows["capture/sampled/n-gram trees"]
    assert captured["status"] == NOT_APPLICABLE and captured["detail"].startswith("only on ")
    assert "not applicable: 8 only on cuda" in text and found["counts"]["ok"] == 0


def test_quick_rows_judge_every_op():
    """tests/ops/test_cases.py runs all rows, also on simt."""
    cases = [case for case in every_case(SIMT) if is_chosen(case.name, [], quick=True)]
    judged = {op for case in cases if isinstance(case, Case) for op in case.ops}
    assert sorted(judged) == public_ops() and len(cases) <= 104


def test_every_op_has_cases_with_loops():
    """Add a new op's case to its family in pagedtree/check/cases."""
    judged = {op for case in every_case(CPU) if isinstance(case, Case) and case.loops is not None for op in case.ops}
    assert sorted(judged) == public_ops()
    assert len({case.name for case in every_case(CPU)}) == len(every_case(CPU))


# Planted errors -------------------------------------------------------------------------------------------------------


def on_backend(place: Place) -> bool:
    """Returns true while CPU tensors use the place's backend."""
    index = ops._use_backend(0)
    ops._use_backend(index)
    return backends()[index] == place.backend


def plant(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., Any], place: Place) -> None:
    """Replaces an op on `place` by wrong(op, *args, **kwargs)."""
    packet, _, overload = name.partition(".")

    class Planted:
        """Replaces an op and its overload."""

        def __init__(self, right: Any, is_wrong: bool) -> None:
            self.right, self.is_wrong = right, is_wrong

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return (wrong if self.is_wrong and on_backend(place) else _right)(self.right, *args, **kwargs)

        def __getattr__(self, attribute: str) -> Any:
            found = getattr(self.right, attribute)
            return Planted(found, True) if attribute == (overload or "default") else found

    monkeypatch.setattr(ops, packet, Planted(getattr(ops, packet), not overload))


def _right(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def nudge(tensor: Tensor) -> bool:
    """Nudges the last element, or row of floats; False if there is none."""
    if not tensor.numel():
        return False
    last = tensor[(-1,) * tensor.dim()]
    if tensor.dtype == torch.bool:
        last.logical_not_()
    elif tensor.dtype == torch.float8_e4m3fn:
        last.view(torch.uint8).bitwise_xor_(1)
    elif tensor.is_floating_point():
        row = tensor[(-1,) * (tensor.dim() - 1)] if tensor.dim() > 1 else last
        row.mul_(1.03).add_(1e-3)
    else:
        last.add_(1)
    return True


def slightly_wrong(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Nudges the last result, or an op's first written cache."""
    result = op(*args, **kwargs)
    tensors = [result] if isinstance(result, Tensor) else list(result or args[2:3])
    any(nudge(tensor) for tensor in reversed(tensors))
    return result


def first_failure(op: str, place: Place) -> Row | None:
    return next((row for case in cases_of(op, place) if (row := run_row(case, place)).status == FAILED), None)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("op", ["append_kv", "build_trees", "commit", "tree_attention", "verify_sampled"])
def test_a_slightly_wrong_op_is_found(op, place, monkeypatch):
    plant(monkeypatch, op, slightly_wrong, place)
    row = first_failure(op, place)
    assert row is not None and re.search(r"differ|are off", row.detail)  # by its results


# Hints without effect on results.
WITHOUT_EFFECT = {"plan", "max_seqlen_q", "attention_plan.tree_lens", "attention_plan.latent"}


# Every op has these: slow tests for most.
OPTIONS = {*RequestOptions().tensors(), "repetition_penalty", "presence_penalty", "frequency_penalty"}
OPS_WHOSE_OPTIONS_ARE_QUICK = {"verify_sampled", "token_logprobs", "step_shards", "commit"}


def optional_arguments() -> Iterator[Any]:
    """Yields ops with their arguments' defaults."""
    for name in public_ops():
        if "." in name:
            continue
        arguments = getattr(ops, name).default._schema.arguments
        defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        effective = [key for key in defaults if not {key, f"{name}.{key}"} & WITHOUT_EFFECT]
        options = [] if name in OPS_WHOSE_OPTIONS_ARE_QUICK else [key for key in effective if key in OPTIONS]
        for keys, marks in (([key for key in effective if key not in options], []), (options, [pytest.mark.slow])):
            if keys:
                yield pytest.param(name, {key: defaults[key] for key in keys}, id=name, marks=marks)


@pytest.mark.parametrize(("op", "defaults"), list(optional_arguments()))
def test_arguments_that_an_op_forgets_are_found(op, defaults, monkeypatch):
    names = [a.name for a in getattr(ops, op).default._schema.arguments]
    forgotten: str | None = None
    arguments: set[str] = set()

    def forgets(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs |= dict(zip(names, args, strict=False))
        arguments.update(key for key, default in defaults.items() if kwargs.get(key, default) is not default)
        return function(**(kwargs if forgotten is None else {**kwargs, forgotten: defaults[forgotten]}))

    plant(monkeypatch, op, forgets, CPU)
    missing = set(defaults)
    for case in reversed(cases_of(op, CPU)):  # rows with options come last
        arguments.clear()
        case.run(CPU)  # records the case's arguments
        for forgotten in sorted(arguments & missing):
            if run_row(case, CPU).status == FAILED:
                missing.remove(forgotten)
        forgotten = None
        if not missing:
            break
    assert missing == set()


# Output for users -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_failing_rows_are_named_with_a_command_that_runs_them(place, capsys, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        plant(patch, "commit", slightly_wrong, place)
        arguments = [*options(place), "--only", "commit/", "--json", str(tmp_path / "found.json")]
        status, text = run_check(capsys, *arguments)
        assert status == 1
        found = json.loads((tmp_path / "found.json").read_text())
        failed = {row["name"]: row for row in found["rows"] if row["status"] == FAILED}
        assert "commit/EOS for all" in failed and found["counts"]["failed"] == len(failed) > 3
        assert found["command"] == " ".join(["python -m pagedtree check", *arguments])
        shown = dict(re.findall(r"^FAILED (.*)\n    .+\n    rerun: (.*)$", text, re.MULTILINE))
        assert shown == {name: row["rerun"] for name, row in failed.items()}
        counts = found["counts"]
        assert re.search(rf"^commit +{counts[OK]} +{counts[FAILED]} ", text, re.MULTILINE), text
        name = "commit/no history, no node map"
        again = shlex.split(shown[name])
        assert again[:4] == ["python", "-m", "pagedtree", "check"]
        status, text = run_check(capsys, *again[4:])
        assert status == 1 and re.findall(r"^FAILED (.*)$", text, re.MULTILINE) == [name]
    status, text = run_check(capsys, *again[4:])
    assert status == 0 and "1 rows in" in text and "1 ok" in text, text


def raises(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_an_exception_is_the_failure_of_its_row(capsys, tmp_path, monkeypatch):
    plant(monkeypatch, "prepare_step", raises, CPU)
    path = tmp_path / "found.json"
    status, text = run_check(capsys, "--device", "cpu", "--only", "/1000 nodes", "--json", str(path))
    assert status == 1
    found = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert found["compact_kv/1000 nodes"]["status"] == OK  # rows before and after run
    row = found["prepare_step/1000 nodes"]
    assert row["status"] == FAILED and row["detail"].startswith("raised RuntimeError: CUDA error: an illegal")
    status, text = run_check(capsys, "--device", "cpu", "--only", "/no sequence")
    assert status == 1 and re.findall(r"^FAILED (.*)$", text, re.MULTILINE) == ["prepare_step/no sequence"]


def test_rows_after_a_lost_device_run_in_a_fresh_process(capsys, tmp_path, monkeypatch):
    """An illegal access breaks the process's later GPU work."""
    plant(monkeypatch, "prepare_step", raises, CPU)
    monkeypatch.setattr(runner, "context_is_lost", lambda place: True)

    def in_this_one(given: list[str], **kwargs: Any) -> Any:
        is_check = given[1:4] == ["-m", "pagedtree", "check"]
        return subprocess.CompletedProcess(given, cli.main(given[3:]) if is_check else 1, stdout="")

    monkeypatch.setattr(subprocess, "run", in_this_one)
    path = tmp_path / "found.json"
    arguments = ["--device", "cpu", "--only", "/no sequence", "--json", str(path)]
    status, text = run_check(capsys, *arguments)
    assert status == 1
    assert "prepare_step/no sequence left the device unusable" in text
    found = json.loads(path.read_text())
    names = [case.name for case in every_case(CPU) if "/no sequence" in case.name]
    assert [row["name"] for row in found["rows"]] == names
    assert [row["name"] for row in found["rows"] if row["status"] != OK] == ["prepare_step/no sequence"]

    def dies(given: list[str], **kwargs: Any) -> Any:
        return subprocess.CompletedProcess(given, -11)

    monkeypatch.setattr(subprocess, "run", dies)
    status, text = run_check(capsys, *arguments)
    assert status == 1 and "the fresh process ended with status -11" in text
    statuses = [row["status"] for row in json.loads(path.read_text())["rows"]]
    at = names.index("prepare_step/no sequence")
    assert statuses == [OK] * at + [FAILED] + [NOT_RUN] * (len(names) - at - 1)


def test_the_portable_instruction_set_is_not_compared_with_itself(monkeypatch):
    case = next(case for case in every_case(CPU) if isinstance(case, Case) and case.loops is None)
    assert run_row(case, CPU).against == "the portable instruction set"
    monkeypatch.setenv("PAGEDTREE_CPU_ISA", "portable")
    row = run_row(case, CPU)
    assert row.status == NOT_APPLICABLE and "portable" in row.detail


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device: expected cuda"),
        (["--device", "meta"], "--device: expected cuda"),
        pytest.param(["--device", "cuda"], "--device cuda: this ", marks=WITHOUT_CUDA),
        (["--backend", "metal"], "invalid choice"),
        (["--only", "no such row"], "no row has 'no such row' in its name"),
        (["--json", "no/such/folder/x.json"], "--json: there is no folder"),
        (["--no-such-option"], "unrecognized arguments"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["check", *arguments])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_list_names_the_rows(capsys):
    status, text = run_check(capsys, "--list", "--device", "cpu", "--only", "tree_attention/page 7/bf16")
    assert status == 0 and text.split("\n") == [f"tree_attention/page 7/bf16/D {d}" for d in (64, 128)] + [""]


# Tolerances -----------------------------------------------------------------------------------------------------------


def test_tolerances():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [300.0, 400.0]])
    nan = torch.tensor([1.0, torch.nan])
    assert equal(nan, nan) == "" and equal(x, x) == ""
    assert "1 of 6 elements differ, first at [2, 0]: 301.0 instead of 300.0" in equal(
        x + torch.tensor([[0, 0], [0, 0], [1, 0]]), x
    )
    assert equal(x.half(), x) == "torch.float16 instead of torch.float32"
    assert equal(x[:2], x) == "shape [2, 2] instead of [3, 2]"
    assert within(1.0)(x + 1, x) == "" and "6 of 6" in within(0.5)(x + 1, x)
    assert within(1e9)(torch.tensor([torch.inf]), torch.tensor([1.0])) and within(0)(nan, nan) == ""
    assert within(1.0)(torch.tensor([1.0]), torch.tensor([torch.inf])) != ""
    limit = relative(0.01)
    assert limit(x * 1.009, x) == "" and "2 of 3 rows are off" in limit(x * 1.02, x)
    assert limit(x + torch.tensor([[0, 0], [9.0, 0], [0, 0]]), x) != ""  # a row of zeros
    assert limit(torch.where(x == 4, torch.nan, x), x) != "" and limit(x[:0], x[:0]) == ""
