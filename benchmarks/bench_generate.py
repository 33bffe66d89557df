"""The tables of examples/toy.py, kept with the facts of the machine.

python benchmarks/bench_generate.py [--json PATH] [arguments of examples/toy.py]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import machine_facts, save

TOY = Path(__file__).resolve().parents[1] / "examples" / "toy.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write; default benchmarks/results/demo.json")
    args, toy_arguments = parser.parse_known_args()
    facts = machine_facts()
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.json"
        command = [sys.executable, str(TOY), "--json", str(table), *toy_arguments]
        status = subprocess.run(command).returncode
        if status == 0:
            save("demo", json.loads(table.read_text()), facts | {"arguments": toy_arguments}, args.json)
    return status


if __name__ == "__main__":
    sys.exit(main())
