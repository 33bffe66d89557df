"""SGLang's tests of CPU and speculation kernels, on the adapter's functions and backend."""

from __future__ import annotations

import ast
import itertools
import re
import sys
import unittest
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from peer_source import PeerSource, names_of, refusing
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, softplus

from pagedtree import advance_conv, advance_state, append_kv, tree_conv1d, tree_delta_rule
from pagedtree.integrations import flash_attn, sglang
from pagedtree.integrations.sglang.attention import PagedTreeBackend

SOURCE = PeerSource("sglang")
CPU, CUDA = "test/registered/cpu/", "python/sglang/kernels/aot/tests/speculative/"
REFUSED = "head size|expected decoder self-attention"


def attend(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, out: Tensor, req_to_token: Tensor, scale: float, logit_cap: float,
    is_cross_attention: bool, window: int, encoder_lens: Tensor | None, sinks: Tensor | None, **batch: Any,
) -> None:  # fmt: skip
    """Runs a layer over these buffers, after `new` (keys, values, slots) is appended."""
    if encoder_lens is not None:  # SGLang stores an encoder's rows before its decoder's
        places = torch.arange(req_to_token.shape[1]) + encoder_lens[:, None]
        req_to_token = req_to_token.gather(1, places.clamp(max=req_to_token.shape[1] - 1))
    latent = k_buffer.data_ptr() == v_buffer.data_ptr()
    decodes, verifies = "new" in batch, "spec_info" in batch
    mode = SimpleNamespace(is_decode_or_idle=lambda: decodes, is_target_verify=lambda: verifies)
    runner = SimpleNamespace(
        use_mla_backend=latent,
        page_size=1,
        req_to_token_pool=SimpleNamespace(req_to_token=req_to_token),
        model_config=SimpleNamespace(context_len=req_to_token.shape[1], kv_lora_rank=512, qk_rope_head_dim=64),
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda i: k_buffer, get_value_buffer=lambda i: v_buffer),
    )
    sizes = {"tp_q_head_num": q.shape[1], "tp_k_head_num": k_buffer.shape[1]}
    sizes |= {"qk_head_dim": q.shape[2], "v_head_dim": v_buffer.shape[2], "sliding_window_size": window - 1}
    options = {"logit_cap": logit_cap, "logit_capping_method": "tanh", "is_cross_attention": is_cross_attention}
    options |= {"attn_type": "decoder", "xai_temperature_len": -1, "k_scale": None, "v_scale": None}
    layer = SimpleNamespace(scaling=scale, layer_id=0, **sizes, **options)
    k, v, slots = batch.pop("new", (None, None, None))
    fields = {"seq_lens_cpu": None, "spec_info": None, "extend_seq_lens_cpu": None, "out_cache_loc": slots}
    forward_batch = SimpleNamespace(forward_mode=mode, batch_size=len(batch["seq_lens"]), **{**fields, **batch})
    backend = PagedTreeBackend(runner)
    backend.init_forward_metadata(forward_batch)
    out.copy_(backend.forward_extend(q, k, v, layer, forward_batch, decodes, sinks=sinks).view_as(out))


def decode_attention_cpu(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, out: Tensor, k: Tensor, v: Tensor, slots: Tensor, scratch: Tensor,
    req_to_token: Tensor, indices: Tensor, seq_lens: Tensor, scale: float, *layer: Any,
) -> None:  # fmt: skip
    batch = {"req_pool_indices": indices, "seq_lens": seq_lens, "new": (k, v, slots)}
    attend(q, k_buffer, v_buffer, out, req_to_token, scale, *layer, **batch)


def extend_attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, k_buffer: Tensor, v_buffer: Tensor, req_to_token: Tensor,
    indices: Tensor, seq_lens: Tensor, lens: Tensor, begin: Tensor, longest: int, scale: float, logit_cap: float,
    is_cross_attention: bool, window: int, encoder_lens: Tensor | None, sinks: Tensor | None,
    tree_mask: Tensor | None = None,
) -> None:  # fmt: skip
    batch: dict[str, Any] = {"req_pool_indices": indices, "seq_lens": seq_lens, "extend_seq_lens": lens}
    if tree_mask is not None:  # SGLang's lengths exclude the tree
        spec = SimpleNamespace(draft_token_num=longest, custom_mask=tree_mask)
        batch |= {"seq_lens": seq_lens - longest, "spec_info": spec}
    layer = scale, logit_cap, is_cross_attention, window, encoder_lens, sinks
    attend(q, k_buffer, v_buffer, out, req_to_token, *layer, **batch)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, index: Tensor, **how: Any):
    rows = [x.flatten(0, 1) for x in (k, v, g.float(), beta.float())]
    out = tree_delta_rule(q.flatten(0, 1), *rows, state, index, None, **how)
    advance_state(state, index, *rows, None, **how)
    return out.view_as(v)


