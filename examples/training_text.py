"""What heads learn from: a target's answers, the outputs of its layers there, and the tokens that it holds likely."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from own_texts import Text, fingerprint
from torch import Tensor

from pagedtree.integrations.transformers.model import decoder_layers

__all__ = ["SEED", "Answers", "Batch", "layer_outputs"]

SEED = 0
# So many of the tokens that the target holds the most likely are learnt; of a language model's, the others are noise.
TEACHER_TOKENS = 32
# The target reads about so many tokens at a time, and a file holds what it made of them.
READ_AT_ONCE = 16384


@dataclass(frozen=True)
class Batch:
    """B texts of T + 1 tokens, and what the target made of the first T.

    Attributes:
        tokens: int64 [B, T + 1].
        features: [B, T, F], the outputs of the layers that were asked for, side by side.
        likely, logits: [B, T, K], the most likely tokens behind each token, the likeliest first, and their logits.
        is_learnt: bool [B, T]: whether what comes behind a token is for the drafter to learn.
    """

    tokens: Tensor
    features: Tensor
    likely: Tensor
    logits: Tensor
    is_learnt: Tensor

    def teacher(self, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The target's distribution over its likely tokens: int64 and float [B, T, K], probabilities of 0 for none.

        index: int64 [V], each token's number in a smaller vocabulary, -1 for a token that it lacks. The distribution is
        then the one over that vocabulary, in its numbers, and nothing at all (probabilities 0) where the likeliest
        token of all is not in it.
        """
        tokens, logits = self.likely.long(), self.logits.float()
        if index is None:
            return tokens, logits.softmax(-1)
        tokens = index[tokens]
        probs = logits.masked_fill(tokens < 0, -torch.inf).softmax(-1)
        return tokens.clamp(min=0), probs.masked_fill(tokens[..., :1] < 0, 0.0)

    def places(self, count: int, room: int, seed: int) -> Tensor:
        """int64 [B, count]: random places where what comes behind is to be learnt; not the first one, and each has
        `room` tokens of the text behind it, as far as there are such places.
        """
        fits = self.is_learnt.clone()
        fits[:, 0] = False
        fits[:, :-1] &= self.is_learnt[:, 1:]  # padding
        fits[:, fits.shape[1] - room :] = False
        # Any place will do in an answer that is too short: nothing is learnt that is not to be learnt.
        fits[~fits.any(1), 1] = True
        generator = torch.Generator().manual_seed(seed)
        return fits.float().multinomial(count, replacement=True, generator=generator)


