from __future__ import annotations

import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from support.attention import TARGETS, Target, target_id
from support.devices import made_on, only_on
from support.ranks import Ranks

from pagedtree import _C
from pagedtree.testing import backends

# Examples repeat in every run, and failures print theirs. `backend` has no state to disturb.
UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
settings.register_profile(
    "pagedtree", deadline=None, derandomize=True, max_examples=50, suppress_health_check=UNCHECKED
)
settings.load_profile("pagedtree")


# Stored verdicts must not choose the engine.
os.environ["PAGEDTREE_CACHE"] = os.devnull
# A process that a script starts with `&` ignores SIGINT, and its children would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    # Collected modules stay: garbage collection over them takes a third of this time, then half a second each time.
    # Tests leave few cycles.
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    gc.set_threshold(100_000, 20, 100)
    return result


@pytest.hookimpl(tryfirst=True)  # before slow cases are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases = defaultdict[str, list[pytest.Function]](list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "each_value" in marks and "slow" not in marks:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_test in cases.values():
        sample = of_each_value(of_test)
        for item in of_test:
            if item not in sample:
                item.add_marker(pytest.mark.slow)


def of_each_value(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Returns cases with every value of every parameter; the first of those with most new values is next."""
    values = {}
    for case in cases:
        texts = {name: repr(value) for name, value in case.callspec.params.items()}
        place = tuple(texts.get(name) for name in ("backend", "target", "isa", "kind"))
        values[case] = {(place, *value) for value in texts.items()}
    missing, found = set().union(*values.values()), []
    while missing:
        found.append(max(cases, key=lambda case: len(values[case] & missing)))
        missing -= values[found[-1]]
    return found


@pytest.fixture(autouse=True)
def whole_trees() -> Iterator[None]:
    """Makes tree=None the default of `generate` and `tree_generate`; an empty fixture of this name restores it."""
    package = sys.modules.get("pagedtree.integrations.transformers")
    functions = () if package is None else (package.generate, package.tree_generate)
    # torch.no_grad wraps one.
    defaults = [getattr(function, "__wrapped__", function).__kwdefaults__ for function in functions]
    for keywords in defaults:
        assert keywords["tree"] == "auto"
        keywords["tree"] = None
    yield
    for keywords in defaults:
        keywords["tree"] = "auto"


@pytest.fixture(params=backends())
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs the test on each backend, without value checks.

    Under "cuda" CPU tensors fail: use `device` or `on_device`.
    """
    monkeypatch.delenv("PAGEDTREE_CHECK", raising=False)
    with only_on(request.param):
        yield request.param


@pytest.fixture
def device(backend: str) -> torch.device:
    return torch.device("cuda" if backend == "cuda" else "cpu")


@pytest.fixture
def draws(backend: str) -> Callable[[int], int]:
    """Returns a number of draws, fewer on simt, where one takes a hundred times as long."""
    on_simt = backend == "simt" or (backend == "cuda" and "HOST_CUDA" in os.environ)
    return lambda count: count // 40 if on_simt else count


@pytest.fixture
def on_device(device: torch.device) -> Iterator[None]:
    """Makes the backend's device the default."""
    with made_on(device):
        yield


@pytest.fixture
def value_checks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks values in tensors (PAGEDTREE_CHECK=1)."""
    monkeypatch.setenv("PAGEDTREE_CHECK", "1")


@pytest.fixture(params=_C.available_isas())
def isa(request: pytest.FixtureRequest, backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test on each CPU instruction set."""
    return use_isa(request, backend, monkeypatch)


@pytest.fixture(params=[isa for isa in _C.available_isas() if not isa.startswith("amx")])
def row_isa(request: pytest.FixtureRequest, backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Excludes AMX, which is for attention only."""
    return use_isa(request, backend, monkeypatch)


def use_isa(request: pytest.FixtureRequest, backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if backend != "cpu":
        pytest.skip("instruction sets are the cpu backend's")
    monkeypatch.setenv("PAGEDTREE_CPU_ISA", request.param)
    return request.param


@pytest.fixture(params=TARGETS, ids=target_id)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """Runs the test on each backend and CPU instruction set."""
    backend, variant = request.param
    monkeypatch.delenv("PAGEDTREE_CHECK", raising=False)
    monkeypatch.delenv("PAGEDTREE_ENGINE", raising=False)
    if backend == "cpu":
        monkeypatch.setenv("PAGEDTREE_CPU_ISA", variant)
    else:
        monkeypatch.setenv("PAGEDTREE_SIMT_ORDER", "random:7")
        if variant:
            monkeypatch.setenv("PAGEDTREE_ENGINE", variant)
    device = torch.device("cuda" if backend == "cuda" else "cpu")
    with only_on(backend), made_on(device):
        yield Target(backend, variant, device)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Waiting for a second thread takes longer than tiny models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Yields gloo processes, which start in a second."""
    processes = Ranks(tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.close()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Destroys the process group of `calls.ops.one_rank`: other tests make theirs."""
    yield
    if torch.distributed.is_initialized():
        import calls.ops

        calls.ops.one_rank.cache_clear()
        torch.distributed.destroy_process_group()
