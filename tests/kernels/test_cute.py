"""mma, ldmatrix and wgmma equal NVIDIA's CuTe in tests/cute/vectors.npz.xz (`make witness`)."""

from __future__ import annotations

import pytest
import torch
from support.doubles import cute_vectors

from pagedtree.check.case import Place
from pagedtree.check.cases import instructions, instructions_sm90
from pagedtree.testing import backends

VECTORS = cute_vectors()
NAMES = sorted(name.removesuffix(".in") for name in VECTORS.files if name.endswith(".in"))
PLACE = Place(torch.device("cpu"), "simt")
KINDS = {"ss": "wgmma_ss/{0}/N {1}", "rsK": "wgmma_rs/K-major/{0}/N {1}", "rsN": "wgmma_rs/N-major/{0}/N {1}"}
pytestmark = pytest.mark.skipif("simt" not in backends(), reason="built without simt")


def differing(name: str) -> int:
    """Counts result words that differ from CuTe's."""
    words, expected = VECTORS[f"{name}.in"], VECTORS[f"{name}.out"]
    if name.startswith("wgmma"):
        _, kind, dtype, columns = name.split("_")
        instruction, width = KINDS[kind].format(dtype, columns), int(columns) // 2
        shape, table = (instructions_sm90.THREADS, -1), instructions_sm90.TABLE
    else:
        instruction = "/".join(name.rsplit("_", 1)) if name.startswith("mma") else name
        shape, table, width = (64, -1), instructions.TABLE, 4
    out, _ = instructions.run_instruction(instruction, words.reshape(shape), PLACE, table)
    return int((out[..., :width] != expected.reshape(shape[0], -1)[:, :width]).sum())


def test_the_vectors_are_all_there() -> None:
    assert len(NAMES) == 3 + 2 + 3 * 6
    assert [str(package).partition("==")[0] for package in VECTORS["origin"]] == ["nvidia-cutlass", "nvidia-cuda-cccl"]


@pytest.mark.parametrize("name", NAMES)
def test_simt_agrees_with_cute(name: str) -> None:
    assert differing(name) == 0
