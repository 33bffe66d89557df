"""The code of docs/integrations/vllm.md runs in vLLM."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_case import accepted, engine, generate, token_prompts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations" / "vllm.md"


def test_the_drafter_of_the_page_drafts(tmp_path, monkeypatch):
    """As the page says, the drafter is a module of its own, named in the configuration together with the worker."""
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_drafter.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    prompts = [*token_prompts(2), [7] * 20]
    options = {
        "worker_cls": "pagedtree.integrations.vllm.worker.TreeCPUWorker",
        "additional_config": {"pagedtree": {"most": 3}},
        "speculative_config": {
            "method": "custom_class",
            "num_speculative_tokens": 15,
            "model": "my_drafter.RepeatDrafter",
        },
    }
    with engine() as llm:
        expected = generate(llm, prompts)
    with engine(**options) as llm:
        assert generate(llm, prompts) == expected
        assert accepted(llm) > 0
