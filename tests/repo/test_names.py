"""One word per family of ops finds its files in every layer."""

import ast
import re
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "csrc").is_dir())
CSRC = ROOT / "csrc"

# Rules whose names are in this table alone.
WALKS = re.findall(r"^  DRAFT\((\w+),", (CSRC / "core" / "verify" / "table.h").read_text(), re.MULTILINE)
# Each family's word in its files' or folders' names.
FAMILIES = {
    "attention": ("tree_attention", "attention_plan", "merge_states"),
    "drafting": ("expand_tree", "rerank_tree", "ngram_propose", "medusa_propose", "best_first_tree", "select_nodes"),
    "kv_cache": ("slot_mapping", "append_kv", "rope_append", "compact_kv"),
    "sampling": ("sample",),
    "shards": ("step_shards", "follow_shards", "weigh_shards", "walk_shards"),
    "step": ("prepare_step", "commit"),
    "tree": ("build_trees", "mask_words"),
    "logprobs": ("token_logprobs",),
    "recurrent": ("tree_delta_rule", "advance_state", "tree_conv1d", "advance_conv"),
    "verify": ("verify_greedy", "verify_sampled", "verify_tokens", "verify_typical", *WALKS),
}
LAYERS = ("python/pagedtree", "csrc/torch", "csrc/cpu", "csrc/cuda")
TABLE = (CSRC / "core" / "ops.h").read_text()


def test_isa_folder_holds_the_sources_of_each_instruction_set() -> None:
    listed = re.findall(
        r"set\(PAGEDTREE_(?:ATTENTION|ROW)_SOURCES\n(.*?)\)", (ROOT / "CMakeLists.txt").read_text(), re.DOTALL
    )
    assert len(listed) == 2
    assert sorted(" ".join(listed).split()) == sorted(
        path.relative_to(ROOT).as_posix() for path in CSRC.glob("cpu/isa/**/*.cpp")
    )


def files_of(layer: str) -> dict[str, str]:
    """Returns texts by path below the layer."""
    folder, suffixes = ROOT / layer, {".py", ".h", ".cpp", ".cuh", ".cu"}
    paths = (path for path in folder.rglob("*") if path.suffix in suffixes)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def strays(family: str, op: str, files: dict[str, str]) -> list[str]:
    """Lists files that implement the op without its family's word in the path; a message if none has both."""
    body = re.compile(rf"^\w[^\n;]*\b{op}\([^;{{]*\)(?: const)?\s*{{", re.MULTILINE)
    wrong = [path for path, text in files.items() if family not in path and body.search(text)]
    has_both = any(family in path and re.search(rf"\b{op}\b", text) for path, text in files.items())
    return wrong if has_both else [*wrong, f"no file with {family} in its path has {op}"]


def test_every_op_has_a_family() -> None:
    tables = "".join(text for path, text in files_of("csrc/torch").items() if path.endswith(".cpp"))
    schemas = re.findall(r'^\s*{"([a-z]\w*)(?:\.\w+)?",\s+(?:"\(|PT_)', tables, re.MULTILINE)
    names = {op for ops in FAMILIES.values() for op in ops}
    assert {*schemas, *WALKS} == names
    assert set(re.findall(r"^  (?:OP|RULE)\((\w+),", TABLE, re.MULTILINE)) <= names


@pytest.mark.parametrize("layer", LAYERS)
def test_each_family_has_one_word_in_every_layer(layer: str) -> None:
    files, with_hosts = files_of(layer), re.findall(r"^  OP\((\w+),", TABLE, re.MULTILINE)
    for family, ops in FAMILIES.items():
        for op in ops:
            if (layer in LAYERS[2:] and op not in with_hosts) or (layer != LAYERS[0] and op in WALKS):
                continue  # a rule, or another op of the backend does it
            assert strays(family, op, files) == [], f"{op} in layer {layer}"


def test_the_tests_of_a_family_bear_its_word_or_an_ops_name() -> None:
    names = [path for path in files_of("tests/ops") if Path(path).name.startswith("test_")]
    words = {family: (family, *ops) for family, ops in FAMILIES.items()}
    words["shards"] = ("distributed",)  # the public module
    assert [family for family, of in words.items() if not any(word in name for name in names for word in of)] == []


def test_references_bear_the_words_of_families() -> None:
    names = {Path(path).stem for path in files_of("python/pagedtree/reference")} - {"__init__"}
    assert names <= {*FAMILIES, "options"}  # options apply to every op


def test_one_helper_writes_the_errors_of_arguments() -> None:
    """A raise that writes the form by hand names no function."""
    texts = {path: text for path, text in files_of("python/pagedtree").items() if path.endswith(".py")}
    nodes = [(path, node) for path, text in texts.items() for node in ast.walk(ast.parse(text))]
    raises = [(path, ast.unparse(node)) for path, node in nodes if isinstance(node, ast.Raise)]
    by_hand = re.compile(r"raise (?!refusal|argument_error).*(: expected |\bmust (be|have)\b.*, got )")
    assert [(path, text) for path, text in raises if by_hand.match(text)] == []
