"""Other libraries' answers to the same prompts, plain and with drafts; all are optional.

OpenVINO GenAI and llama.cpp serve one sequence, from a GGUF file of the model's weights in 16 bits.

vLLM runs in a separate environment and process (vllm_worker.py), compiled by inductor as by default, with its n-gram
chains and with our trees.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["Source", "ready", "takes_one", "versions"]

Tokens = list[list[int]]
# Prompts -> greedy new tokens of each, up to the answer's end or the count.
Generate = Callable[[Tokens, int], Tokens]

# Draft tokens of a step, as `prompt_lookup_num_tokens` of transformers, and the longest n-gram.
DRAFTED, MAX_NGRAM = 8, 3
CONTEXT = 2048

BENCHMARKS = Path(__file__).resolve().parent
VLLM = BENCHMARKS.parent / "build" / "engines-vllm"
STOCK = "vLLM"
OUR_DRAFTERS = "pagedtree.integrations.vllm.drafters."


@dataclass
class Source:
    """The libraries' model; files are written into `folder`.

    checkpoint: the model's folder. sequences: the most at once.
    """

    model: Any
    checkpoint: Path
    folder: Path
    threads: int
    sequences: int

    @property
    def end(self) -> int:
        return int(self.model.generation_config.eos_token_id)

    def gguf(self, kind: str) -> Path:
        """Writes matrices in "F16" or "BF16", norms in fp32, and the tokenizer."""
        from gguf_file import Vocabulary, write_llama

        path = self.folder / f"{kind}.gguf"
        if not path.exists():
            tokenizer = json.loads((self.checkpoint / "tokenizer.json").read_text())
            special = {token["content"] for token in tokenizer["added_tokens"]}
            vocab = {token["content"]: token["id"] for token in tokenizer["added_tokens"]} | tokenizer["model"]["vocab"]
            merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
            write_llama(self.model, Vocabulary(sorted(vocab, key=vocab.__getitem__), special, merges), path, kind)
        return path


def openvino(source: Source, path: Path, has_lookup: bool = False) -> Generate:
    """Its GGUF reader needs fp16 matrices."""
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # else it reads a lone prompt once
    pipeline = openvino_genai.LLMPipeline(
        path,
        "CPU",
        scheduler_config=scheduler,
        INFERENCE_PRECISION_HINT="bf16",
        INFERENCE_NUM_THREADS=source.threads,
        **{"prompt_lookup": True} if has_lookup else {},
    )
    lookup = {"num_assistant_tokens": DRAFTED, "max_ngram_size": MAX_NGRAM} if has_lookup else {}

    def generate(prompts: Tokens, count: int) -> Tokens:
        greedy = openvino_genai.GenerationConfig(max_new_tokens=count, do_sample=False, **lookup)
        greedy.set_eos_token_id(source.end)
        return [list(pipeline.generate(openvino.Tensor(numpy.array(prompts)), greedy).tokens[0])]

    return generate


def llama_cpp(source: Source, path: Path, has_lookup: bool = False) -> Generate:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    model = Llama(
        str(path),
        n_ctx=CONTEXT,
        n_threads=source.threads,
        n_threads_batch=source.threads,
        logits_all=has_lookup,
        draft_model=LlamaPromptLookupDecoding(MAX_NGRAM, DRAFTED) if has_lookup else None,
        verbose=False,
    )

    def generate(prompts: Tokens, count: int) -> Tokens:
        model.reset()  # else its cache has the last call's prompt
        new: list[int] = []
        for token in model.generate(prompts[0], temp=0.0):
            new.append(token)
            if token == source.end or len(new) == count:
                break
        return [new]

    return generate


def vllm(source: Source, drafter: str = "", num_drafts: int = 0, **options: Any) -> Generate:
    """drafter: vLLM's method "ngram", or one of our classes. options: the drafter's."""
    settings: dict[str, Any] = {"model": str(source.checkpoint), "dtype": "bfloat16"}
    settings["max_num_seqs"] = source.sequences
    if drafter == "ngram":
        settings["speculative_config"] = {"method": drafter, "num_speculative_tokens": num_drafts} | options
    elif drafter:
        config = {"method": "custom_class", "model": OUR_DRAFTERS + drafter, "num_speculative_tokens": num_drafts}
        settings |= {"speculative_config": config, "additional_config": {"pagedtree": options}}
    command = [str(VLLM / "bin" / "python"), str(BENCHMARKS / "vllm_worker.py"), json.dumps(settings)]
    threads = {"OMP_NUM_THREADS": str(source.threads), "PYTHONPATH": str(BENCHMARKS.parent / "python")}
    worker = subprocess.Popen(
        command, env=os.environ | threads, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdin is not None and worker.stdout is not None
    asked, answers = worker.stdin, worker.stdout

    def generate(prompts: Tokens, count: int) -> Tokens:
        print(json.dumps({"prompts": prompts, "count": count}), file=asked, flush=True)
        answer = answers.readline()
        if not answer:
            raise RuntimeError(f"vLLM ended with status {worker.wait()}")
        return json.loads(answer)

    return generate


# Name -> the package, and a function that makes the generation.
PEERS: dict[str, tuple[str, Callable[[Source], Generate]]] = {
    "OpenVINO GenAI": ("openvino-genai", lambda source: openvino(source, source.gguf("F16"))),
    "OpenVINO GenAI, prompt lookup": ("openvino-genai", lambda source: openvino(source, source.gguf("F16"), True)),
    "llama.cpp": ("llama-cpp-python", lambda source: llama_cpp(source, source.gguf("BF16"))),
    "llama.cpp, prompt lookup": ("llama-cpp-python", lambda source: llama_cpp(source, source.gguf("BF16"), True)),
    STOCK: ("vllm", vllm),
    f"{STOCK}, its n-gram chain": (
        "vllm", lambda source: vllm(source, "ngram", 5, prompt_lookup_min=1, prompt_lookup_max=4),
    ),
    f"{STOCK}, our n-gram tree": ("vllm", lambda source: vllm(source, "NgramTreeDrafter", 31)),
}  # fmt: skip


def takes_one(name: str) -> bool:
    return not name.startswith(STOCK)


def versions() -> dict[str, str | None]:
    of_vllm = next(VLLM.glob("lib/python3*/site-packages/vllm*.dist-info"), None)
    found = {"vllm": of_vllm and of_vllm.name.removesuffix(".dist-info").partition("-")[2]}
    for package in dict.fromkeys(package for package, _ in PEERS.values() if package != "vllm"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def ready(source: Source) -> dict[str, Generate]:
    """Installed libraries load the model at the first call."""

    def of(make: Callable[[Source], Generate]) -> Generate:
        made = cache(lambda: make(source))
        return lambda prompts, count: made()(prompts, count)

    installed = versions()
    return {name: of(make) for name, (package, make) in PEERS.items() if installed[package]}
