"""Request options in sample, token_logprobs, the lossless verify ops, their parts on shards, and commit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pagedtree
from pagedtree import (
    DraftTree,
    RequestOptions,
    SamplingParams,
    TreeBatch,
    Verdict,
    commit,
    reference,
    sample,
    token_logprobs,
    verify_sampled,
)
from pagedtree.check.case import CPU, Case, Place, Results, within
from pagedtree.check.cases.inputs import float32, int32, int64, normal, random_tree, seeded, streams_of, uniform
from pagedtree.check.cases.rules import RULES
from pagedtree.check.cases.shards import on_ranks
from pagedtree.check.cases.verification import Problem, Sampling, forest, problem_of, with_draft_vocabulary
from pagedtree.distributed import VocabShards

BATCH, VOCAB = 8, 45
AGAINST = "the op without options on logits that plain loops have processed"
# Names of fields, and of penalties.
PARTS = {
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_mask", "output_counts"),
    "repetition": ("repetition_penalty", "prompt_mask"),
    "presence": ("presence_penalty", "output_counts"),
    "frequency": ("frequency_penalty", "output_counts"),
    "bias": ("bias_tokens", "bias_values", "cu_bias"),
    "allowed tokens": ("allowed_mask",),
    "bad words": ("bad_tokens", "cu_bad_words", "cu_bad_seqs", "history", "history_lens", "history_start"),
    "minimum length": ("stop_ids", "min_position"),
}


def cases() -> Iterator[Case]:
    all_names = tuple(name for names in PARTS.values() for name in names)
    for part, names in {**PARTS, "everything": all_names}.items():
        trees, chains = forest("", BATCH, VOCAB), problem_of("", [[-1, 0, 1, 2], [-1, 0, 1]] * (BATCH // 2), VOCAB)
        masked = forest("", BATCH, VOCAB, "fp32", masked=True)
        yield _sample(part, trees, names)
        yield _logprobs(part, trees, names)
        for op in ("verify_sampled", *RULES):
            yield _verify(op, part, chains if op == "verify_block" else trees, names)
        if part == "bad words":  # of few tokens, so that the history's begin matters
            yield _verify("verify_traversal", f"{part}, few tokens", forest("", 30, 6), names)
        yield _verify("verify_sampled", f"{part}, grammar mask", masked, names)
        for op in ("verify_sampled", "verify_rejection"):
            yield _verify(op, part, trees, names, sharded=True)
            if part in ("presence", "bad words"):  # few tokens, so that the paths' tokens matter
                drafts = with_draft_vocabulary(forest("", 30, 6))
                yield _verify(op, f"{part}, draft vocabulary", drafts, names)
                yield _verify(op, f"{part}, draft vocabulary", drafts, names, sharded=True)
    for dtype, vocab in (("fp32", 1), ("bf16", 31), ("fp16", 4099), ("fp32", 70_001)):
        yield _logprobs(f"none, {dtype}, V {vocab}", forest("", BATCH, vocab, dtype, hostile=True), ())
    yield _logprobs("everything, V 4099", forest("", BATCH, 4099, hostile=True), all_names)
    yield _verify("verify_sampled", "everything, hostile rows", forest("", BATCH, VOCAB, hostile=True), all_names)
    malformed = problem_of("", [[-1, 0, 5, 1], [-1, 0, -1], [3, 0, 1], [-1, 0, 1, 2, 3]], max_nodes=4, max_depth=2)
    yield _verify("verify_sampled", "everything, malformed", malformed, all_names)
    yield _verify("verify_sampled", "everything, no sequence", problem_of("", [], VOCAB), all_names)
    # Stop ids are all that is left, and some of them are bad words.
    yield _verify("verify_sampled", "everything, V 2", forest("", BATCH, 2), all_names)
    for op in ("verify_sampled", "verify_rejection"):
        yield _verify(op, "everything, V 2", forest("", BATCH, 2), all_names, sharded=True)
    for problem in (forest("", 12, 5003, nodes=4), problem_of("", [random_tree(7, 300, 30).parents.tolist()], 17)):
        name, names = f"V {problem.logits.shape[1]}", PARTS["penalties"] + PARTS["bias"]
        yield _verify("verify_sampled", name, problem, names)
        yield _verify("verify_sampled", f"{name}, greedy", problem, names, {"temperature": 0.0})
    yield from (
        _commit(name, vocab) for name, vocab in (("output counts", 9), ("output counts of a smaller vocabulary", 4))
    )


def asked(problem: Problem, names: tuple[str, ...]) -> tuple[dict[str, Any], RequestOptions]:
    """Returns penalties and options of those names, for each sequence's likeliest tokens."""
    if not names:
        return {}, RequestOptions()
    logits = problem.logits.float().nan_to_num(-math.inf)
    batch, vocab = problem.batch, logits.shape[1]
    begins = int64([0, *(len(tree) for tree in problem.parents)]).cumsum(0)[:-1].tolist()
    best = [logits[begin].topk(min(4, vocab)).indices.tolist() for begin in begins]
    random_ids = torch.randint(vocab, (batch, 6), generator=seeded(9)).tolist()
    every = RequestOptions.from_lists(
        vocab,
        prompts=[[*ids[:1], *row] for ids, row in zip(best, random_ids, strict=True)],
        # One token that is unlikely but for a penalty that raises its logit.
        outputs=[[ids[1], ids[1], ids[-1], *[row[-1]] * 9] for ids, row in zip(best, random_ids, strict=True)],
        allowed=[[x for x in range(vocab) if x != ids[b % 2]] for b, ids in enumerate(best)],
        bias=[
            {ids[0]: -1.5, ids[1]: 2.0, ids[-1]: -math.inf, b % vocab: 3.25, random_ids[b][2]: 30.0 * (b % 4 == 2)}
            for b, ids in enumerate(best)
        ],
        # The first of the words of two ends where the text begins, and so matches only with an earlier beginning.
        bad_words=[[[ids[-1], ids[0]], [ids[0], ids[1]], [random_ids[b][0]]] for b, ids in enumerate(best)],
        stop_ids=[ids[:2] for ids in best],
        min_positions=[0] * batch,
    )
    positions = streams_of(batch)["positions"]
    assert every.history_lens is not None and every.bias_tokens is not None
    again = torch.arange(every.bias_tokens.numel(), dtype=torch.int64) % 5 == 3  # tokens that are listed twice
    bias_tokens = torch.where(again, every.bias_tokens.roll(1), every.bias_tokens)
    every = replace(every, min_position=positions + 2, history_start=every.history_lens, bias_tokens=bias_tokens)
    penalties = {
        "repetition_penalty": torch.linspace(0.8, 1.9, batch, dtype=torch.float32),
        "presence_penalty": 1.5,
        "frequency_penalty": torch.linspace(-1.0, 1.75, batch, dtype=torch.float32),
    }
    tensors = {name: value if name in names else None for name, value in every.tensors().items()}
    return {name: value for name, value in penalties.items() if name in names}, RequestOptions(**tensors)


