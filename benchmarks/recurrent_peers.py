"""A step of a recurrent layer: `tree_delta_rule` on draft trees, then `advance_state` along accepted nodes. Peers are a
state per node, and transformers' causal forms on a chain of as many nodes.

Sizes are Qwen3-Next's (16 key heads, 32 value heads of 128 columns, one decay a head) and Kimi Linear's rule (one decay
for each key channel). Up to three drafts are accepted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from attention_problem import L3_BYTES
from named_trees import longest_path, nodes_of, tree_named
from suite import Op, Peer, Problem, Shape, Way, check_mean_error, ours, package, peer
from torch import Tensor

from pagedtree import DraftTree, advance_state, build_trees, tree_delta_rule

ACCEPTED = 3
Results = tuple[Tensor, Tensor]  # the output, and the states after the accepted tokens
# Rule -> transformers' module, its chunked form and its loop over tokens.
RULES = {
    "gated delta": ("qwen3_next", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    "kimi delta": ("kimi_linear", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
}


class Step(Problem):
    """Equal trees. Each way has `copies` states, so that no cache holds another way's."""

    def make(self) -> None:
        self.tree = tree_named(self.shape["tree"])
        self.path = longest_path(self.tree)[: ACCEPTED + 1]
        self.draw(self.tree.num_nodes)

    def draw(self, nodes: int) -> None:
        shape, self.batch = self.shape, self.shape["batch"]
        self.heads, self.head_dim = shape["value_heads"], shape["head_dim"]
        self.nodes, rows = nodes, self.batch * nodes
        generator = self.generator()

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
        # Lower bound: each state read and written once, each token's products with it.
        tokens = (self.q, self.k, self.v, self.v, self.g, self.beta)
        self.bytes = 2 * self.initial.nbytes + sum(x.nbytes for x in tokens)
        self.flops = 4 * self.initial.numel() * nodes

    def fresh_states(self) -> Tensor:
        return self.initial.repeat(self.copies, 1, 1, 1, 1)

    def step(self, tree: DraftTree, path: list[int], states: Tensor) -> Callable[[int], Results]:
        parents = torch.from_numpy(tree.parents).to(self.device).repeat(self.batch)
        offsets = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * self.nodes
        trees = build_trees(parents, offsets, max_nodes=self.nodes, max_depth=self.nodes - 1)
        accept = torch.tensor([path] * self.batch, dtype=torch.int32, device=self.device)
        accepted = torch.full((self.batch,), len(path) - 1, dtype=torch.int32, device=self.device)

        def run(copy: int) -> Results:
            state, rest = states[copy], (self.g, self.beta)
            out = tree_delta_rule(self.q, self.k, self.v, *rest, state, self.slots, trees)
            advance_state(state, self.slots, self.k, self.v, *rest, trees, accept, accepted)
            return out, state

        return run

    def op(self, copy: int) -> Results:
        if not hasattr(self, "ours"):
            self.ours = self.step(self.tree, self.path, self.states)
        return self.ours(copy)

    def by_sequence(self) -> tuple[Tensor, ...]:
        """q, k, v, g and beta [B, nodes, ...]."""
        return tuple(x.unflatten(0, (self.batch, self.nodes)) for x in (self.q, self.k, self.v, self.g, self.beta))


class Prefill(Step):
    def make(self) -> None:
        self.draw(self.shape["tokens"])

    def op(self, copy: int) -> Results:
        state, rest = self.states[copy], (self.g, self.beta)
        cut = {"cu_seqlens": torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * self.nodes}
        out = tree_delta_rule(self.q, self.k, self.v, *rest, state, self.slots, None, **cut)
        advance_state(state, self.slots, self.k, self.v, *rest, None, **cut)
        return out, state


@peer("pagedtree on a chain", is_other_problem=True)
def on_chain(p: Step) -> Way:
    """A tree should take at most a tenth more than a chain of as many nodes."""
    return Way(p.step(DraftTree.chain(p.nodes - 1), list(range(len(p.path))), p.fresh_states()))


