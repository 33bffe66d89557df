"""The SGLang adapter against the sources of SGLang's wheel, without an import."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect

import pytest
from package_sources import Sources, attributes_of, own_parameters

import pagedtree_plugins
from pagedtree.integrations import sglang
from pagedtree.integrations.sglang import attention

SOURCES = Sources("sglang")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("kernels/ops/speculative/tree.py", "build_tree_kernel_efficient"),
        ("kernels/ops/speculative/tree.py", "verify_tree_greedy"),
        ("kernels/ops/speculative/tree.py", "reconstruct_indices_from_tree_mask"),
        ("kernels/ops/speculative/spec_tree.py", "verify_tree_greedy_func"),
        ("kernels/ops/speculative/sampling.py", "tree_speculative_sampling_target_only"),
        ("srt/mem_cache/memory_pool.py", "move_kv_cache_native"),
    ],
)
def test_ops_take_the_same_arguments(path, name) -> None:
    ours = own_parameters(getattr(sglang, name.removesuffix("_native")))
    theirs = {key.replace("retrieve", "retrive"): value for key, value in SOURCES.parameters(path, name).items()}
    assert list(ours.items()) == list(theirs.items())


def test_mask_modes() -> None:
    modes = SOURCES.definition("kernels/ops/speculative/spec_tree.py", "TreeMaskMode")
    theirs = {node.targets[0].id for node in modes.body if isinstance(node, ast.Assign)}
    assert theirs == set(sglang.TreeMaskMode.__members__)
    header = SOURCES.text("kernels/jit/include/sgl_kernel/speculative/eagle.cuh")
    assert all(f"{mode.name} = {mode.value}" in header for mode in sglang.TreeMaskMode)


def test_drafts_of_probability_0_are_not_taken() -> None:
    """`test_published_sampling_vector` and `test_published_boundaries` are its twins."""
    kernel = SOURCES.text("kernels/jit/include/sgl_kernel/speculative/sampling.cuh")
    assert "has_target_mass = target_prob_single > DType(0)" in kernel
    assert "if (has_target_mass && (coin < prob_acc / threshold_acc || " in kernel


def test_methods_override_the_base_class() -> None:
    path = "srt/layers/attention/base_attn_backend.py"
    base = SOURCES.definition(path, "AttentionBackend")
    theirs = {node.name for node in base.body if isinstance(node, ast.FunctionDef)}
    ours = {k: v for k, v in vars(attention.PagedTreeBackend).items() if inspect.isfunction(v) and k[0] != "_"}
    assert {"init_forward_metadata", "forward_decode", "forward_extend"} <= set(ours) <= theirs
    for name, method in ours.items():
        assert own_parameters(method) == SOURCES.parameters(path, f"AttentionBackend.{name}"), name


@pytest.mark.parametrize(
    ("variable", "path", "classes"),
    [
        ("forward_batch", "srt/model_executor/forward_batch_info.py", ["ForwardBatch"]),
        ("mode", "srt/model_executor/forward_batch_info.py", ["ForwardMode"]),
        ("layer", "srt/layers/radix_attention.py", ["RadixAttention"]),
        ("model_runner", "srt/model_executor/model_runner.py", ["ModelRunner"]),
        ("spec", "srt/speculative/eagle_info.py", ["EagleVerifyInput"]),
        ("spec", "srt/speculative/ngram_info.py", ["NgramVerifyInput"]),
        ("token_to_kv_pool", "srt/mem_cache/memory_pool.py", ["KVCache"]),
        ("req_to_token_pool", "srt/mem_cache/memory_pool.py", ["ReqToTokenPool"]),
    ],
)
def test_attributes_exist(variable, path, classes) -> None:
    names = attributes_of(ast.parse(inspect.getsource(attention)), variable)
    assert names, variable
    assert names <= SOURCES.members(path, *classes), variable


def test_a_model_with_recurrent_layers_is_known_by_its_pool() -> None:
    names = SOURCES.members("srt/mem_cache/memory_pool.py", "HybridReqToTokenPool")
    assert "mamba_pool" in names
    assert "mamba_pool" not in SOURCES.members("srt/mem_cache/memory_pool.py", "ReqToTokenPool")


def test_the_plugin_is_found_and_registers() -> None:
    assert SOURCES.definition("srt/layers/attention/attention_registry.py", "register_attention_backend")
    assert "add_attention_backend_choices = " in SOURCES.text("srt/arg_groups/choices.py")
    group = next(
        node.value.value
        for node in ast.parse(SOURCES.text("srt/plugins/__init__.py")).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "GENERAL_PLUGINS_GROUP"
    )
    entries = importlib.metadata.entry_points(group=group, name="pagedtree")
    assert {entry.load() for entry in entries} == {pagedtree_plugins.sglang}
    factory = SOURCES.definition("srt/speculative/draft_utils.py", "DraftBackendFactory._create_backend")
    assert [x.arg for x in factory.args.args][:4] == ["self", "backend_name", "backend_map", "error_template"]
    assert "HookType.AROUND" in SOURCES.text("srt/plugins/hook_registry.py")
