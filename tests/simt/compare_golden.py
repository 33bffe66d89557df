"""Compares two outputs of golden.cu, the GPU's and simt's: `compare_golden.py GPU SIMT` writes the differences as JSON.

Moves of bits must agree exactly. A sum of an mma may be rounded or cut anywhere on the way: its error is measured in
units of 2^-24 of the largest term, 4. ex2 is an approximation: measured in units in the last place of a normal result.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

LIMITS = {"mma_m16n8k16<bf16>": 16.0, "mma_m16n8k16<fp16>": 16.0, "ex2": 2.0}


def read(text: str) -> dict[str, np.ndarray]:
    words: dict[str, list[int]] = {}
    for line in text.splitlines():
        name, _, values = line.partition(":")
        if values.strip() == "absent":
            continue
        words.setdefault(name, []).extend(int(word, 16) for word in values.split())
    return {name: np.array(values, dtype=np.uint32) for name, values in words.items()}


def difference(name: str, ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    if name not in LIMITS:
        return float((ours != theirs).sum())
    a, b = (words.view(np.float32).astype(np.float64) for words in (ours, theirs))
    with np.errstate(over="ignore", invalid="ignore"):
        unit = (
            4 * 2.0**-24 if name.startswith("mma") else np.spacing(np.maximum(np.abs(b), 2.0**-126).astype(np.float32))
        )
        error = np.where(a == b, 0.0, np.abs(a - b) / unit)
    return float(np.nan_to_num(error, nan=np.inf).max())


def compare(gpu: str, simt: str) -> dict[str, dict[str, float | bool]]:
    first, second = read(gpu), read(simt)
    absent = {line.partition(":")[0] for line in gpu.splitlines() if line.endswith(": absent")}
    result = {}
    for name in sorted((first.keys() | second.keys()) - absent):
        empty = np.zeros(0, dtype=np.uint32)
        found = difference(name, first.get(name, empty), second.get(name, empty))
        result[name] = {"difference": found, "limit": LIMITS.get(name, 0.0), "ok": found <= LIMITS.get(name, 0.0)}
    return result


if __name__ == "__main__":
    found = compare(*(Path(path).read_text() for path in sys.argv[1:3]))
    print(json.dumps(found, indent=1))
    sys.exit(not found or not all(entry["ok"] for entry in found.values()))