@peer("a state per node")
def state_per_node(p: Step) -> Way:
    """Writes each node's state and keeps the last accepted one, as engines that verify drafts do."""
    states, behind = p.fresh_states(), p.initial.new_empty(p.nodes, *p.initial.shape)

    def run(copy: int) -> Results:
        q, k, v, g, beta = (x.float() for x in p.by_sequence())
        q, k = (x.repeat_interleave(p.heads // x.shape[2], dim=2) for x in (q * p.head_dim**-0.5, k))
        decay = g.exp().reshape(p.batch, p.nodes, p.heads, -1, 1)
        out = torch.empty_like(v)
        for node, parent in enumerate(p.tree.parents.tolist()):
            before, state = states[copy] if parent < 0 else behind[parent], behind[node]
            torch.mul(before, decay[:, node], out=state)
            u = beta[:, node, :, None] * (v[:, node] - (k[:, node, :, None] @ state)[:, :, 0])
            state.addcmul_(k[:, node, :, :, None], u[:, :, None])
            out[:, node] = (q[:, node, :, None] @ state)[:, :, 0]
        states[copy].copy_(behind[p.path[-1]])
        return out.to(p.v.dtype), states[copy]

    return Way(run)


def no_transformers() -> str | None:
    if reason := package("transformers")():
        return reason
    lacking = [module for module, *_ in RULES.values() if not find_spec(f"transformers.models.{module}")]
    return f"this transformers has no {lacking[0]}" if lacking else None


def causal(p: Step, form: int) -> Way:
    """transformers' causal form: a prompt once; a chain, then its accepted tokens again."""
    module, *forms = RULES[p.shape["rule"]]
    rule = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), forms[form])
    q, k, *rest = p.by_sequence()
    # Kimi Linear has as many key heads as value heads; the other rule repeats its own.
    repeated = p.heads // k.shape[2] if p.shape["rule"] == "kimi delta" else 1
    rows, states = (*(x.repeat_interleave(repeated, dim=2) for x in (q, k)), *rest), p.fresh_states()
    is_prompt = isinstance(p, Prefill)

    def run(copy: int) -> Results:
        state = states[copy]
        out, after = rule(*rows, initial_state=state, output_final_state=is_prompt)
        if not is_prompt:
            accepted = (x[:, : len(p.path)] for x in rows)
            _, after = rule(*accepted, initial_state=state, output_final_state=True)
        return out, state.copy_(after)

    return Way(run)


def by_transformers(suffix: str = "", like: Peer | None = None) -> list[Peer]:
    forms = {"loop": 1, "chunk": 0}  # in RULES
    properties = {"when": no_transformers, "like": like}
    return [peer(f"transformers' {name}{suffix}", **properties)(partial(causal, form=i)) for name, i in forms.items()]


# The ops -------------------------------------------------------------------------------------------------------------


def memory_of(shape: Shape) -> int:
    """Counts copies of states, one per node, and transformers' chunks of 64 tokens, where channel decays have a number
    for each channel of a pair."""
    nodes = shape["tokens"] if "tokens" in shape else nodes_of(shape["tree"])
    states = 4 * shape["batch"] * shape["value_heads"] * shape["head_dim"] ** 2
    tokens = shape["batch"] * shape["value_heads"] * (nodes + 63) * shape["head_dim"]
    behind = 0 if "tokens" in shape else nodes
    numbers = 64 * 5 if shape["rule"] == "kimi delta" else 40
    return states * (behind + 12) + 10 * L3_BYTES["cpu"] + 4 * tokens * numbers


def check(problem: Step, ours: Way, theirs: Way) -> None:
    """Both begin with equal states."""

    def after(way: Way) -> Results:
        way.run(0)[1].copy_(problem.initial)
        out, state = way.run(0)
        return out.reshape(problem.v.shape).float(), state

    for name, mine, found in zip(("output", "state"), after(ours), after(theirs), strict=True):
        check_mean_error(name, mine, found, 0.02)


LAYER = {"key_heads": 16, "value_heads": 32, "head_dim": 128, "rule": "gated delta", "dtype": "bfloat16", "threads": 0}
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
    problem=Step,
    peers=[ours, on_chain, state_per_node, *by_transformers(" on a chain", like=on_chain)],
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
    peers=[ours, *by_transformers()],
    memory=memory_of,
    check=check,
)
OPS = [STEP, PREFILL]
