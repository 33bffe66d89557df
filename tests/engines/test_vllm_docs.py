"""The code of docs/integrations/vllm.md runs in vLLM."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from vllm_case import MEDUSA, METHOD, accepted, engine, generate, token_prompts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations" / "vllm.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
OPTIONS: dict[str, dict[str, Any]] = {
    "RepeatDrafter": {"tree": "whole", "most": 3},
    "HeadsDrafter": {"tree": "whole", "heads": MEDUSA},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_drafters_of_the_page_draft(name, tmp_path, monkeypatch):
    """A drafter is a module, named in the configuration with the worker."""
    (block,) = (block for block in BLOCKS if f"class {name}(" in block)
    (tmp_path / f"my_{name}.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    prompts = [*token_prompts(2), [7] * 20]
    options = {
        "worker_cls": "pagedtree.integrations.vllm.worker.TreeCPUWorker",
        "additional_config": {"pagedtree": OPTIONS[name]},
        "speculative_config": {
            "method": METHOD,
            "num_speculative_tokens": 15,
            "model": f"my_{name}.{name}",
        },
    }
    with engine() as llm:
        expected = generate(llm, prompts)
    with engine(**options) as llm:
        assert generate(llm, prompts) == expected
        assert accepted(llm) > 0


def test_every_block_of_the_page_is_run():
    assert len(BLOCKS) == len(OPTIONS)
