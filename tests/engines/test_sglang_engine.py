"""SGLang on CPU tensors with pagedtree's ops: speculation leaves the text of plain decoding."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from package_sources import Sources, own_parameters
from sglang_engine import SETTINGS, environment, prompts

from pagedtree.integrations.sglang import on_cpu

SOURCES = Sources("sglang")
pytest.importorskip("xgrammar", reason="SGLang's dependencies are not installed: make test-engines ENGINE=sglang")
FOLDER = Path(__file__).parent
TARGET, EAGLE = (FOLDER.parents[1] / "examples" / "checkpoints" / name for name in ("target", "eagle"))
TREES = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 3}
TREES |= {"speculative_num_draft_tokens": 8}


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> str:
    from transformers import AutoModelForCausalLM

    from pagedtree.generation.drafters import EagleHead

    folder = tmp_path_factory.mktemp("head")
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    EagleHead.from_pretrained(EAGLE, target).save_pretrained(folder)
    return str(folder)


def run(*engines: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs engines in one process, whose group SGLang may end."""
    command = [sys.executable, "-W", "ignore", FOLDER / "sglang_engine.py", *map(json.dumps, engines)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, env=env)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == len(engines), f"rc {done.returncode}\n{done.stderr[-4000:]}"
    return results


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    ids = run({})[0]["ids"]
    assert len(ids) == 8 and all(len(tokens) == 24 for tokens in ids)
    return ids


@pytest.fixture(scope="module")
def speculation(head) -> list[dict[str, Any]]:
    """EAGLE-3 trees with three branches, n-gram trees."""
    ngram = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}
    return [{**TREES, "speculative_draft_model_path": head}, ngram]


@pytest.fixture(scope="module")
def eager(speculation) -> list[dict[str, Any]]:
    """The results of both, then of chains in pages of four."""
    chains = {**speculation[0], "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4, "page_size": 4}
    return run(*speculation, chains)


def test_speculation_gives_the_text_of_plain_decoding(eager, plain) -> None:
    for result in eager:
        assert result["ids"] == plain
        assert max(result["lengths"]) > 1.5


def test_captured_graphs(speculation, eager, plain, tmp_path) -> None:
    """SGLang's runners replay graphs for 12 and 4 requests with 8 and fewer, of decoding, drafts and verification."""
    engines = {"DECODE": {}, "DECODE TARGET_VERIFY": speculation[0], "TARGET_VERIFY": speculation[1]}
    sizes = {"cuda_graph_bs_decode": [4, 12], "max_running_requests": 16}
    results = run(*({**engine, **sizes, "graphs": str(tmp_path / modes)} for modes, engine in engines.items()))
    assert [result["ids"] for result in results] == [plain] * 3
    assert results[1]["lengths"] == eager[0]["lengths"]  # so the drafts are the same
    for modes in engines:
        replays = [line.split() for line in (tmp_path / modes).read_text().splitlines()]
        padded = Counter(mode for mode, size, requests in replays if int(size) > int(requests))
        assert {*padded} == {*modes.split()} and min(padded.values()) > 5


def test_latent_attention(tmp_path) -> None:
    """A DeepSeek-V2 without experts also has transformers' texts."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    rotary = {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 2048, "rope_theta": 10000.0}
    sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 2048}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.05}
    latents = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    dense = {"first_k_dense_replace": 2, "n_routed_experts": 4, "moe_layer_freq": 1, "v_head_dim": 128}
    config = DeepseekV2Config(**sizes, **latents, **dense, bos_token_id=0, eos_token_id=1, rope_parameters=rotary)
    DeepseekV2ForCausalLM(config).float().save_pretrained(tmp_path)
    settings = {"model_path": str(tmp_path)}
    plain, trees = run(settings, {**settings, "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8})
    assert trees["ids"] == plain["ids"] and max(trees["lengths"]) > 1.5
    model = DeepseekV2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for prompt, ids in zip(prompts(), plain["ids"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids


@contextmanager
def server(**options: Any) -> Iterator[str]:
    """Yields the address of SGLang's server, whose processes form a group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {**SETTINGS, "port": port, **options}
    arguments = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", *arguments]
    flags = "--disable-cuda-graph", "--skip-server-warmup"
    with subprocess.Popen([*command, *flags], start_new_session=True, env=environment()) as process:
        try:
            ready = False
            while not ready:
                time.sleep(1)
                assert process.poll() is None, "the server has ended"
                with suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60).close()
                    ready = True
            yield f"http://127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def ask(address: str, **sampling: Any) -> list[Any]:
    body = {"input_ids": prompts(), "sampling_params": {"ignore_eos": True, "max_new_tokens": 24, **sampling}}
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{address}/generate", data, headers), timeout=300) as response:
        return json.load(response)


