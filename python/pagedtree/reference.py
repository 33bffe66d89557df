"""What the ops compute, as plain loops in float64. For tests: slow, and by another route than the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedtree.options import RequestOptions
from pagedtree.sampling import SamplingParams
from pagedtree.tree import TreeBatch

# What a draw is for: the last word of the Philox counter.
GUMBEL = 0
DRAFT = 3


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10 on uint32 counters [..., 4] and keys [..., 2]; returns uint32 [..., 4]."""
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k = [key[..., i].astype(np.uint64) for i in range(2)]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high = [product >> np.uint64(32) for product in (first, second)]
        c = [high[1] ^ c[1] ^ k[0], second & low, high[0] ^ c[3] ^ k[1], first & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, axis=-1).astype(np.uint32)


def random_words(seed: int, position: int, blocks: int, use: int) -> np.ndarray:
    """The words of blocks 0..blocks-1: uint32 [blocks, 4]."""
    counter = np.empty((blocks, 4), dtype=np.uint32)
    counter[:, 0] = position & 0xFFFFFFFF
    counter[:, 1] = (position >> 32) & 0xFFFFFFFF
    counter[:, 2] = np.arange(blocks)
    counter[:, 3] = use
    key = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], dtype=np.uint32)
    return philox4x32(counter, np.broadcast_to(key, (blocks, 2)))


def draft_use(place: int) -> int:
    """The use of the draws of a draft model at the frontier node of that index."""
    return DRAFT | place << 8


def gumbel_noise(seed: int, position: int, vocab: int, use: int = GUMBEL) -> np.ndarray:
    """The noise of tokens 0..vocab-1: float64 [vocab]."""
    words = random_words(seed, position, (vocab + 3) // 4, use).reshape(-1)[:vocab]
    return -np.log(-np.log1p(-(words.astype(np.float64) + 0.5) * 2.0**-32))


def clean_logits(row: Tensor, allowed: np.ndarray | None = None) -> np.ndarray:
    """NaN and what the grammar forbids as -inf, +inf as the dtype's largest finite: float64 [V]."""
    logits = row.float().cpu().numpy().astype(np.float64)
    logits = np.where(np.isnan(logits), -np.inf, np.minimum(logits, torch.finfo(row.dtype).max))
    return logits if allowed is None else np.where(allowed, logits, -np.inf)


def kept_tokens(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, filter_order: str
) -> np.ndarray:
    """bool [V]: what the filters keep, by sorting. `logits` are clean, with a finite one; temperature > 0."""
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-logits, kind="stable")
    kept_by_min_p = weights >= min_p
    left = kept_by_min_p if filter_order == "top_k_first" else np.ones_like(kept_by_min_p)

    def largest(among: np.ndarray) -> np.ndarray:
        if top_k <= 0 or top_k >= among.sum():
            return among
        return among & (logits >= logits[order][among[order]][top_k - 1])

    def nucleus(among: np.ndarray) -> np.ndarray:
        ids = order[among[order]]
        mass = np.cumsum(weights[ids])
        keep = np.zeros_like(among)
        keep[ids[: int(np.searchsorted(mass, top_p * mass[-1] * (1 - 1e-12))) + 1]] = True
        return keep if top_p < 1 else among

    if filter_order == "top_k_first":
        return nucleus(largest(left))
    return kept_by_min_p & largest(left) & nucleus(left)


def distribution(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
    filter_order: str = "top_k_first",
) -> np.ndarray:  # fmt: skip
    """The distribution of one row of clean logits under sampling parameters: float64 [V]."""
    if logits.max() == -np.inf:
        return np.full(logits.size, 1 / logits.size) if temperature > 0 else np.eye(1, logits.size)[0]
    if temperature == 0:
        return np.eye(1, logits.size, int(np.argmax(logits)))[0]
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / temperature)
    weights = np.where(kept_tokens(logits, temperature, top_k, top_p, min_p, filter_order), weights, 0)
    return weights / weights.sum()


def sample_row(p: np.ndarray, seed: int, position: int) -> tuple[int, float]:
    """The token that distribution `p` gives at (seed, position), and by how much it won."""
    with np.errstate(divide="ignore"):
        scores = np.log(p) + gumbel_noise(seed, position, p.size)
    token = int(np.argmax(scores))
    others = np.delete(scores, token)
    return token, float(scores[token] - others.max()) if others.size else np.inf


