"""The plugins' names of vLLM exist in its sources, which are not imported.

Run for the tests' release and the next one (`make test-engines ENGINE=vllm_next`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from package_sources import Sources, attributes_of

from pagedtree import integrations

SOURCES = Sources("vllm")
FOLDER = Path(integrations.__file__).parent / "vllm"
FILES = {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.py"))}
RUNNER_V2 = ("v1/worker/gpu/model_runner.py", "GPUModelRunner")
SCHEDULER = ("v1/core/sched/scheduler.py", "Scheduler")
BASES: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("runner.py", "TreeRunner"): [("v1/worker/gpu_model_runner.py", "GPUModelRunner")],
    ("runner_v2.py", "TreeRunnerV2"): [RUNNER_V2],
    ("runner_v2.py", "_DraftTreesHandler"): [("v1/worker/gpu/spec_decode/utils.py", "DraftTokensHandler")],
    ("speculator.py", "TreeSpeculator"): [("v1/worker/gpu/spec_decode/speculator.py", "BaseSpeculator")],
    ("dflash.py", "DFlashTreeSpeculator"): [
        ("v1/worker/gpu/spec_decode/dflash/speculator.py", "DFlashSpeculator"),
        ("v1/worker/gpu/spec_decode/speculator.py", "DraftModelSpeculator"),
    ],
    ("scheduler.py", "TreeScheduler"): [SCHEDULER],
    ("async_scheduler.py", "AsyncTreeScheduler"): [("v1/core/sched/async_scheduler.py", "AsyncScheduler"), SCHEDULER],
    ("attention.py", "PagedTreeBackend"): [("v1/attention/backend.py", "AttentionBackend")],
    ("attention.py", "PagedTreeMetadataBuilder"): [("v1/attention/backend.py", "AttentionMetadataBuilder")],
    ("attention.py", "PagedTreeImpl"): [
        ("v1/attention/backend.py", name) for name in ("AttentionImpl", "AttentionImplBase")
    ],
    ("platform.py", "PagedTreeCpuPlatform"): [
        ("platforms/cpu.py", "CpuPlatform"),
        ("platforms/interface.py", "Platform"),
    ],
    ("worker.py", "TreeCPUWorker"): [("v1/worker/cpu_worker.py", "CPUWorker")],
    ("worker.py", "TreeGPUWorker"): [("v1/worker/gpu_worker.py", "Worker")],
}
OWNERS = {
    ("runner_v2.py", "batch"): ("v1/worker/gpu/input_batch.py", "InputBatch"),
    ("runner_v2.py", "input_batch"): ("v1/worker/gpu/input_batch.py", "InputBatch"),
    ("runner_v2.py", "req_states"): ("v1/worker/gpu/states.py", "RequestState"),
    ("runner_v2.py", "sampler"): ("v1/worker/gpu/sample/sampler.py", "Sampler"),
    ("runner_v2.py", "block_tables"): ("v1/worker/gpu/block_table.py", "BlockTables"),
    ("speculator.py", "batch"): ("v1/worker/gpu/input_batch.py", "InputBatch"),
    ("speculator.py", "states"): ("v1/worker/gpu/states.py", "RequestState"),
    ("dflash.py", "batch"): ("v1/worker/gpu/input_batch.py", "InputBatch"),
    ("device_sampling.py", "batch"): ("v1/worker/gpu/input_batch.py", "InputBatch"),
    ("device_sampling.py", "sampler"): ("v1/worker/gpu/sample/sampler.py", "Sampler"),
    ("device_sampling.py", "states"): ("v1/worker/gpu/sample/states.py", "SamplingStates"),
    ("device_sampling.py", "penalties"): ("v1/worker/gpu/sample/penalties.py", "PenaltiesState"),
    ("device_sampling.py", "req_states"): ("v1/worker/gpu/states.py", "RequestState"),
    ("attention.py", "common"): ("v1/attention/backend.py", "CommonAttentionMetadata"),
}


def imported() -> Iterator[tuple[str, str]]:
    """Includes imports inside functions."""
    for tree in FILES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((str(node.module), alias.name) for alias in node.names)


def names_in(path: str) -> set[str]:
    """Includes names that a package imports."""
    is_package = (SOURCES.folder / path).is_dir()
    found = {entry.stem for entry in (SOURCES.folder / path).iterdir()} if is_package else set()
    for node in ast.walk(ast.parse(SOURCES.text(f"{path}/__init__.py" if is_package else f"{path}.py"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.level and node.names[0].name == "*":
                found |= names_in(f"{path}/{node.module}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # packages with lazy imports
            found.add(node.value)
    return found


@pytest.mark.parametrize(("module", "name"), sorted(set(imported())))
def test_imports_exist(module: str, name: str) -> None:
    assert name in names_in("/".join(module.split(".")[1:]))


def own_class(file: str, name: str) -> ast.ClassDef:
    return next(node for node in FILES[file].body if isinstance(node, ast.ClassDef) and node.name == name)


def arguments(function: ast.FunctionDef) -> tuple[list[str], bool]:
    """Returns names without self, and whether others are accepted."""
    signature = function.args
    names = [argument.arg for argument in [*signature.args, *signature.kwonlyargs]][1:]
    return names, signature.vararg is not None or signature.kwarg is not None


def calls_super(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == function.name
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "id", "") == "super"
        for node in ast.walk(function)
    )


@pytest.mark.parametrize(("file", "name"), BASES)
def test_methods_override(file: str, name: str) -> None:
    """Public and overriding methods have vLLM's parameters."""
    theirs: dict[str, Any] = {}
    for path, base in reversed(BASES[file, name]):
        body = SOURCES.definition(path, base).body
        theirs |= {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    methods = [node for node in own_class(file, name).body if isinstance(node, ast.FunctionDef)]
    checked = [
        node
        for node in methods
        if node.name not in ("__init__", "do_kv_cache_update")
        and (node.name[0] != "_" or calls_super(node) or node.name in theirs)
    ]
    assert checked
    for method in checked:
        assert method.name in theirs
        names, takes_others = arguments(method)
        expected, _ = arguments(theirs[method.name])
        assert names == (expected[: len(names)] if takes_others else expected), method.name


@pytest.mark.parametrize(("file", "variable"), OWNERS)
def test_attributes_exist(file: str, variable: str) -> None:
    names = attributes_of(FILES[file], variable)
    assert names
    assert names <= SOURCES.members(*OWNERS[file, variable])


def test_the_runners_attributes_exist() -> None:
    names = {"drafter", "speculator", "_masks"}
    body = own_class("runner_v2.py", "TreeRunnerV2").body
    declared = {getattr(node.target, "id", "") for node in body if isinstance(node, ast.AnnAssign)}
    assert len(declared) > 10
    assert declared - names <= SOURCES.members(*RUNNER_V2)


def test_the_cache_is_updated_before_attention() -> None:
    assert ".do_kv_cache_update(" in SOURCES.text("model_executor/layers/attention/attention.py")


def test_the_speculator_is_called_with_these_arguments() -> None:
    calls = [
        node
        for node in ast.walk(SOURCES.definition(*RUNNER_V2))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.speculator.propose"
    ]
    assert len(calls) == 2
    propose = next(
        node for node in own_class("speculator.py", "TreeSpeculator").body if getattr(node, "name", "") == "propose"
    )
    names, _ = arguments(propose)
    for call in calls:
        assert len(call.args) <= len(names) and {keyword.arg for keyword in call.keywords} <= set(names)


def test_the_method_that_carries_drafters_may_name_a_model() -> None:
    """V2's drafter is the `model` of the n-gram method, which vLLM leaves unchanged."""
    text = SOURCES.text("config/speculative.py")
    assert 'NgramGPUTypes = Literal["ngram_gpu"]' in text
    assert text.index("if self.model is None and self.num_speculative_tokens is not None:") < text.index(
        'self.model = "ngram_gpu"'
    )
    runner = SOURCES.text("v1/worker/gpu/model_runner.py")
    assert "self.speculative_config is not None and self.speculative_config.use_ngram()" in runner
