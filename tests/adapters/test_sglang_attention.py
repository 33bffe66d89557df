"""The SGLang backend on objects with SGLang's attributes, against dense attention of each request."""

from __future__ import annotations

import sys
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from support.attention import Pages, causal_mask, close, dense_attention, random_trees, tree_sees
from support.doubles import Graph, Recording
from torch import Tensor

from pagedtree.integrations.sglang import on_cpu
from pagedtree.integrations.sglang.attention import PagedTreeBackend, PagedTreeDraftBackend
from pagedtree.integrations.sglang.plugin import create_draft_backend

HEADS, KV_HEADS, DIM = 4, 2, 64


class Mode(Enum):
    DECODE, IDLE, EXTEND, TARGET_VERIFY, DRAFT_EXTEND_V2 = range(5)

    def is_decode_or_idle(self) -> bool:
        return self in (Mode.DECODE, Mode.IDLE)

    def is_target_verify(self) -> bool:
        return self is Mode.TARGET_VERIFY

    def is_extend_without_speculative(self) -> bool:
        return self is Mode.EXTEND


class AttentionType(Enum):
    DECODER, ENCODER_ONLY = "decoder", "encoder_only"


def layer_of(**options):
    heads = dict(tp_q_head_num=HEADS, tp_k_head_num=KV_HEADS, qk_head_dim=DIM, v_head_dim=DIM, scaling=0.2, layer_id=3)
    kind = dict(is_cross_attention=False, attn_type=AttentionType.DECODER, xai_temperature_len=-1)
    scores = dict(logit_cap=0.0, logit_capping_method="tanh", sliding_window_size=-1, k_scale=None, v_scale=None)
    return SimpleNamespace(**{**heads, **kind, **scores, **options})