def walk(parents: Sequence[int], drafts: Sequence[int], next_token: Callable[[int, int], int]) -> tuple[list, list]:
    """The path and tokens of sampled or greedy verification; next_token(node, depth) is what follows `node`."""
    path, tokens = [0], [next_token(0, 0)]
    while True:
        children = [i for i, parent in enumerate(parents) if parent == path[-1] and drafts[i] == tokens[-1]]
        if not children:
            return path, tokens
        path.append(children[0])
        tokens.append(next_token(path[-1], len(path) - 1))


def apply_options(
    logits: Tensor,
    params: SamplingParams,
    options: RequestOptions | None,
    *,
    trees: TreeBatch | None = None,
    draft_tokens: Tensor | None = None,
    positions: Tensor | None = None,
    grammar_mask: Tensor | None = None,
    draft_to_target: Tensor | None = None,
) -> Tensor:
    """Logits after penalties, options and grammar mask: float32 [N, V]. Without trees each row is a sequence's root.

    An op with options gives what the op without gives for this. NaN stays NaN, forbidden or not, so that a row that has
    one is still told; +inf is the largest finite number of the dtype, or after bias of float32.
    """
    num_rows, vocab = logits.shape
    given = {name: t.cpu() for name, t in (options or RequestOptions()).tensors().items() if t is not None}
    drafts = [-1] * num_rows if draft_tokens is None else draft_tokens.tolist()
    if draft_to_target is not None:
        drafts = [int(draft_to_target[t]) if 0 <= t < len(draft_to_target) else -1 for t in drafts]
    clean = logits.float().clamp(max=torch.finfo(logits.dtype).max).cpu().numpy()
    grammar = None if grammar_mask is None else grammar_mask.cpu()
    out = clean.copy()
    for row, b, path in paths_of(num_rows, drafts, trees):
        forbidden = np.zeros(vocab, bool)
        for mask, at in ((given.get("allowed_mask"), b), (grammar, row)):
            if mask is not None:
                forbidden |= ~(mask[at].numpy() if mask.dtype == torch.bool else unpacked(mask[at], vocab))
        forbidden[[x for x in ends_of_bad_words(given, b, path) if 0 <= x < vocab]] = True
        args = (given, params, b, [x for x in path if 0 <= x < vocab])
        if positions is not None and "stop_ids" in given and "min_position" in given:
            predicted = int(positions[b]) + len(path) + 1
            stops = [x for x in given["stop_ids"][b].tolist() if 0 <= x < vocab]
            if predicted < int(given["min_position"][b]):
                stopped = forbidden.copy()
                stopped[stops] = True
                if np.nanmax(with_bias_and_penalties(clean[row], stopped, *args), initial=-np.inf) > -np.inf:
                    forbidden = stopped
        out[row] = with_bias_and_penalties(clean[row], forbidden, *args)
    return torch.from_numpy(out).to(logits.device)


def paths_of(num_rows: int, drafts: list[int], trees: TreeBatch | None) -> Iterator[tuple[int, int, list[int]]]:
    """(row, sequence, the tokens of its path below the root) of each row that a walk can visit."""
    if trees is None:
        yield from ((row, row, []) for row in range(num_rows))
        return
    offsets, parents, depths = (t.tolist() for t in (trees.cu_nodes, trees.parents, trees.depths))
    for b, begin in enumerate(offsets[:-1]):
        for row in range(begin, offsets[b + 1]):
            path: list[int] = []
            at = row
            while at > begin and depths[row] >= 0:
                path.insert(0, drafts[at])
                at = begin + parents[at]
            if row == begin or depths[row] >= 0:
                yield row, b, path


def ends_of_bad_words(given: dict[str, Tensor], b: int, path: list[int]) -> list[int]:
    """The last tokens of the words whose other tokens end the text."""
    if not {"bad_tokens", "cu_bad_words", "cu_bad_seqs"} <= given.keys():
        return []
    text = path
    if "history" in given and "history_lens" in given:
        start = int(given["history_start"][b]) if "history_start" in given else 0
        text = given["history"][b, max(start, 0) : max(int(given["history_lens"][b]), 0)].tolist() + path
    first, end = given["cu_bad_seqs"][b : b + 2].tolist()
    words = [
        given["bad_tokens"][begin:stop].tolist() for begin, stop in pairwise(given["cu_bad_words"][first : end + 1])
    ]
    return [word[-1] for word in words if word and text[len(text) - len(word) + 1 :] == word[:-1]]


