"""`generate`: a model's own text, faster, by verifying draft trees over a paged cache."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from pagedtree import SamplingParams
from pagedtree._arguments import refusal
from pagedtree.generation.decode_step import Policy
from pagedtree.generation.drafters.base import Drafter, NoDrafter, StepResult, as_drafter
from pagedtree.generation.engine import Engine
from pagedtree.generation.fixed_step import check_device
from pagedtree.generation.paged_cache import PagedCache
from pagedtree.generation.scheduler import GeneratedSequence, Scheduler
from pagedtree.generation.stats import GenerationStats
from pagedtree.generation.token_options import TokenOptions
from pagedtree.generation.tree_tuner import TreeTuner, TunerOf
from pagedtree.grammars import GrammarMatcher
from pagedtree.integrations.transformers import generate_arguments as arguments
from pagedtree.integrations.transformers.attention import autocast_dtype
from pagedtree.integrations.transformers.generate_arguments import Prompts, Request
from pagedtree.integrations.transformers.generation_config import config_fields
from pagedtree.integrations.transformers.model import TransformersModel
from pagedtree.integrations.transformers.rotary import check_constant, check_rotation
from pagedtree.integrations.transformers.turns import in_turn

if TYPE_CHECKING:
    from pagedtree.distributed import VocabShards

# Trees of a drafter that does not say how big they get.
ASSUMED_MAX_NODES = 64
# The most nodes of a tree that `tree_delta_rule` takes.
MAX_RECURRENT_NODES = 256
P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def to_its_end(streamer: Any) -> Iterator[None]:
    """Ends a streamer after the block, also after a refusal or error: another thread may wait for the end."""
    try:
        yield
    finally:
        if hasattr(streamer, "end"):
            streamer.end()


def _ending(function: Callable[P, R]) -> Callable[P, R]:
    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), to_its_end(kwargs.get("streamer")):
            return function(*args, **kwargs)

    return call


@_ending
def generate(
    model: Any,
    input_ids: Tensor | Sequence[Tensor] | Sequence[Sequence[int]] | Mapping[str, Any],
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
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    rule: str = "auto",
    tree: str | None = "auto",
    max_batch_tokens: int = 4096,
    max_sequences: int | None = None,
    share_prefix: bool | None = None,
    cuda_graph: bool = False,
    segment: int | None = None,
    shards: VocabShards | None = None,
    callback: Callable[[int, list[int]], object] | None = None,
    on_step: Callable[[StepResult], None] | None = None,
    options: TokenOptions | Sequence[TokenOptions | None] | None = None,
    min_new_tokens: int | Sequence[int] | None = None,
    logits_processor: Iterable[Any] | None = None,
    generation_config: bool = True,
    grammars: Sequence[GrammarMatcher | None] | None = None,
    logprobs: int | None = None,
    logprobs_mode: str = "raw",
    streamer: Any = None,
) -> tuple[list[Tensor] | Tensor, GenerationStats]:
    """Generates up to `max_new_tokens` tokens for each prompt; the drafter does not change the text's distribution.

    Greedy output is the model's own `generate(do_sample=False)`, and rule "sampled" gives the tokens that
    `pagedtree.sample` draws with each sequence's seed, for any drafter, page size, batch and eviction, except at
    near-ties. Under the other lossless rules tokens depend on seed, drafts and evictions.

    Args:
        model: a transformers causal language model in evaluation mode (docs/transformers.md lists them), whose layers
            use transformers' attention interface, with a head_dim that `tree_attention` has, or latent attention of 512
            and 64 values, or are recurrent.
        input_ids: int64 [B, L], a list of prompts (1-D tensors or lists of ints), a BatchEncoding, or a dict of
            input_ids and attention_mask.
        drafter: a `drafters.Drafter`; None = plain decoding.
        max_new_tokens: at least 1; fewer, with a warning, at the end of a position table (GPT-2, OPT, BERT).
        params: sampling parameters and penalties; temperature 0 is greedy. Tensor fields have one entry per prompt or
            sequence. None = from the generation config.
        seeds: one per sequence, int64 [B * n]; default 0, 1, 2, ...
        page_size: tokens per page. num_pages: default enough for all sequences that run at once; with fewer, the
            youngest wait or are evicted and read again later.
        n: outcomes per prompt; they share the prompt's pages.
        attention_mask: [B, L], zero where `input_ids`, a tensor, is padding (at either side). None: each pad_token_id
            in the tensor is padding, unless that token also ends sequences.
        eos_token_id: token or tokens that end a sequence and stay in it; default the generation config's; [] for none.
        pad_token_id: fills the rows of a tensor after EOS; default the model's, or its EOS, or 0.
        stop_strings: text or texts that end a sequence, after the token that completes one in its generated text,
            special tokens included. Needs `tokenizer`. Default the generation config's.
        rule: how drafts are verified. All but "typical" are lossless.
            "auto": "sampled" with params or a generation config that samples, else "greedy".
            "greedy", "sampled": `verify_greedy`, `verify_sampled`.
            "rejection": `verify_rejection`, by the drafter's draft_law.
            "block": `verify_block`, for drafters of chains.
            "traversal": `verify_traversal`, for drafters of draft_law "iid" or "swor".
            "typical": `verify_typical` with its defaults; not lossless.
        tree: "auto": each step drafts and verifies the subtree (possibly none) of the highest throughput, as measured;
            "rejection", "block" and "traversal" may give other texts with the same seed. None, and with cuda_graph or
            shards: full trees.
        max_batch_tokens: about the most prompt tokens per pass. max_sequences: most running sequences; None = all.
        share_prefix: whether a pass reads shared pages once for all outcomes (`merge_states`), without sliding windows.
            None: if this saves at least 1024 tokens.
        cuda_graph: replays a CUDA graph of the decode step, one for 1, 2, 4, 8, ... sequences, if none needs prefill.
            Drafters: None, `NgramDrafter` (remember=0), `MedusaDrafter`, `ModelDrafter`, `EagleDrafter`, `MtpDrafter`.
        segment: of `attention_plan`: a request's attention depends on its own text alone, not on the batch; with seeds,
            so does its text, if the model's other layers and the drafts do, too. Prompts and evicted text are read in
            chunks that end at multiples of it; K and V of evicted text may differ in their last bits. Needs tree=None.
        shards: of the model's output layer (`tensor_parallel`); all ranks call `generate` together, with the same
            arguments and seeds. Rules "greedy", "sampled" and "rejection"; the drafter may be a `DraftGroup`.
        callback: called with (sequence, new tokens) after each pass, in sequence order. A true result ends the
            sequence, on all ranks of shards. on_step: called with a `StepResult` after each pass.
        options: `TokenOptions`: one for all, or a list with one or None per prompt or sequence.
        min_new_tokens: least number of tokens before EOS (not before stop strings), for all, or for each prompt or
            sequence; default the generation config's, or 0.
        logits_processor: transformers' processors, read but not called: RepetitionPenalty, SequenceBias of single
            tokens, NoBadWords, MinLength, MinNewTokensLength, SuppressTokens, SuppressTokensAtBegin, and with params
            the warpers of temperature, top_k, top_p and min_p.
        generation_config: whether `model.generation_config` supplies defaults; False = only EOS and padding.
        grammars: a separate `pagedtree.grammars.GrammarMatcher`, for one call, or None for each sequence. A text ends
            with the token that completes the grammar.
        logprobs: stats.sequences also gets each token's log-probability, its rank and the top-`logprobs` tokens
            (`TokenLogprobs`), at most 1024; 0 = only the token's own, None = off.
        logprobs_mode: "raw": of the model's logits; "processed": after options, grammar, temperature and filters
            (greedy: after options and grammar).
        streamer: of transformers (`TextStreamer`, ...): gets the prompt, then each new token, of one sequence.

    Returns (sequences, stats). Sequence b * n + j is outcome j of prompt b: prompt and generated tokens, EOS included.
    For a list of prompts a list of int64 tensors [length]; for a tensor one int64 tensor [B * n, L + generated], padded
    at the right with pad_token_id. stats.sequences holds each finish reason.

    Calls that share a model or a drafter run one after another; do not run the model in another thread meanwhile. Rule
    "typical" takes no options and penalties, cuda_graph no grammars, shards no logprobs.

    `model.generation_config` counts as in `model.generate`, with top_k 50 where do_sample is True and it has none.
    params replace its sampling and repetition_penalty, rule "greedy" its sampling, min_new_tokens also min_length, a
    logits processor the field of its type; others and options are added. min_length counts a tensor's width, or the
    lengths of prompts in a list. Fields without a counterpart that change the text (num_beams, ...) are refused.

    Raises ValueError for arguments that do not fit each other or the model, texts that pass a limit at which rotary
    frequencies change (see `rotary`), or num_pages too small for one sequence; TypeError for objects of another type.
    """
    packed, adapted = TransformersModel(model), as_drafter(drafter)
    arguments.check_kinds(params=params, callback=callback, on_step=on_step, shards=shards, streamer=streamer)
    arguments.check_kinds(share_prefix=share_prefix, cuda_graph=cuda_graph, logits_processor=logits_processor)
    arguments.at_least_one(max_new_tokens=max_new_tokens, n=n, page_size=page_size, max_batch_tokens=max_batch_tokens)
    if segment is not None:
        arguments.check_segment(segment, tree, share_prefix)
        share_prefix = False
    given = {"min_new_tokens": min_new_tokens, "stop_strings": stop_strings}
    config = config_fields(model, generation_config, params=params, rule=rule, given=given)
    stops, eos_ids = config.stops(stop_strings, tokenizer), arguments.eos_tokens(model, eos_token_id)
    vocab_size, num_logits = (packed.vocab_size, packed.num_logits) if shards is None else (shards.vocab, shards.vocab)
    prompts = Prompts.of(model, input_ids, attention_mask, vocab_size, eos_ids, pad_token_id, n)
    read = config.read(logits_processor or (), prompts.tokens, prompts.width, eos_ids, num_logits)
    sequences = prompts.sequences(max_new_tokens, page_size if segment is None else math.lcm(page_size, segment))
    request = Request(prompts, sequences, max_new_tokens, min_new_tokens, params, seeds, options, eos_ids, config, read)
    scheduler = _scheduler(packed, adapted, sequences, page_size, num_pages, max_batch_tokens, max_sequences, segment)
    sampling, rows = request.sampling(rule, adapted, num_logits, shards, packed.device)
    steps = arguments.grammars_of(grammars, len(sequences), num_logits, eos_ids)
    reader = arguments.logprobs_of(logprobs, logprobs_mode, num_logits, shards is not None)
    policy = Policy(sampling, eos_ids, tree, share_prefix, cuda_graph, stops, rows, steps, reader, callback, on_step)
    stats = _run(model, packed, adapted, scheduler, policy, streamer)
    return prompts.results(sequences, packed.device), stats


def _scheduler(
    packed: TransformersModel,
    drafter: Drafter,
    sequences: list[GeneratedSequence],
    page_size: int,
    num_pages: int | None,
    max_batch_tokens: int,
    max_sequences: int | None,
    segment: int | None,
) -> Scheduler:
    """Returns the queue of the sequences, which has a cache with room for each of them."""
    arguments.at_least_one(max_sequences=1 if max_sequences is None else max_sequences)
    _limit_lengths(packed, sequences)
    at_once = check_rotation(packed.model, sequences, packed.is_recurrent)
    if segment is not None and at_once:
        raise refusal("segment", "None for prompts that must be read at once, as rotary frequencies change")
    if num_pages is None:
        max_nodes = drafter.max_nodes or ASSUMED_MAX_NODES
        needed = sorted((-(-(s.max_length + max_nodes) // page_size) + 1 for s in sequences), reverse=True)
        num_pages = max(sum(needed[:max_sequences]), 1)
    num_pages = arguments.integer("num_pages", num_pages)
    cache = PagedCache(num_pages, page_size, packed.device, packed.is_recurrent, segment)
    scheduler = Scheduler(sequences, cache, max(max_batch_tokens, at_once), max_sequences)
    scheduler.check_capacity(drafter.max_nodes or 1)
    if packed.is_recurrent and drafter.max_nodes > MAX_RECURRENT_NODES:
        wanted = f"trees of at most {MAX_RECURRENT_NODES} nodes for a model with recurrent layers"
        raise refusal("drafter", wanted, f"max_nodes {drafter.max_nodes}")
    return scheduler


def _run(
    model: Any, packed: TransformersModel, drafter: Drafter, scheduler: Scheduler, policy: Policy, streamer: Any
) -> GenerationStats:
    """Runs the engine, alone with the model and the drafter."""
    if policy.cuda_graph:
        _check_graph(model, drafter, packed.device, policy)
    if streamer is not None and len(scheduler.waiting) != 1:
        raise refusal("streamer", "one sequence, as in transformers", len(scheduler.waiting))
    config = getattr(drafter.model, "config", None)
    things = (model, model.config, drafter.given, drafter.model, config, *drafter.networks)
    with in_turn(*(thing for thing in things if thing is not None)):
        policy.tuner = _tuner(model, drafter, policy)
        if streamer is not None:
            streamer.put(torch.tensor([scheduler.waiting[0].tokens], dtype=torch.int64))
            policy.callback = fed(streamer, policy.callback)
        engine = Engine(packed, scheduler, drafter, policy)
        with packed.use():
            return engine.run()


def fed(streamer: Any, callback: Callable[[int, list[int]], object] | None) -> Callable[[int, list[int]], object]:
    """Returns a callback that feeds the streamer token by token, then calls the other one."""

    def put(sequence: int, tokens: list[int]) -> object:
        for token in tokens:
            streamer.put(torch.tensor([token], dtype=torch.int64))
        return None if callback is None else callback(sequence, tokens)

    return put


def _limit_lengths(packed: TransformersModel, sequences: list[GeneratedSequence]) -> None:
    """Limits sequences to the positions that their model can read. Raises ValueError for longer prompts."""
    count = packed.num_positions
    # The last token of a sequence is generated, but never read.
    late = [] if count is None else [sequence for sequence in sequences if sequence.max_length > count + 1]
    if count is None or not late or not packed.has_position_table:
        return
    longest = max(late, key=lambda sequence: sequence.prompt_len)
    if longest.prompt_len > count:
        wanted = f"prompts of at most {count} tokens, the positions of the model's table"
        raise refusal("input_ids", wanted, f"{longest.prompt_len} in prompt {longest.group}")
    warnings.warn(
        f"max_new_tokens: prompt {longest.group} of {longest.prompt_len} tokens gets at most"
        f" {count + 1 - longest.prompt_len} more, as the model's table has {count} positions",
        stacklevel=5,
    )
    for sequence in late:
        sequence.max_length = count + 1


def _check_graph(model: Any, drafter: Drafter, device: torch.device, policy: Policy) -> None:
    if autocast_dtype(device) is not None:
        raise refusal("cuda_graph", "False within torch.autocast, whose converted weights a graph cannot keep")
    check_device(device)
    for name, network in (("model", model), ("drafter", drafter.model)):
        check_constant(f"cuda_graph: {name}", network)
        if isinstance(network, torch.nn.Module) and any(weight.is_meta for weight in network.parameters()):
            raise refusal(f"cuda_graph: {name}", "weights on the GPU", "offloaded ones (device meta)")
    if policy.sampling.shards is not None:
        raise refusal("shards", "None with cuda_graph", "a VocabShards")
    if policy.grammars is not None:
        raise refusal("grammars", "None with cuda_graph, whose step cannot wait for masks from the host")
    if policy.share_prefix:
        raise refusal("share_prefix", "None or False with cuda_graph, whose step reads all pages", "True")


def _tuner(model: Any, drafter: Drafter, policy: Policy) -> TreeTuner | None:
    if policy.tree not in (None, "auto"):
        raise refusal("tree", 'None or "auto"', repr(policy.tree))
    # A captured step drafts the same tree each time, and shard ranks would choose by different clocks.
    is_fixed = policy.tree is None or policy.cuda_graph or policy.sampling.shards is not None
    if is_fixed or isinstance(drafter, NoDrafter):
        return None
    entry = drafter.tuner
    if entry is None or entry.model() is not model:
        max_depth = drafter.max_depth or (drafter.max_nodes or ASSUMED_MAX_NODES) - 1
        tuner = TreeTuner(max_depth, drafter.grows_by_level, drafter.has_free_guesses)
        keeper = drafter.given if hasattr(drafter.given, "observe") else drafter
        keeper.tuner = entry = TunerOf(weakref.ref(model), tuner)
    return entry.tuner
