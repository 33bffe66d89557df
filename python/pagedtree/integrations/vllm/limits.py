"""Refuses, by name, options that draft trees do not support, in configurations and requests."""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Iterator
from functools import wraps
from importlib.metadata import entry_points
from numbers import Real
from typing import Any

from pagedtree._arguments import refusal
from pagedtree.integrations.vllm.own_worker import check_worker
from pagedtree.tree import MAX_NODES

PACKAGE = "pagedtree."
# The method of the speculative configuration whose `model` is a drafter, by model runner. V2 refuses custom_class; with
# its n-gram method it keeps texts on the device and schedules asynchronously, which suits trees.
METHODS = {"V1": "custom_class", "V2": "ngram_gpu"}
SCHEDULER = "pagedtree.integrations.vllm.scheduler.TreeScheduler"
ASYNC_SCHEDULER = "pagedtree.integrations.vllm.async_scheduler.AsyncTreeScheduler"
MAX_TOP_N = 1024  # of token_logprobs
INTEGERS = ("seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")  # which vLLM takes unseen
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # positive numbers of fp32
MAX_LENGTH = 2**30  # longer than any text; with a prompt's length it still is an int32


def uses_trees(vllm_config: Any) -> bool:
    """Returns whether the configuration names a drafter or a worker of this package."""
    speculation = vllm_config.speculative_config
    drafter = speculation.model if speculation is not None and speculation.method in METHODS.values() else None
    worker = vllm_config.parallel_config.worker_cls
    return (drafter or "").startswith(PACKAGE) or (isinstance(worker, str) and worker.startswith(PACKAGE))


def scheduler_of(vllm_config: Any) -> str:
    return ASYNC_SCHEDULER if vllm_config.scheduler_config.async_scheduling else SCHEDULER