def chunk_gated_delta_rule_cpu(
    *, query, key, value, g, beta, initial_state, output_final_state, cu_seqlens, head_first, use_qk_l2norm_in_kernel,
    initial_state_indices,
):  # fmt: skip
    how = {"cu_seqlens": cu_seqlens, "l2norm": use_qk_l2norm_in_kernel}
    return delta_rule(query, key, value, g, beta, initial_state, initial_state_indices, **how), initial_state


def fused_sigmoid_gating_delta_rule_update_cpu(
    *, A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel,
    softplus_beta, softplus_threshold,
):  # fmt: skip
    g = -A_log.float().exp() * softplus(a.float() + dt_bias)
    how = {"cu_seqlens": cu_seqlens, "l2norm": use_qk_l2norm_in_kernel}
    out = delta_rule(q, k, v, g[None], b.sigmoid()[None], initial_state_source, initial_state_indices, **how)
    return out.transpose(0, 1)


def causal_conv1d_fwd_cpu(x, weight, bias, states, cu_seqlens, index, has_state, silu, pad_slot, is_packed):
    """Serves x [B, C, T], or [C, T] with cu_seqlens."""
    batch = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
    rows = x.mT.flatten(0, -2) if cu_seqlens is None else x.T
    if cu_seqlens is None:
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32) * x.shape[-1]
    states = x.new_zeros(batch, rows.shape[1], weight.shape[1] - 1) if states is None else states
    index = torch.arange(batch, dtype=torch.int32) if index is None else index
    if has_state is not None:
        states[index[~has_state].long()] = 0
    out = tree_conv1d(
        rows, weight, bias, states, index, None, cu_seqlens=cu_seqlens, activation="silu" if silu else None
    )
    advance_conv(states, index, rows, None, cu_seqlens=cu_seqlens)
    return out.view(x.mT.shape).mT


def causal_conv1d_update_cpu(x, states, weight, bias, silu, lens, index, pad_slot, is_packed):
    return causal_conv1d_fwd_cpu(x[..., None], weight, bias, states, None, index, None, silu, pad_slot, False)[..., 0]


def store_cache_cpu(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, row_dim: int) -> None:
    k, v, k_cache, v_cache = (
        x.view(torch.float8_e4m3fn) if x.element_size() == 1 else x for x in (k, v, k_cache, v_cache)
    )
    append_kv(k, v, k_cache[:, None], v_cache[:, None], slots)


def flash_attn_varlen(q, k, v, cu_q, cu_k, max_q, max_k, causal):
    if causal and not torch.equal(cu_q, cu_k):
        pytest.xfail("the first token is expected to see one key; FlashAttention's last token sees all")
    return flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal=causal)


def tree_speculative_sampling_target_only(*, threshold_acc: float, **given: Any) -> None:
    if threshold_acc == 0:
        pytest.xfail("drafts of probability 0 are expected, which SGLang 0.5.23 does not take either")
    sglang.tree_speculative_sampling_target_only(threshold_acc=threshold_acc, **given)


OURS: dict[str, Callable[..., Any]] = {"build_tree_kernel_efficient_cpu": sglang.build_tree_kernel_efficient_cpu}
OURS |= {"verify_tree_greedy_cpu": sglang.verify_tree_greedy_cpu, "decode_attention_cpu": decode_attention_cpu}
OURS |= {"extend_attention_cpu": extend_attention_cpu, "chunk_gated_delta_rule_cpu": chunk_gated_delta_rule_cpu}
OURS |= {"fused_sigmoid_gating_delta_rule_update_cpu": fused_sigmoid_gating_delta_rule_update_cpu}
OURS |= {"store_cache_cpu": store_cache_cpu, "flash_attn_varlen_func": flash_attn_varlen}
for name, function in OURS.items():
    setattr(torch.ops.sgl_kernel, name, function)
sys.modules |= {"sgl_kernel": sglang, "sgl_kernel.speculative": sglang}  # imported by their functions