def with_bias_and_penalties(
    row: np.ndarray, forbidden: np.ndarray, given: dict[str, Tensor], params: SamplingParams, b: int, path: list[int]
) -> np.ndarray:
    """One row, in float32: what is forbidden is -inf and stays so."""
    vocab = row.size
    repetition, presence, frequency = penalties_of(params, b)
    counts = np.zeros(vocab, np.int64)
    if "output_counts" in given:
        counts += given["output_counts"][b].numpy().clip(min=0)
    for x in path:
        counts[x] += 1
    seen = counts > 0
    if "prompt_mask" in given:
        seen = seen | unpacked(given["prompt_mask"][b], vocab)
    row, is_nan, forbidden = row.copy(), np.isnan(row), forbidden | (row == -np.inf)
    with np.errstate(all="ignore"):
        if {"bias_tokens", "bias_values", "cu_bias"} <= given.keys():
            begin, end = given["cu_bias"][b : b + 2].tolist()
            for x, bias in zip(given["bias_tokens"][begin:end].tolist(), given["bias_values"][begin:end], strict=True):
                if 0 <= x < vocab and not bias.isnan():
                    row[x] += np.float32(bias)
                    forbidden[x] |= bool(bias == -torch.inf)
        row = np.minimum(row, np.finfo(np.float32).max)
        row = np.where(seen, np.where(row > 0, row / repetition, row * repetition), row)
        row = row - frequency * counts.astype(np.float32)
        row = row - presence * (counts > 0).astype(np.float32)
    return np.where(forbidden & ~is_nan, np.float32(-np.inf), row)


def penalties_of(params: SamplingParams, b: int) -> tuple[np.float32, np.float32, np.float32]:
    """Repetition, presence and frequency penalty of a sequence, clamped; NaN is off."""

    def value_of(name: str) -> float:
        value = torch.as_tensor(getattr(params, name)).flatten().tolist()
        return value[b] if len(value) > 1 else value[0]

    repetition = value_of("repetition_penalty")
    presence, frequency = (
        0.0 if math.isnan(value) else min(max(value, -2.0), 2.0)
        for value in (value_of("presence_penalty"), value_of("frequency_penalty"))
    )
    return np.float32(repetition if repetition > 0 else 1), np.float32(presence), np.float32(frequency)


def unpacked(words: Tensor, vocab: int) -> np.ndarray:
    """bool [vocab] of packed int32 words."""
    return np.unpackbits(words.contiguous().numpy().view(np.uint8), bitorder="little")[:vocab].astype(bool)


# The rules that weigh the target's distribution p against the drafts' q, in whatever numbers the distributions are made
# of: exact in fractions. p and q hold one list for each node; below(entry, bound) says whether the coin of an entry is
# below `bound`. Each returns the path and the distribution of the bonus.

Row = Sequence[Any]
Below = Callable[[int, Any], bool]


def excess(p: Row, q: Row) -> list:
    return [max(a - b, 0) for a, b in zip(p, q, strict=True)]


def normalised(weights: Row) -> list:
    total = sum(weights)
    return [weight / total for weight in weights] if total else [*weights]


def without(weights: Row, *tokens: int) -> list:
    return [0 if x in tokens else weight for x, weight in enumerate(weights)]


def children_of(parents: Sequence[int], drafts: Sequence[int], node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node and drafts[child] >= 0]


def judge_in_turn(
    node: int, children: list[int], drafts: Sequence[int], p: Row, q: Row, draft_law: str, below: Below
) -> tuple[int | None, Row]:
    """The accepted child or None, and what is left of p."""
    for child in children:
        x = drafts[child]
        if q[x] > 0 and p[x] > 0 and below(child, p[x] / q[x]):
            return child, p
        p = normalised(excess(p, q))
        if draft_law == "swor":
            q = normalised(without(q, x))
    return None, p


