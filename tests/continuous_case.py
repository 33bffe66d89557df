"""`generate_batch` of transformers 4.57 and 5, called alike."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import GenerationConfig

IS_5 = int(transformers.__version__.split(".")[0]) >= 5
COUNT = 12


@pytest.fixture(autouse=True)
def known_memory(monkeypatch):
    """transformers 4.57 asks how much memory there is, and knows of no CPU's."""
    if not IS_5:
        from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler

        monkeypatch.setattr(PagedAttentionMemoryHandler, "get_available_memory", staticmethod(lambda _: 1 << 30))


def configs(page_size, max_batch_tokens, options):
    """Arguments of `generate_batch` and of continuous batching managers."""
    config = GenerationConfig(**{"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": -1, **options})
    sizes = {"num_blocks": 64, "max_batch_tokens": max_batch_tokens}
    if not IS_5:
        for name, value in {"block_size": page_size, **sizes}.items():
            setattr(config, name, value)
        return {"generation_config": config}
    from transformers import ContinuousBatchingConfig

    batching = ContinuousBatchingConfig(page_size=page_size, seed=3, **sizes)
    return {"generation_config": config, "continuous_batching_config": batching}


def batched(model, prompts, page_size=16, max_batch_tokens=64, **options):
    """New tokens of each prompt, in order."""
    torch.manual_seed(3)
    arguments = configs(page_size, max_batch_tokens, options)
    results = model.generate_batch([prompt.tolist() for prompt in prompts], progress_bar=False, **arguments)
    assert all(result.error is None for result in results.values())
    order = sorted(results, key=lambda name: [int(part) for part in name.replace("req_", "").split("__child#")])
    return [results[name].generated_tokens for name in order]
