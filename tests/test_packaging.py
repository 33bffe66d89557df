"""What is built and shipped: the native libraries, the source archive, the wheel, the CMake package."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import pagedtree
from pagedtree import _C, info

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
PACKAGE = Path(pagedtree.__file__).parent
OBJECTS = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}" / "CMakeFiles"
NEVER_SHIPPED = (".so", ".o", ".safetensors", ".bin", ".pt", ".pyc")
SMALL_PROGRAM = """
import json, sys, pagedtree, torch
from pagedtree import info
trees = pagedtree.TreeBatch.from_trees([pagedtree.DraftTree.full([2, 2])])
assert trees.valid.all() and trees.depths.tolist() == [0, 1, 1, 2, 2, 2, 2]
print(json.dumps({"file": pagedtree.__file__, **info.collect()}))
"""


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    """The command's output; its failure shows both streams."""
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
    """Of `nm -C` on an instruction set's object: what the linker may merge with another object's copy or clash with."""
    found = []
    for line in listing.splitlines():
        match = re.match(r"[0-9a-f]* +([TWVuBDRi]) (.*)", line)
        if match and f"pagedtree::cpu::{isa}::" not in match[2] and not match[2].startswith("DW.ref."):
            found.append(match[2])
    return found


@pytest.mark.parametrize("isa", list(_C.build_info()["cpu_isas"]))
def test_isa_objects_share_no_code(isa):
    """A function that the linker shares could be the AVX-512 copy on a machine without it (csrc/cpu/isa.h)."""
    objects = sorted((OBJECTS / f"pagedtree_cpu_{isa}.dir").rglob("*.o"))
    if not objects:
        pytest.skip("not built in this checkout")
    for path in objects:
        listing = run("nm", "-C", "--defined-only", path)
        assert f"pagedtree::cpu::{isa}::" in listing
        assert shared_symbols(isa, listing) == [], path.name


def test_a_shared_symbol_is_found():
    listing = "\n".join(
        [
            "0000000000000000 T pagedtree::cpu::avx2::kernels()",
            "0000000000000000 t pagedtree::(anonymous namespace)::local()",
            "0000000000000000 W void std::sort<int*>(int*, int*)",
            "0000000000000010 W pagedtree::node_range(int const*, long, long)",
            "0000000000000000 V DW.ref.__gxx_personality_v0",
        ]
    )
    assert shared_symbols("avx2", listing) == [
        "void std::sort<int*>(int*, int*)",
        "pagedtree::node_range(int const*, long, long)",
    ]


def test_only_the_backend_table_is_exported():
    listing = run("nm", "-DC", "--defined-only", PACKAGE / "lib" / "libpagedtree_cpu.so")
    exported = {line.split(maxsplit=2)[2] for line in listing.splitlines() if "pagedtree" in line}
    assert exported == {
        "pagedtree::cpu::backend()",
        "pagedtree::cpu::isa_kernels()",
        "pagedtree::cpu::available_isas()",
    }


@pytest.mark.parametrize("name", ["cuda", "simt"])
def test_a_loaded_backend_exports_its_tables_only(name):
    """Both hold the same kernels: what one exported, the other could be linked to."""
    library = PACKAGE / "lib" / f"libpagedtree_{name}.so"
    if not library.exists():
        pytest.skip(f"built without {name}")
    listing = run("nm", "-DC", "--defined-only", library)
    exported = {line.split(maxsplit=2)[2] for line in listing.splitlines()}
    assert {symbol for symbol in exported if "pagedtree" in symbol} == {
        f"pagedtree::{name}::backend()",
        "pagedtree_backend",
        "pagedtree_instructions",
        *(["pagedtree_simt_set_executor"] if name == "simt" else []),
    }
    assert not any(symbol.startswith(("cuda", "__cuda")) for symbol in exported)


def test_symbol_versions_stay_in_reach():
    """What the libraries ask of the system is what Debian 12's GCC 12 asks at most: a wheel made there runs on glibc
    2.34 and libstdc++ of GCC 12 (manylinux_2_34 and, but for libstdc++, Ubuntu 22.04 and RHEL 9)."""
    limits = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13)}
    for path in [*PACKAGE.glob("lib/*.so"), *PACKAGE.glob("_C*.so")]:
        for name, version in info.symbol_versions(path).items():
            assert tuple(map(int, version.split("."))) <= limits[name], path.name


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


