"""Checked access to the values of a checkpoint's config.json; nothing in the file is trusted."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from pagedtree._arguments import refusal

CONFIG_NAME = "config.json"
# Above every real size, and small enough that the product of two fits in 64 bits.
MAX_SIZE = 1 << 24
MAX_BYTES = 1 << 24  # of the file

# Entries that do not change the computation: transformers' common entries, training, tokens, sampling, provenance.
WORDS = """
    add_cross_attention architectures attention_dropout attn_implementation auto_map bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_sparse_step decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping embed_requires_grad encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id has_lm_head
    has_no_defaults_at_init has_own_embed_tokens id2label initializer_range is_decoder is_encoder_decoder label2id
    length_penalty license max_length max_position_embeddings max_sequence_length max_window_layers min_length
    model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    num_target_layers output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type producer pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id speculators_config speculators_version suppress_tokens target_model_type task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unk_token_id use_bfloat16 use_cache
"""
HARMLESS = frozenset(WORDS.split())
# Names of one flag: of vLLM, of JetSpec and of transformers.
CAUSAL = ("causal", "causal_head", "is_causal")
# In names of entries that may decide which tokens see each other.
ABOUT_MASKS = re.compile("causal|direction|attn|attention|mask(?!_token)")


class ConfigEntries:
    """Checked entries of a config.json, or of an object in it.

    A null entry counts as missing. Methods raise ValueError, naming the file and the entry, for a wrong type or value.
    where: the object's name in messages.
    """

    def __init__(self, entries: Any, where: str = "config") -> None:
        if not isinstance(entries, Mapping):
            raise refusal(where, "an object of named entries", reprlib.repr(entries))
        self.where, self.entries = where, dict(entries)
        self._read: set[str] = set()

    @classmethod
    def load(cls, folder: Path) -> ConfigEntries:
        path = folder / CONFIG_NAME
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise refusal(path, f"at most {MAX_BYTES} bytes", "a larger file")
        try:
            entries = json.loads(raw.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, numbers of thousands of digits
            raise refusal(path, "an object in JSON", error) from error
        return cls(entries, str(path))

    def __contains__(self, key: str) -> bool:
        return self.entries.get(key) is not None

    def refuse(self, key: str, expected: str, got: Any = None) -> NoReturn:
        """Raises ValueError. got: the value, if it is not the entry's."""
        value = self.entries.get(key) if got is None else got
        text = "nothing" if value is None else reprlib.repr(value)
        raise refusal(f"{self.where}: {str(key)[:80]}", expected, text)

    def value(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self.entries[key] if key in self else default

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """Returns an integer from `least` to `most`. Without a default the entry is required."""
        value = self.value(key, default)
        if not _is_integer(value) or not least <= value <= most:
            self.refuse(key, f"an integer from {least} to {most}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        if not (_is_integer(value) and value < 1 << 63) and not isinstance(value, float):
            self.refuse(key, "a number above 0")
        if not 0.0 < value < math.inf:
            self.refuse(key, "a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def is_causal(self, *others: ConfigEntries) -> bool | None:
        """Returns the flag of CAUSAL under any of its names, here or in `others`; None without. Refuses two values."""
        found = [(name, part.flag(name, False)) for part in (self, *others) for name in CAUSAL if name in part]
        for name, flag in found:
            if flag != found[0][1]:
                self.refuse(name, f"the same as {found[0][0]} {json.dumps(found[0][1])}", flag)
        return found[0][1] if found else None

    def integers(self, key: str, *, least: int, most: int = MAX_SIZE) -> tuple[int, ...]:
        """Returns a list of integers from `least` to `most`; () without an entry."""
        values = self.value(key, [])
        if not isinstance(values, (list, tuple)) or not all(_is_integer(v) and least <= v <= most for v in values):
            self.refuse(key, f"a list of integers from {least} to {most}")
        return tuple(values)

    def word(self, key: str, known: Collection[str], default: str) -> str:
        value = self.value(key, default)
        if not isinstance(value, str) or value not in known:
            self.refuse(key, f"one of {', '.join(known)}")
        return value

    def words(self, key: str, known: Collection[str]) -> tuple[str, ...]:
        """Returns a list of some of these words; () without an entry."""
        values = self.value(key, [])
        if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) and v in known for v in values):
            self.refuse(key, f"a list of {', '.join(known)}")
        return tuple(values)

    def section(self, key: str) -> ConfigEntries:
        return ConfigEntries(self.value(key, {}), f"{self.where}: {key}")

    def only(self, **values: Any) -> None:
        for key, expected in values.items():
            value = self.value(key, expected)
            if isinstance(value, bool) != isinstance(expected, bool) or value != expected:
                self.refuse(key, f"{json.dumps(expected)}, as nothing else is computed")

    def refuse_others(self, harmless: Collection[str] = ()) -> None:
        """Refuses entries that are neither read nor in `harmless`; names that begin with _ are private notes."""
        for key in self.entries:
            if key in self and key not in self._read and key not in harmless and not str(key).startswith("_"):
                if ABOUT_MASKS.search(str(key).lower()):
                    # The head would load without it, too, and only draft worse.
                    self.refuse(key, "a known entry, as this one may decide which tokens see each other; keep it")
                self.refuse(key, "no such entry, as nobody knows whether it changes what is computed")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
