"""Native libraries, source archive, wheel and CMake package."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import check_wheel
import pytest
import setuptools

import pagedtree
from pagedtree import _C
from pagedtree.tools import cli

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PACKAGE = Path(pagedtree.__file__).parent
OBJECTS = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}" / "CMakeFiles"
SMALL_PROGRAM = """
import json, sys, pagedtree, torch
from pagedtree.tools import info
trees = pagedtree.TreeBatch.from_trees([pagedtree.DraftTree.full([2, 2])])
assert trees.valid.all() and trees.depths.tolist() == [0, 1, 1, 2, 2, 2, 2]
print(json.dumps({"file": pagedtree.__file__, **info.collect()}))
"""


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    """Returns the command's output; a failure shows both streams."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# --- native libraries


def shared_symbols(isa: str, listing: str) -> list[str]:
    """Lists symbols that the linker may merge, or that clash."""
    found = []
    for line in listing.splitlines():
        match = re.match(r"[0-9a-f]* +([TWVuBDRi]) (.*)", line)
        if match and f"pagedtree::cpu::{isa}::" not in match[2] and not match[2].startswith("DW.ref."):
            found.append(match[2])
    return found


@pytest.mark.parametrize("isa", list(_C.build_info()["cpu_isas"]))
def test_isa_objects_share_no_code(isa):
    """A merged function could be AVX-512 on a machine without it (csrc/cpu/isa.h)."""
    objects = sorted((OBJECTS / f"pagedtree_cpu_{isa}.dir").rglob("*.o"))
    if not objects:
        pytest.skip("not built in this checkout")
    for path in objects:
        listing = run("nm", "-C", "--defined-only", path)
        assert f"pagedtree::cpu::{isa}::" in listing
        assert shared_symbols(isa, listing) == [], path.name


def test_backends_export_their_tables_only():
    """simt and cuda share kernels' names, which the linker could mix up."""
    has_hopper = any(a.startswith("9.0a") for a in _C.build_info()["cuda_architectures"])
    of_simt = {f"pagedtree_simt_{name}" for name in ("set_executor", "refuse_maps", "trace", "traced")}
    loaded = {"pagedtree_backend", "pagedtree_backend_error", "pagedtree_engine_facts", "pagedtree_instructions"}
    expected = {
        "cpu": {"pagedtree::cpu::isa_kernels()", "pagedtree::cpu::available_isas()"},
        "cuda": loaded | ({"pagedtree_instructions_sm90"} if has_hopper else set()),
        "simt": loaded | of_simt | {"pagedtree_instructions_sm90"},
    }
    for name, symbols in expected.items():
        library = PACKAGE / "lib" / f"libpagedtree_{name}.so"
        if name == "cpu" or library.exists():
            listing = run("nm", "-DC", "--defined-only", library)
            exported = {line.split(maxsplit=2)[2] for line in listing.splitlines()}
            found = {symbol for symbol in exported if symbol.startswith(("cuda", "__cuda")) or "pagedtree" in symbol}
            assert found == symbols | {f"pagedtree::{name}::backend()"}


DRIVERS = {  # (the driver's CUDA, the build's CUDA): message
    (12080, 13000): "the NVIDIA driver is for CUDA 12.8, but pagedtree is built with CUDA 13.0: update the driver to"
    " one for CUDA 13, or build pagedtree with nvcc of CUDA 12",
    (12000, 12080): "the NVIDIA driver is for CUDA 12.0, but pagedtree's kernels take more than 4 KB of parameters:"
    " update the driver to one for CUDA 12.1 (R530) or later",
    (12010, 12080): "",
    (13000, 13000): "",
}


def test_drivers_that_are_too_old_are_named(tmp_path):
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    lines = (f"puts(pagedtree::cuda::driver_error({driver}, {build}).c_str());" for driver, build in DRIVERS)
    (tmp_path / "main.cpp").write_text(
        f'#include <cstdio>\n#include "cuda/driver.h"\nint main() {{ {"".join(lines)} }}\n'
    )
    run("c++", "-std=c++20", f"-I{CSRC}", tmp_path / "main.cpp", "-o", tmp_path / "drivers")
    assert run(tmp_path / "drivers").split("\n")[:-1] == [*DRIVERS.values()]


