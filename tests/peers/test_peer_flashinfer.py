"""FlashInfer's inputs and references for its kernels (`flashinfer.trace.templates`), on the adapter."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from peer_source import PeerSource

from pagedtree.integrations import flashinfer

SOURCE = PeerSource("flashinfer")
FOLDER = "flashinfer/trace/templates/"
KNOWN = {"torch": torch, "math": math, "Tuple": tuple}
SOURCE.take(FOLDER + "_init_helpers.py", "make_paged_kv_indices", known=KNOWN)


def theirs(file: str, name: str) -> tuple:
    """Returns functions of inputs and expected outputs."""
    names = f"_{name}_init", f"_{name}_reference"
    return tuple(SOURCE.take(FOLDER + file, *names, known=KNOWN).values())


@pytest.fixture(autouse=True)
def stand_in(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)  # functions of inputs import it


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-3}[out.dtype]
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance, rtol=tolerance)


SIZES = [{"seq_len": 16, "num_heads": 4, "head_dim": 64}, {"seq_len": 7, "num_heads": 2, "head_dim": 128}]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_merge_state(sizes, seed, dtype) -> None:
    make, reference = theirs("cascade.py", "merge_state")
    inputs = {name: x.to(dtype) if name[0] == "v" else x for name, x in make(**sizes, seed=seed, device="cpu").items()}
    for out, expected in zip(flashinfer.merge_state(**inputs), reference(**inputs), strict=True):
        close(out, expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_states", [1, 2, 3, 8])
def test_merge_states(sizes, seed, num_states) -> None:
    make, reference = theirs("cascade.py", "merge_states")
    inputs = make(**sizes, num_states=num_states, seed=seed, device="cpu")
    for out, expected in zip(flashinfer.merge_states(**inputs), reference(**inputs), strict=True):
        close(out, expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", SIZES)
def test_merge_state_in_place(sizes, seed) -> None:
    make, reference = theirs("cascade.py", "merge_state_in_place")
    inputs = make(**sizes, seed=seed, device="cpu")
    expected = reference(**{name: x.clone() for name, x in inputs.items()})
    flashinfer.merge_state_in_place(**inputs)
    for out, right in zip((inputs["v"], inputs["s"]), expected, strict=True):
        close(out, right)


@pytest.mark.parametrize("name", ["append_paged_kv_cache", "append_paged_mla_kv_cache"])
@pytest.mark.parametrize("rows", [1, 9, 60, 100, 257])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_append(name, rows, batch_size, page_size) -> None:
    make, reference = theirs("page.py", name)
    inputs = make(nnz_kv=rows, batch_size=batch_size, page_size=page_size, device="cpu")
    copies = {key: torch.utils._pytree.tree_map(torch.clone, value) for key, value in inputs.items()}
    reference(**copies)
    getattr(flashinfer, name)(**inputs)
    for key in inputs:
        torch.testing.assert_close(inputs[key], copies[key], rtol=0, atol=0)


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (32, 8)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("total_q", [4, 17, 40])
def test_paged_prefill(page_size, heads, head_dim, total_q) -> None:
    make, reference = theirs("attention.py", "gqa_paged_prefill")
    sizes = {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "page_size": page_size}
    case = make(total_q=total_q, **sizes, num_pages_per_seq=3, device="cpu")
    plan, run = case["plan"], case["run"]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(8))
    wrapper.plan(**plan)
    found = wrapper.run_return_lse(**run)
    form = plan["qo_indptr"], plan["paged_kv_indptr"], plan["paged_kv_indices"]
    for out, expected in zip(found, reference(run["q"], *run["paged_kv_cache"], *form, head_dim**-0.5), strict=True):
        close(out, expected)


@pytest.mark.parametrize("name", ["mla_paged_decode", "mla_paged_prefill"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_latent(name, page_size, heads, rows) -> None:
    make, reference = theirs("attention.py", name)
    rows = {"total_q": rows} if name.endswith("prefill") else {"batch_size": rows}
    case = make(**rows, num_qo_heads=heads, page_size=page_size, device="cpu")
    plan, run = case["plan"], case["run"]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(8))
    wrapper.plan(**plan)
    form = {key: plan[key] for key in ("qo_indptr", "kv_indptr", "kv_indices", "sm_scale")}
    if name.endswith("decode"):
        del form["qo_indptr"]
    for out, expected in zip(wrapper.run(**run, return_lse=True), reference(**run, **form), strict=True):
        close(out, expected)
