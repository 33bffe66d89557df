"""`generate`: a model's own text, faster, by verifying draft trees over a paged cache."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pagedtree import SamplingParams
from pagedtree.integrations.transformers import scheduler
from pagedtree.integrations.transformers.drafters import Drafter, NoDrafter, StepResult, as_drafter
from pagedtree.integrations.transformers.engine import Engine
from pagedtree.integrations.transformers.fixed_step import check_device
from pagedtree.integrations.transformers.model import check_model, use_attention
from pagedtree.integrations.transformers.paged_cache import PagedCache
from pagedtree.integrations.transformers.rotary import check_constant, check_rotation, same_rotation
from pagedtree.integrations.transformers.rules import Sampling, check_rule
from pagedtree.integrations.transformers.scheduler import Scheduler
from pagedtree.integrations.transformers.stats import GenerationStats, SequenceStats
from pagedtree.integrations.transformers.tree_tuner import TreeTuner

if TYPE_CHECKING:
    from pagedtree.distributed import VocabShards

__all__ = ["generate"]

# Reading a prefix once takes two more launches a layer. Measured on the CPU, that pays from about here on for single
# queries; for trees of 16 nodes, bound by arithmetic rather than by reading, it makes little difference.
MIN_SHARED_TOKENS = 1024
# Trees of a drafter that does not say how big they get.
ASSUMED_MAX_NODES = 64


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor | Sequence[Tensor] | Sequence[Sequence[int]],
    *,
    drafter: Any = None,
    max_new_tokens: int,
    params: SamplingParams | None = None,
    seeds: Tensor | Sequence[int] | None = None,
    page_size: int = 16,
    num_pages: int | None = None,
    n: int = 1,
    attention_mask: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    rule: str = "auto",
    tree: str | None = None,
    max_batch_tokens: int = 4096,
    share_prefix: bool | None = None,
    cuda_graph: bool = False,
    shards: VocabShards | None = None,
    callback: Callable[[int, list[int]], None] | None = None,
    on_step: Callable[[StepResult], None] | None = None,
) -> tuple[list[Tensor] | Tensor, GenerationStats]:
    """Generates up to `max_new_tokens` tokens for each prompt; the law of the result does not depend on the drafter.

    Greedy output is the model's own `generate(do_sample=False)`; under rule "sampled" it is, for each sequence, what
    `pagedtree.sample` draws with its seed, token by token. Both hold for any drafter, page size, batch and eviction,
    up to nearly tied logits (which in fp32 do not happen in practice). Under the other lossless rules the tokens follow
    the same law; which ones come out depends on the seed, and also on the drafts and on when a sequence was evicted.

    Args:
        model: a transformers causal language model in evaluation mode whose layers all use transformers' attention
            interface (Llama, Mistral, Qwen, Gemma, gpt-oss, ...), with a head_dim that `tree_attention` has.
        input_ids: int64 [B, L], or a list of prompts of different lengths (1-D tensors or lists of ints).
        drafter: None (plain decoding), or an object with propose(tokens, lengths), see `drafters.Drafter`.
        max_new_tokens: at least 1; EOS ends a sequence earlier.
        params: None = greedy; else how to sample. Tensor fields have one entry a prompt, or one a sequence.
        seeds: one a sequence, int64 [B * n]; default 0, 1, 2, ...
        page_size: tokens a page. num_pages: pages in the pool; default: enough for all sequences at once. With fewer,
            sequences wait, and the youngest are evicted and read again later.
        n: outcomes a prompt; they share the pages of the prompt, of which nothing is copied.
        attention_mask: [B, L], zero where `input_ids` is padding (at either side); only with a tensor.
        eos_token_id: token or tokens that end a sequence, kept in it; default the model's generation config; an empty
            list for none.
        pad_token_id: what fills the rows of a tensor after EOS; default the model's, or its EOS, or 0.
        rule: how drafts are verified. All but "typical" are lossless.
            "auto": "greedy" without params, else "sampled". "greedy", "sampled": `verify_greedy`, `verify_sampled`.
            "rejection": `verify_rejection`, by the drafter's draft_law.
            "block": `verify_block`, for drafters of chains.
            "traversal": `verify_traversal`, for drafters of draft_law "iid" or "swor".
            "typical": `verify_typical` with its defaults; not lossless: likely drafts are favoured, nothing is random.
        tree: None: the drafter's own trees, in each step. "auto": the tree that `choose_tree` finds for what steps cost
            and what was accepted so far, at most the drafter's own; none where drafts do not pay, nor while
            they have lost 1 % of the time against plain decoding; a little more if they won before, or promise to.
            What was learnt stays with the drafter.
        max_batch_tokens: longer prompts are read in chunks, so that a pass feeds the model about this many tokens.
        share_prefix: whether a pass reads the pages that several outcomes share once, for all of them, and joins
            that with their own pages by `merge_states`. None: if at least 1024 tokens need not be read then. Layers
            with a sliding window never do.
        cuda_graph: replays a CUDA graph of the decode step, drafting to commit, where no sequence has to be read; the
            output is the same. One graph for 1, 2, 4, 8, ... sequences. Drafters: None, `NgramDrafter` (remember=0),
            `MedusaDrafter`, `ModelDrafter`, whose pool then has room for all sequences from the beginning.
        shards: the model's output layer gives this rank's columns of the logits (`tensor_parallel`); all ranks call
            `generate` together, with the same arguments and seeds, and get the same. Rules "greedy", "sampled" and
            "rejection"; the drafter may be a `pagedtree.distributed.DraftGroup`.
        callback: called with (sequence, new tokens) after each pass, in the order of the sequences.
        on_step: called with a `StepResult` after each pass, for tracing.

    Returns (sequences, stats). Sequence b * n + j is outcome j of prompt b: prompt and generated tokens, EOS included.
    For a list of prompts a list of int64 tensors [length]; for a tensor, like model.generate, one int64 tensor
    [B * n, L + generated], padded at the right with pad_token_id.

    Raises ValueError for an empty prompt, a model or arguments that do not fit, sequences that would change the
    frequencies of a model's rotary embedding for their neighbours ("longrope", "dynamic"; see `rotary`), a rule that
    the drafter or params do not fit, cuda_graph without a GPU or with another drafter, or num_pages too small for a
    sequence with the whole pool to itself.
    """
    check_model(model)
    prompts = _prompts(input_ids, attention_mask)
    _check_at_least_one(max_new_tokens=max_new_tokens, n=n, page_size=page_size, max_batch_tokens=max_batch_tokens)
    device = model.get_input_embeddings().weight.device
    drafter = as_drafter(drafter)
    rule = check_rule(rule, params, drafter.draft_law, drafter.is_chain, shards is not None)
    sequences = [
        scheduler.Sequence(
            index=b * n + j,
            group=b,
            tokens=list(prompt),
            max_length=len(prompt) + max_new_tokens,
            # The last token is always computed, and what is shared is whole pages.
            shared_len=(len(prompt) - 1) // page_size * page_size if n > 1 else 0,
        )
        for b, prompt in enumerate(prompts)
        for j in range(n)
    ]
    max_nodes = drafter.max_nodes or ASSUMED_MAX_NODES
    if num_pages is None:
        num_pages = max(sum(-(-(s.max_length + max_nodes) // page_size) + 1 for s in sequences), 1)
    cache = PagedCache(num_pages, page_size, device)
    queue = Scheduler(sequences, cache, max_batch_tokens)
    queue.check_capacity(drafter.max_nodes or 1)
    is_long = check_rotation("model", model, sequences)
    if hasattr(drafter, "prepare"):  # any object with `observe` is a drafter
        drafter.prepare(sequences)
    if cuda_graph:
        check_device(device)
        for name, each in (("model", model), ("drafter", getattr(drafter, "model", None))):
            check_constant(f"cuda_graph: {name}", each)
        if shards is not None:
            raise ValueError("shards: expected None with cuda_graph, got a VocabShards")
        if share_prefix:
            raise ValueError(
                "share_prefix: expected None or False with cuda_graph, whose step reads all pages, got True"
            )
    tuner = _tuner(model, drafter, tree, cuda_graph, shards is not None)
    stats = GenerationStats(sequences=[SequenceStats() for _ in sequences])
    min_shared_tokens = {None: MIN_SHARED_TOKENS, True: 1, False: None}[share_prefix]
    each = _params_of_sequences(params, len(prompts), n)
    sampling = Sampling(rule, each, _seeds(seeds, len(sequences), device), shards)
    eos_ids = _eos_ids(model, eos_token_id)
    engine = Engine(
        model, queue, drafter, sampling, eos_ids, min_shared_tokens, callback, on_step, stats, cuda_graph, tuner
    )  # fmt: skip
    with use_attention(model), same_rotation(model, is_long):
        engine.run()
    if isinstance(input_ids, Tensor):
        pad = next(
            (token for token in (pad_token_id, model.generation_config.pad_token_id, *eos_ids) if token is not None), 0
        )
        return _padded(input_ids, prompts, sequences, n, pad), stats
    return [torch.tensor(sequence.tokens, device=device) for sequence in sequences], stats


def _tuner(model: Any, drafter: Drafter, tree: str | None, cuda_graph: bool, is_sharded: bool) -> TreeTuner | None:
    """What the drafter learnt with this model before goes on."""
    if tree not in (None, "auto"):
        raise ValueError(f'tree: expected None or "auto", got {tree!r}')
    if tree is None or isinstance(drafter, NoDrafter):
        return None
    if cuda_graph:
        raise ValueError('tree: expected None with cuda_graph, whose step drafts the same tree each time, got "auto"')
    if is_sharded:
        raise ValueError('tree: expected None with shards, as each rank would choose by its own clock, got "auto"')
    if drafter.tuner is None or drafter.tuner[0]() is not model:
        max_nodes = drafter.max_nodes or ASSUMED_MAX_NODES
        drafter.tuner = weakref.ref(model), TreeTuner(max_nodes, drafter.max_depth or max_nodes - 1)
    return drafter.tuner[1]


def _check_at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")


def _prompts(input_ids: Any, attention_mask: Tensor | None) -> list[list[int]]:
    if isinstance(input_ids, Tensor):
        if input_ids.ndim != 2 or input_ids.is_floating_point():
            raise ValueError(
                f"input_ids: expected integers [B, L], got {input_ids.dtype} {list(input_ids.shape)}; a list for"
                " prompts of different lengths"
            )
        keep = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        if keep.shape != input_ids.shape:
            raise ValueError(f"attention_mask: expected {list(input_ids.shape)}, got {list(keep.shape)}")
        pairs = zip(input_ids.tolist(), keep.tolist(), strict=True)
        prompts = [[token for token, kept in zip(*pair, strict=True) if kept] for pair in pairs]
    else:
        if attention_mask is not None:
            raise ValueError("attention_mask: expected none with a list of prompts")
        prompts = [prompt.tolist() if isinstance(prompt, Tensor) else list(prompt) for prompt in input_ids]
    for b, prompt in enumerate(prompts):
        if not prompt or not all(isinstance(token, int) for token in prompt):
            raise ValueError(f"input_ids: expected at least one token in one dimension, got {prompt} as prompt {b}")
    return prompts


def _params_of_sequences(params: SamplingParams | None, num_prompts: int, n: int) -> SamplingParams | None:
    """Tensor fields get one entry a sequence."""
    if params is None:
        return None
    expanded: dict[str, Any] = {}
    for field in fields(params):
        value = getattr(params, field.name)
        if not isinstance(value, Tensor) or value.ndim == 0:
            continue
        if value.ndim != 1 or value.shape[0] not in (1, num_prompts, num_prompts * n):
            raise ValueError(f"params: expected {field.name} of {num_prompts} prompts, got {list(value.shape)}")
        expanded[field.name] = value.repeat_interleave(num_prompts * n // value.shape[0]) if value.shape[0] else value
    return replace(params, **expanded)


def _seeds(seeds: Tensor | Sequence[int] | None, num_sequences: int, device: torch.device) -> Tensor:
    given = torch.arange(num_sequences) if seeds is None else torch.as_tensor(seeds)
    if given.shape != (num_sequences,) or given.is_floating_point():
        raise ValueError(f"seeds: expected {num_sequences} integers, got {given.dtype} {list(given.shape)}")
    return given.to(device, torch.int64)


def _eos_ids(model: Any, eos_token_id: int | Sequence[int] | None) -> list[int]:
    if eos_token_id is None:
        eos_token_id = model.generation_config.eos_token_id
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else [int(token) for token in eos_token_id]


def _padded(
    input_ids: Tensor, prompts: list[list[int]], sequences: list[scheduler.Sequence], n: int, pad: int
) -> Tensor:
    new = [sequence.tokens[len(prompts[sequence.group]) :] for sequence in sequences]
    width = max(map(len, new), default=0)
    rows = torch.tensor([[*row, *[pad] * (width - len(row))] for row in new], dtype=torch.int64)
    rows = rows.view(len(new), width).to(input_ids.device)
    return torch.cat([input_ids.long().repeat_interleave(n, dim=0), rows], dim=1)