def parametrize(**lists: list[Any]) -> Callable[..., Any]:
    """Makes each case of their loop a test."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        function.cases = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
        return function

    return keep


KNOWN: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "unittest": unittest}
KNOWN |= {"CustomTestCase": unittest.TestCase, "TreeMaskMode": sglang.TreeMaskMode}
KNOWN |= {"precision": {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}}
KNOWN |= {"pytest": pytest, "softplus": softplus, "scaled_dot_product_attention": scaled_dot_product_attention}
KNOWN |= {"parametrize": parametrize, "PAD_SLOT_ID": -1, "causal_conv1d_weight_pack": lambda weight: weight}
KNOWN |= {"causal_conv1d_fwd": causal_conv1d_fwd_cpu, "causal_conv1d_update": causal_conv1d_update_cpu}
KNOWN |= {"flash_attn_varlen_func": flash_attn_varlen, "DEVICE": "cpu", "CACHE_SIZE": 4096, "Optional": Optional}
KNOWN |= {"verify_tree_greedy": sglang.verify_tree_greedy}
KNOWN |= {"reconstruct_indices_from_tree_mask": sglang.reconstruct_indices_from_tree_mask}
KNOWN |= {"tree_speculative_sampling_target_only": tree_speculative_sampling_target_only}
KNOWN |= {"maybe_detect_oob": lambda *args: None, "List": list}


def everything(path: str) -> list[str]:
    text = (SOURCE.folder / path).read_text(encoding="utf-8")
    names = set[str]().union(*map(names_of, ast.parse(text).body))
    return sorted(names.difference(KNOWN))


def cases(path: str, name: str, once: str = "") -> Iterator[Any]:
    """Yields cases of methods with `parametrize`, or calls of the method `once`."""
    theirs = SOURCE.take(path, *everything(path), known=KNOWN)[name]
    for method in [method for method in vars(theirs) if method.startswith("test_")]:
        test, run = theirs(method), method
        found = [((), case) for case in getattr(getattr(theirs, method), "cases", [])]
        if not found:
            run = once
            setattr(test, once, lambda *args, found=found, **kwargs: found.append((args, kwargs)))
            getattr(test, method)()
            delattr(test, once)
        for args, kwargs in found:
            label = "-".join(map(str, (*args, *kwargs.values())))
            yield pytest.param(getattr(test, run), args, kwargs, id=f"{method}-{label}")


ATTENTION = [
    *cases(CPU + "test_decode.py", "TestDecodeAttention", "_test_grouped_decode_attention_once"),
    *cases(CPU + "test_extend.py", "TestExtendAttention", "_test_extend_attention_once"),
    *cases(CPU + "test_mla.py", "TestMLA", "_test_grouped_decode_attention_once"),
    *cases(CPU + "test_flash_attn.py", "TestFlashAttn", "_test_flash_attn_large_seq_causal_mask_once"),
]
CONVOLUTIONS = [*cases(CPU + "test_causal_conv1d.py", "TestCausalConv1d")]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1234)


@pytest.mark.parametrize(("test", "args", "kwargs"), ATTENTION)
@refusing(REFUSED)
def test_attention(test, args, kwargs) -> None:
    if kwargs.get("batch") == 4097:
        pytest.xfail("13 GB of keys")
    test(*args, **kwargs)


@pytest.mark.parametrize(("test", "args", "kwargs"), CONVOLUTIONS)
def test_convolutions(test, args, kwargs) -> None:
    test(*args, **kwargs)


def trees() -> dict[str, Any]:
    """Returns the classes of `test_spec_kernels.py` whose kernels are all ours."""
    path = CPU + "test_spec_kernels.py"
    SOURCE.take("python/sglang/srt/speculative/eagle_utils.py", "organize_draft_results", known=KNOWN)
    tree = ast.parse((SOURCE.folder / path).read_text(encoding="utf-8"))
    found = SOURCE.take(path, *everything(path), known=KNOWN)
    called = {
        name: set(re.findall(r"torch\.ops\.sgl_kernel\.(\w+)", ast.unparse(node)))
        for node in tree.body
        for name in names_of(node)
        if name.startswith("Test")
    }
    return {name: found[name] for name, kernels in called.items() if kernels <= {*OURS}}


globals().update(trees())
for path, names in {
    CPU + "test_mamba.py": ["test_chunk_gated_delta_rule", "test_fused_sigmoid_gating_delta_rule_update"],
    CPU + "test_store_cache.py": ["test_store_cache"],
    CUDA + "test_eagle_utils.py": ["test_verify_tree_greedy"],
    CUDA + "test_ngram_utils.py": ["test_reconstruct_indices_from_tree_mask"],
    CUDA + "test_speculative_sampling.py": ["test_tree_speculative_sampling_target_only"],
}.items():
    found = SOURCE.take(path, *everything(path), known=KNOWN)
    globals().update({name: found[name] for name in names})