def _settings(vllm_config: Any, runner: str, has_own_drafter: bool) -> Iterator[tuple[str, Any, Any]]:
    """Yields the settings that trees fix: name, value and the only value that they allow."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    device = vllm_config.device_config.device_type
    yield from (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1),
        ("data_parallel_size", parallel.data_parallel_size, 1),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size, 1),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size, 1),
        ("api_server_count", parallel._api_process_count, 1),
        ("enable_dbo", parallel.enable_dbo, False),
        ("enable_lora", vllm_config.lora_config is not None, False),
        ("kv_transfer_config", vllm_config.kv_transfer_config, None),
        ("logits_processors", model.logits_processors or None, None),
        # vLLM uses these without a setting.
        ("installed vllm.logits_processors", [e.value for e in entry_points(group="vllm.logits_processors")], []),
        ("watermark_config", vllm_config.watermark_config, None),
        ("model (rotary positions of several dimensions)", bool(model.uses_mrope), False),
        ("model (recurrent layers, whose states follow no trees here)", bool(model.has_inner_state), False),
        ("model (encoder and decoder)", bool(model.is_encoder_decoder), False),
        ("model (diffusion)", bool(model.is_diffusion), False),
        ("model (chunked local attention): attention_chunk_size", model.attention_chunk_size, None),
        ("kv_sharing_fast_prefill", vllm_config.cache_config.kv_sharing_fast_prefill, False),
        ("model (latent attention on a GPU)", bool(model.use_mla and device != "cpu"), False),
    )
    if runner == "V1":
        yield "async_scheduling", bool(vllm_config.scheduler_config.async_scheduling), False
    else:
        yield "enable_batch_sharded_sampling", bool(parallel.enable_batch_sharded_sampling), False
        yield "return_sampling_mask", bool(model.return_sampling_mask), False
        yield "enable_trace_replay", bool(model.enable_trace_replay), False
    if (speculation := vllm_config.speculative_config) is None:
        return
    method = "dflash" if has_own_drafter else METHODS[runner]
    yield f"speculative_config.method on model runner {runner}", speculation.method, method
    yield "speculative_config.rejection_sample_method", speculation.rejection_sample_method, "standard"
    if runner == "V1":
        yield "speculative_config.enable_adaptive_verification", speculation.enable_adaptive_verification, False
        by_size = speculation.num_speculative_tokens_per_batch_size
        yield "speculative_config.num_speculative_tokens_per_batch_size", by_size, None


def check_config(vllm_config: Any) -> None:
    """Raises ValueError, naming the setting, for configurations where trees are unsupported or untested."""
    model, speculation = vllm_config.model_config, vllm_config.speculative_config
    runner = "V2" if vllm_config.use_v2_model_runner else "V1"
    has_own_drafter = speculation is not None and runner == "V2" and speculation.method == "dflash"
    for name, value, expected in _settings(vllm_config, runner, has_own_drafter):
        if value != expected:
            raise refusal(f"draft trees: {name}", expected, value)
    if runner == "V1" and model.logprobs_mode == "processed_logits":
        modes = "raw_logprobs, raw_logits or processed_logprobs"
        raise refusal("draft trees: logprobs_mode", modes, "processed_logits")
    if runner == "V1" and model.logprobs_mode == "processed_logprobs" and not 0 <= model.max_logprobs <= MAX_TOP_N:
        wanted = f"0..{MAX_TOP_N} where logprobs_mode is processed_logprobs"
        raise refusal("draft trees: max_logprobs", wanted, model.max_logprobs)
    check_worker(vllm_config)
    scheduler, expected = vllm_config.scheduler_config.scheduler_cls, scheduler_of(vllm_config)
    if scheduler != expected:
        raise refusal("draft trees: scheduler_cls", expected, scheduler)
    if speculation is not None and not 1 <= speculation.num_speculative_tokens < MAX_NODES:
        count = speculation.num_speculative_tokens
        raise refusal("draft trees: speculative_config.num_speculative_tokens", f"1..{MAX_NODES - 1}", count)
    if speculation is not None:
        from pagedtree.integrations.vllm.tree_drafter import TreeDrafter

        drafter = TreeDrafter if has_own_drafter else check_drafter(speculation.model)
        drafter.check(vllm_config)
        drafter.options_of(vllm_config)


def avoid_rotary_op(vllm_config: Any) -> None:
    """Makes latent models rotate in torch. Raises ValueError if vLLM's op for it is requested.

    vLLM 0.32's op for CPUs rotates only the first `tokens` of [tokens * heads, 64] query rows.
    """
    if not vllm_config.model_config.is_deepseek_mla:
        return
    custom_ops = vllm_config.compilation_config.custom_ops
    if "+rotary_embedding" in custom_ops:
        wanted = "none of +rotary_embedding (vLLM's op for CPUs is wrong for models with latent attention)"
        raise refusal("attention_backend CUSTOM: compilation_config.custom_ops", wanted, custom_ops)
    if "-rotary_embedding" not in custom_ops:
        custom_ops.append("-rotary_embedding")


def check_drafter(name: str) -> Any:
    """Returns the class of this name. Raises ValueError unless it is a tree drafter."""
    from pagedtree.integrations.vllm.tree_drafter import TreeDrafter  # imports vLLM

    module_name, _, class_name = name.rpartition(".")
    try:
        drafter_class = getattr(importlib.import_module(module_name), class_name, None) if module_name else None
    except ImportError as error:
        raise ValueError(f"draft trees: speculative_config.model = {name} cannot be imported: {error}") from error
    if not isinstance(drafter_class, type) or not issubclass(drafter_class, TreeDrafter):
        wanted = "a class derived from TreeDrafter, such as pagedtree.integrations.vllm.drafters.NgramTreeDrafter"
        raise refusal("draft trees: speculative_config.model", wanted, name)
    return drafter_class


def extend_requests() -> None:
    """Makes vLLM accept min_p and logit_bias, which it refuses under speculation, for engines with trees, and refuse as
    `check_request` does."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    refuse, process = SamplingParams._validate_spec_decode, InputProcessor.process_inputs
    if hasattr(process, "knows_trees"):
        return

    def refuse_without_trees(self: Any, speculative_config: Any) -> None:
        if not _drafts_trees(speculative_config):
            refuse(self, speculative_config)

    @wraps(process)
    def process_and_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process(self, *args, **kwargs)
        if request.sampling_params is not None and uses_trees(self.vllm_config):
            try:
                check_request(request.sampling_params, is_v2=self.vllm_config.use_v2_model_runner)
            except ValueError as error:  # over HTTP: status 400
                raise VLLMValidationError(str(error)) from None
        return request

    process_and_check.knows_trees = True  # type: ignore[attr-defined]
    SamplingParams._validate_spec_decode = refuse_without_trees
    InputProcessor.process_inputs = process_and_check


