"""Peers that gpu_run/prepare.sh made for a Hopper GPU without their packages.

PAGEDTREE_GPU_RUN names the folder, whose Python packages follow the installed ones in the path.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import lzma
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(os.environ["PAGEDTREE_GPU_RUN"]).resolve() if os.environ.get("PAGEDTREE_GPU_RUN") else None
FLASH_ATTENTION_3 = "python/flash_attn_3/_C.abi3.so.xz"
if FOLDER is not None:
    sys.path.append(str(FOLDER / "python"))


def carried(name: str) -> Path:
    """Returns a file of the folder; its FileNotFoundError has the reason."""
    if FOLDER is None:
        raise FileNotFoundError(f"PAGEDTREE_GPU_RUN names no folder with {name}")
    if not (FOLDER / name).exists():
        manifest = FOLDER / "manifest.json"
        absent = json.loads(manifest.read_text())["absent"] if manifest.exists() else {}
        reasons = [reason for made, reason in absent.items() if name.startswith(made)]
        raise FileNotFoundError(f"{name} is not in {FOLDER}" + "".join(f": {reason}" for reason in reasons))
    return FOLDER / name


def loaded_by(load: Callable[[], object]) -> Callable[[], str | None]:

    @functools.cache
    def absent() -> str | None:
        if not torch.cuda.is_available():
            return "measured on machines with a GPU"
        if torch.cuda.get_device_capability()[0] != 9:
            return "compiled for Hopper"
        try:
            load()
        except (OSError, ImportError) as error:
            return str(error)
        return None

    return absent


@functools.cache
def flash_attention_3() -> Any:
    if importlib.util.find_spec("flash_attn_interface") is None:
        carried(FLASH_ATTENTION_3)  # raises with the reason
    if FOLDER is not None and (FOLDER / FLASH_ATTENTION_3).exists():
        unpack(FOLDER / FLASH_ATTENTION_3)
    return importlib.import_module("flash_attn_interface")


def unpack(packed: Path) -> None:
    library = packed.with_suffix("")
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        with lzma.open(packed) as source, unfinished.open("wb") as target:
            shutil.copyfileobj(source, target, 16 << 20)
        unfinished.replace(library)
