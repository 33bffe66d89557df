"""Drives CMake; everything else is in pyproject.toml."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def generator() -> list[str]:
    # Named at each configure: an isolated build's ninja is gone when the next one reuses the tree.
    path = shutil.which("ninja")
    return ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={path}"] if path else []


class BuildPython(build_py):
    """Takes benchmarks/ along, for `python -m pagedtree bench`; a checkout runs its own."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "pagedtree" / "benchmarks"
            target.mkdir(parents=True, exist_ok=True)
            for pattern in ("*.py", "*.cu"):
                for source in (ROOT / "benchmarks").glob(pattern):
                    shutil.copy(source, target)


class CMakeBuild(build_ext):
    """Builds all native libraries in one CMake tree and installs them into the package."""

    def run(self) -> None:
        if self.inplace:
            package, tree = ROOT / "python" / "pagedtree", ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        else:
            package, tree = Path(self.build_lib).resolve() / "pagedtree", Path(self.build_temp).resolve()
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(tree), *generator(),
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]  # fmt: skip
        # Unset: as the tree was configured before.
        for option in ("PAGEDTREE_EMULATED_ISA", "PAGEDTREE_SIMT"):
            if os.environ.get(option):
                configure.append(f"-D{option}={os.environ[option]}")
        subprocess.run(configure, check=True)
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        subprocess.run(["cmake", "--build", str(tree), "--parallel", jobs], check=True)
        for library in ("libpagedtree_cuda.so", "libpagedtree_simt.so"):  # of a build that had them
            (package / "lib" / library).unlink(missing_ok=True)
        subprocess.run(["cmake", "--install", str(tree), "--prefix", str(package)], check=True)


setup(
    ext_modules=[Extension("pagedtree._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildPython},
)
