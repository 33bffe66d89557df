"""The source tree: includes and imports, places of Torch, CUDA and engines, size."""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cuh", ".cu"))

# Folder -> allowed folders and files; the longest match applies.
ARROWS = {
    "core": {"core"},
    "cpu": {"core", "cpu"},
    # Compiled once per instruction set; hosts call these headers.
    "cpu/isa": {
        "core",
        "cpu/isa",
        "cpu/isa/tile",
        "cpu/isa.h",
        "cpu/attention_work.h",
        "cpu/logits_scratch.h",
        "cpu/recurrent_work.h",
    },
    "cpu/isa/tile": {"core", "cpu/isa/tile"},
    "cuda": {"core", "cuda", "cuda/tile"},
    "cuda/tile": {"core", "cuda/tile", "simt"},  # an instruction's PTX and its simt version
    "simt": {"core", "simt"},
    "torch": {"core", "torch"},
    "bindings": {"core", "cpu", "cuda", "bindings"},
}


def folder_of(path: str) -> str:
    return max((name for name in ARROWS if path.startswith(name + "/")), key=len, default="")


def violations(path: str, text: str) -> list[str]:
    """Lists forbidden includes of a file in csrc."""
    folder, wrong = folder_of(path), []
    for name in re.findall(r'#\s*include\s+"([^"]+)"', text):
        if not {name, folder_of(name)} & ARROWS[folder]:
            wrong.append(name)
    for name in re.findall(r"#\s*include\s+<([^>]+)>", text):
        torch = name.startswith(("torch/", "c10/", "ATen/")) and folder != "torch"
        unstable = folder == "torch" and re.match(r"c10/|ATen/|torch/(?!csrc/stable/|headeronly/)", name)
        python = name.startswith(("pybind11/", "Python.h")) and folder != "bindings"
        cuda = name.startswith(("cuda", "mma")) and not folder.startswith(("cuda", "simt"))
        if torch or unstable or python or cuda:
            wrong.append(name)
    return wrong


def test_includes_follow_the_arrows() -> None:
    sources = {path.relative_to(CSRC).as_posix(): path.read_text() for path in SOURCES}
    assert [path for path in sources if not folder_of(path)] == [], "folders without a rule in ARROWS"
    assert {path: wrong for path, text in sources.items() if (wrong := violations(path, text))} == {}


def circles(arrows: dict[str, set[str]]) -> list[str]:
    """Lists the nodes of circles, and those that lead to one."""
    while ends := {node for node, to in arrows.items() if not to & arrows.keys()}:
        arrows = {node: to for node, to in arrows.items() if node not in ends}
    return sorted(arrows)


def place_of(path: str) -> str:
    """Returns a file's folder. The interface of the backends lies in core, but above core/verify."""
    return path if path in ("core/ops.h", "core/backend.h") else path.rpartition("/")[0]


def test_includes_have_no_circles() -> None:
    sources = {path.relative_to(CSRC).as_posix(): path.read_text() for path in SOURCES}
    files = {path: set(re.findall(r'#\s*include\s+"([^"]+)"', text)) for path, text in sources.items()}
    places: dict[str, set[str]] = {place_of(path): set() for path in files}
    for path, names in files.items():
        places[place_of(path)] |= {place_of(name) for name in names} - {place_of(path)}
    assert circles(files) == circles(places) == []


def long_functions(text: str) -> Iterator[str]:
    """Yields the heads of functions of more than 80 lines of code; of kernels, of more than 150."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("//", "#"))]
    heads: dict[int, int] = {}  # indentation -> last line
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        head = heads.get(indent, i)
        if line.strip() == "}" and i - head >= (150 if "__global__" in lines[head] else 80):
            yield lines[head].strip()
        heads[indent] = i


def test_functions_are_short() -> None:
    assert {path.name: heads for path in SOURCES if (heads := list(long_functions(path.read_text())))} == {}


PYTHON = ROOT / "python" / "pagedtree"
MODULES = sorted(path for path in PYTHON.rglob("*.py"))
ENGINES = ("transformers", "vllm", "sglang", "flashinfer", "flash_attn")
GRAMMAR_ENGINES = ("xgrammar", "llguidance")

# Folder -> forbidden imports; the longest match applies.
FORBIDDEN = {
    "": ("pagedtree.generation", "pagedtree.integrations", *ENGINES, *GRAMMAR_ENGINES),
    "generation": ("pagedtree.integrations", *ENGINES, *GRAMMAR_ENGINES),
    "generation/drafters": (
        *("pagedtree.integrations", *ENGINES, *GRAMMAR_ENGINES),
        *(f"pagedtree.generation.{name}" for name in ("engine", "decode_step", "fixed_step")),
    ),
    "integrations": (),
    **{
        f"integrations/{name}": tuple(f"pagedtree.integrations.{other}" for other in ENGINES if other != name)
        for name in ENGINES
    },
    "integrations/vllm": tuple(f"pagedtree.integrations.{other}" for other in ("sglang", "flashinfer", "flash_attn")),
}


def imports(text: str) -> Iterator[str]:
    """Yields imported modules and names, also within functions."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def forbidden_imports(path: str, text: str) -> list[str]:
    """Lists forbidden imports of a file in the package."""
    folder = max((name for name in FORBIDDEN if not name or path.startswith(name + "/")), key=len)
    return [
        name for name in imports(text) for other in FORBIDDEN[folder] if name == other or name.startswith(other + ".")
    ]


