"""Checks a wheel's files and its libraries' needs: python tests/check_wheel.py dist/*.whl"""

from __future__ import annotations

import re
import runpy
import sys
import tempfile
import zipfile
from pathlib import Path

# An unbuilt checkout cannot import the package.
PACKAGE = Path(__file__).resolve().parents[1] / "python" / "pagedtree"
symbol_versions = runpy.run_path(str(PACKAGE / "tools" / "symbol_versions.py"))["symbol_versions"]

# RHEL 9: glibc 2.34, libstdc++ of GCC 11, libgcc of GCC 3.4. Debian 12 and Ubuntu 22.04 are newer.
LIMITS = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (3, 4)}
REQUIRED = {
    "pagedtree/benchmarks/bench_ops.py",
    "pagedtree/benchmarks/flashinfer_kernel.cu",
    "pagedtree/include/pagedtree/core/backend.h",
    "pagedtree/lib/cmake/pagedtree/pagedtree-config.cmake",
    "pagedtree/lib/libpagedtree_cpu.so",
    "pagedtree/lib/libpagedtree_torch.so",
    "pagedtree/py.typed",
    "pagedtree_plugins.py",
}
OPTIONAL = {"pagedtree/lib/libpagedtree_cuda.so"}
BINARY = (".so", ".o", ".a", ".safetensors", ".bin", ".pt", ".pyc")
MOST_BYTES = 20_000_000


def too_new(library: Path) -> list[str]:
    """Lists symbol versions that the oldest supported system lacks."""
    return [
        f"{library.name} needs {name}_{version}, more than {'.'.join(map(str, LIMITS[name]))}"
        for name, version in symbol_versions(library).items()
        if tuple(map(int, version.split("."))) > LIMITS[name]
    ]


def faults(wheel: Path) -> list[str]:
    """Lists faults, a sentence each."""
    name = re.fullmatch(r"pagedtree-([^-]+)-cp(\d+)-cp\2-linux_(\w+)\.whl", wheel.name)
    if name is None:
        return [f"the name {wheel.name} is not pagedtree-VERSION-cpNN-cpNN-linux_MACHINE.whl"]
    version, python, machine = name.groups()
    required = {*REQUIRED, f"pagedtree/_C.cpython-{python}-{machine}-linux-gnu.so"}
    found = []
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = set(archive.namelist())
        found += [f"{path} is missing" for path in sorted(required - names)]
        binary = {path for path in names if path.endswith(BINARY)}
        found += [f"{path} does not belong there" for path in sorted(binary - required - OPTIONAL)]
        others = {path.partition("/")[0] for path in names} - {"pagedtree", "pagedtree_plugins.py"}
        others.discard(f"pagedtree-{version}.dist-info")
        found += [f"{path} does not belong there" for path in sorted(others)]
        if not any(path.endswith(".dist-info/licenses/LICENSE") for path in names):
            found.append("the license is missing")
        for path in sorted(path for path in binary if path.endswith(".so")):
            found += too_new(Path(archive.extract(path, folder)))
    if wheel.stat().st_size > MOST_BYTES:
        found.append(f"{wheel.stat().st_size} bytes, more than {MOST_BYTES}")
    return found


def main() -> int:
    wheels = [Path(argument) for argument in sys.argv[1:]]
    if not wheels:
        print(__doc__, file=sys.stderr)
        return 2
    failed = False
    for wheel in wheels:
        wrong = faults(wheel)
        failed = failed or bool(wrong)
        print(f"{wheel.name}: {'; '.join(wrong) or f'{wheel.stat().st_size} bytes, as it should be'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
