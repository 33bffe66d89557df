"""Running `python -m pagedtree generate` on tiny checkpoints of words w0, w1, ..."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from pagedtree.integrations.transformers import cli as command_module
from pagedtree.tools import cli

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Outcome(NamedTuple):
    """What a run of the command gave; of a refusal by the parser, too."""

    status: int
    out: str
    err: str

    @property
    def tokens(self) -> list[int]:
        return [int(word[1:]) for word in self.out.split()]


def command_of(folder: Path, capsys: Any, count: int, name: str = ".") -> Callable[..., Outcome]:
    """Returns what runs the command on a checkpoint in the folder, with its prompt.txt, for `count` tokens."""

    def run(*options: Any, count: int = count) -> Outcome:
        capsys.readouterr()
        arguments = ["--model", folder / name, "--prompt", folder / "prompt.txt", "--device", "cpu"]
        try:
            status = cli.main(["generate", *map(str, (*arguments, "--max-new-tokens", count, *options))])
        except SystemExit as end:
            status = int(end.code or 0)
        return Outcome(status, *capsys.readouterr())

    return run


def check_refused(run: Callable[..., Outcome], *options: Any, message: str) -> None:
    """One line says what was wrong with the options, and nothing was printed."""
    status, out, err = run(*options)
    assert (status, out) == (2, "") and "Traceback" not in err and message in err, err


def calls_of_generate(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records what the command gives to `generate`, in each call."""
    calls, function = [], command_module.generate

    def watched(model: Any, prompts: Any, **more: Any) -> Any:
        calls.append(SimpleNamespace(model=model, prompts=prompts, **more))
        return function(model, prompts, **more)

    monkeypatch.setattr(command_module, "generate", watched)
    return calls