def test_imports_follow_the_arrows() -> None:
    modules = {path.relative_to(PYTHON).as_posix(): path.read_text() for path in MODULES}
    assert {path: wrong for path, text in modules.items() if (wrong := forbidden_imports(path, text))} == {}


def test_imports_have_no_circles() -> None:
    paths = {".".join(p.relative_to(PYTHON.parent).with_suffix("").parts).removesuffix(".__init__"): p for p in MODULES}
    names = paths.keys() | {"pagedtree._C"}
    modules = {
        module: {name if name in names else name.rpartition(".")[0] for name in imports(path.read_text())} - {module}
        for module, path in paths.items()
    }
    assert circles(modules) == []


MAKERS = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros")


def without_dtype(text: str) -> list[str]:
    """Lists calls that create tensors of the caller's default dtype."""
    return [
        ast.unparse(call)
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in MAKERS
        and all(keyword.arg != "dtype" for keyword in call.keywords)
    ]


def test_tensors_are_made_with_a_dtype() -> None:
    modules = {path.relative_to(PYTHON).as_posix(): path.read_text() for path in MODULES}
    assert {path: calls for path, text in modules.items() if (calls := without_dtype(text))} == {}


CODE = (".py", ".h", ".cpp", ".cu", ".cuh")
BUDGET_FILE = ROOT / "tests" / "repo" / "budget.toml"
BUDGET = {name: int(most) for name, most in re.findall(r'^"?([^"\s]+)"? = (\d+)', BUDGET_FILE.read_text(), re.M)}
FOLDER_PARTS = {"csrc": 2, "python": 4, "tests": 2}  # path parts of a folder in the budget; else one


def tracked_texts() -> dict[str, str]:
    """Returns git's text files by path."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    paths = [path for path in listed.split("\0") if (ROOT / path).is_file() and not (ROOT / path).is_symlink()]
    data = {path: (ROOT / path).read_bytes() for path in paths}
    return {path: content.decode() for path, content in data.items() if b"\0" not in content}


def counted(texts: dict[str, str]) -> dict[str, int]:
    """Counts lines by folder, of code, of text; and places that the formatter skips."""
    found = Counter({"text": sum(text.count("\n") for text in texts.values())})
    for path, text in texts.items():
        if path.endswith(CODE):
            *folders, _ = path.split("/")
            folder = "/".join(folders[: FOLDER_PARTS.get(path.split("/")[0], 1)]) or "."
            found.update({folder: text.count("\n"), "code": text.count("\n")})
            found["fmt_skip"] += len(re.findall(r"#\s*fmt: skip", text))
    return found


def beyond(found: dict[str, int], budget: dict[str, int]) -> list[str]:
    """Lists counts beyond the budget, and folders that only one of both has."""
    return [name for name in sorted(found | budget) if not 0 <= found.get(name, -1) <= budget.get(name, -1)]


def test_sizes_stay_within_the_budget() -> None:
    found = counted(tracked_texts())
    today = "\n".join(f'"{name}" = {count}' for name, count in sorted(found.items()))
    assert beyond(found, BUDGET) == [], f"{BUDGET_FILE.name} allows less (CONTRIBUTING.md, Size); counted:\n{today}"


def test_places_of_mutants_are_there() -> None:
    texts = {m: ((PYTHON if m.backend == "python" else CSRC) / m.file).read_text() for m in MUTANTS}
    assert [mutant.name for mutant, text in texts.items() if mutant.line not in text] == []