def test_the_server_gives_the_text_of_plain_decoding(head, plain) -> None:
    """The server survives a top_k that is no int32."""
    with server(**TREES, speculative_draft_model_path=head) as address:
        large = ask(address, temperature=1, top_k=2**40, max_new_tokens=2)
        answers = ask(address, temperature=0)
    assert [len(answer["output_ids"]) for answer in large] == [2] * len(plain)
    assert [answer["output_ids"] for answer in answers] == plain
    assert max(answer["meta_info"]["spec_accept_length"] for answer in answers) > 1.5


def exact_texts(prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    """Returns each text's probability under top-k 2, by transformers' model."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        with torch.no_grad():
            top = target(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1].topk(2)
        rows = zip(texts.items(), top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True)
        texts = {(*text, x): p * q for (text, p), ids, qs in rows for x, q in zip(ids, qs, strict=True)}
    return texts


def test_sampled_requests_keep_their_distribution(head) -> None:
    """The chi-square test of three tokens fails under SGLang's lossy threshold."""
    count, expected = 256, exact_texts(prompts()[3], 3)
    assert min(expected.values()) * count > 10
    sampling = {"temperature": 1, "top_k": 2, "max_new_tokens": 3}
    sampled = {**TREES, "speculative_draft_model_path": head, "sampling": sampling}
    sampled |= {"copies": count, "random_seed": 1, "max_running_requests": 64}
    squares = []
    for result in run(sampled, {**sampled, "speculative_accept_threshold_acc": 0.4}):
        found = Counter(map(tuple, result["ids"]))
        assert {*found} <= {*expected} and sum(found.values()) == count and max(result["lengths"]) > 1
        squares.append(sum((found[text] - count * p) ** 2 / (count * p) for text, p in expected.items()))
    assert squares[0] < 24.3 < squares[1]  # chi-square of seven degrees of freedom, at 0.001


def test_sglang_lacks_the_rules_replaced_on_cpus() -> None:
    """`pagedtree.integrations.sglang.on_cpu` replaces these rules of SGLang."""
    text = SOURCES.text("srt/speculative/eagle_utils.py")
    assert "return is_all_greedy or is_cpu or is_xpu" in text
    assert all(f"{name}," in text or f" {name}" in text for name in on_cpu.SAMPLING)
    keywords = SOURCES.definition("srt/speculative/eagle_utils.py", "_verify_uses_greedy").args.kwonlyargs
    assert {"is_all_greedy", "is_cpu"} <= {keyword.arg for keyword in keywords}
    theirs = SOURCES.parameters("srt/mem_cache/allocation.py", "get_last_loc")
    assert [*own_parameters(on_cpu.last_loc)] == [*theirs]


def test_installed_plugin_changes_nothing() -> None:
    """Under another attention backend SGLang is unchanged."""

    def listed(**variables: str) -> list[str]:
        env = {**environment(), **variables}
        command = sys.executable, FOLDER / "untouched.py", "sglang"
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert "PAGEDTREE_PLUGINS" not in os.environ
    installed, missing = listed(), listed(SGLANG_PLUGINS="none")
    assert installed == missing  # both list our modules: the stand-in of sgl_kernel imports some