def _case(name: str, ops: tuple[str, ...], run: Callable[[Place], Results], expected: Callable[[], Results]) -> Case:
    return Case(name, ops, run, expected, always_loops=True, against=AGAINST)


def _sample(part: str, problem: Problem, names: tuple[str, ...]) -> Case:
    logits, streams = problem.logits[:BATCH], streams_of(BATCH)
    roots = replace(problem, parents=[[-1]] * BATCH, logits=logits)
    penalties, options = asked(roots, names)
    mask = uniform(*logits.shape, seed=3) < 0.9

    def run(place: Place) -> Results:
        arguments = place.put({"params": SamplingParams(**SAMPLING, **penalties), "options": options, **streams})
        return {"tokens": sample(place.put(logits), **arguments, grammar_mask=place.put(mask))}

    def expected() -> Results:
        processed = reference.apply_options(
            logits, SamplingParams(**penalties), options, positions=streams["positions"], grammar_mask=mask
        )
        return {"tokens": sample(processed, SamplingParams(**SAMPLING), **streams)}

    return _case(f"sample/options/{part}", ("sample",), run, expected)


def _logprobs(part: str, problem: Problem, names: tuple[str, ...]) -> Case:
    logits, vocab = problem.logits[:BATCH], problem.logits.shape[1]
    penalties, options = asked(replace(problem, parents=[[-1]] * BATCH, logits=logits), names)
    tokens, rows = logits.float().topk(min(3, vocab)).indices[:, -1].contiguous(), int64(range(BATCH)).flip(0)
    tokens[5], tokens[6], rows[7] = vocab, -1, 2**40  # no tokens, and no row
    filters = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "filter_order": "joint"}
    kinds: dict[str, dict[str, Any]] = {"plain": {}, "drawn from": filters}
    top_n = min(5, vocab)

    def run(place: Place) -> Results:
        arguments = place.put({"options": options, "tokens": tokens, "rows": rows})
        fields: Results = {}
        for kind, filtered in kinds.items():
            params = place.put(SamplingParams(**filtered, **penalties))
            results = token_logprobs(place.put(logits), params=params, top_n=top_n, **arguments)
            fields |= {f"{kind} {name}": result for name, result in zip(LOGPROBS, results, strict=True)}
        bare = token_logprobs(place.put(logits), arguments["tokens"], top_n=0)
        return fields | {"of the logits": bare[0], "rank in the logits": bare[1]}

    def by_loops() -> Results:
        processed = reference.apply_options(logits[rows % BATCH], SamplingParams(**penalties), options)
        selected_rows = [row if at < BATCH else None for row, at in zip(processed, rows.tolist(), strict=True)]
        fields: Results = {}
        for kind, filtered in kinds.items():
            results = [_logprobs_of(row, int(x), top_n, filtered) for row, x in zip(selected_rows, tokens, strict=True)]
            columns = zip(LOGPROBS, zip(*results, strict=True), strict=True)
            fields |= {f"{kind} {name}": (float32 if "logprobs" in name else int64)(column) for name, column in columns}
        results = [_logprobs_of(row, int(x), 0, {}) for row, x in zip(logits, tokens, strict=True)]
        bare = float32([result[0] for result in results]), int64([result[1] for result in results])
        return fields | {"of the logits": bare[0], "rank in the logits": bare[1]}

    close = {f"{kind} {name}": within(1e-5, 1e-6) for kind in kinds for name in ("logprobs", "top_logprobs")}
    compare = close | {"of the logits": within(1e-5)}
    return Case(f"token_logprobs/options/{part}", ("token_logprobs",), run, by_loops, compare=compare)


