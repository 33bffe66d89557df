"""A step of a layer with a recurrent state: `tree_delta_rule` on draft trees, then `advance_state` along what was
accepted. Beside it what users would call instead: a state for each node, and transformers' causal forms on a chain of
as many nodes.

Sizes are Qwen3-Next's (16 key heads, 32 value heads of 128 columns, one decay a head) and Kimi Linear's rule (one decay
for each key channel). Three drafts are accepted where the tree is deep enough.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from attention_peers import L3_BYTES
from named_trees import nodes_of, tree_named
from suite import Mismatch, Op, Ours, Shape, always
from torch import Tensor

from pagedtree import DraftTree, advance_state, build_trees, tree_delta_rule

ACCEPTED = 3
# Rule -> transformers' module, its chunked form and its loop over tokens.
RULES = {
    "gated delta": ("qwen3_next", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    "kimi delta": ("kimi_linear", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
}


def state_bytes(shape: Shape) -> int:
    """Counts the bytes of a batch's states: fp32, one matrix for each value head."""
    return 4 * shape["batch"] * shape["value_heads"] * shape["head_dim"] ** 2


@dataclass
class Problem:
    """Equal trees, one for each sequence. Each way to do a step has `copies` states of its own, so that none finds what
    another one has left in a cache."""

    shape: Shape
    device: torch.device

    def __post_init__(self) -> None:
        self.tree = tree_named(self.shape["tree"])
        self.path = longest_path(self.tree)[: ACCEPTED + 1]
        self.draw(self.tree.num_nodes)
        state = self.initial.nbytes
        self.notes = {"state_traffic": {
            "pagedtree": {"read": 2 * state, "written": state},
            StatePerNode.name: {"read": self.nodes * state, "written": self.nodes * state},
        }}  # fmt: skip

    def draw(self, nodes: int) -> None:
        """A layer's inputs for so many tokens of each sequence, and the states."""
        shape, self.batch = self.shape, self.shape["batch"]
        self.heads, self.head_dim = shape["value_heads"], shape["head_dim"]
        self.nodes, rows = nodes, self.batch * nodes
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator, device=self.device)

        dtype = getattr(torch, shape["dtype"])
        unit = (F.normalize(draw(rows, shape["key_heads"], self.head_dim), dim=-1) for _ in range(2))
        self.q, self.k = (x.to(dtype) for x in unit)
        self.v = draw(rows, self.heads, self.head_dim).to(dtype)
        channels = [self.head_dim] if shape["rule"] == "kimi delta" else []
        self.g = -0.1 * draw(rows, self.heads, *channels).abs()
        self.beta = draw(rows, self.heads).sigmoid()
        self.initial = draw(self.batch, self.heads, self.head_dim, self.head_dim)
        self.copies = max(1, min(16, -(-2 * L3_BYTES[self.device.type] // self.initial.nbytes)))
        self.states = self.fresh_states()
        self.slots = torch.arange(self.batch, dtype=torch.int32, device=self.device)
        # What no way can avoid: each state read and written once, each token's products with it.
        tokens = (self.q, self.k, self.v, self.v, self.g, self.beta)
        self.bytes = 2 * self.initial.nbytes + sum(x.nbytes for x in tokens)
        self.flops = 4 * self.initial.numel() * nodes

    def fresh_states(self) -> Tensor:
        return self.initial.repeat(self.copies, 1, 1, 1, 1)

    def step(self, tree: DraftTree, path: list[int], states: Tensor) -> Callable[[int], Tensor]:
        """The two ops on trees of this form, of which these nodes are accepted."""
        parents = torch.from_numpy(tree.parents).to(self.device).repeat(self.batch)
        offsets = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * self.nodes
        trees = build_trees(parents, offsets, max_nodes=self.nodes, max_depth=self.nodes - 1)
        accept = torch.tensor([path] * self.batch, dtype=torch.int32, device=self.device)
        accepted = torch.full((self.batch,), len(path) - 1, dtype=torch.int32, device=self.device)

        def run(copy: int) -> Tensor:
            state, rest = states[copy], (self.g, self.beta)
            out = tree_delta_rule(self.q, self.k, self.v, *rest, state, self.slots, trees)
            advance_state(state, self.slots, self.k, self.v, *rest, trees, accept, accepted)
            return out

        return run

    def op(self, copy: int) -> Tensor:
        if not hasattr(self, "ours"):
            self.ours = self.step(self.tree, self.path, self.states)
        return self.ours(copy)

    def by_sequence(self) -> tuple[Tensor, ...]:
        """q, k, v, g and beta as [B, nodes, ...]."""
        return tuple(x.unflatten(0, (self.batch, self.nodes)) for x in (self.q, self.k, self.v, self.g, self.beta))


class Prefill(Problem):
    """A prompt of `tokens` for each sequence, whose states are those behind it."""

    def __post_init__(self) -> None:
        self.draw(self.shape["tokens"])

    def op(self, copy: int) -> Tensor:
        state, rest = self.states[copy], (self.g, self.beta)
        cut = {"cu_seqlens": torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * self.nodes}
        out = tree_delta_rule(self.q, self.k, self.v, *rest, state, self.slots, None, **cut)
        advance_state(state, self.slots, self.k, self.v, *rest, None, **cut)
        return out


def longest_path(tree: DraftTree) -> list[int]:
    path = [int(tree.depths.argmax())]
    while path[0]:
        path.insert(0, int(tree.parents[path[0]]))
    return path


class OnChain:
    """The op on a chain of as many nodes: a tree is to take at most a tenth more."""

    name = "pagedtree on a chain"
    takes_chain = True
    absent = staticmethod(always)

    def __init__(self, problem: Problem) -> None:
        chain = DraftTree.chain(problem.nodes - 1)
        self.states = problem.fresh_states()
        self.run = problem.step(chain, list(range(len(problem.path))), self.states)


class StatePerNode:
    """Torch ops that write the state of each node, as engines do that verify drafts, and keep that of the last accepted
    one."""

    name = "a state per node"
    takes_chain = False
    absent = staticmethod(always)

    def __init__(self, problem: Problem) -> None:
        self.problem, self.states = problem, problem.fresh_states()
        self.behind = problem.initial.new_empty(problem.nodes, *problem.initial.shape)

    def run(self, copy: int) -> Tensor:
        p = self.problem
        q, k, v, g, beta = (x.float() for x in p.by_sequence())
        q, k = (x.repeat_interleave(p.heads // x.shape[2], dim=2) for x in (q * p.head_dim**-0.5, k))
        decay = g.exp().reshape(p.batch, p.nodes, p.heads, -1, 1)
        out = torch.empty_like(v)
        for node, parent in enumerate(p.tree.parents.tolist()):
            before, state = self.states[copy] if parent < 0 else self.behind[parent], self.behind[node]
            torch.mul(before, decay[:, node], out=state)
            u = beta[:, node, :, None] * (v[:, node] - (k[:, node, :, None] @ state)[:, :, 0])
            state.addcmul_(k[:, node, :, :, None], u[:, :, None])
            out[:, node] = (q[:, node, :, None] @ state)[:, :, 0]
        self.states[copy].copy_(self.behind[p.path[-1]])
        return out.to(p.v.dtype)


class Causal:
    """A causal form of transformers on a chain: once for all tokens, and again over those accepted, for the state."""

    takes_chain = True
    form: int  # in RULES

    def __init__(self, problem: Problem) -> None:
        self.problem, self.states = problem, problem.fresh_states()
        module, *forms = RULES[problem.shape["rule"]]
        module = f"transformers.models.{module}.modeling_{module}"
        self.rule = getattr(importlib.import_module(module), forms[self.form])
        q, k, *self.rest = problem.by_sequence()
        # Kimi Linear has as many key heads as value heads; the other rule repeats them itself.
        repeated = problem.heads // k.shape[2] if problem.shape["rule"] == "kimi delta" else 1
        self.q, self.k = (x.repeat_interleave(repeated, dim=2) for x in (q, k))

    @staticmethod
    def absent() -> str | None:
        found = importlib.util.find_spec("transformers")
        for module, *_ in RULES.values():
            if found and not importlib.util.find_spec(f"transformers.models.{module}"):
                return f"this transformers has no {module}"
        return None if found else "transformers is not installed"

    def run(self, copy: int) -> Tensor:
        state, rows = self.states[copy], (self.q, self.k, *self.rest)
        out, _ = self.rule(*rows, initial_state=state, output_final_state=False)
        accepted = (x[:, : len(self.problem.path)] for x in rows)
        _, after = self.rule(*accepted, initial_state=state, output_final_state=True)
        state.copy_(after)
        return out


class RecurrentLoop(Causal):
    name = "transformers' loop on a chain"
    form = 1


class CausalChunk(Causal):
    name = "transformers' chunk on a chain"
    form = 0


class PrefillByLoop(RecurrentLoop):
    """All tokens, once."""

    name = "transformers' loop"
    takes_chain = False

    def run(self, copy: int) -> Tensor:
        state = self.states[copy]
        rows = (self.q, self.k, *self.rest)
        out, after = self.rule(*rows, initial_state=state, output_final_state=True)
        state.copy_(after)
        return out


class PrefillByChunk(PrefillByLoop):
    name = "transformers' chunk"
    form = 0


# The ops -------------------------------------------------------------------------------------------------------------


def memory_of(shape: Shape) -> int:
    """The copies of the states, one for each node, and what transformers' forms make of chunks of 64 tokens: for
    decays of channels, a number for each channel of a pair."""
    nodes, states = shape["tokens"] if "tokens" in shape else nodes_of(shape["tree"]), state_bytes(shape)
    tokens = shape["batch"] * shape["value_heads"] * (nodes + 63) * shape["head_dim"]
    behind = 0 if "tokens" in shape else nodes
    return (
        states * (behind + 12) + 10 * L3_BYTES["cpu"] + 4 * tokens * (64 * 5 if shape["rule"] == "kimi delta" else 40)
    )


def check(problem: Problem, ours: Any, theirs: Any) -> None:
    """Outputs and states, from the same states."""

    def after(run: Callable[[int], Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
        states[0] = problem.initial
        out = run(0).reshape(problem.v.shape).float()
        return out, states[0]

    chain = OnChain(problem) if theirs.takes_chain else None
    expected = after(chain.run, chain.states) if chain else after(ours.run, problem.states)
    for name, mine, found in zip(("output", "state"), expected, after(theirs.run, theirs.states), strict=True):
        error = ((found - mine).square().mean() / mine.square().mean()).sqrt().item()
        if not error <= 0.02:
            raise Mismatch(f"the root mean square of the {name}'s error is {error:.3f} of that of the {name}")


LAYER = {
    "key_heads": 16, "value_heads": 32, "head_dim": 128, "rule": "gated delta", "dtype": "bfloat16", "threads": 0,
}  # fmt: skip
STEP = Op(
    name="recurrent_step",
    base={"batch": 4, "tree": "binary 32", **LAYER},
    axes={
        "batch": [1, 16],
        "tree": ["chain 32", "Sequoia 32", "EAGLE-2 60", "chain 128"],
        "key_heads": [32],
        "dtype": ["float16"],
    },
    headline=[
        *({"tree": f"binary {nodes}"} for nodes in (8, 16, 64, 128)),
        *({"tree": f"binary {nodes}", "rule": "kimi delta"} for nodes in (8, 32, 128)),
    ],
    quick={"batch": 1, "tree": "binary 8"},
    problem=Problem,
    peers=[Ours, OnChain, StatePerNode, RecurrentLoop, CausalChunk],
    memory=memory_of,
    check=check,
)
PREFILL = Op(
    name="recurrent_prefill",
    base={"batch": 1, "tokens": 512, **LAYER},
    axes={"tokens": [32, 2048], "batch": [4]},
    headline=[{"tokens": 128}, {"tokens": 128, "rule": "kimi delta"}],
    quick={"tokens": 64},
    problem=Prefill,
    peers=[Ours, PrefillByLoop, PrefillByChunk],
    memory=memory_of,
    check=check,
)
OPS = [STEP, PREFILL]
