"""Files and folders named on the command line."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagedtree.integrations.transformers.gguf import dequantized, is_gguf

__all__ = ["check_checkpoint", "errors_of", "model_folder", "read_text"]

# A name on the hub: model, or owner/model.
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def read_text(option: str, path: str, stdin: bool = False) -> str:
    """Returns UTF-8 text, with or without a byte order mark, with unchanged line ends. stdin: "-" is standard input.
    Raises ValueError, which names the option, for a file that cannot be read or is not UTF-8."""
    try:
        data = sys.stdin.buffer.read() if stdin and path == "-" else Path(path).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{option}: expected a file that can be read, got {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{option}: expected text in UTF-8, got {path} with byte 0x{error.object[error.start]:02x} at offset"
            f" {error.start}"
        ) from None


def check_checkpoint(option: str, name: str, of_model: bool = False) -> None:
    """Raises ValueError, which names the option, for anything but a checkpoint folder; of_model: or a GGUF file, or a
    name on the hub, which is not looked up."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{option}: expected a checkpoint, got {name}, a folder without config.json")
    elif of_model and (is_gguf(path) or (not path.exists() and HUB_NAME.fullmatch(name))):
        return
    else:
        kind = "a folder, a GGUF file or a name on the hub" if of_model else "a folder"
        found = "another file" if path.exists() and of_model else "a file" if path.exists() else "which does not exist"
        raise ValueError(f"{option}: expected {kind}, got {name}, {found}")


def model_folder(option: str, name: str) -> str:
    """Returns the argument for `from_pretrained`: the name itself, or the folder of a GGUF file's checkpoint."""
    if not is_gguf(name):
        return name
    try:
        with errors_of(option, name):
            return str(dequantized(name))
    except ModuleNotFoundError as error:
        raise ValueError(f"{option} {name}: {error}") from None


@contextmanager
def errors_of(option: str, name: str) -> Iterator[None]:
    """Turns a checkpoint's loading error into one line that names the option and the checkpoint."""
    try:
        yield
    except (OSError, ValueError) as error:
        where = "" if Path(name).exists() else "no folder here, and not loaded from the hub: "
        raise ValueError(f"{option} {name}: {where}{' '.join(str(error).split())}") from error
