"""GGUF files as ordinary checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedtree.integrations.transformers.turns import in_turn

__all__ = ["dequantized", "is_gguf"]

PACKAGES = ("gguf", "accelerate")
MAGIC = b"GGUF"
# Tensors that hold plain numbers. All other types are blocks of small integers with a scale.
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantized(path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None) -> Path:
    """Returns a GGUF file's checkpoint as a folder that `from_pretrained` of model and tokenizer loads.

    The first call for a file writes the folder, with a message on standard error (20 s for 135 million parameters).
    Later calls only compare digests. The folder may be deleted at any time.

    Weights of a file with quantised tensors are kept in bfloat16, which rounds by at most 0.2 %. Other files keep their
    type: float32, float16 or bfloat16, the matrices' if they are mixed.

    folder: parent of the checkpoint's folder. Default: pagedtree in $XDG_CACHE_HOME, or in ~/.cache.

    Raises ModuleNotFoundError without gguf or accelerate, ValueError for another or a damaged file, a model in several
    files, or one that transformers cannot read.
    """
    path = Path(path)
    _check_file(path)
    parent = _cache() if folder is None else Path(folder)
    checkpoint = parent / f"{path.stem[:40]}-{_digest(path)}"
    with in_turn(dequantized):  # while one thread writes, sys.stderr is redirected for all of them
        if not checkpoint.is_dir():
            _write(path, checkpoint)
    return checkpoint


def _write(path: Path, kept: Path) -> None:
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"a GGUF file needs {package}: pip install {' '.join(PACKAGES)}", name=package)
    print(f"reading {path} once; its weights will be kept in {kept}", file=sys.stderr, flush=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    # Progress bars are written to sys.stderr; transformers' warnings go to the stream that it found when imported.
    with (
        contextlib.redirect_stderr(io.StringIO()),
        tempfile.TemporaryDirectory(prefix=".unfinished-", dir=kept.parent) as unfinished,
    ):
        model, tokenizer = _read(path)
        folder = Path(unfinished, kept.name)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        try:
            folder.rename(kept)
        except OSError:
            if not kept.is_dir():  # else another process wrote the same folder first
                raise


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Returns whether there is a file that begins as GGUF files do."""
    path = Path(path)
    return path.is_file() and _start(path) == MAGIC


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedtree"


def _check_file(path: Path) -> None:
    if not path.is_file():
        found = "a folder" if path.is_dir() else "which does not exist"
        raise ValueError(f"path: expected a GGUF file, got {path}, {found}")
    if (start := _start(path)) != MAGIC:
        raise ValueError(f"path: expected a GGUF file, got {path}, which begins with {start!r} and not with {MAGIC!r}")


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(MAGIC))


def _digest(path: Path) -> str:
    """Digests the file and transformers' version: one version's config may be unreadable to another."""
    digest = hashlib.sha256(transformers.__version__.encode())
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]


def _read(path: Path) -> tuple[Any, Any]:
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    config = getattr(transformers, "GgufConfig", None)  # versions before 5 always unpack the weights
    dense: dict[str, Any] = {} if config is None else {"quantization_config": config(dequantize=True)}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **source, **dense, dtype=_dtype(path), output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except ImportError:
        raise
    except Exception as error:  # whatever a reader of binary files stumbles over
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"path: expected a GGUF file that transformers {transformers.__version__} can read, got {path}: {reason}"
        ) from error
    model, info = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise ValueError(
                f"path: expected all weights of a {model.config.model_type} model, got {path} with {kind}:"
                f" {sorted(map(str, info[kind]))[:3]} ..."
            )
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:  # since transformers 5; it refuses to save, although the weights are plain by now
        quantizer.remove_quantization_config(model)
    return model, tokenizer


def _dtype(path: Path) -> torch.dtype:
    from gguf import GGUFReader

    types = {tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    if not types <= set(FLOAT_TYPES):
        return torch.bfloat16
    # Norms are in float32 also where the matrices are not.
    return FLOAT_TYPES[next((name for name in ("BF16", "F16") if name in types), "F32")]
