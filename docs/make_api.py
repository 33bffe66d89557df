"""Writes docs/api.md, a line for each public name, and the full reference build/docs/api.md, from the docstrings."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pagedtree

DOCS = Path(__file__).resolve().parent
INDEX = DOCS / "api.md"
REFERENCE = DOCS.parent / "build" / "docs" / "api.md"
LINE = 100

# Sections of the page: title, module whose __all__ is listed. The package itself comes first and is split by module.
EXTRA_MODULES = {
    "Grammars": "pagedtree.grammars",
    "Tensor parallel": "pagedtree.distributed",
    "Testing": "pagedtree.testing",
    "transformers": "pagedtree.integrations.transformers",
    "SGLang": "pagedtree.integrations.sglang",
    "FlashInfer": "pagedtree.integrations.flashinfer",
    "FlashAttention": "pagedtree.integrations.flash_attn",
}
# Order and titles of the package's own modules; one that is missing here is listed under its own name.
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


def annotation_text(annotation: Any) -> str:
    if annotation is None:
        return "None"
    text = getattr(annotation, "__forward_arg__", annotation)
    return text if isinstance(text, str) else getattr(text, "__name__", str(text))


def parameter_text(parameter: inspect.Parameter) -> str:
    text = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text += parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {annotation_text(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {parameter.default!r}" if ":" in text else f"={parameter.default!r}"
    return text


def signature_text(name: str, function: Any, *, method: bool = False) -> str:
    """`name(...) -> ...`, one argument per line where it is long."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if method and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    parts, keyword_only = [], False
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            keyword_only = True
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        parts.append(parameter_text(parameter))
    result = signature.return_annotation
    arrow = "" if result is signature.empty or inspect.isclass(function) else f" -> {annotation_text(result)}"
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) > LINE:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){arrow}"
    return line


def docstring_markdown(text: str) -> str:
    """A docstring as Markdown: sections ("Args:") become lists, indented blocks become code."""
    out: list[str] = []
    lines = text.split("\n")
    i = 0
    while i < len(lines):
        line = lines[i]
        block, end = _indented_block(lines, i + 1)
        if "" in block:  # what follows a blank line is code of its own
            block = block[: block.index("")]
            end = i + 1 + len(block)
        if re.fullmatch(r"[A-Z]\w*( \([^)]*\))?:|[A-Z][\w ]*\([^)]*\):", line) and block:
            out += [f"**{line.rstrip(':')}**", "", *_items(block), ""]
            i = end
        elif line.startswith("    ") and (i == 0 or not lines[i - 1]):
            block, end = _indented_block(lines, i)
            out += ["```text", *block, "```", ""]
            i = end
        else:
            out.append(line.strip())
            i += 1
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def _indented_block(lines: list[str], begin: int) -> tuple[list[str], int]:
    """The dedented lines from `begin` that are indented or blank, and where they end."""
    end = begin
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith("    ")):
        end += 1
    block = lines[begin:end]
    while block and not block[-1].strip():
        block.pop()
    return [line[4:] for line in block], end


def _items(block: list[str]) -> list[str]:
    """`name: text` entries as list items, their deeper lines included; a block without any stays a paragraph."""
    entry_start = re.compile(r"([\w*][\w*, .\[\]()`]*): (.*)")
    if not any(entry_start.match(line) for line in block):
        return [line.strip() for line in block]
    out: list[str] = []
    for line in block:
        match = entry_start.match(line)
        if match:
            out.append(f"- `{match[1]}`: {match[2]}")
        elif line.startswith("    "):
            out.append(f"  {line.strip()}")
        else:
            out.append(f"- {line}" if line else "")
    return out


def entry(name: str, thing: Any, level: str = "###") -> list[str]:
    out = [f"{level} `{name}`", ""]
    if inspect.isclass(thing):
        if not issubclass(thing, (Exception, Enum)):  # an enumeration's signature differs between versions of Python
            out += ["```python", signature_text(name, thing), "```", ""]
        out += [docstring_markdown(inspect.getdoc(thing) or ""), ""]
        for key, member in vars(thing).items():
            if not key.startswith("_") and not _inherits_meaning(thing, key, member):
                out += member_entry(name, key, member)
    elif callable(thing):
        out += [
            "```python",
            signature_text(name, thing),
            "```",
            "",
            docstring_markdown(inspect.getdoc(thing) or ""),
            "",
        ]
    return out


def _inherits_meaning(owner: type, key: str, member: Any) -> bool:
    """Tells whether the member overrides one of a base class without a docstring of its own."""
    return not getattr(member, "__doc__", None) and any(hasattr(base, key) for base in owner.__bases__)


def member_entry(owner: str, key: str, member: Any) -> list[str]:
    """Methods and documented properties; fields are in the class's own docstring."""
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    if isinstance(member, property):
        doc = inspect.getdoc(member)
        return [f"**`{owner}.{key}`**: {doc}", ""] if doc else []
    if not inspect.isfunction(function):
        return []
    doc = docstring_markdown(inspect.getdoc(function) or "")
    return ["```python", signature_text(f"{owner}.{key}", function, method=True), "```", "", doc, ""]


def sections() -> dict[str, list[tuple[str, Any]]]:
    """The public names by section: those of pagedtree.__all__ by the module that defines them, then EXTRA_MODULES."""
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


def index() -> str:
    """The page docs/api.md: each public name, linked to its file, and the first line of its docstring."""
    out = [
        "# API reference",
        "",
        "All public names, each linked to its file, whose docstrings are the reference. `make docs` writes this list,",
        "and puts the docstrings on one page, `build/docs/api.md`. Names are imported from `pagedtree` unless the",
        "section says otherwise. [concepts.md](concepts.md) explains the words.",
    ]
    for title, names in sections().items():
        out += ["", f"## {title}", ""]
        for name, thing in names:
            file = os.path.relpath(inspect.getfile(inspect.unwrap(thing)), DOCS)
            out.append(f"- [`{name}`]({file}): {(inspect.getdoc(thing) or '').partition(chr(10))[0]}")
    return "\n".join(out) + "\n"


def reference() -> str:
    """The page build/docs/api.md: signature and docstring of each public name."""
    introduction = [
        "# API reference",
        "",
        "Names are imported from `pagedtree` unless the section says otherwise. In shapes, B is sequences, T query",
        "tokens, N tree nodes, W mask words, V the vocabulary, S the longest path.",
        "",
    ]
    out: list[str] = []
    for title, names in sections().items():
        out += [f"## {title}", ""]
        module = re.fullmatch(r".*: `(.*)`", title)
        if module:
            out += [docstring_markdown(inspect.getdoc(importlib.import_module(module[1])) or ""), ""]
        for name, thing in names:
            out += entry(name, thing)
    lines = [*introduction, *contents("\n".join(out)), "", *out]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def contents(page: str) -> list[str]:
    """A list of the page's sections with links to them and to the names they have."""
    out: list[str] = []
    seen: dict[str, int] = {}
    for marks, title in re.findall(r"^(##|###) (.*)$", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S), re.M):
        anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")  # as GitHub makes it
        count = seen[anchor] = seen.get(anchor, -1) + 1
        link = f"[{title}](#{anchor}{f'-{count}' if count else ''})"
        if marks == "##":
            out.append(f"- {link}:")
        else:
            out[-1] += ("," if out[-1].endswith(")") else "") + f" {link}"
    return [section.removesuffix(":") for section in out]


def main() -> None:
    INDEX.write_text(index(), encoding="utf-8")
    REFERENCE.parent.mkdir(parents=True, exist_ok=True)
    REFERENCE.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
