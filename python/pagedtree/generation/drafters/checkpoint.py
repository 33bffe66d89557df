"""Checkpoints of draft heads: a folder with config.json and a file of tensors.

Tensors' names and shapes are checked against the config before loading.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedtree._arguments import refusal
from pagedtree.generation.drafters.checkpoint_config import CONFIG_NAME
from pagedtree.generation.drafters.formats import size_of

WEIGHTS_NAME = "model.safetensors"

# Names of safetensors; other dtypes are not read.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I64": torch.int64, "I32": torch.int32}
DTYPES = {**FLOATS, **INTEGERS, "BOOL": torch.bool}


class _Stored(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: one that is not in DTYPES
    load: Callable[[], Tensor]


class StoredTensors:
    """The tensors in the files of a checkpoint, by name.

    Raises ValueError, naming the file, for a corrupt file or another format, OSError for unreadable ones. No code in
    pickled files runs. files: names in order of preference; the first one found is read, "*.safetensors" all together.
    rename: maps names in the files to the model's.
    """

    def __init__(self, folder: Path, files: Sequence[str], rename: Callable[[str], str] = str) -> None:
        self.folder, self._tensors = folder, dict[str, _Stored]()
        matches = next((paths for name in files if (paths := sorted(folder.glob(name)))), [])
        if not matches:
            raise refusal(folder, f"{' or '.join(files)}, found none of them", kind=FileNotFoundError)
        for path in matches:
            read = _of_safetensors if path.suffix == ".safetensors" else _of_pickle
            for name, stored in read(path).items():
                key = rename(name)
                if key in self._tensors:
                    raise refusal(path, "each tensor once", f"another {name}")
                self._tensors[key] = stored

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def expect(
        self,
        shapes: Mapping[str, str],
        sizes: Mapping[str, Any],
        *,
        optional: Collection[str] = (),
        integers: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> None:
        """Raises ValueError for missing or unknown tensors, wrong shapes and unsupported dtypes.

        shapes: each name's sizes as products, like "intermediate_size, 2 * hidden_size". sizes: the factors' values.
        optional: names that may be missing. integers: names of integer tensors; others are floating-point. ignored:
        names that are not read.
        """
        unknown = sorted(self._tensors.keys() - shapes.keys() - set(ignored))
        if unknown:
            where = f"{self._tensors[unknown[0]].file}: {unknown[0]}"
            raise refusal(where, "no such tensor with this config, as it would not be used")
        for name, form in shapes.items():
            expected = tuple(size_of(size, sizes) for size in form.split(", "))
            wanted = f"[{form}] = {[*expected]} by its config"
            stored = self._tensors.get(name)
            if stored is None:
                if name in optional:
                    continue
                raise refusal(self.folder, f"a tensor {name}, {wanted}", "none")
            if stored.shape != expected:
                raise refusal(f"{stored.file}: {name}", wanted, [*stored.shape])
            if stored.dtype not in (INTEGERS if name in integers else FLOATS).values():
                kind = "integers of 32 or 64 bits" if name in integers else "floating-point values of 16 bits or more"
                raise refusal(f"{stored.file}: {name}", kind, stored.dtype or "another type")

    def first_size(self, name: str) -> int | None:
        return self._tensors[name].shape[0] if name in self and self._tensors[name].shape else None

    def load(self, name: str) -> Tensor:
        return self._tensors[name].load()


def have_same_values(stored: Tensor, weight: Tensor) -> bool:
    pairs = zip(stored.split(4096), weight.detach().split(4096), strict=False)  # bounds the memory
    return all(torch.equal(a[: len(b)].to(b), b[: len(a)]) for a, b in pairs)


def check_ids(name: str, ids: Tensor, num_tokens: int) -> None:
    """Raises ValueError for draft tokens that the target lacks, and for duplicates."""
    if ids.ndim != 1 or not len(ids) or ids.dtype not in INTEGERS.values():
        raise refusal(name, "integers [draft vocabulary]", f"{ids.dtype} {[*ids.shape]}")
    if bool(((ids < 0) | (ids >= num_tokens)).any()):
        raise refusal(name, f"tokens of the target's {num_tokens}", f"{int(ids.min())}..{ids.max()}")
    ordered = ids.sort().values
    if bool((again := ordered[1:] == ordered[:-1]).any()):
        twice = int(ordered[1:][again][0])
        raise refusal(name, "each of the target's tokens once at most", f"{twice} again")


def draft_ids(stored: StoredTensors, count: int, num_tokens: int) -> Tensor:
    """Returns int64 [count], the target ids of a head's draft tokens: from the tensor d2t, else the first `count` ids.
    Raises ValueError for ids outside `num_tokens`, duplicates, and a tensor t2d that disagrees."""
    ids = torch.arange(count, dtype=torch.int64)
    if "d2t" in stored:
        ids = ids + stored.load("d2t")
    check_ids(f"{stored.folder}: d2t", ids, num_tokens)
    if "t2d" in stored:
        tokens = stored.load("t2d").flatten().nonzero()[:, 0]
        if not torch.equal(tokens, ids.sort().values):
            raise refusal(f"{stored.folder}: t2d", f"the {count} tokens of d2t", f"{len(tokens)} that differ")
    return ids


def save_checkpoint(
    folder: str | Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    others: Mapping[str, Tensor] | None = None,
    *,
    name: str = WEIGHTS_NAME,
) -> None:
    """Writes config.json and a safetensors file `name` into a folder, created if needed. weights: written in `dtype`.
    others: as they are."""
    from safetensors.torch import save_file  # of an extra of the package

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    tensors = {key: tensor.detach().to(dtype).contiguous() for key, tensor in weights.items()}
    save_file({**tensors, **(others or {})}, folder / name, metadata={"format": "pt"})


def _of_safetensors(path: Path) -> dict[str, _Stored]:
    from safetensors import SafetensorError, safe_open  # of an extra of the package

    try:
        file = safe_open(path, "pt")
    except SafetensorError as error:
        raise refusal(path, "a file in the format of safetensors", error) from error
    tensors = {}
    for name in file.keys():  # noqa: SIM118 - it is no dict
        header = file.get_slice(name)
        load = partial(file.get_tensor, name)
        tensors[name] = _Stored(path, tuple(header.get_shape()), DTYPES.get(header.get_dtype()), load)
    return tensors


def _of_pickle(path: Path) -> dict[str, _Stored]:
    try:
        # Memory-mapped: the file's size bounds the memory. weights_only: its code does not run.
        tensors: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # an unpickler can raise anything on an arbitrary file
        first = (str(error).splitlines() or [""])[0]
        raise refusal(path, "tensors as torch.save writes them", first) from error
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise refusal(path, "tensors by name", f"a {type(tensors).__name__}")
    return {name: _Stored(path, *_form(path, name, tensor)) for name, tensor in tensors.items()}


def _form(path: Path, name: str, tensor: Any) -> tuple[tuple[int, ...], torch.dtype, Callable[[], Tensor]]:
    is_plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise refusal(f"{path}: {name}", "a plain tensor that holds all of its elements")
    return tuple(tensor.shape), tensor.dtype, lambda: tensor