def judge_exclusive(
    node: int, children: list[int], drafts: Sequence[int], p: Row, q: Row, draft_law: str, below: Below
) -> tuple[int | None, Row]:
    tried: list[int] = []
    for child in children:
        if drafts[child] in tried:
            continue
        tried.append(drafts[child])
        if p[tried[-1]] > 0 and below(node, sum(p[x] for x in tried)):
            return child, p
    return None, normalised(without(p, *tried))


def rejection(
    parents: Sequence[int], drafts: Sequence[int], p: Sequence[Row], q: Sequence[Row], draft_law: str, below: Below
) -> tuple[list[int], list]:
    judge = judge_exclusive if draft_law == "onehot" else judge_in_turn
    path = [0]
    while True:
        node = path[-1]
        children = children_of(parents, drafts, node)
        child, left = judge(node, children, drafts, p[node], q[node], draft_law, below)
        if child is None:
            return path, [*left] if any(left) else [*p[node]]
        path.append(child)


def acceptance(z: Any, weight: Any) -> Any:
    return z / (z + 1 - weight) if z + 1 - weight else 1


def block(
    parents: Sequence[int], drafts: Sequence[int], p: Sequence[Row], q: Sequence[Row], draft_law: str, below: Below
) -> tuple[list[int], list]:
    path, weight, accepted = [0], 1, 0
    left: list = []
    while True:
        node = path[-1]
        child = next((i for i, parent in enumerate(parents) if parent == node), None)
        x = -1 if child is None else drafts[child]
        distribution = [int(y == x) for y in range(len(p[node]))] if draft_law == "onehot" else q[node]
        rest = [weight * mass for mass in p[node]]
        h = weight
        if x >= 0:
            rest = excess(rest, distribution)
            h = acceptance(sum(rest), weight)
        if node == 0 or below(node, h):
            accepted, left = len(path), rest if any(rest) else [*p[node]]
        if child is None or x < 0:
            return path[:accepted], normalised(left)
        weight = min(1, weight * p[node][x] / distribution[x]) if distribution[x] > 0 else 0
        path.append(child)


def traversal(
    parents: Sequence[int], drafts: Sequence[int], p: Sequence[Row], q: Sequence[Row], draft_law: str, below: Below
) -> tuple[list[int], list]:
    def verify(node: int, weight: Any) -> tuple[list[int], list] | None:
        left, draft = p[node], q[node]
        for child in children_of(parents, drafts, node):
            x = drafts[child]
            found = verify(child, min(1, weight * left[x] / draft[x]) if draft[x] > 0 else 0)
            if found is not None:
                return [node, *found[0]], found[1]
            left = excess([weight * mass for mass in left], draft)
            weight = acceptance(sum(left), weight) if node else 1
            left = normalised(left)
            if draft_law == "swor":
                draft = normalised(without(draft, x))
        if node == 0 or below(node, weight):
            return [node], [*left] if any(left) else [*p[node]]
        return None

    found = verify(0, 1)
    assert found is not None
    return found


def branches(walk: Callable[[Below], Any]) -> Iterator[tuple[Any, dict[int, tuple], Any]]:
    """Every way that walk(below) can go: its probability, the interval of each coin in it, the result."""
    pending: list[list[bool]] = [[]]
    while pending:
        script = pending.pop()
        intervals: dict[int, tuple] = {}
        answers = iter(script)

        def below(
            entry: int, bound: Any, script: list = script, answers: Iterator = answers, intervals: dict = intervals
        ) -> bool:
            low, high = intervals.get(entry, (0, 1))
            if not low < bound < high:
                return bound >= high
            answer = next(answers, None)
            if answer is None:
                pending.append([*script, False])
                script.append(answer := True)
            intervals[entry] = (low, bound) if answer else (bound, high)
            return answer

        result = walk(below)
        yield math.prod(high - low for low, high in intervals.values()), intervals, result


