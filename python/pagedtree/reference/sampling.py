"""Random numbers, filters and distributions of sampled tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["GUMBEL", "OTHERS", "clean_logits", "distribution", "draft_use", "gumbel_noise", "philox4x32"]
__all__ += ["random_words", "sample_row"]

# Use ids of draws: the last word of the Philox counter.
GUMBEL, DRAFT = 0, 3
# A bit of the use of words that belong to the tokens of a group of noise but its first.
OTHERS = 0x80


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Returns Philox4x32-10 of uint32 counters [..., 4] and keys [..., 2]: uint32 [..., 4]."""
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
    counter = np.empty((blocks, 4), dtype=np.uint32)
    counter[:, 0] = position & 0xFFFFFFFF
    counter[:, 1] = (position >> 32) & 0xFFFFFFFF
    counter[:, 2] = np.arange(blocks)
    counter[:, 3] = use
    key = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], dtype=np.uint32)
    return philox4x32(counter, np.broadcast_to(key, (blocks, 2)))


def draft_use(place: int) -> int:
    """Returns the use id of a draft model's draws at the frontier node of that index."""
    return DRAFT | place << 8


def gumbel_noise(seed: int, position: int, vocab: int, use: int = GUMBEL) -> np.ndarray:
    """Returns the noise of tokens 0..vocab-1, drawn in groups of 8: float64 [vocab]."""
    groups = np.arange((vocab + 7) // 8)

    def exponentials(words: np.ndarray) -> np.ndarray:
        return -np.log1p(-(words.astype(np.float64) + 0.5) * 2.0**-32)

    blocks = random_words(seed, position, (len(groups) + 127) // 128 * 32, use)
    least = exponentials(blocks[groups // 128 * 32 + groups % 32, groups // 32 % 4]) / 8
    words = random_words(seed, position, 2 * len(groups), use | OTHERS).reshape(-1, 8)
    first = words[:, 0] >> 29
    is_first = np.arange(8) == first[:, None]
    more = np.zeros((len(groups), 8))
    more[~is_first] = exponentials(words[:, 1:]).reshape(-1)
    return -np.log(least[:, None] + more).reshape(-1)[:vocab]


def clean_logits(row: Tensor, allowed: np.ndarray | None = None) -> np.ndarray:
    """Returns the logits with NaN and forbidden tokens as -inf, +inf as the dtype's largest finite: float64 [V]."""
    logits = row.float().cpu().numpy().astype(np.float64)
    logits = np.where(np.isnan(logits), -np.inf, np.minimum(logits, torch.finfo(row.dtype).max))
    return logits if allowed is None else np.where(allowed, logits, -np.inf)


def kept_tokens(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, filter_order: str
) -> np.ndarray:
    """Returns bool [V], the tokens that the filters keep, by sorting. Clean `logits`, one finite; temperature > 0."""
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-logits, kind="stable")
    kept_by_min_p = weights >= min_p
    mask = kept_by_min_p if filter_order == "top_k_first" else np.ones_like(kept_by_min_p)

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
        return nucleus(largest(mask))
    return kept_by_min_p & largest(mask) & nucleus(mask)


def distribution(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
    filter_order: str = "top_k_first",
) -> np.ndarray:  # fmt: skip
    """Returns the distribution of one row of clean logits: float64 [V]."""
    if logits.max() == -np.inf:
        return np.full(logits.size, 1 / logits.size) if temperature > 0 else np.eye(1, logits.size)[0]
    if temperature == 0:
        return np.eye(1, logits.size, int(np.argmax(logits)))[0]
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / temperature)
    weights = np.where(kept_tokens(logits, temperature, top_k, top_p, min_p, filter_order), weights, 0)
    return weights / weights.sum()


def sample_row(p: np.ndarray, seed: int, position: int) -> tuple[int, float]:
    """Returns the token that distribution `p` gives at (seed, position), and its margin."""
    with np.errstate(divide="ignore"):
        scores = np.log(p) + gumbel_noise(seed, position, p.size)
    token = int(np.argmax(scores))
    rivals = np.delete(scores, token)
    return token, float(scores[token] - rivals.max()) if rivals.size else np.inf