LOGPROBS = ("logprobs", "ranks", "top_tokens", "top_logprobs")


def _logprobs_of(
    row: Tensor | None, token: int, top_n: int, filtered: dict[str, Any]
) -> tuple[float, int, list[int], list[float]]:
    if row is None:
        return -math.inf, 0, [-1] * top_n, [-math.inf] * top_n
    clean = reference.clean_logits(row)
    with np.errstate(divide="ignore", over="ignore"):
        logprobs = np.log(reference.distribution(clean, **filtered))
        if not filtered and clean.max() > -math.inf:  # also of probabilities that are too small for a number
            scores = (clean - clean.max()).astype(np.float64)
            logprobs = scores - np.log(np.exp(scores).sum())
    order = np.argsort(-clean, kind="stable")[:top_n].tolist()
    top = [x if clean[x] > -math.inf or clean.max() == -math.inf else -1 for x in order]
    of_top = [float(logprobs[x]) if x >= 0 else -math.inf for x in top]
    if not 0 <= token < len(clean):
        return -math.inf, 0, top, of_top
    return float(logprobs[token]), int((clean >= clean[token]).sum()), top, of_top


def _call(op: str, place: Place, problem: Problem, logits: Tensor, params: SamplingParams, **given: Any) -> Verdict:
    (_, drafts, trees), _ = problem.place(place)
    arguments = place.put(logits), drafts, trees, place.put(params)
    given = place.put({**given, **streams_of(problem.batch)})
    if op == "verify_sampled":
        return verify_sampled(*arguments, **given)
    verify, _, (*_, law) = RULES[op]
    probs = None if law == "onehot" else place.put(_draft_probs(problem))
    return verify(*arguments, draft_law=law, draft_probs=probs, **given)