def _drafts_trees(speculation: Any) -> bool:
    if speculation is None or speculation.method not in METHODS.values():
        return False
    try:
        check_drafter(speculation.model)
    except ValueError:
        return False
    return True


def check_request(params: Any, *, is_v2: bool = False) -> None:
    """Raises ValueError, naming the parameter, if a request needs an unsupported option."""
    settings: list[tuple[str, Any, Any]] = [
        ("logprob_token_ids", params.logprob_token_ids or None, None),
        ("thinking_token_budget", getattr(params, "thinking_token_budget", None), None),
        ("trace_decode_token_ids", getattr(params, "trace_decode_token_ids", None) or None, None),
    ]
    for name, value, expected in settings:
        if value != expected:
            raise refusal(f"draft trees: {name}", expected, value)
    min_p_of(params)
    integers: dict[str, Any] = {name: [value] for name in INTEGERS if (value := getattr(params, name)) is not None}
    integers |= {name: getattr(params, name) or () for name in ("allowed_token_ids", "logit_bias")}
    for name, values in integers.items():
        if wrong := [value for value in values if not hasattr(value, "__index__")]:
            raise refusal(f"draft trees: {name}", "integers", f"{wrong[0]!r:.60}")
    for value in (params.logit_bias or {}).values():
        if not isinstance(value, Real):
            raise refusal("draft trees: logit_bias", "numbers", f"{value!r:.60}")
    # vLLM divides by 0 below, and by infinity above.
    if not SMALLEST <= params.repetition_penalty <= LARGEST:
        raise refusal("draft trees: repetition_penalty", f"{SMALLEST}..{LARGEST}", params.repetition_penalty)
    if not is_v2:
        return
    # Lists that V2 keeps in tensors, whose engine ends at longer ones.
    from vllm.envs import VLLM_MAX_BAD_WORDS_TOTAL_TOKENS, VLLM_MAX_NUM_BAD_WORDS
    from vllm.v1.worker.gpu.sample import logit_bias as v2

    words = params.bad_words_token_ids or []
    for name, values, most in (
        ("allowed_token_ids", params.allowed_token_ids or (), v2.MAX_NUM_ALLOWED_TOKEN_IDS),
        ("entries of logit_bias", params.logit_bias or (), v2.MAX_NUM_LOGIT_BIAS_TOKENS),
        ("stop_token_ids with min_tokens", params.min_tokens and params.all_stop_token_ids, v2.MAX_NUM_STOP_TOKEN_IDS),
        ("bad_words", words, VLLM_MAX_NUM_BAD_WORDS),
        ("tokens of bad_words", [token for word in words for token in word], VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    ):
        if values and len(values) > most:
            raise refusal(f"draft trees: {name}", f"at most {most} on model runner V2", len(values))


def fit_request(params: Any) -> None:
    """Brings a request's numbers into the widths of the tensors that they go to; the text stays the same."""
    params.min_p = min_p_of(params)
    if params.seed is not None:  # modulo 2^64, as of generators: the children of one request count up from its seed
        params.seed = (operator.index(params.seed) + 2**63) % 2**64 - 2**63
    params.top_k = min(params.top_k, 2**31 - 1)
    params.min_tokens = min(params.min_tokens, MAX_LENGTH)
    if params.max_tokens is not None:
        params.max_tokens = min(params.max_tokens, MAX_LENGTH)
    if params.logit_bias:  # vLLM's argmax takes NaN for the largest number
        params.logit_bias = {
            int(token): math.inf if value != value else float(min(max(value, -1e300), 1e300))
            for token, value in params.logit_bias.items()
        }


def min_p_of(params: Any) -> float:
    """Returns a request's min_p: its own, or extra_args["min_p"] (`vllm_xargs` over HTTP)."""
    value = (params.extra_args or {}).get("min_p", params.min_p)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise refusal("extra_args", "min_p in [0, 1]", repr(value))
    return float(value)
