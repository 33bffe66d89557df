"""Commands of `python -m pagedtree`; `info`."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pagedtree
from pagedtree import _C
from pagedtree.testing import backends
from pagedtree.tools import bench, cli, info


def test_info_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == found["build"]["version"] == pagedtree.__version__
    assert found["torch"] == torch.__version__
    assert found["backends"] == backends()
    assert found["cpu"]["isas"][0] == "portable"
    assert set(found["cpu"]["isas"]) <= set(found["build"]["cpu_isas"])
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert found["build"]["torch_target"] == "2.10"
    names = {Path(path).name.split(".")[0] for path in found["libraries"]}
    assert names >= {"_C", "libpagedtree_cpu", "libpagedtree_torch"}
    assert all("GLIBC" in library["needs"] for library in found["libraries"].values())


def test_info_as_text_says_the_same(capsys):
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"version: {pagedtree.__version__}" in lines
    assert f"backends: {' '.join(backends())}" in lines
    assert f"  isas: {' '.join(_C.available_isas())}" in lines


def test_the_best_isa_is_chosen_unless_one_is_forced(monkeypatch):
    monkeypatch.delenv("PAGEDTREE_CPU_ISA", raising=False)
    assert _C.active_isa() == _C.available_isas()[-1]
    for isa in _C.available_isas():
        monkeypatch.setenv("PAGEDTREE_CPU_ISA", isa)
        assert _C.active_isa() == isa
    monkeypatch.setenv("PAGEDTREE_CPU_ISA", "sse9")
    with pytest.raises(RuntimeError, match=r"PAGEDTREE_CPU_ISA: expected one of portable.* got sse9"):
        _C.active_isa()
    assert "got sse9" in info.collect()["cpu"]["isa"]


def test_info_tells_the_engine(monkeypatch):
    monkeypatch.setattr(info, "_cuda_kernels", dict)  # takes half a second
    monkeypatch.delenv("PAGEDTREE_ENGINE", raising=False)
    if "cuda" not in backends():
        assert info.collect()["cuda_engine"] == "mma.sync (auto, without a GPU)"
    monkeypatch.setenv("PAGEDTREE_ENGINE", "wgmma")
    assert info.collect()["cuda_engine"] == "wgmma (PAGEDTREE_ENGINE=wgmma)"
    monkeypatch.setenv("PAGEDTREE_ENGINE", "tcgen05")
    assert info.collect()["cuda_engine"] == "error: PAGEDTREE_ENGINE: expected auto, mma.sync or wgmma, got tcgen05"


def test_the_native_modules_share_one_backend_library():
    loaded = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libpagedtree_cpu" in line
    }
    assert len(loaded) == 1


def test_symbol_versions_takes_the_newest_by_number(tmp_path):
    library = tmp_path / "lib.so"
    library.write_bytes(
        b"\0GLIBC_2.9\0GLIBC_2.14\0GLIBCXX_3.4.9\0GLIBCXX_3.4.21\0xGLIBC_9.9\0GLIBC_PRIVATE\0GCC_3.0\0GCC_12.0.0\0"
    )
    assert info.symbol_versions(library) == {"GCC": "12.0.0", "GLIBC": "2.14", "GLIBCXX": "3.4.21"}


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["no-such-command"], 2), (["--help"], 0)])
def test_usage(arguments, code, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    said = capsys.readouterr()
    assert exit_.value.code == code and "usage: python -m pagedtree" in said.out + said.err
    assert code or all(command in said.out for command in cli.COMMANDS)


def test_a_missing_extra_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "needs_something.py").write_text("import something_absent.inner\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "generate", ("needs_something", "transformers", ""))
    assert cli.main(["generate", "--model", "x"]) == 2
    assert 'needs something_absent: pip install "pagedtree[transformers]"' in capsys.readouterr().err


def test_an_early_interruption_is_quiet(tmp_path):
    """A stand-in saves torch's import of a second."""
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(pagedtree.__file__).parents[1])])
    command = [sys.executable, "-m", "pagedtree", "info"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_command_of_another_installation_is_named(monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "bench", ("pagedtree.absent", "transformers", ""))
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err == "python -m pagedtree bench: not part of this installation\n"


def test_bench_runs_a_script_with_its_arguments(tmp_path, monkeypatch, capfd):
    script = tmp_path / "bench_nothing.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    monkeypatch.setattr(bench, "scripts", lambda: {"nothing": script, "ops": script})
    for arguments in (["nothing", "--shapes", "x"], ["--shapes", "x"]):
        assert cli.main(["bench", *arguments]) == 3
        assert "['--shapes', 'x']" in capfd.readouterr().out
    assert cli.main(["bench"]) == 3
    with pytest.raises(SystemExit):
        cli.main(["bench", "something"])


@pytest.mark.parametrize("with_folder", [False, True])
def test_benchmarks_that_need_the_checkout_say_so_where_there_is_none(with_folder, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "pagedtree" / "benchmarks"  # as in a wheel
    folder.mkdir(parents=True)
    for path in bench.scripts().values():
        (folder / path.name).write_text("raise SystemExit(3)")
    installed = {name: folder / path.name for name, path in bench.scripts().items()}
    monkeypatch.setattr(bench, "scripts", lambda: installed)
    if with_folder:  # lacks the models
        target = folder.parent / "examples" / "checkpoints" / "target"
        target.mkdir(parents=True)
        (target / "config.json").write_text("{}")
    for name in installed:
        status = cli.main(["bench", name, "--json", "x"])
        told = capfd.readouterr().err
        if name in bench.OF_CHECKOUT:
            assert status == 2
            assert f"python -m pagedtree bench {name} needs the models of examples/" in told and "checkpoints" in told
            assert f"Get a checkout of pagedtree's repository and run in it: python benchmarks/bench_{name}.py" in told
        else:
            assert status == 3 and not told


def test_the_benchmarks_that_need_the_checkout_are_listed():
    assert bench.DEFAULT in bench.scripts()
    for name, path in bench.scripts().items():
        reads = "examples" in path.read_text().partition('"""\n\n')[2]
        assert reads == (name in bench.OF_CHECKOUT), name
        assert not reads or bench.missing(path) is None  # from this checkout


def test_module_runs_as_a_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pagedtree", "--version"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("pagedtree", run_name="__main__")
    assert exit_.value.code == 0 and capsys.readouterr().out == f"pagedtree {pagedtree.__version__}\n"