def typical(parents: Sequence[int], drafts: Sequence[int], p: np.ndarray, epsilon: float, delta: float) -> list[int]:
    """The path of `pagedtree.verify_typical`."""
    paths = {0: [0]}
    for node, parent in enumerate(parents):
        if node == 0 or parent not in paths or drafts[node] < 0:
            continue
        distribution = p[parent]
        entropy = -sum(float(mass) * math.log(mass) for mass in distribution if mass > 0)
        if distribution[drafts[node]] > min(epsilon, delta * math.exp(-entropy)):
            paths[node] = [*paths[parent], node]
    return max(paths.values(), key=lambda path: (len(path), -path[-1]))


def visible_keys(seq_len: int, n: int, tree_len: int, words: Tensor | None, window: int) -> Tensor:
    """bool [n, seq_len]: which keys each of a sequence's n queries sees; words int32 [n, W], causal if tree_len < 0."""
    seen = np.zeros((n, seq_len), dtype=bool)
    tree_start = seq_len - tree_len
    for i in range(n):
        if words is None or tree_len < 0:
            position = seq_len - n + i
            first = max(0, position - window + 1) if window else 0
            seen[i, first : max(position + 1, 0)] = True
            continue
        bits = np.flatnonzero(np.unpackbits(words[i].numpy().view(np.uint8), bitorder="little")[:tree_len])
        position = tree_start + len(bits) - 1
        seen[i, :tree_start] = True
        if window:
            seen[i, : max(position - window + 1, 0)] = False
        for depth, j in enumerate(bits):
            seen[i, tree_start + j] = not window or position - (tree_start + depth) < window
    return torch.from_numpy(seen)


def is_latent(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Tells whether V is the first columns of K: then it is scaled as K is."""
    same = k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride()[:2] == v_cache.stride()[:2]
    return same and k_cache.shape[2] == 1


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    tree_mask: Tensor | None = None,
    *,
    tree_lens: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `pagedtree.tree_attention` in float64, clamping of bad values included."""
    num_tokens, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, head_dim_v = v_cache.shape
    group = num_heads // num_kv_heads
    out = torch.zeros(num_tokens, num_heads, head_dim_v, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float64)
    sink = torch.full((num_heads,), -torch.inf) if sinks is None else sinks
    k_factor = torch.ones(num_kv_heads) if k_scale is None else k_scale.expand(num_kv_heads)
    if v_scale is None and is_latent(k_cache, v_cache):
        v_scale = k_scale
    v_factor = torch.ones(num_kv_heads) if v_scale is None else v_scale.expand(num_kv_heads)
    offsets = cu_seqlens_q.tolist()
    for b, given in enumerate(seq_lens.tolist()):
        begin, n = offsets[b], offsets[b + 1] - offsets[b]
        seq_len = min(max(given, 0), page_table.shape[1] * page_size)
        tree_len = n if tree_lens is None else min(max(int(tree_lens[b]), -1), seq_len)
        words = None if tree_mask is None else tree_mask[begin : begin + n]
        seen = visible_keys(seq_len, n, min(tree_len, seq_len), words, window)
        used = seen.any(0)
        positions = torch.arange(seq_len)[used]
        pages = page_table[b].long()[positions // page_size]
        known = (pages >= 0) & (pages < num_pages)
        k, v = (
            torch.zeros(seq_len, num_kv_heads, cache.shape[3], dtype=torch.float64).index_put(
                (positions[known],), cache[pages[known], positions[known] % page_size].float().double()
            )
            for cache in (k_cache, v_cache)
        )
        k, v = k * k_factor.double()[:, None], v * v_factor.double()[:, None]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[begin : begin + n].double(), k)
        scores = scores * (head_dim**-0.5 if scale is None else scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        logits = torch.cat([scores, sink.double()[:, None, None].expand(-1, n, 1)], -1)
        total = logits.logsumexp(-1)
        weights = (scores - total.masked_fill(total == -torch.inf, 0)[..., None]).exp()
        out[begin : begin + n] = torch.einsum("hqk,khd->qhd", weights, v)
        lse[begin : begin + n] = total.T
    return out, lse


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of `pagedtree.merge_states` in float64."""
    lse = torch.logaddexp(lse_a.double(), lse_b.double())
    base = lse.masked_fill(lse == -torch.inf, 0)
    sides = ((out_a, lse_a), (out_b, lse_b))
    out = sum((lse_x.double() - base).exp()[..., None] * out_x.double().nan_to_num() for out_x, lse_x in sides)
    return torch.as_tensor(out), lse