def test_the_library_asks_for_the_driver(tmp_path):
    library = PACKAGE / "lib" / "libpagedtree_cuda.so"
    if not library.exists() or shutil.which("cc") is None:
        pytest.skip("built without CUDA, or no C compiler")
    (tmp_path / "driver.c").write_text("int cuDriverGetVersion(int* version) { *version = 12000; return 0; }\n")
    run("cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c")
    script = (
        f"import ctypes; error = ctypes.CDLL({str(library)!r}).pagedtree_backend_error; "
        "error.restype = ctypes.c_char_p; print(error().decode())"
    )
    told = run(sys.executable, "-c", script, LD_LIBRARY_PATH=str(tmp_path))
    assert told.startswith("the NVIDIA driver is for CUDA 12.0")


def test_symbol_versions_stay_in_reach():
    """A wheel from Debian 12's GCC 12 needs glibc 2.34, libstdc++ of GCC 11, any libgcc_s."""
    for path in [*PACKAGE.glob("lib/*.so"), *PACKAGE.glob("_C*.so")]:
        assert check_wheel.too_new(path) == []


def test_the_op_library_needs_no_python_and_the_backend_no_torch():
    def needed(path: Path) -> set[str]:
        return set(re.findall(r"\(NEEDED\).*\[([a-z_0-9+-]+)", run("readelf", "-d", path)))

    assert not any("python" in name for name in needed(PACKAGE / "lib" / "libpagedtree_torch.so"))
    system = {"libstdc++", "libm", "libgcc_s", "libc", "ld-linux-x86-64", "ld-linux-aarch64"}
    assert needed(PACKAGE / "lib" / "libpagedtree_cpu.so") <= system
    for library in (PACKAGE / "lib" / f"libpagedtree_{name}.so" for name in ("cuda", "simt")):
        if library.exists():
            assert needed(library) <= system | {"libpthread", "librt", "libdl"}, library.name


@pytest.mark.parametrize("header", sorted((CSRC / "core").glob("*.h")), ids=lambda path: path.name)
def test_core_headers_stand_alone(header, tmp_path):
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "main.cpp").write_text(f'#include "core/{header.name}"\n')
    run("c++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", tmp_path / "main.cpp")


def test_the_cpp_example_runs_against_the_cmake_package(tmp_path, capsys):
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("no CMake or C++ compiler")
    assert cli.main(["info", "--cmake-dir"]) == 0
    package = capsys.readouterr().out.strip()
    run("cmake", "-S", ROOT / "examples" / "cpp", "-B", tmp_path, f"-Dpagedtree_DIR={package}")
    run("cmake", "--build", tmp_path)
    lines = run(tmp_path / "tree_step").splitlines()
    assert lines[0] == "backend cpu" and len(lines) == 23
    assert lines[10:13] == ["a latent cache: the same", *(f"sequence {b}, no token twice: 0 1 2" for b in range(2))]
    assert lines[16] == "row 3 convolved 0 1 0 1 0 0 0 0, read 2 2 0 1 0 0 0 0"  # its path: rows 0, 1, 3
    assert lines[20:] == [
        "sequence 0, its state: 2 2 0 1 0 0 0 0, its last input: 0 0 0 1 0 0 0 0",
        "sequence 1, its state: 0 0 0 0 2 2 1 0, its last input: 0 0 0 0 0 0 1 0",
        "the best 5 rows: 0 1 2 3 4",
    ]
    assert "  node 3, parent  1, depth 2 saw 111111101" in lines


# --- the build


@pytest.fixture
def setup_py(monkeypatch) -> dict[str, Any]:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    return runpy.run_path(str(ROOT / "setup.py"))


def make_program(folder: Path, name: str, text: str = "") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_environments_own_cmake_and_ninja_build(setup_py, tmp_path, monkeypatch):
    """The environment's tools precede the PATH, activated or not."""
    other = make_program(tmp_path, "cmake"), make_program(tmp_path, "ninja")
    monkeypatch.setenv("PATH", str(tmp_path))
    site = Path(sysconfig.get_path("purelib"))
    found = setup_py["find_cmake"]()
    assert found != str(other[0]) and Path(found).is_relative_to(site) and "version" in run(found, "--version")
    program = setup_py["generator"]()[-1].removeprefix("-DCMAKE_MAKE_PROGRAM=")
    assert program != str(other[1]) and Path(program).is_relative_to(sys.prefix)