@contextmanager
def _outputs(model: Any, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Returns what these decoder layers gave in the last pass; see `pagedtree.generation.Drafter.feature_layers`."""
    found: dict[int, Tensor] = {}

    def keep(index: int, output: Any) -> None:
        found[index] = output[0] if isinstance(output, tuple) else output

    modules = decoder_layers(model, layers)
    handles = [
        module.register_forward_hook(lambda _, args, output, i=i: keep(i, output))
        for i, module in zip(layers, modules, strict=True)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def layer_outputs(model: Any, layers: Sequence[int], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of these layers at tokens [B, T], side by side, [B, T, F], and the logits [B, T, V]."""
    with _outputs(model, layers) as found:
        logits = model(input_ids=tokens, use_cache=False).logits
    return torch.cat([found[i] for i in layers], dim=-1), logits


class Answers:
    """Texts that the target wrote, which it reads once. What it makes of them is kept in files, of which a batch reads
    only its own part.

    Args:
        folder: of these files. They take (F + 3 K) * 2 bytes for each token.
        batch_tokens: so many tokens are in a batch at most, unless a single text is longer, texts of about the same
            length together.
        max_tokens: what is longer is cut off.
    """

    def __init__(
        self, model: Any, layers: Sequence[int], texts: Sequence[Text], folder: Path, batch_tokens: int, max_tokens: int
    ) -> None:
        # No answer begins behind the end, and each has something in it.
        texts = [Text(text.start, text.tokens[: max_tokens + 1]) for text in texts]
        texts = [text for text in texts if text.start + 1 < len(text.tokens)]
        if not texts:
            raise ValueError(f"texts: expected answers that begin within {max_tokens} tokens, got none")
        self._dtype = model.dtype
        self._vocab_size = model.config.get_text_config().vocab_size
        # In the order in which they came, so that nothing is read again when there are more.
        read = zip(texts, _readings(model, layers, texts, folder), strict=True)
        self._texts, self._rows = zip(*sorted(read, key=lambda each: len(each[0].tokens)), strict=True)
        self._batches: list[list[int]] = [[]]
        for i, text in enumerate(self._texts):
            if self._batches[-1] and len(text.tokens) * (len(self._batches[-1]) + 1) > batch_tokens:
                self._batches.append([])
            self._batches[-1].append(i)

    @property
    def num_tokens(self) -> int:
        """Tokens of the answers."""
        return sum(len(text.tokens) - text.start for text in self._texts)

    @cached_property
    def frequencies(self) -> Tensor:
        """[V]: how often the target would choose each token, had it written the answers many times."""
        counts = torch.zeros(self._vocab_size)
        for text, (_, likely, logits) in zip(self._texts, self._rows, strict=True):
            answer = slice(text.start - 1, None)
            counts.index_add_(0, likely[answer].flatten().long(), logits[answer].float().softmax(-1).flatten())
        return counts

    def batch(self, step: int) -> Batch:
        """It depends on the step alone. All texts come once before one comes again."""
        epoch, number = divmod(step, len(self._batches))
        order = torch.randperm(len(self._batches), generator=torch.Generator().manual_seed(SEED + epoch))
        chosen = self._batches[int(order[number])]
        texts, rows = [self._texts[i] for i in chosen], [self._rows[i] for i in chosen]
        tokens = _padded([torch.tensor(text.tokens) for text in texts])
        place, ends = torch.arange(tokens.shape[1] - 1), torch.tensor([[len(text.tokens)] for text in texts])
        features, likely, logits = (_padded(parts) for parts in zip(*rows, strict=True))
        # Prompts are learnt, too: the target has read them anyway, and they are as varied as what people write.
        return Batch(tokens, features.to(self._dtype), likely, logits, place < ends - 1)


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _readings(
    model: Any, layers: Sequence[int], texts: Sequence[Text], folder: Path
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each text: features, likely tokens and their logits behind all its tokens but the last."""
    folder.mkdir(parents=True, exist_ok=True)
    name, parts = fingerprint(model), list(_parts(texts))
    for number, part in enumerate(parts, 1):
        key = repr((name, [*layers], TEACHER_TOKENS, [text.tokens for text in part]))
        file = folder / f"read-{hashlib.sha256(key.encode()).hexdigest()[:24]}.pt"
        if not file.exists():
            rows = [_read(model, layers, text) for text in part]
            torch.save([torch.cat(tensors) for tensors in zip(*rows, strict=True)], file.with_suffix(".tmp"))
            file.with_suffix(".tmp").replace(file)
            print(f"read by the target: {number} of {len(parts)} parts", flush=True)
        tensors = torch.load(file, mmap=True)
        yield from zip(*(x.split([len(text.tokens) - 1 for text in part]) for x in tensors), strict=True)


def _parts(texts: Sequence[Text]) -> Iterator[list[Text]]:
    part: list[Text] = []
    for text in texts:
        part.append(text)
        if sum(len(each.tokens) for each in part) > READ_AT_ONCE:
            yield part
            part = []
    if part:
        yield part


def _read(model: Any, layers: Sequence[int], text: Text) -> tuple[Tensor, Tensor, Tensor]:
    features, logits = layer_outputs(model, layers, torch.tensor([text.tokens[:-1]]))
    likely = logits[0].topk(min(TEACHER_TOKENS, logits.shape[-1]))
    return features[0].bfloat16(), likely.indices.int(), likely.values.bfloat16()
