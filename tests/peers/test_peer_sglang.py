"""SGLang's tests of its speculation kernels for CPUs, on the adapter's functions of the same names.

The source is SGLang's repository; of `test_spec_kernels.py` those tests run that call no other kernel.
"""

from __future__ import annotations

import ast
import re
import unittest

import torch
from peer_source import PeerSource, names_of

from pagedtree.integrations import sglang

SOURCE = PeerSource("sglang")
PATH = "test/registered/cpu/test_spec_kernels.py"
OURS = ("build_tree_kernel_efficient_cpu", "verify_tree_greedy_cpu")
library = torch.library.Library("sgl_kernel", "FRAGMENT")
TREE = "Tensor a, Tensor b, Tensor c, Tensor(a!) d, Tensor(b!) e, Tensor(c!) f, Tensor(d!) g, Tensor(e!) h"
library.define(f"build_tree_kernel_efficient_cpu({TREE}, int topk, int depth, int n, int mode) -> ()")
OUTPUTS = "Tensor(a!) a, Tensor(b!) b, Tensor(c!) c"
library.define(f"verify_tree_greedy_cpu({OUTPUTS}, Tensor d, Tensor e, Tensor f, Tensor g, Tensor h) -> ()")
for name in OURS:
    library.impl(name, getattr(sglang, name), "CPU")

TEXT = (SOURCE.folder / PATH).read_text(encoding="utf-8")
KNOWN = {
    "torch": torch, "F": torch.nn.functional, "unittest": unittest, "CustomTestCase": unittest.TestCase,
    "TreeMaskMode": sglang.TreeMaskMode,
}  # fmt: skip


def calls(node: ast.AST) -> set[str]:
    return set(re.findall(r"torch\.ops\.sgl_kernel\.(\w+)", ast.unparse(node)))


definitions = [node for node in ast.parse(TEXT).body if names_of(node)]
functions = {node.name: node for node in definitions if isinstance(node, ast.FunctionDef)}
usable = [name for name, node in functions.items() if calls(node) <= {*OURS}]
classes = [
    node.name
    for node in definitions
    if isinstance(node, ast.ClassDef)
    and calls(node) <= {*OURS}
    and (calls(node) or "_run_build_tree_kernel" in ast.unparse(node))
    and not {name for name in functions if name not in usable and name in ast.unparse(node)}
]
assert classes, f"{PATH} has no test of {' or '.join(OURS)}"
globals().update({name: SOURCE.take(PATH, *usable, *classes, known=KNOWN)[name] for name in classes})
