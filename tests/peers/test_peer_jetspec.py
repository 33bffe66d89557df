"""JetSpec's tests and loop on `pagedtree.integrations.jetspec`, in an environment with its packages.

JetSpec has removed its tests: the history of the clone PEER_SOURCE has them.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from peer_source import PeerSource

SOURCE = PeerSource("jetspec").folder
ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build" / "engines-jetspec" / "bin" / "python"
FOLDERS = {"HEAD": ("jetspec", "bench", "examples", "pyproject.toml"), "9a94dc6^": ("tests",)}
FAIL_WITH_THEIR_OPS = {f"test_compiled_verify_hidden_matches_eager_kernel[target_layer_ids{i}]" for i in (1, 2)}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Extracts JetSpec and moves its GPU tests to the CPU."""
    folder = tmp_path_factory.mktemp("jetspec")
    for commit, names in FOLDERS.items():
        packed = subprocess.run(["git", "-C", SOURCE, "archive", commit, *names], check=True, stdout=subprocess.PIPE)
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
    parity = folder / "tests" / "core" / "test_tree_attention_kernel_parity.py"
    for file in (parity, *folder.glob("tests/inference_engine/test_*.py")):
        text = file.read_text(encoding="utf-8").replace("torch.cuda.is_available()", "True")
        file.write_text(text.replace('"cuda"', '"cpu"'), encoding="utf-8")
    return folder


def run(tree: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    path = [Path(__file__).parent, ROOT / "tests", ROOT / "python", tree]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "TRITON_INTERPRET": "1"}
    return subprocess.run([PYTHON, *arguments], cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)


def test_jetspec_tests_pass(tree: Path) -> None:
    options = "-q", "-p", "jetspec_on_cpu", "-p", "no:cacheprovider", "--junitxml", "report.xml"
    done = run(tree, "-m", "pytest", *options, "tests")
    cases = [*ElementTree.parse(tree / "report.xml").iter("testcase")]
    failed = {case.get("name") for case in cases if {*(child.tag for child in case)} & {"failure", "error"}}
    assert failed == FAIL_WITH_THEIR_OPS and len(cases) > 200, done.stdout[-4000:]


def test_jetspec_loop_matches_plain_texts(tree: Path) -> None:
    """Greedy texts are its loop's, sampled ones plain sampling's, for right and wrong drafters."""
    done = run(tree, ROOT / "examples" / "jetspec_loop.py")
    assert done.returncode == 0 and done.stdout.count("5 of 5 texts equal") == 4, done.stdout
