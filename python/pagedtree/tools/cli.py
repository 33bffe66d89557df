"""`python -m pagedtree COMMAND ...`: passes the arguments to the command's module, imported only then."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import pagedtree

# Command -> (module with main(argv) -> exit status, extra with its imports, summary).
COMMANDS = {
    "info": ("pagedtree.tools.info", None, "versions, backends, instruction sets, libraries"),
    "generate": ("pagedtree.integrations.transformers.cli", "transformers", "complete prompts with a checkpoint"),
    "check": ("pagedtree.check", None, "compare every op on this device with the CPU backend"),
    "bench": ("pagedtree.tools.bench", None, "measure the ops on this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status, 2 if the command cannot run in this environment."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m pagedtree",
        description=pagedtree.__doc__,
        epilog="python -m pagedtree COMMAND --help tells a command's own arguments",
    )
    parser.add_argument("--version", action="version", version=f"pagedtree {pagedtree.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, _, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    command = parser.parse_args(arguments[:1]).command
    module_name, extra, _ = COMMANDS[command]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "pagedtree":
            print(f"{parser.prog} {command}: not part of this installation", file=sys.stderr)
        else:
            hint = f': pip install "pagedtree[{extra}]"' if extra else ""
            print(f"{parser.prog} {command} needs {error.name}{hint}", file=sys.stderr)
        return 2
    status: int = module.main(arguments[1:])
    return status
