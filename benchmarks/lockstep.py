"""Two generations that take turns step by step, so that whatever else the machine does hits both alike.

On a CPU each has one thread, both on the same core, and a thread's own clock leaves out what a hypervisor or another
process took; several threads would be two teams in one process, which wait for each other.
"""

from __future__ import annotations

import importlib
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch

from pagedtree.generation.drafters import StepResult
from pagedtree.generation.engine import Engine
from pagedtree.integrations.transformers import generate
from pagedtree.integrations.transformers.model import use_attention

# A step that takes so many times as long as the others of the two with as many tokens: the machine did something else.
HICCUP = 1.5

__all__ = ["Player", "in_lockstep"]

OnStep = Callable[[StepResult], None]


class Player:
    """One of the two, in a thread of its own.

    Attributes:
        steps: for each turn the tokens that its step packed and the seconds that it took.
        seconds: the sum over all turns; a turn counts as at most HICCUP times the median of similar turns.
        first_tokens: for each sequence the seconds until the end of the step that gave it its first token.
        result: what its function returned.
    """

    def __init__(self, generation: Callable[[OnStep], Any], device: str) -> None:
        self.generation = generation
        self.is_on_cpu = device == "cpu"
        self.clock = time.thread_time if self.is_on_cpu else time.perf_counter
        self.steps: list[tuple[int, float]] = []
        self.seconds = self.since = 0.0
        self.first_steps: dict[int, int] = {}
        self.first_tokens: dict[int, float] = {}
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self.turn = threading.Semaphore(0)
        self.other: Player

    def play(self) -> None:
        _here.player = self
        if self.is_on_cpu:
            torch.set_num_threads(1)
            if hasattr(os, "sched_setaffinity"):  # of this thread; two cores of one machine differ by 10 % and more
                os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        self.turn.acquire()
        self.since = self.clock()
        try:
            self.result = self.generation(self.saw_step)
        except BaseException as error:  # for the caller's thread
            self.error = error
        if self.steps:  # what comes after the last step
            rows, seconds = self.steps[-1]
            self.steps[-1] = rows, seconds + self.clock() - self.since
        self.is_done = True
        self.other.turn.release()

    def pass_on(self, rows: int) -> None:
        self.steps.append((rows, self.clock() - self.since))
        if not self.other.is_done:
            self.other.turn.release()
            self.turn.acquire()
        self.since = self.clock()

    def saw_step(self, step: StepResult) -> None:
        for sequence in step.sequences:
            self.first_steps.setdefault(sequence.index, len(self.steps))


_here = threading.local()


def in_lockstep(model: Any, first: Callable[[OnStep], Any], second: Callable[[OnStep], Any]) -> tuple[Player, Player]:
    """Runs both, each a call of our `generate` with that model and the `on_step` that it gets; the first one begins."""
    players = Player(first, model.device.type), Player(second, model.device.type)
    players[0].other, players[1].other = players[1], players[0]
    step = Engine.step

    def step_and_pass_on(engine: Engine) -> None:
        before = engine.stats.packed_tokens
        step(engine)
        _here.player.pass_on(engine.stats.packed_tokens - before)

    num_threads = torch.get_num_threads()
    threads = [threading.Thread(target=player.play) for player in players]
    # Outside of both, as the model is the same: the first to end would take our attention from the other. Calls that
    # share a model would run one after the other; these take turns here.
    with (
        patch.object(Engine, "step", step_and_pass_on),
        patch.object(importlib.import_module(generate.__module__), "in_turn", lambda *things: nullcontext()),
        use_attention(model),
    ):
        for thread in threads:
            thread.start()
        players[0].turn.release()
        for thread in threads:
            thread.join()
    torch.set_num_threads(num_threads)  # some libraries have one number for the process
    for player in players:
        if player.error is not None:
            raise player.error
    by_rows = defaultdict(list)
    for rows, seconds in players[0].steps + players[1].steps:
        by_rows[rows].append(seconds)
    for player in players:
        likely = [min(seconds, HICCUP * statistics.median(by_rows[rows])) for rows, seconds in player.steps]
        player.seconds = sum(likely)
        player.first_tokens = {sequence: sum(likely[: step + 1]) for sequence, step in player.first_steps.items()}
    return players
