"""Shared gloo processes, which run functions for groups of the first ranks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pagedtree.distributed import VocabShards

MOST_RANKS = 4
TIMEOUT = 60.0  # seconds per collective


def serve(rank: int, num_ranks: int, folder: str, timeout: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    span = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks, timeout=span)
    groups = {size: dist.new_group(list(range(size)), timeout=span) for size in range(1, num_ranks + 1)}
    pipe.send(("ready", None))
    while (task := pipe.recv()) is not None:
        function, size, arguments = task
        try:
            pipe.send(("done", function(groups[size], *arguments)))
        except Exception as error:
            pipe.send(("failed", (error, traceback.format_exc())))
    os._exit(0)  # does not wait for others


class Ranks:
    """`num_ranks` processes; `run` calls a test module's function on the first."""

    def __init__(self, folder: Path, num_ranks: int = MOST_RANKS, timeout: float = TIMEOUT) -> None:
        # Forks from a process with only slow modules imported.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "pagedtree.distributed", "hypothesis", "pytest"])
        self.pipes, self.processes = [], []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, num_ranks, str(folder), timeout, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        for rank in range(num_ranks):
            assert self._answer(rank)[0] == "ready"

    def run(self, function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        """Returns function(group, *arguments) by rank, or raises a rank's exception."""
        answers = self.outcomes(function, size, *arguments)
        for error in answers:
            if isinstance(error, Exception):
                raise error
        return answers

    def outcomes(self, function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        """Returns results by rank: exceptions of failed ones, None of dead ones."""
        for pipe in self.pipes[:size]:
            pipe.send((function, size, arguments))
        outcomes = []
        for rank in range(size):
            kind, value = self._answer(rank)
            if kind == "failed":
                if hasattr(value[0], "add_note"):
                    value[0].add_note(value[1])
                value = value[0]
            outcomes.append(value)
        return outcomes

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # already ended
                pipe.send(None)
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()

    def _answer(self, rank: int) -> tuple[str, Any]:
        try:
            return self.pipes[rank].recv()
        except EOFError:
            return "dead", None


def columns(fractions: list[float], vocab: int, rank: int) -> int:
    sizes = [int(fraction * vocab) for fraction in fractions]
    return [*sizes, vocab - sum(sizes)][rank]


def shards_of(group: dist.ProcessGroup, fractions: list[float], vocab: int) -> VocabShards:
    return VocabShards(columns(fractions, vocab, dist.get_rank(group)), group=group)