class Server:
    """The newest `news[b]` rows of the pool are NaN until written."""

    def __init__(
        self, lens: list[int], news: list[int], page_size: int, device, dtype, dims=(DIM, DIM), latent: bool = False
    ):
        self.lens, self.news, self.dims = lens, news, dims
        self.paged = Pages.random(lens, page_size, 1 if latent else KV_HEADS, dims[0], dtype, dim_v=dims[1])
        if latent:  # V is part of K's rows
            self.paged.v, self.paged.v_cache = [k[..., : dims[1]] for k in self.paged.k], self.paged.k_cache
        ids = torch.randperm(len(lens) + 3)[: len(lens)]
        req_to_token = torch.full((len(lens) + 3, max(lens) + 2 * page_size), -1, dtype=torch.int32)
        slots = []
        for b, s in enumerate(lens):
            pages, positions = torch.tensor(self.paged.pages[b]), torch.arange(s)
            slots.append(pages[positions // page_size] * page_size + positions % page_size)
            req_to_token[ids[b], :s] = slots[b].int()
        self.out_cache_loc = torch.cat([x[len(x) - n :] for x, n in zip(slots, news, strict=True)])
        caches = [cache.flatten(0, 1).clone() for cache in (self.paged.k_cache, self.paged.v_cache)]
        for cache in caches:
            cache[self.out_cache_loc] = torch.nan
        self.buffers = [cache.to(device) for cache in caches]
        if latent:
            self.buffers[1] = self.buffers[0][..., : dims[1]]
        self.k, self.v = (
            torch.cat([x[len(x) - n :] for x, n in zip(side, news, strict=True)]).flatten(1).to(device)
            for side in (self.paged.k, self.paged.v)
        )
        generator = torch.Generator().manual_seed(1)
        self.q = torch.randn(sum(news), HEADS * dims[0], generator=generator).to(device, dtype)
        pool = SimpleNamespace(get_key_buffer=lambda i: self.buffers[0], get_value_buffer=lambda i: self.buffers[1])
        self.runner = SimpleNamespace(
            use_mla_backend=latent,
            token_to_kv_pool=pool,
            req_to_token_pool=SimpleNamespace(req_to_token=req_to_token.to(device)),
            page_size=page_size,
            model_config=SimpleNamespace(
                context_len=req_to_token.shape[1], kv_lora_rank=dims[1], qk_rope_head_dim=dims[0] - dims[1]
            ),
        )
        places = dict(req_pool_indices=ids.to(device), out_cache_loc=self.out_cache_loc.to(device))
        absent = dict.fromkeys(("spec_info", "extend_seq_lens", "extend_seq_lens_cpu"))
        self.common = {"batch_size": len(lens), **places, **absent, "seq_lens_cpu": torch.tensor(lens)}

    def run(self, mode: Mode, **fields) -> Tensor:
        widths = {"qk_head_dim": self.dims[0], "v_head_dim": self.dims[1], "tp_k_head_num": self.buffers[0].shape[1]}
        layer, options = fields.pop("layer", layer_of(**widths)), fields.pop("options", {})
        device = self.q.device
        lens = {"seq_lens": torch.tensor(self.lens).to(device), "extend_seq_lens": torch.tensor(self.news).to(device)}
        batch = {"forward_mode": mode, **self.common, **lens, **fields}
        backend = PagedTreeBackend(self.runner)
        backend.init_forward_metadata(SimpleNamespace(**batch))
        call = backend.forward_decode if mode is Mode.DECODE else backend.forward_extend
        return call(self.q, self.k, self.v, layer, SimpleNamespace(**batch), **options)

    def check(self, out: Tensor, sees: list[Tensor], **options) -> None:
        assert out.shape == (len(self.q), HEADS * self.dims[1]) and out.dtype == self.q.dtype
        queries = self.q.cpu().view(-1, HEADS, self.dims[0]).split(self.news)
        rows = zip(queries, self.paged.k, self.paged.v, sees, strict=True)
        expected = [dense_attention(q, k, v, seen, **{"scale": 0.2, **options})[0] for q, k, v, seen in rows]
        close(out, torch.cat(expected).flatten(1))
        for buffer, side in zip(self.buffers, (self.k, self.v), strict=True):
            assert torch.equal(buffer[self.common["out_cache_loc"]].flatten(1), side)


@pytest.fixture
def dtype(backend) -> torch.dtype:
    return torch.float32 if backend == "cpu" else torch.float16


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("known_on_host", [True, False])
@pytest.mark.parametrize("dims", [(DIM, DIM), (192, 128)])
def test_extend(backend, device, dtype, page_size, known_on_host, dims) -> None:
    server = Server([9, 40, 17], [9, 5, 1], page_size, device, dtype, dims=dims)
    fields = {"extend_seq_lens_cpu": server.news} if known_on_host else {"seq_lens_cpu": None}
    out = server.run(Mode.EXTEND, **fields)
    server.check(out, [causal_mask(n, s) for n, s in zip(server.news, server.lens, strict=True)])


def test_latents(backend, device, dtype) -> None:
    """Decoding, a second chunk and a tree over rows of 576 columns, 512 of them values."""
    n, prefixes = 5, [12, 0, 30]
    sees = [tree_sees(tree, p) for tree, p in zip(random_trees([n] * 3), prefixes, strict=True)]
    mask = torch.cat([seen[:, p:].flatten() for seen, p in zip(sees, prefixes, strict=True)])
    lens, at = [p + n for p in prefixes], {"seq_lens": torch.tensor(prefixes, device=device)}
    latents = {"dims": (576, 512), "latent": True}
    server = Server(lens, [1] * 3, 4, device, dtype, **latents)
    server.check(server.run(Mode.DECODE), [causal_mask(1, s) for s in lens])
    server = Server(lens, [n] * 3, 4, device, dtype, **latents)
    spec = SimpleNamespace(draft_token_num=n, custom_mask=mask.to(device))
    server.check(server.run(Mode.TARGET_VERIFY, **at, seq_lens_cpu=torch.tensor(prefixes), spec_info=spec), sees)
    server = Server(lens, [n] * 3, 1, device, dtype, **latents)
    server.check(server.run(Mode.EXTEND), [causal_mask(n, s) for s in lens])


@pytest.mark.parametrize("known_on_host", [True, False])
def test_prompts_of_latent_layers(backend, device, dtype, known_on_host) -> None:
    """Without a prefix SGLang passes heads of 192 and 128 columns, which the pool lacks."""
    lens = [9, 1, 17]
    server = Server(lens, lens, 4, device, dtype, dims=(576, 512), latent=True)
    heads = Server(lens, lens, 4, device, dtype, dims=(192, 128))
    server.q, server.k, server.v = heads.q, heads.k, heads.v
    layer = layer_of(qk_head_dim=192, v_head_dim=128)
    fields = {"extend_prefix_lens_cpu": [0, 0, 0], "layer": layer}
    fields |= {"extend_seq_lens_cpu": lens} if known_on_host else {}
    out = server.run(Mode.EXTEND, **fields, options={"save_kv_cache": False})
    rows = zip(heads.q.cpu().view(-1, HEADS, 192).split(lens), heads.paged.k, heads.paged.v, lens, strict=True)
    close(out, torch.cat([dense_attention(q, k, v, causal_mask(s, s), scale=0.2)[0] for q, k, v, s in rows]).flatten(1))
    with pytest.raises(NotImplementedError, match="expected latents, got heads of them behind a prefix"):
        server.run(Mode.EXTEND, **{**fields, "extend_prefix_lens_cpu": [0, 3, 0]}, options={"save_kv_cache": False})


def test_windows_caps_and_sinks(backend, device, dtype) -> None:
    server = Server([9, 40, 17], [9, 5, 1], 4, device, dtype)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out = server.run(
        Mode.EXTEND, layer=layer_of(sliding_window_size=6, logit_cap=2.5), options={"sinks": sinks.to(device, dtype)}
    )
    sees = [
        causal_mask(n, s, window=7) for n, s in zip(server.news, server.lens, strict=True)
    ]  # 6 and the query itself
    server.check(out, sees, softcap=2.5, sinks=sinks)


@pytest.mark.each_value
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layout", ["full", "full, in a larger buffer", "qlen", "none"])
@pytest.mark.parametrize("n", [1, 7, 33])
def test_target_verify(backend, device, dtype, page_size, layout, n) -> None:
    prefixes = [12, 0, 30]
    server = Server([p + n for p in prefixes], [n] * 3, page_size, device, dtype)
    sees = [tree_sees(tree, p) for tree, p in zip(random_trees([n] * 3), prefixes, strict=True)]
    if layout == "none":
        mask, sees = None, [causal_mask(n, p + n) for p in prefixes]
    elif layout == "qlen":
        mask = torch.cat([seen[:, p:].flatten() for seen, p in zip(sees, prefixes, strict=True)])
    else:
        mask = torch.cat([seen.flatten() for seen in sees])
        if "larger" in layout:
            mask = torch.cat([mask, mask[:50]])
    spec = SimpleNamespace(draft_token_num=n, custom_mask=None if mask is None else mask.to(device))
    out = server.run(
        Mode.TARGET_VERIFY,
        seq_lens=torch.tensor(prefixes, device=device),
        seq_lens_cpu=torch.tensor(prefixes),
        spec_info=spec,
    )
    server.check(out, sees)


@pytest.mark.parametrize("kind", ["decode", "verify, full masks", "verify, qlen masks", "draft extend"])
def test_captured_steps(backend, device, dtype, kind) -> None:
    """SGLang pads the replays of a graph for four requests with three, two and none."""
    n, prefixes = 1 if kind == "decode" else 5, [12, 0, 30]
    mode = Mode.DECODE if kind == "decode" else Mode.TARGET_VERIFY if "verify" in kind else Mode.DRAFT_EXTEND_V2
    server = Server([p + n for p in prefixes], [n] * 3, 4, device, dtype)
    sees = [tree_sees(tree, p) for tree, p in zip(random_trees([n] * 3), prefixes, strict=True)]
    lens = [p + n * ("verify" not in kind) for p in prefixes]
    free = min({*range(6)} - {*server.common["req_pool_indices"].tolist()})

    def batch(rows: list[int], size: int) -> SimpleNamespace:
        pad, tokens = size - len(rows), [b * n + i for b in rows for i in range(n)]
        masks = [sees[b][:, prefixes[b] * ("qlen" in kind) :].flatten() for b in rows]
        mask = torch.cat([torch.zeros(0, dtype=torch.bool), *masks]).to(device)
        places = torch.nn.functional.pad(server.common["req_pool_indices"][rows], (0, pad), value=free)
        new = torch.full((size,), n, device=device)
        return SimpleNamespace(
            forward_mode=mode, batch_size=size, req_pool_indices=places, seq_lens_cpu=None, extend_seq_lens=new,
            extend_seq_lens_cpu=[n] * size, seq_lens=torch.tensor([lens[b] for b in rows] + [1] * pad, device=device),
            out_cache_loc=torch.nn.functional.pad(server.common["out_cache_loc"][tokens], (0, pad * n), value=-1),
            spec_info=SimpleNamespace(draft_token_num=n, custom_mask=mask, draft_token=torch.zeros(len(tokens))),
            rows=[torch.nn.functional.pad(x[tokens], (0, 0, 0, pad * n)) for x in (server.q, server.k, server.v)],
        )  # fmt: skip

    captured, graph, static = PagedTreeBackend(server.runner), Graph(), batch([0], 4)
    captured.init_cuda_graph_state(4, 4 * n)
    captured.init_forward_metadata_out_graph(static, in_capture=True)
    with Recording(graph):
        captured.init_forward_metadata_in_graph(static)
        out = captured.forward_extend(*static.rows, layer_of(), static)
    for rows in ([0, 1, 2], [2, 0], []):
        padded, plain = batch(rows, 4), batch(rows, len(rows))
        for name in ("req_pool_indices", "seq_lens", "extend_seq_lens", "out_cache_loc"):
            getattr(static, name).copy_(getattr(padded, name))
        for to, row in zip(static.rows, padded.rows, strict=True):
            to.copy_(row)
        captured.init_forward_metadata_out_graph(padded)
        graph.replay()
        if rows:
            eager = PagedTreeBackend(server.runner)
            eager.init_forward_metadata(plain)
            close(out[: len(rows) * n], eager.forward_extend(*plain.rows, layer_of(), plain).float())


def test_rows_that_were_written_before(backend, device, dtype) -> None:
    server = Server([9, 5], [2, 2], 4, device, dtype)
    server.buffers = [x.to(device).flatten(0, 1) for x in (server.paged.k_cache, server.paged.v_cache)]
    k, v = server.k, server.v
    server.k = server.v = None
    out = server.run(Mode.EXTEND)
    server.k, server.v = k, v
    server.check(out, [causal_mask(2, 9), causal_mask(2, 5)])
    server.k = server.v = torch.full_like(k, torch.nan)
    again = server.run(Mode.EXTEND, options={"save_kv_cache": False})
    assert torch.equal(out, again)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("known", ["on the host", "on the device", "to a graph"])
def test_drafting_steps(backend, device, dtype, page_size, topk, known) -> None:
    """A branch attends to the prefix and its slots of earlier steps."""
    steps, prefixes = 4, [9, 0, 22]
    # Slots of branches follow the prefix, branch by branch.
    server = Server([p + topk * steps for p in prefixes], [topk * steps] * 3, page_size, device, dtype)
    drafts = server.common["out_cache_loc"]
    lens = {"seq_lens": torch.tensor(prefixes, device=device), "seq_lens_cpu": None}
    lens |= {"seq_lens_cpu": torch.tensor(prefixes)} if known == "on the host" else {}
    batch = SimpleNamespace(**server.common | lens)
    container = PagedTreeDraftBackend(server.runner, topk, steps)
    if known == "to a graph":
        with Recording(Graph()):
            container.init_forward_metadata_in_graph(batch)
    else:
        container.init_forward_metadata(batch)
    assert len(container.attn_backends) == steps - 1
    rows = (x.view(3 * topk, steps, *x.shape[1:]).transpose(0, 1) for x in (drafts, server.q, server.k, server.v))
    of_step = (x.contiguous() for x in rows)
    for step, (slots, q, k, v) in enumerate(zip(*of_step, strict=True)):
        if step == steps - 1:
            break
        now = SimpleNamespace(out_cache_loc=slots)
        out = container.attn_backends[step].forward_decode(q, k, v, layer_of(), now)
        for b, prefix in enumerate(prefixes):
            for branch in range(topk):
                keys = [*range(prefix), *(prefix + branch * steps + i for i in range(step + 1))]
                rows = server.paged.k[b][keys], server.paged.v[b][keys], torch.ones(1, len(keys), dtype=torch.bool)
                row = b * topk + branch
                expected = dense_attention(q[row].view(1, HEADS, DIM).cpu(), *rows, scale=0.2)[0]
                close(out[row], expected.flatten())


def test_the_plugin_adds_a_backend_for_drafting() -> None:
    server = Server([4], [1], 4, torch.device("cpu"), torch.float32)
    factory = SimpleNamespace(draft_model_runner=server.runner, topk=2, speculative_num_steps=3)
    record = {}

    def original(self, name, backends, template, stamps_children=False):
        record["known"], (label, backend) = sorted(backends), backends["pagedtree"]()
        return label, backend, template, stamps_children

    arguments = "decode_attention_backend", {"triton": None}, "error"
    label, backend, *rest = create_draft_backend(original, factory, *arguments, stamps_children=True)
    assert record["known"] == ["pagedtree", "triton"] and label == "pagedtree" and rest == ["error", True]
    assert isinstance(backend, PagedTreeDraftBackend) and (backend.topk, backend.num_steps) == (2, 3)
    assert isinstance(create_draft_backend(original, factory, *arguments)[1], PagedTreeBackend)


def test_fp8_cache(backend, device) -> None:
    dtype = torch.float32 if backend == "cpu" else torch.float16
    server = Server([20, 7], [3, 7], 4, device, dtype)
    scale = torch.tensor(0.0625, device=device)
    server.buffers = [(x.nan_to_num() / scale).to(torch.float8_e4m3fn) for x in server.buffers]
    out = server.run(Mode.EXTEND, layer=layer_of(k_scale=scale, v_scale=scale))
    queries = server.q.cpu().view(-1, HEADS, DIM).split(server.news)
    for b, (q, rows) in enumerate(zip(queries, out.cpu().view(-1, HEADS, DIM).split(server.news), strict=True)):
        stored = [(x[b] / 0.0625).to(torch.float8_e4m3fn).float() * 0.0625 for x in (server.paged.k, server.paged.v)]
        close(rows, dense_attention(q, *stored, causal_mask(server.news[b], server.lens[b]), scale=0.2)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_cross_attention": True}, "decoder self-attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "decoder self-attention"),
        ({"logit_cap": 1.0, "logit_capping_method": "sigmoid"}, "tanh capping, got sigmoid"),
        ({"xai_temperature_len": 100}, "xai_temperature_len"),
    ],
)
def test_layers_that_are_refused(options, message) -> None:
    server = Server([4], [1], 4, torch.device("cpu"), torch.float32)
    with pytest.raises(NotImplementedError, match=message):
        server.run(Mode.DECODE, layer=layer_of(**options))


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="head size 64 with K's 64, got 128"):
        Server([4], [1], 4, torch.device("cpu"), torch.float32, dims=(64, 128)).run(Mode.DECODE)
    server = Server([4], [1], 4, torch.device("cpu"), torch.float32)
    with pytest.raises(NotImplementedError, match="k_rope, q_rope: only sinks"):
        server.run(Mode.DECODE, options={"q_rope": server.q, "k_rope": server.k, "return_lse": False})
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        PagedTreeBackend(server.runner).forward_decode(server.q, server.k, server.v, layer_of(), SimpleNamespace())
    with pytest.raises(NotImplementedError, match="--cuda-graph-backend-prefill full"):
        PagedTreeBackend(server.runner).init_forward_metadata_out_graph(SimpleNamespace(forward_mode=Mode.EXTEND), True)
    server.runner.token_to_kv_pool.translate_loc_from_full_to_swa = None
    with pytest.raises(NotImplementedError, match="sliding windows"):
        PagedTreeBackend(server.runner)
    server.runner.req_to_token_pool.mamba_pool = None
    with pytest.raises(NotImplementedError, match=r"recurrent layers \(a mamba_pool\) are not supported"):
        PagedTreeBackend(server.runner)
    server.runner.use_mla_backend = True
    with pytest.raises(NotImplementedError, match="kv_lora_rank 512 and qk_rope_head_dim 64, got 64 and 0"):
        PagedTreeBackend(server.runner)


