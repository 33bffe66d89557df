"""Fills the grammar masks of a batch of trees on worker threads."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from pagedtree._arguments import expect_shape, expect_type, refusal
from pagedtree.grammars.matcher import Array, GrammarMatcher, allow_only, linked_tree
from pagedtree.tree import TreeBatch

__all__ = ["GrammarFill", "GrammarMasks"]


class GrammarFill:
    """A mask fill in progress, returned by `GrammarMasks.fill`.

    Attributes:
        waited: seconds that `result` blocked; None before the call.
        filled: seconds from `fill` to the last row; None before `result`.
    """

    def __init__(self, mask: Tensor, device: torch.device, tasks: Future[list[Future[float]]], began: float) -> None:
        self.waited: float | None = None
        self.filled: float | None = None
        self._mask, self._device, self._tasks, self._began = mask, device, tasks, began
        self._result: Tensor | None = None

    def _settle(self) -> None:
        if not self._tasks.cancelled() and self._tasks.exception() is None:
            wait(self._tasks.result())

    def done(self) -> bool:
        """Returns whether `result` would return without blocking."""
        if not self._tasks.done():
            return False
        return self._tasks.exception() is not None or all(task.done() for task in self._tasks.result())

    def result(self, out: Tensor | None = None) -> Tensor:
        """Returns the masks, int32 [N, ceil(V / 32)] on the device: grammar_mask of the verify ops and of `sample`.

        out: optional tensor of that shape on the device, filled and returned, as captured graphs require.

        On CUDA the copy is queued on the current stream without waiting. Raises the matcher's own error, or ValueError
        where `out` does not fit.
        """
        if out is not None:
            expect_type("out", out, Tensor)
            if out.shape != self._mask.shape or out.dtype != torch.int32 or out.device != self._device:
                wanted = f"int32 {list(self._mask.shape)} on {self._device}"
                raise refusal("out", wanted, f"{out.dtype} {list(out.shape)} on {out.device}")
        if self._result is None:
            before = time.perf_counter()
            self._settle()
            self.waited = time.perf_counter() - before
            ends = [task.result() for task in self._tasks.result()]
            self.filled = max(ends, default=self._began) - self._began
            if out is None:
                self._result = self._mask.to(self._device, non_blocking=True)
        if out is not None:
            self._result = out.copy_(self._mask, non_blocking=True)
        assert self._result is not None
        return self._result


class GrammarMasks:
    """The grammars of a batch of sequences, and the threads that fill their masks during the target's pass.

        masks = GrammarMasks([XGrammarMatcher(matcher), None], vocab_size=logits.shape[1])
        first = sample(prompt_logits, params, ..., grammar_mask=masks.fill_next().result())
        masks.advance(first[:, None])
        while not finished:
            draft_tokens, trees = ...
            fill = masks.fill(draft_tokens, trees)
            logits = target(draft_tokens, trees)
            verdict = verify_sampled(logits, draft_tokens, trees, ..., grammar_mask=fill.result())
            step = commit(verdict, trees, start, eos_ids=...)
            masks.advance(verdict.tokens, step.num_tokens)

    Attributes:
        matchers: list of B, one matcher per sequence, None: no grammar. A scheduler may change it between steps. Each
            matcher appears at most once.
        vocab_size: V, the columns of the logits, 1..2^20.

    `threads` is the maximum number of workers, by default one per CPU core that the process may use. `device` is the
    masks' device, by default the draft tokens' (`fill_next`: cpu). `close`, or leaving the context manager, ends the
    threads. Other values raise TypeError and ValueError.
    """

    def __init__(
        self,
        matchers: Sequence[GrammarMatcher | None],
        vocab_size: int,
        *,
        threads: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value, top in (("vocab_size", vocab_size, 2**20), ("threads", threads, 1024)):
            if name == "threads" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise refusal(name, "an integer", f"{value!r:.40}", TypeError)
            if not 1 <= value <= top:
                raise refusal(name, f"1..{top}", value)
        self.matchers = matchers
        self.vocab_size = vocab_size
        self._device = None if device is None else torch.device(device)
        self._pool = ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)), "pagedtree-grammar")
        self._last: GrammarFill | None = None

    @property
    def matchers(self) -> list[GrammarMatcher | None]:
        return self._matchers

    @matchers.setter
    def matchers(self, matchers: Sequence[GrammarMatcher | None]) -> None:
        _check_matchers(matchers)
        self._matchers = list(matchers)

    def fill(
        self,
        draft_tokens: Tensor,
        trees: TreeBatch,
        *,
        draft_to_target: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> GrammarFill:
        """Starts filling the masks of all nodes, one task per sequence, and returns without waiting.

        Args:
            draft_tokens: int32 or int64 [N], as for the verify ops: root tokens are ignored, ids outside 0..V-1 are no
                drafts.
            trees: B trees of N rows. Malformed trees are read as in `build_trees`.
            draft_to_target: int32 or int64 [V_draft], if draft_tokens are ids of a draft vocabulary.
            device: device of the masks; default the object's, else draft_tokens'.

        GPU inputs are copied to the host behind the queued kernels, and only the worker threads wait: call `fill`
        before queueing the target's pass. To avoid the copy, pass CPU tensors and `device`.

        Returns a `GrammarFill`. Bit x % 32 of word x // 32 in row n is set if token x may follow node n. Where the
        grammar has ended or allows no token, only the stop tokens are set. Bits past the grammar's vocabulary or V are
        0. Rows of forbidden drafts and their descendants, unreachable nodes, padding and sequences without a grammar
        allow the whole vocabulary.

        Matchers keep their state. Raises TypeError and ValueError for wrong types, shapes and numbers of matchers.
        """
        expect_type("draft_tokens", draft_tokens, Tensor)
        expect_type("trees", trees, TreeBatch)
        trees._check()
        rows = trees.parents.shape[0]
        _expect_ids("draft_tokens", draft_tokens, [rows])
        if len(self._matchers) != trees.batch_size:
            raise refusal("matchers", f"{trees.batch_size}, one per tree or None", len(self._matchers))
        if draft_to_target is not None:
            expect_type("draft_to_target", draft_to_target, Tensor)
            _expect_ids("draft_to_target", draft_to_target, [draft_to_target.numel()])
            draft_tokens = _mapped(draft_tokens, draft_to_target)
        return self._start(draft_tokens, trees.parents, trees.cu_nodes, (trees.max_nodes, trees.max_depth), device)

    def fill_next(self, *, device: torch.device | str | None = None) -> GrammarFill:
        """Fills the masks of each sequence's next token: one row per sequence, as for `sample`. See `fill`."""
        batch = len(self._matchers)
        roots = torch.full((batch,), -1, dtype=torch.int32, device="cpu")
        offsets = torch.arange(batch + 1, dtype=torch.int32, device="cpu")
        return self._start(roots, roots, offsets, (1, 0), device)

    def _start(
        self,
        tokens: Tensor,
        parents: Tensor,
        cu_nodes: Tensor,
        bounds: tuple[int, int],
        device: torch.device | str | None,
    ) -> GrammarFill:
        began = time.perf_counter()
        choice = torch.device(device) if device is not None else self._device or tokens.device
        target = torch.empty(0, device=choice, dtype=torch.int32).device  # with its index
        self._settle()
        _check_matchers(self._matchers)
        matchers, vocab, rows = list(self._matchers), self.vocab_size, tokens.shape[0]
        host, events = _on_host(tokens.long(), parents, cu_nodes)
        words = -(-vocab // 32)
        mask = torch.empty((rows, words), dtype=torch.int32, device="cpu", pin_memory=_can_pin(target))
        filled = mask.numpy()

        def start() -> list[Future[float]]:
            for event in events:
                event.synchronize()
            nodes, links, offsets = (tensor.numpy() for tensor in host)
            ends = offsets.tolist()
            if ends[0] != 0 or ends[-1] > rows or any(a > b for a, b in pairwise(ends)):
                raise refusal("cu_nodes", f"offsets that ascend from 0 to at most {rows}")
            filled[ends[-1] :] = -1
            _clear_from(filled[ends[-1] :], vocab)
            return [
                self._pool.submit(_fill_one, matcher, nodes[a:b], links[a:b], bounds, filled[a:b], vocab)
                for matcher, (a, b) in zip(matchers, pairwise(ends), strict=True)
            ]

        self._last = GrammarFill(mask, target, self._pool.submit(start), began)
        return self._last

    def _settle(self) -> None:
        if self._last is not None:
            self._last._settle()

    def advance(
        self,
        tokens: Tensor | Sequence[Sequence[int]],
        counts: Tensor | Sequence[int] | None = None,
        *,
        strict: bool = True,
    ) -> list[bool]:
        """Advances the matchers by the tokens appended to their sequences.

        Args:
            tokens: [B, S] integers, or a list of B lists: each sequence's tokens, up to the first negative one, e.g. a
                verdict's `tokens`. GPU tensors are copied to the host, which synchronises.
            counts: int [B], tokens to take per sequence, e.g. `num_tokens` of `commit`, which stops at EOS.
            strict: whether a forbidden token raises.

        Returns for each sequence whether the grammar allowed its tokens; if not, its matcher keeps its state. Tokens
        after a grammar's end are ignored. If strict, raises ValueError for a forbidden token and no matcher moves.
        Raises TypeError and ValueError for wrong types and shapes.
        """
        matchers = self._matchers
        _check_matchers(matchers)
        texts = _token_lists(tokens, counts, len(matchers))
        self._settle()
        moved: list[tuple[GrammarMatcher, int]] = []
        allowed = [True] * len(matchers)
        for b, (matcher, text) in enumerate(zip(matchers, texts, strict=True)):
            if matcher is None:
                continue
            steps = 0
            for token in text:
                if matcher.is_terminated():
                    break
                if token >= matcher.vocab_size or not matcher.accept(token):
                    allowed[b] = False
                    break
                steps += 1
            if steps and allowed[b]:
                moved.append((matcher, steps))
            elif steps:
                matcher.rollback(steps)
            if strict and not allowed[b]:
                for other, count in moved:
                    other.rollback(count)
                raise refusal("tokens", "what the grammars allow", f"{token} as tokens[{b}][{steps}]")
        return allowed

    def is_terminated(self) -> list[bool]:
        """Returns for each sequence whether its grammar has ended; False without a grammar."""
        self._settle()
        return [matcher is not None and matcher.is_terminated() for matcher in self._matchers]

    def close(self) -> None:
        """Ends the threads after pending tasks finish. The object cannot fill afterwards."""
        self._settle()
        self._pool.shutdown()

    def __enter__(self) -> GrammarMasks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _clear_from(mask: Array, vocab: int) -> None:
    word, bit = divmod(vocab, 32)
    if word < mask.shape[1]:
        mask[:, word] &= np.int32((1 << bit) - 1)
        mask[:, word + 1 :] = 0


def _fill_one(
    matcher: GrammarMatcher | None, tokens: Array, parents: Array, bounds: tuple[int, int], mask: Array, vocab: int
) -> float:
    """Fills the rows of one sequence. Returns when that was done."""
    words = mask.shape[1] if matcher is None else -(-matcher.vocab_size // 32)
    # An engine writes rows of its vocabulary's width, which may differ from the logits'.
    rows = mask if words == mask.shape[1] else np.empty((mask.shape[0], words), np.int32)
    rows.fill(-1)
    if matcher is not None and len(tokens):
        matcher.fill_tree(linked_tree(tokens, parents, bounds, min(vocab, matcher.vocab_size)), rows)
        _clear_from(rows, matcher.vocab_size)
    if rows is not mask:
        shared = min(words, mask.shape[1])
        mask[:, :shared] = rows[:, :shared]
        mask[:, shared:] = 0
    _clear_from(mask, vocab)
    if matcher is not None:
        stop = [token for token in matcher.stop_token_ids if token < vocab]
        for node in np.flatnonzero(~(mask != 0).any(axis=1)):
            allow_only(mask[node], stop)
    return time.perf_counter()


def _check_matchers(matchers: Sequence[GrammarMatcher | None]) -> None:
    if isinstance(matchers, (str, bytes)) or not isinstance(matchers, Sequence):
        raise refusal("matchers", "a sequence of matchers or None", type(matchers).__name__, TypeError)
    ids: set[int] = set()
    for b, matcher in enumerate(matchers):
        if matcher is None:
            continue
        if not isinstance(matcher, GrammarMatcher):
            raise refusal(f"matchers[{b}]", "a GrammarMatcher or None", type(matcher).__name__, TypeError)
        if id(matcher) in ids:
            raise refusal(f"matchers[{b}]", "a matcher of its own for each sequence", "one twice")
        ids.add(id(matcher))


def _expect_ids(name: str, tensor: Tensor, shape: list[int]) -> None:
    expect_shape(shape, **{name: tensor})
    if tensor.dtype not in (torch.int32, torch.int64):
        raise refusal(name, "int32 or int64", tensor.dtype)
    if tensor.is_meta:
        raise refusal(name, "a tensor with values", "one on meta")


def _mapped(tokens: Tensor, ids: Tensor) -> Tensor:
    if ids.device != tokens.device:
        raise refusal("draft_to_target", f"a tensor on {tokens.device}", f"one on {ids.device}")
    inside = (tokens >= 0) & (tokens < ids.shape[0])
    padded = torch.cat([ids.long(), ids.new_full((1,), -1, dtype=torch.int64)])
    return padded[torch.where(inside, tokens.long(), ids.shape[0])]


def _can_pin(device: torch.device) -> bool:
    # Torch without CUDA has no pinned memory, even if a test registers a device of that name.
    return device.type == "cuda" and torch.backends.cuda.is_built()


def _on_host(*tensors: Tensor) -> tuple[list[Tensor], list[torch.cuda.Event]]:
    """Returns private host copies, and the events to wait for before reading them."""
    copies, events = [], []
    for tensor in tensors:
        if _can_pin(tensor.device):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(copy.copy_(tensor, non_blocking=True))
            event = torch.cuda.Event(blocking=True)  # waits without spinning
            event.record(torch.cuda.current_stream(tensor.device))
            events.append(event)
        else:
            copies.append(tensor.to("cpu", copy=True))
    return copies, events


def _token_lists(
    tokens: Tensor | Sequence[Sequence[int]], counts: Tensor | Sequence[int] | None, batch: int
) -> list[list[int]]:
    for name, value, dims in (("tokens", tokens, 2), ("counts", counts, 1)):
        if isinstance(value, Tensor):
            if value.dim() != dims or value.shape[0] != batch or value.is_floating_point():
                form = "[B, S]" if dims == 2 else "[B]"
                raise refusal(name, f"integers {form} with B = {batch}", f"{value.dtype} {list(value.shape)}")
        elif value is not None:
            if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
                raise refusal(name, "a tensor or a sequence", type(value).__name__, TypeError)
            if len(value) != batch:
                raise refusal(name, f"{batch} entries, one per sequence", len(value))
    lists = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    limits = counts.tolist() if isinstance(counts, Tensor) else counts
    texts = []
    for b, text in enumerate(lists):
        if isinstance(text, (Tensor, np.ndarray)):
            text = text.tolist()
        if not isinstance(text, Sequence) or not all(isinstance(token, Integral) for token in text):
            raise refusal(f"tokens[{b}]", "integers", f"{text!r:.60}", TypeError)
        length = next((j for j, token in enumerate(text) if token < 0), len(text))
        if limits is not None:
            if not isinstance(limits[b], Integral):
                raise refusal(f"counts[{b}]", "an integer", f"{limits[b]!r:.40}", TypeError)
            length = min(length, max(int(limits[b]), 0))
        texts.append([int(token) for token in text[:length]])
    return texts
