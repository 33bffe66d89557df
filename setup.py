"""Drives CMake; everything else is in pyproject.toml."""

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def find_tool(name: str, folder: str) -> str | None:
    """The program of the Python package of that name (its constant `folder` says where), else the one on the PATH.

    The environment's own comes first: its bin folder is on the PATH only where the environment is activated.
    """
    if importlib.util.find_spec(name) is not None:
        path = Path(getattr(importlib.import_module(name), folder, "")) / name
        if path.is_file():
            return str(path)
    return shutil.which(name)


def find_cmake() -> str:
    cmake = find_tool("cmake", "CMAKE_BIN_DIR")
    if cmake is None:
        raise SystemExit(
            f"pagedtree is built by CMake, which is neither a package of {sys.executable} nor on the PATH: "
            f"{sys.executable} -m pip install cmake ninja"
        )
    return cmake


def generator() -> list[str]:
    # Named at each configure: an isolated build's ninja is gone when the next one reuses the tree.
    path = find_tool("ninja", "BIN_DIR")
    return ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={path}"] if path else []


def announce(ninja: str, tree: Path, jobs: int) -> None:
    """Says what the build is about to compile, if that takes long enough to wonder."""
    plan = subprocess.run([ninja, "-C", str(tree), "-n"], stdout=subprocess.PIPE, text=True, check=True).stdout
    sources = re.findall(r"Building \w+ object .*", plan)
    kernels = sum(".cu." in source for source in sources)
    isas = len({match[1] for source in sources if (match := re.search(r"pagedtree_cpu_(\w+)\.dir", source))})
    # What these took on cores of 2023, in seconds.
    minutes = ((len(sources) - kernels) * 2 + kernels * 20) / jobs / 60
    if minutes < 0.25:
        return
    parts = [f"{len(sources)} files"]
    if isas:
        parts.append(f"for {isas} CPU instruction set" + "s" * (isas > 1))
    if kernels:
        parts.append(f"with {kernels} of CUDA kernels among them")
    time = "about a minute" if minutes < 1.5 else f"about {minutes:.0f} minutes"
    print(f"== compiling {' '.join(parts)}, {jobs} at once: {time}", flush=True)


class BuildPython(build_py):
    """Takes along what `python -m pagedtree bench` runs; a checkout runs its own."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "pagedtree" / "benchmarks"
            target.mkdir(parents=True, exist_ok=True)
            for pattern in ("benchmarks/*.py", "benchmarks/*.cu"):
                for source in ROOT.glob(pattern):
                    shutil.copy(source, target)


class CMakeBuild(build_ext):
    """Builds all native libraries in a CMake tree, which the wheels of all Pythons share, and installs them."""

    def run(self) -> None:
        if self.inplace:
            package, tree = ROOT / "python" / "pagedtree", ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        else:
            package, tree = Path(self.build_lib).resolve() / "pagedtree", ROOT / "build" / "wheels" / "cmake"
        cmake = find_cmake()
        configure = [
            cmake, "-S", str(ROOT), "-B", str(tree), *generator(),
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            "-U*Python_*", f"-DPython_EXECUTABLE={sys.executable}",  # FindPython keeps the Python that it found before
            "-DPAGEDTREE_PYTHON=ON",
            f"-DPAGEDTREE_SMALL={'OFF' if self.inplace else 'ON'}",
        ]  # fmt: skip
        # Unset: as the tree was configured before.
        for option in ("PAGEDTREE_EMULATED_ISA", "PAGEDTREE_SIMT"):
            if os.environ.get(option):
                configure.append(f"-D{option}={os.environ[option]}")
        subprocess.run(configure, check=True)
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        if ninja := find_tool("ninja", "BIN_DIR"):
            announce(ninja, tree, jobs)
        subprocess.run([cmake, "--build", str(tree), "--parallel", str(jobs)], check=True)
        for library in ("libpagedtree_cuda.so", "libpagedtree_simt.so"):  # of a build that had them
            (package / "lib" / library).unlink(missing_ok=True)
        subprocess.run([cmake, "--install", str(tree), "--prefix", str(package)], check=True)


setup(
    ext_modules=[Extension("pagedtree._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildPython},
)