def test_the_cpp_example_runs_against_the_cmake_package(tmp_path):
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("no CMake or C++ compiler")
    package = run(sys.executable, "-m", "pagedtree", "info", "--cmake-dir").strip()
    run("cmake", "-S", ROOT / "examples" / "cpp", "-B", tmp_path, f"-Dpagedtree_DIR={package}")
    run("cmake", "--build", tmp_path)
    lines = run(tmp_path / "tree_step").splitlines()
    assert lines[0] == "backend cpu" and len(lines) == 10
    assert "  node 3, parent  1, depth 2 saw 111111101" in lines


# --- source archive and wheel


def make_sdist(folder: Path) -> Path:
    # The list of files is made anew: an egg-info in the checkout may name files of an older state.
    run(sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def test_sdist_holds_what_the_build_needs(tmp_path):
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
    assert names >= {"Makefile", "requirements-dev.txt", "tests/test_packaging.py", "examples/cpp/CMakeLists.txt"}
    assert [name for name in names if name.endswith(NEVER_SHIPPED)] == []
    assert archive.stat().st_size < 2_000_000


def test_python_files_of_the_package_are_all_listed():
    """pyproject.toml names the packages; a new folder must be added there, or the wheel lacks it."""
    listed = {name.replace(".", "/") for name in re.findall(r'"(pagedtree[\w.]*)"', packages_line())}
    found = {path.parent.relative_to(ROOT / "python").as_posix() for path in (ROOT / "python").rglob("*.py")}
    assert found == listed


def packages_line() -> str:
    (line,) = re.findall(r"^packages = \[.*?\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    return line


@pytest.mark.slow
def test_wheel_from_sdist_installs_into_an_empty_environment(tmp_path):
    """sdist -> wheel -> an environment that has torch and numpy only."""
    with tarfile.open(make_sdist(tmp_path)) as tar:
        tar.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if (path / "pyproject.toml").exists())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", tmp_path / "dist", source, PAGEDTREE_SIMT="0")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    tag = sysconfig.get_config_var("py_version_nodot")
    assert wheel.name.endswith(f"-cp{tag}-cp{tag}-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} <= {"pagedtree", f"pagedtree-{pagedtree.__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "pagedtree/include/pagedtree/core/backend.h" in names
    assert "pagedtree/lib/cmake/pagedtree/pagedtree-config.cmake" in names
    assert "pagedtree/benchmarks/bench_ops.py" in names and "pagedtree/benchmarks/flashinfer_kernel.cu" in names
    libraries = {name for name in names if name.endswith(NEVER_SHIPPED)}
    extension = f"pagedtree/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    native = {f"pagedtree/lib/libpagedtree_{name}.so" for name in ("cpu", "torch")}
    cuda = "pagedtree/lib/libpagedtree_cuda.so"
    assert libraries - {cuda} == {extension, *native}
    assert (cuda in libraries) == _C.build_info()["cuda"]
    assert wheel.stat().st_size < 20_000_000

    environment = tmp_path / "empty"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    # torch and numpy are borrowed; a path in a .pth file does not bring that folder's own editable installs along.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(*pip, "--python", python, "install", "--no-index", wheel)
    found = json.loads(run(python, "-c", SMALL_PROGRAM, cwd=tmp_path, PYTHONPATH=""))
    assert Path(found["file"]).is_relative_to(environment)
    assert found["version"] == pagedtree.__version__ and found["backends"] == ["cpu"]
    assert "rules" in run(python, "-m", "pagedtree", "bench", "--help", cwd=tmp_path, PYTHONPATH="")
    assert "rows in" in run(python, "-m", "pagedtree", "check", "--only", "page 7", cwd=tmp_path, PYTHONPATH="")


def python_of_version(version: str) -> str | None:
    """A Python of this version: on the PATH, or one of pyenv's (whose names on the PATH may lead nowhere)."""
    for path in [f"python{version}", *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))]:
        if shutil.which(path) and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_python_versions(version, tmp_path):
    """`_C` compiles, links and answers under each supported Python, and every module compiles there."""
    candidates = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")]
    works = (
        path for path in candidates if path and not subprocess.run([path, "-c", ""], capture_output=True).returncode
    )
    interpreter = next(works, None)
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