# ---- functions that SGLang lacks on CPUs


def test_last_slots() -> None:
    table = torch.tensor([[5, 6, 7], [8, 9, 4]], dtype=torch.int32)
    found = on_cpu.last_loc(table, torch.tensor([1, 0, 1]), torch.tensor([2, 0, 3]))
    assert found.tolist() == [9, -1, 4]


def test_filters_of_probabilities() -> None:
    probs = torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]])
    result = on_cpu.top_k_renorm(probs, torch.tensor([2, 1, 2**30], dtype=torch.int32))
    torch.testing.assert_close(result, torch.tensor([[0.625, 0, 0.375, 0], [0.25] * 4, [0.1, 0.2, 0.3, 0.4]]))
    result = on_cpu.top_p_renorm(probs, torch.tensor([0.5, 0.3, 0.71]))
    torch.testing.assert_close(result, torch.tensor([[1.0, 0, 0, 0], [0.25] * 4, [0, 2 / 9, 3 / 9, 4 / 9]]))


def test_requests_that_sample_are_not_verified_greedily(monkeypatch) -> None:
    names = dict.fromkeys(on_cpu.SAMPLING)
    utils = SimpleNamespace(**{**names, "top_k_renorm_prob": len})
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative", SimpleNamespace(eagle_utils=utils))

    def original(*, is_all_greedy: bool, is_cpu: bool, is_hip: bool) -> bool:
        return is_all_greedy or is_cpu or is_hip

    ask = dict(is_cpu=True, is_hip=False)
    assert on_cpu.verify_uses_greedy(original, is_all_greedy=True, **ask)
    assert not on_cpu.verify_uses_greedy(original, is_all_greedy=False, **ask)
    assert on_cpu.verify_uses_greedy(original, is_all_greedy=False, is_cpu=False, is_hip=True)
    assert utils.top_k_renorm_prob is len  # existing functions stay
    assert utils.top_p_renorm_prob is on_cpu.top_p_renorm
    assert utils.tree_speculative_sampling_target_only is on_cpu.tree_speculative_sampling_target_only
