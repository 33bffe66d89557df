"""A generation config's fields that act on a text, and the arguments of `generate` that they become."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, generation

from pagedtree import SamplingParams
from pagedtree._arguments import argument_error, refusal
from pagedtree.generation.stop_strings import StopStrings
from pagedtree.integrations.transformers.logits_processors import WARPERS, Processors, known_tokens, read_processors

# In the order in which transformers applies them.
PROCESSORS = {
    "sequence_bias": generation.SequenceBiasLogitsProcessor,
    "repetition_penalty": generation.RepetitionPenaltyLogitsProcessor,
    "bad_words_ids": generation.NoBadWordsLogitsProcessor,
    "suppress_tokens": generation.SuppressTokensLogitsProcessor,
}
SAMPLING = {name: kind for kind, name in WARPERS.items()}
LEAST = ("min_length", "min_new_tokens")
SERVED = {*PROCESSORS, *SAMPLING, *LEAST, "do_sample", "begin_suppress_tokens", "stop_strings"}

# Fields that do not change a text. Fields in none of these sets are refused if set.
IGNORED = {
    name
    for names in (
        # The call says these.
        "max_length max_new_tokens bos_token_id eos_token_id pad_token_id",
        # They belong to beams, encoders or contrastive search.
        "early_stopping length_penalty diversity_penalty num_beam_groups low_memory decoder_start_token_id",
        # Caches, chunks and compilation.
        "use_cache cache_config max_cache_len return_legacy_cache prefill_chunk_size",
        "compile_config disable_compile continuous_batching_config",
        # Drafts, which are the drafter's here and do not change the text there either.
        "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind use_mtp",
        "assistant_confidence_threshold num_assistant_tokens num_assistant_tokens_schedule target_lookbehind",
        "speculation_type",
        # Outputs other than the text.
        "output_attentions output_hidden_states output_logits output_scores return_dict_in_generate",
        # Finite logits stay unchanged, the distribution is normalised anyway.
        "remove_invalid_values renormalize_logits",
        "transformers_version",
    )
    for name in names.split()
}
# Filters and ways of search that only one kind of decoding has.
ONLY_SAMPLED = {*SAMPLING, "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"}
ONLY_GREEDY = {"penalty_alpha"}
# Values, besides None and False, that make a field neutral.
NEUTRAL = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "temperature", "top_p", "typical_p"), 1),
    **dict.fromkeys(("num_beams", "num_return_sequences", "guidance_scale"), 1),
    **dict.fromkeys(("top_k", "min_p", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
}
SHARES = {"top_p", "typical_p", "epsilon_cutoff", "eta_cutoff"}  # of the probability: from 1 on they do nothing
KNOWN = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
ADVICE = "change model.generation_config, or leave it out: generation_config=False, --no-generation-config"


@dataclass(frozen=True)
class ConfigFields:
    """The config's fields that a call has to follow, by name."""

    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(f"{name}={reprlib.repr(value)}" for name, value in self.values.items())

    @property
    def is_sampled(self) -> bool:
        return "do_sample" in self.values

    def origin(self) -> str:
        """Returns the end of a message that refuses request options: the ones that the config sets."""
        names = [name for name in self.values if name not in (*SAMPLING, "do_sample", "stop_strings")]
        return f"; generation_config sets {', '.join(names)}: {ADVICE}" if names else ""

    def params(self) -> SamplingParams | None:
        """Returns the config's sampling and repetition penalty; None is greedy."""
        processors = self._processors(["repetition_penalty", *SAMPLING], [])
        with _named():
            settings = read_processors(processors, [], None, [], 0)
        return settings.on_params(SamplingParams() if self.is_sampled else None)

    def stops(self, stop_strings: str | Sequence[str] | None, tokenizer: Any) -> StopStrings | None:
        if stop_strings is not None:
            return StopStrings(stop_strings, tokenizer)
        if "stop_strings" not in self.values:
            return None
        with _named("stop_strings"):
            return StopStrings(self.values["stop_strings"], tokenizer)

    def read(
        self,
        given: Iterable[Any],
        prompts: Sequence[Sequence[int]],
        width: int | None,
        eos_ids: Sequence[int],
        vocab: int,
    ) -> Processors:
        """Joins the settings of a call's fields and logits processors `given`; one of a field's type replaces it. The
        others are as for `read_processors`."""
        before = self._processors(PROCESSORS, eos_ids)
        warpers = self._processors(SAMPLING, eos_ids)
        with _named():
            read_processors([*before, *warpers], [], None, eos_ids, vocab).on_params(SamplingParams())
        given = list(given)
        processors = [next((other for other in given if type(other) is type(own)), own) for own in before]
        processors += [other for other in given if not any(other is one for one in processors)]
        settings = read_processors([*processors, *warpers], prompts, width, eos_ids, vocab)
        kinds = {type(other) for other in given}
        if "begin_suppress_tokens" in self.values and generation.SuppressTokensAtBeginLogitsProcessor not in kinds:
            with _named("begin_suppress_tokens"):
                first = generation.SuppressTokensAtBeginLogitsProcessor(self.values["begin_suppress_tokens"], 0)
                settings.begin_suppress_tokens += known_tokens(first.begin_suppress_tokens, vocab)
        for b, prompt in enumerate(prompts):
            length = len(prompt) if width is None else width
            least = self.values.get("min_new_tokens", self.values.get("min_length", 0) - length)
            settings.min_new_tokens[b] = max(settings.min_new_tokens[b], least)
        return settings

    def _processors(self, names: Iterable[str], eos_ids: Sequence[int]) -> list[Any]:
        processors = []
        for name in names:
            if name in self.values:
                eos_lists = (list(eos_ids),) if name == "bad_words_ids" and eos_ids else ()
                with _named(name):
                    processors.append({**PROCESSORS, **SAMPLING}[name](self.values[name], *eos_lists))
        return processors