def _draft_probs(problem: Problem) -> Tensor:
    logits = problem.logits.float() + normal(*problem.logits.shape, seed=5)
    return logits.nan_to_num(-math.inf).softmax(-1)


def _processed(problem: Problem, penalties: dict[str, Any], options: RequestOptions) -> Tensor:
    (logits, drafts, trees), keywords = problem.place(CPU)
    positions = streams_of(problem.batch)["positions"]
    return reference.apply_options(
        logits, SamplingParams(**penalties), options, trees=trees, draft_tokens=drafts, positions=positions, **keywords
    )


SAMPLING: Sampling = {"temperature": 0.9, "top_k": 12, "top_p": 0.95}


def _verify(
    op: str, part: str, problem: Problem, names: tuple[str, ...], sampling: Sampling = SAMPLING, sharded: bool = False
) -> Case:
    penalties, options = asked(problem, names)
    params, vocab = SamplingParams(**sampling, **penalties), problem.logits.shape[1]
    sizes = [vocab // 2, vocab - vocab // 2]

    def run(place: Place) -> Results:
        (_, drafts, trees), keywords = problem.place(place)
        if not sharded:
            return _call(op, place, problem, problem.logits, params, options=options, **keywords)._asdict()
        verify, law = getattr(pagedtree, op), {} if op == "verify_sampled" else {"draft_law": "onehot"}
        logits = place.put(problem.logits)
        inputs = place.put({"params": params, "options": options, **streams_of(problem.batch)})

        def on_rank(shards: VocabShards) -> Results:
            return verify(shards.own(logits), drafts, trees, shards=shards, **law, **inputs, **keywords)._asdict()

        return on_ranks(sizes, place.device, on_rank)

    def expected() -> Results:
        processed, keywords = _processed(problem, penalties, options), problem.place(CPU)[1]
        keywords.pop("grammar_mask", None)
        results = _call(op, CPU, problem, processed, SamplingParams(**sampling), **keywords)._asdict()
        return {f"{name} on rank {rank}": x for rank in range(2) for name, x in results.items()} if sharded else results

    if not sharded:
        return _case(f"{op}/options/{part}", (op,), run, expected)
    ops = ("step_shards", "follow_shards" if op == "verify_sampled" else "weigh_shards")
    return _case(f"shards/options, {op}/{part}", ops, run, expected)


def _commit(name: str, vocab: int) -> Case:
    tokens, accepted, eos = [[5, 5, 8, 5], [1, -1, -1, -1]], [3, 0], 8

    def run(place: Place) -> Results:
        trees = TreeBatch.from_trees([DraftTree.chain(3), DraftTree.chain(0)], device=place.device, max_depth=3)
        verdict = Verdict(int32([[0, 1, 2, 3], [0, -1, -1, -1]]), int32(accepted), int64(tokens), int32([0, 0]))
        wide = place.put(torch.ones(2, vocab + 3, dtype=torch.int32))  # rows are strided
        options = RequestOptions(output_counts=wide[:, :vocab])
        commit(place.put(verdict), trees, place.put(int32([3, 4])), eos_ids=place.put(int64([eos])), options=options)
        return {"output_counts": wide}

    def expected() -> Results:
        counts = torch.ones(2, vocab + 3, dtype=torch.int32)
        for b, row in enumerate(tokens):
            new_tokens = row[: accepted[b] + 1]
            for token in new_tokens[: new_tokens.index(eos) + 1 if eos in new_tokens else None]:
                if token < vocab:
                    counts[b, token] += 1
        return {"output_counts": counts}

    return Case(f"commit/{name}", ("commit",), run, expected)