def test_without_the_packages_cmake_and_ninja_are_those_on_the_path(setup_py, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_py["generator"]() == []
    with pytest.raises(SystemExit, match=r"neither a package of \S+ nor on the PATH: \S+ -m pip install cmake ninja"):
        setup_py["find_cmake"]()
    path = make_program(tmp_path, "cmake")
    assert setup_py["find_cmake"]() == str(path)
    path = make_program(tmp_path, "ninja")
    assert setup_py["generator"]() == ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={path}"]


def test_a_folder_of_that_name_is_no_package(setup_py, tmp_path, monkeypatch):
    """In the checkout Python takes cmake/ for a package."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    monkeypatch.delitem(sys.modules, "cmake", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    path = make_program(tmp_path, "cmake")
    assert setup_py["find_cmake"]() == str(path)
    sys.modules.pop("cmake", None)


def configured(folder: Path, script: str, **environment: str) -> tuple[bool, str]:
    """Returns success and one-line output of a script with cmake/cuda.cmake."""
    if shutil.which("cmake") is None:
        pytest.skip("no CMake")
    (folder / "configure.cmake").write_text(script.format(cuda=f"include({ROOT}/cmake/cuda.cmake)"))
    inherited = {name: value for name, value in os.environ.items() if name != "PAGEDTREE_CUDA"}
    streams = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(["cmake", "-P", folder / "configure.cmake"], env=inherited | environment, **streams)
    return done.returncode == 0, " ".join(done.stdout.split())


def test_a_cmake_that_does_not_know_nvccs_cxx20_is_refused(tmp_path):
    nvcc = make_program(tmp_path, "nvcc")
    right, told = configured(tmp_path, f"set(CMAKE_VERSION 3.25.1)\nset(PAGEDTREE_NVCC {nvcc})\n{{cuda}}\n")
    assert not right
    assert "need CMake 3.25.2 or later" in told and "this is 3.25.1" in told and "PAGEDTREE_CUDA=0" in told


ARCHITECTURE_LISTS = {
    "8.0+PTX 9.0a": ("80|90a-real", "8.0+PTX 9.0a", ""),
    "7.0;7.5 8.6,9.0a": ("86-real|90a-real", "8.6 9.0a", "left out of the build: 7.0;7.5"),
    "7.5": ("", "", "has 7.5 only"),
    "10.0 12.0+PTX": ("100-real|120", "10.0 12.0+PTX", ""),
    "": ("80-real|90|90a-real", "8.0 9.0+PTX 9.0a", ""),  # without a GPU: PTX serves later ones
}
CHOOSE = """
set(PAGEDTREE_NVCC NOTFOUND)
set(ENV{{PAGEDTREE_CUDA}} 0)
{cuda}
pagedtree_choose_architectures(found)
string(REPLACE ";" "|" found "${{found}}")
message(STATUS "built <${{found}}> of <${{PAGEDTREE_CUDA_ARCH_LIST}}>")
"""


@pytest.mark.parametrize("listed", ARCHITECTURE_LISTS)
def test_architectures_below_8_0_are_left_out_by_name(tmp_path, listed):
    built, kept, said = ARCHITECTURE_LISTS[listed]
    make_program(tmp_path, "nvidia-smi", "exit 1")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    right, told = configured(tmp_path, CHOOSE, TORCH_CUDA_ARCH_LIST=listed, PATH=path)
    assert right == bool(built) and said in told and ("Warning" in told) == bool(built and said)
    assert f"built <{built}> of <{kept}>" in told if right else "need compute capability 8.0 or later" in told
    assert right or "PAGEDTREE_CUDA=0" in told


# --- source archive and wheel


def make_sdist(folder: Path) -> Path:
    # A new egg_info: the checkout's may be stale.
    run(sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def test_sdist_holds_build_sources(tmp_path):
    archive = make_sdist(tmp_path)
    with tarfile.open(archive) as tar:
        names = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
    sources = {path.relative_to(ROOT).as_posix() for path in CSRC.rglob("*") if path.is_file()}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "python").rglob("*.py*") if path.suffix != ".pyc"}
    assert names >= sources | modules
    assert names >= {
        "CMakeLists.txt",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "setup.py",
        "python/pagedtree/py.typed",
    }
    assert names >= {"Makefile", "requirements-dev.txt", "tests/repo/test_packaging.py", "examples/cpp/CMakeLists.txt"}
    assert names >= {"requirements.txt", "examples/prompts/held_out.json", "SECURITY.md", "CITATION.cff"}
    assert [name for name in names if name.endswith(check_wheel.BINARY)] == []
    assert archive.stat().st_size < 2_000_000


def test_python_files_of_the_package_are_all_listed():
    """The wheel would lack folders missing in pyproject.toml."""
    (line,) = re.findall(r"^packages = \[.*?\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    listed = {name.replace(".", "/") for name in re.findall(r'"(pagedtree[\w.]*)"', line)}
    found = {path.parent.relative_to(ROOT / "python").as_posix() for path in PACKAGE.rglob("*.py")}
    assert found == listed


def test_the_version_is_the_same_wherever_it_stands():
    changelog, citation = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    version, date = re.findall(r"^## \[(\d.*)\] - (.*)$", changelog, re.MULTILINE)[0]
    assert pagedtree.__version__ == version
    assert f"\nversion: {version}\ndate-released: {date}\n" in citation
    assert all(version in (ROOT / name).read_text() for name in ("README.md", "SECURITY.md"))


@pytest.mark.slow
def test_wheel_from_sdist_installs_into_an_empty_environment(tmp_path):
    """The environment has only torch and numpy."""
    with tarfile.open(make_sdist(tmp_path)) as tar:
        tar.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if (path / "pyproject.toml").exists())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", tmp_path / "dist", source, PAGEDTREE_SIMT="0")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    tag = sysconfig.get_config_var("py_version_nodot")
    assert wheel.name.endswith(f"-cp{tag}-cp{tag}-linux_{platform.machine()}.whl")
    assert check_wheel.faults(wheel) == []
    with zipfile.ZipFile(wheel) as archive:
        assert ("pagedtree/lib/libpagedtree_cuda.so" in archive.namelist()) == _C.build_info()["cuda"]

    environment = tmp_path / "empty"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    # Borrows torch and numpy; .pth paths bring no editable installs.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # The checkout's egg-info would count as installed.
    run(*pip, "--python", python, "install", "--no-index", wheel, PYTHONPATH="")
    found = json.loads(run(python, "-c", SMALL_PROGRAM, cwd=tmp_path, PYTHONPATH=""))
    assert Path(found["file"]).is_relative_to(environment)
    assert found["version"] == pagedtree.__version__ and found["backends"] == ["cpu"]
    assert "ops, real, step" in run(python, "-m", "pagedtree", "bench", "--help", cwd=tmp_path, PYTHONPATH="")
    assert "rows in" in run(python, "-m", "pagedtree", "check", "--only", "page 7", cwd=tmp_path, PYTHONPATH="")


def python_of_version(version: str) -> str | None:
    """Finds a Python on the PATH or in pyenv, whose shims may be dead."""
    for path in [f"python{version}", *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))]:
        if shutil.which(path) and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_python_versions(version, tmp_path):
    """`_C` compiles, links and answers, and every module compiles."""
    interpreter = python_of_version(version)
    if interpreter is None:
        pytest.skip(f"no Python {version} here")
    headers = run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('include'))").strip()
    pybind11 = run(sys.executable, "-m", "pybind11", "--includes").split()[-1]
    names = ("VERSION", "ISAS", "CUDA_ARCH_LIST", "COMPILER", "BUILD_TYPE", "TORCH_TARGET")
    defines = [f'-DPAGEDTREE_{name}="{version}"' for name in names]
    includes = [f"-I{headers}", pybind11, f"-I{CSRC}"]
    library = PACKAGE / "lib"
    run(
        *("c++", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", *defines, *includes),
        *(*sorted((CSRC / "bindings").glob("*.cpp")), "-o", tmp_path / "_C.so"),
        *(f"-L{library}", "-lpagedtree_cpu", f"-Wl,-rpath,{library}"),
    )
    program = "import _C; assert _C.available_isas()[0] == 'portable'; print(_C.build_info()['version'])"
    assert run(interpreter, "-c", program, cwd=tmp_path, PYTHONPATH="").strip() == version
    for path in sorted((ROOT / "python").rglob("*.py")):
        run(interpreter, "-c", "import sys; compile(open(sys.argv[1]).read(), sys.argv[1], 'exec')", path)
