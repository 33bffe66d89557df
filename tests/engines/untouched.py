"""`untouched.py vllm` or `sglang`: prints as JSON where the engine's functions and methods are defined, with plugins.
`untouched.py vllm OPTIONS` starts an engine instead."""

from __future__ import annotations

import importlib
import json
import sys
from types import FunctionType
from typing import Any

LOADERS = {"vllm": ("vllm.plugins", "load_general_plugins"), "sglang": ("sglang.srt.plugins", "load_plugins")}
MODULES = {
    "vllm": ["vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"],
    "sglang": [
        "sglang.srt.layers.attention.attention_registry",
        "sglang.srt.managers.scheduler",
        "sglang.srt.speculative.eagle_utils",
    ],
}


def place(value: Any) -> str | None:
    value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    if isinstance(value, FunctionType):
        return f"{value.__code__.co_filename}:{value.__code__.co_firstlineno}"
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else None


def places(engine: str) -> dict[str, str | None]:
    found = {}
    for module_name, module in sorted(sys.modules.items()):
        if module_name.split(".")[0] != engine or module is None:
            continue
        for name, value in [*vars(module).items()]:
            found[f"{module_name}.{name}"] = place(value)
            if isinstance(value, type) and value.__module__ == module_name:
                found |= {f"{module_name}.{name}.{key}": place(member) for key, member in [*vars(value).items()]}
    return found


def main() -> None:
    engine, *options = sys.argv[1:]
    if options:
        from vllm import LLM

        LLM(**json.loads(options[0]))
    module, load = LOADERS[engine]
    getattr(importlib.import_module(module), load)()
    for name in MODULES[engine]:
        importlib.import_module(name)
    if engine == "vllm":
        from vllm.platforms import current_platform

        print(json.dumps(place(type(current_platform))))
    print(json.dumps(places(engine), sort_keys=True))
    print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] == "pagedtree")))


if __name__ == "__main__":
    main()
