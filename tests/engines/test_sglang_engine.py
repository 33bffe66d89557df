"""SGLang itself on CPU tensors with pagedtree's attention and ops: speculation gives the text of plain decoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from package_sources import Sources, own_parameters

from pagedtree.integrations.sglang import on_cpu

SOURCES = Sources("sglang")
pytest.importorskip("xgrammar", reason="SGLang's dependencies are not installed: make test-engines ENGINE=sglang")
FOLDER = Path(__file__).parent
TARGET, EAGLE = (FOLDER.parents[1] / "examples" / "checkpoints" / name for name in ("target", "eagle"))


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> str:
    """The EAGLE-3 head of the examples in the format that SGLang loads."""
    from transformers import AutoModelForCausalLM

    from pagedtree.integrations.transformers import EagleHead

    folder = tmp_path_factory.mktemp("head")
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    EagleHead.from_pretrained(EAGLE, target).save_pretrained(folder)
    return str(folder)


def run(*engines: dict[str, Any]) -> list[dict[str, Any]]:
    """What each engine generates, one after the other in one process of their own, whose group SGLang may end."""
    command = [sys.executable, "-W", "ignore", FOLDER / "sglang_engine.py", *map(json.dumps, engines)]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, env=dict(os.environ))
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == len(engines), f"rc {done.returncode}\n{done.stderr[-4000:]}"
    return results


def test_speculation_gives_the_text_of_plain_decoding(head) -> None:
    """Trees of an EAGLE-3 head with three branches, its chains in pages of four, and n-gram trees."""
    eagle = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": head, "speculative_num_steps": 3}
    trees = {**eagle, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}
    chains = {**eagle, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4, "page_size": 4}
    ngram = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}
    plain, *others = run({}, trees, chains, ngram)
    assert len(plain["ids"]) == 8 and all(len(ids) == 24 for ids in plain["ids"])
    for other in others:
        assert other["ids"] == plain["ids"]
        assert max(other["lengths"]) > 1.5  # drafts were accepted


def test_sampled_requests_keep_their_distribution(head) -> None:
    """Three tokens of 256 equal requests, two choices each: as many of each text as without speculation."""
    eagle = {
        "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": head, "speculative_num_steps": 3,
        "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8,
    }  # fmt: skip
    sampled = {"copies": 256, "random_seed": 1, "sampling": {"temperature": 1, "top_k": 2, "max_new_tokens": 3}}
    plain, trees = run(sampled, {**eagle, **sampled})
    ours, theirs = (Counter(map(tuple, result["ids"])) for result in (trees, plain))
    assert len(theirs) == 8  # greedy verification would leave two, one for each first token
    squares = sum((ours[text] - theirs[text]) ** 2 / (ours[text] + theirs[text]) for text in {*ours, *theirs})
    assert squares < 24.3  # chi-square of seven degrees of freedom, at 0.001
    assert max(trees["lengths"]) > 1


def test_branches_in_pages_are_refused_by_sglang() -> None:
    """Its own rule, which asks for the names of three of its backends; docs/integrations/sglang.md names it."""
    text = SOURCES.text("srt/arg_groups/speculative_hook.py")
    assert '_PAGE_TREE_SPEC_BACKENDS = ("flashinfer", "fa3", "triton")' in text
    assert 'and view.attention_backend != "flashinfer"' in text  # of n-gram trees


def test_what_is_filled_in_on_cpus_is_missing_there() -> None:
    """SGLang's own rules, which `pagedtree.integrations.sglang.on_cpu` stands in for."""
    text = SOURCES.text("srt/speculative/eagle_utils.py")
    assert "return is_all_greedy or is_cpu or is_xpu" in text
    assert all(f"{name}," in text or f" {name}" in text for name in on_cpu.SAMPLING)
    keywords = SOURCES.definition("srt/speculative/eagle_utils.py", "_verify_uses_greedy").args.kwonlyargs
    assert {"is_all_greedy", "is_cpu"} <= {keyword.arg for keyword in keywords}
    theirs = SOURCES.parameters("srt/mem_cache/allocation.py", "get_last_loc")
    assert [*own_parameters(on_cpu.last_loc)] == [*theirs]
