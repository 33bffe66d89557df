"""Files and folders that are named on the command line."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["check_checkpoint", "errors_of", "read_text"]

# A name on the hub: that of a model, or of its owner and the model.
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def read_text(option: str, path: str, stdin: bool = False) -> str:
    """A text in UTF-8, with or without a byte order mark, its line ends as they are. stdin: "-" is standard input.

    Raises ValueError, which names the option, for a file that cannot be read or is not UTF-8.
    """
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


def check_checkpoint(option: str, name: str, hub: bool = False) -> None:
    """Raises ValueError, which names the option, for what is no folder of a checkpoint.

    hub: a name on the hub will do, too. Whether the hub has it is not asked here.
    """
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{option}: expected a checkpoint, got {name}, a folder without config.json")
    elif not hub or path.exists() or HUB_NAME.fullmatch(name) is None:
        kind = "a folder or a name on the hub" if hub else "a folder"
        found = "a file" if path.exists() else "which does not exist"
        raise ValueError(f"{option}: expected {kind}, got {name}, {found}")


@contextmanager
def errors_of(option: str, name: str) -> Iterator[None]:
    """What goes wrong while a checkpoint is loaded, as one line that names the option and the checkpoint."""
    try:
        yield
    except (OSError, ValueError) as error:
        where = "" if Path(name).exists() else "no folder here, and not loaded from the hub: "
        raise ValueError(f"{option} {name}: {where}{' '.join(str(error).split())}") from error
