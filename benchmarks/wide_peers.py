"""Other libraries' generation of one sequence by the widened target, and their speculation with the toy's draft model.

Both read GGUF files, which are written here from the models in memory: the same weights and prompts. Neither library is
needed; one that is not installed is left out by name.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Models", "ready", "write_gguf"]

Tokens = list[list[int]]
Generate = Callable[[list[int], int], Tokens]

# Draft tokens of a step, as in our chains, and as `prompt_lookup_num_tokens` of transformers.
DRAFTED, LOOKED_UP = 5, 8
MAX_NGRAM = 3
CONTEXT = 2048


@dataclass
class Models:
    """What the peers generate with; they write their files into `folder`."""

    target: Any
    draft: Any
    tokenizer_file: Path
    folder: Path
    threads: int

    def gguf(self, name: str, kind: str) -> Path:
        path = self.folder / kind / name / "model.gguf"
        if not path.exists():
            path.parent.mkdir(parents=True)
            write_gguf(getattr(self, name), self.tokenizer_file, path, kind)
        return path


def ready(
    models: Models, wanted: Sequence[str] | None = None, device: str = "cpu"
) -> tuple[dict[str, Generate], dict[str, str]]:
    """Name -> a greedy generation of one prompt, (tokens, count) -> new tokens; and why other libraries are absent.

    wanted: parts of the names of the libraries; None: all.
    """
    found: dict[str, Generate] = {}
    absent: dict[str, str] = {}
    for library, (packages, make) in PEERS.items():
        if wanted is not None and not any(part.lower() in library.lower() for part in wanted):
            continue
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if device != "cpu":
            absent[library] = "measured on a CPU"
        elif missing:
            absent[library] = f"{', '.join(missing)} not installed"
        else:
            try:
                made = make(models)
                for generate in made.values():
                    generate([1, 2, 3], 4)  # what is done once
                found |= {f"{library}{name}": generate for name, generate in made.items()}
            except Exception as error:  # named, not hidden
                absent[library] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return found, absent


def openvino(models: Models) -> dict[str, Generate]:
    """OpenVINO GenAI, in bf16. Its reader of GGUF takes fp16 matrices; a draft model must be a folder in its format."""
    import numpy
    import openvino
    import openvino_genai

    options = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": models.threads}
    target, draft = (models.gguf(name, "F16") for name in ("target", "draft"))
    openvino_genai.LLMPipeline(draft, "CPU", enable_save_ov_model=True, **options)  # writes the folder

    def of(pipeline: Any, **speculation: int) -> Generate:
        def generate(prompt: list[int], count: int) -> Tokens:
            config = openvino_genai.GenerationConfig(
                max_new_tokens=count, ignore_eos=True, do_sample=False, **speculation
            )
            return [list(pipeline.generate(openvino.Tensor(numpy.array([prompt])), config).tokens[0])]

        return generate

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # else it reads the prompt in the first round alone

    def pipeline(**speculation: Any) -> Any:
        return openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **speculation, **options)

    drafted = openvino_genai.draft_model(draft.parent, "CPU", **options)
    return {
        "": of(pipeline()),
        ", draft model": of(pipeline(draft_model=drafted), num_assistant_tokens=DRAFTED),
        ", prompt lookup": of(pipeline(prompt_lookup=True), num_assistant_tokens=LOOKED_UP, max_ngram_size=MAX_NGRAM),
    }


def llama_cpp(models: Models) -> dict[str, Generate]:
    """llama.cpp by its Python package, which has prompt lookup, and a place for other drafts: there a second model."""
    import numpy
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

    def load(name: str, drafts: Any = None) -> Any:
        return Llama(
            str(models.gguf(name, "BF16")),
            n_ctx=CONTEXT,
            n_threads=models.threads,
            n_threads_batch=models.threads,
            logits_all=drafts is not None,
            draft_model=drafts,
            verbose=False,
        )

    class Drafts(LlamaDraftModel):  # type: ignore[misc]
        def __init__(self) -> None:
            self.model = load("draft")

        def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
            # It keeps what it has read of the text, and drops the tokens that were refused.
            drafted = self.model.generate(input_ids.tolist(), temp=0.0, reset=True)
            return numpy.array([next(drafted) for _ in range(DRAFTED)], dtype=numpy.intc)

    def of(model: Any, drafts: Any = None) -> Generate:
        def tokens(prompt: list[int]) -> Iterator[int]:
            for each in (model, getattr(drafts, "model", None)):
                if each is not None:
                    each.reset()  # else it finds the last call's prompt in its cache
            return model.generate(prompt, temp=0.0)

        def generate(prompt: list[int], count: int) -> Tokens:
            found = tokens(prompt)
            return [[next(found) for _ in range(count)]]

        return generate

    drafts = Drafts()
    lookup = LlamaPromptLookupDecoding(max_ngram_size=MAX_NGRAM, num_pred_tokens=LOOKED_UP)
    return {
        "": of(load("target")),
        ", draft model": of(load("target", drafts), drafts),
        ", prompt lookup": of(load("target", lookup)),
    }


# Library -> the packages that it needs, and what makes its generations.
PEERS: dict[str, tuple[tuple[str, ...], Callable[[Models], dict[str, Generate]]]] = {
    "OpenVINO GenAI": (("openvino_genai", "gguf"), openvino),
    "llama.cpp": (("llama_cpp", "gguf"), llama_cpp),
}


def write_gguf(model: Any, tokenizer_file: Path, path: Path, kind: str) -> None:
    """A Llama and its byte-level BPE tokenizer (tokenizer.json) as GGUF, matrices in "F16" or "BF16", norms in fp32."""
    from gguf_file import Vocabulary, write_llama

    tokenizer = json.loads(tokenizer_file.read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    vocab = {token["content"]: token["id"] for token in tokenizer["added_tokens"]} | tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    write_llama(model, Vocabulary(tokens, special, merges), path, kind)
