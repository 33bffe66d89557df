"""The list of public names in api.md; as a program, pages of all docstrings, build/docs/index.html."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pagedtree

DOCS = Path(__file__).resolve().parent

# Sections of the page: title, module with __all__. The package comes first, split by module.
EXTRA_MODULES = {
    "Grammars": "pagedtree.grammars",
    "Tensor parallel": "pagedtree.distributed",
    "Testing": "pagedtree.testing",
    "Drafters": "pagedtree.generation.drafters",
    "transformers": "pagedtree.integrations.transformers",
    "SGLang": "pagedtree.integrations.sglang",
    "FlashInfer": "pagedtree.integrations.flashinfer",
    "FlashAttention": "pagedtree.integrations.flash_attn",
}
# Sections with the engine's function names.
ENGINES = ("SGLang", "FlashInfer", "FlashAttention")
# Order and titles of the package's modules; others have their own name.
TITLES = {
    "tree": "Trees",
    "drafting": "Drafting",
    "tree_choice": "Drafting",
    "attention": "Attention",
    "attention_cost": "Attention",
    "kv_cache": "KV cache",
    "sampling": "Sampling",
    "sampling_params": "Sampling",
    "options": "Sampling",
    "logprobs": "Sampling",
    "verify": "Verification",
    "recurrent": "Recurrent layers",
    "step": "A whole step",
}


def sections() -> dict[str, list[tuple[str, Any]]]:
    """Returns public names by section: pagedtree.__all__ by defining module, then EXTRA_MODULES."""
    out: dict[str, list[tuple[str, Any]]] = {title: [] for title in TITLES.values()}
    for name in sorted(pagedtree.__all__):
        thing = getattr(pagedtree, name)
        if isinstance(thing, ModuleType) or not hasattr(thing, "__module__"):
            continue
        module = thing.__module__.removeprefix("pagedtree.").split(".")[0]
        out.setdefault(TITLES.get(module, module), []).append((name, thing))
    for title, path in EXTRA_MODULES.items():
        module = importlib.import_module(path)
        out[f"{title}: `{path}`"] = [(name, getattr(module, name)) for name in module.__all__]
    return {title: names for title, names in out.items() if names}


def names() -> str:
    """Lists public names with links and the first clause of their docstrings; engines' functions by name alone."""
    out: list[str] = []
    for title, entries in sections().items():
        out += ["", f"## {title}", ""]
        if title.startswith(ENGINES):
            files = [os.path.relpath(inspect.getfile(inspect.unwrap(thing)), DOCS) for _, thing in entries]
            out.append(", ".join(f"[`{name}`]({file})" for (name, _), file in zip(entries, files, strict=True)))
            continue
        for name, thing in entries:
            file = os.path.relpath(inspect.getfile(inspect.unwrap(thing)), DOCS)
            clause = re.split(r"[.;:]\s|\.$", " ".join((inspect.getdoc(thing) or "").split()), maxsplit=1)[0]
            out.append(f"- [`{name}`]({file}): {clause}")
    return "\n".join(out[1:])


def main() -> None:
    import pdoc

    pdoc.render.configure(docformat="google")
    pdoc.pdoc("pagedtree", *EXTRA_MODULES.values(), output_directory=DOCS.parent / "build" / "docs")


if __name__ == "__main__":
    main()