def config_fields(
    model: Any, follow: Any = True, *, params: SamplingParams | None = None, rule: str = "auto", given: dict[str, Any]
) -> ConfigFields:
    """Returns the fields of `model.generation_config` that a call has to follow.

    Params replace its sampling and repetition penalty, the rule "greedy" its sampling. follow: False for none. given:
    the call's other arguments by field; None = not given. Raises ValueError, naming them, for fields without a
    counterpart and values that transformers does not take.
    """
    if not isinstance(follow, bool):
        kind = type(follow).__name__
        raise refusal("generation_config", "True or False", f"{kind}; True takes model.generation_config", TypeError)
    config = model.generation_config
    if config is None or not follow:
        return ConfigFields()
    # Values that a call of `model.generate` takes where the config has none; transformers 4.57 has them in the config.
    defaults: dict[str, Any] = getattr(config, "_get_default_generation_params", dict)()
    values = {name: getattr(config, name, None) for name in KNOWN}
    values |= {name: defaults.get(name) for name, value in values.items() if value is None}
    if not isinstance(values["do_sample"], bool | None):
        raise refusal("generation_config: do_sample", "True or False", repr(values["do_sample"]))
    is_sampled = bool(values["do_sample"]) and params is None and rule != "greedy"
    replaced = {name for name, value in given.items() if value is not None}
    replaced |= ONLY_GREEDY if is_sampled else {"do_sample", *ONLY_SAMPLED}
    if params is not None:
        replaced.add("repetition_penalty")
    if values["min_new_tokens"] is not None or "min_new_tokens" in replaced:
        replaced.add("min_length")
    acting = {name: values[name] for name in KNOWN if name not in (IGNORED | replaced) and _acts(name, values[name])}
    fields = {name: value for name, value in acting.items() if name not in SERVED}
    if fields:
        raise refusal("generation_config", "fields that draft trees can follow", f"{ConfigFields(fields)}; {ADVICE}")
    return ConfigFields(acting)


def _acts(name: str, value: Any) -> bool:
    if value is None or value is False:
        return False
    if name in LEAST:
        return integer(f"generation_config: {name}", value) > 0
    with _named(name):
        if name == "cache_implementation":
            return bool(value == "quantized")
        return bool(value != NEUTRAL.get(name)) and not (name in SHARES and value >= 1)


def integer(name: str, value: Any) -> int:
    value = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise refusal(name, "an integer", repr(value))
    if not -(2**63) <= int(value) < 2**63:
        raise refusal(name, "an integer of 64 bits", value)
    return int(value)


@contextmanager
def _named(*names: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise argument_error(": ".join(["generation_config", *names]), f"{error}; {ADVICE}") from None
