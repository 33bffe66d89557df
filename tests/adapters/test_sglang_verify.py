"""SGLang's verification: its vectors, plain walks along random links, counts of all outcomes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.attention import random_tree
from support.devices import placed
from torch import Tensor

from pagedtree import DraftTree
from pagedtree.integrations.sglang import (
    tree_speculative_sampling_target_only,
    verify_tree_greedy,
    verify_tree_greedy_cpu,
    verify_tree_greedy_func,
)
from pagedtree.reference.verify import rejection, walk

# From SGLang's test_eagle_utils and test_speculative_sampling; the second tree's sibling list is reversed.
CANDIDATES = [[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]
NEXT_TOKEN = [[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]]
NEXT_SIBLING = [[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]]
LIKELY = {(0, 0): 3, (0, 3): 4, (0, 4): 5, (1, 0): 11, (1, 4): 12}  # the target's token at a node; 18 elsewhere
PREDICTS = [3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18]
ACCEPT_INDEX = [[0, 3, 4, 5], [6, 10, 11, -1]]
ACCEPT_TOKEN_NUM = [3, 2]


def published(device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    logits = torch.ones(2, 6, 20)
    for b, node in np.ndindex(2, 6):
        logits[b, node, LIKELY.get((b, node), 18)] = 10
    trees = {"candidates": CANDIDATES, "retrive_next_token": NEXT_TOKEN, "retrive_next_sibling": NEXT_SIBLING}
    arguments = {name: torch.tensor(value, device=device) for name, value in trees.items()}
    arguments["retrive_index"] = torch.arange(12, device=device).view(2, 6)
    return arguments, logits.to(device)


def outputs(
    rows: int, bs: int, width: int, dtype: torch.dtype, device: torch.device | None = None
) -> dict[str, Tensor]:
    return {
        "predicts": torch.full((rows,), -1, dtype=dtype, device=device),
        "accept_index": torch.full((bs, width), -1, dtype=dtype, device=device),
        "accept_token_num": torch.full((bs,), 77, dtype=dtype, device=device),
    }


def lists(outs: dict[str, Tensor]) -> list:
    return [out.tolist() for out in outs.values()]


def respell(arguments: dict[str, Tensor], spelling: str) -> dict[str, Tensor]:
    return {name.replace("retrive", spelling): value for name, value in arguments.items()}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("spelling", ["retrive", "retrieve"])
def test_published_greedy_vector(device, dtype, spelling) -> None:
    trees, logits = published(device)
    outs = outputs(12, 2, 4, dtype, device)
    verify_tree_greedy(**outs, **respell(trees, spelling), target_predict=logits.argmax(-1))
    assert lists(outs) == [PREDICTS, ACCEPT_INDEX, ACCEPT_TOKEN_NUM]
    again = outputs(12, 2, 4, dtype, device)
    returned = verify_tree_greedy_func(**again, **respell(trees, spelling), target_predict=logits.argmax(-1), topk=4)
    assert all(x is y for x, y in zip(returned, again.values(), strict=True)) and lists(again) == lists(outs)
    assert verify_tree_greedy_cpu is verify_tree_greedy  # SGLang's name on CPUs


def test_compiled() -> None:
    trees, logits = published(torch.device("cpu"))
    outs = outputs(12, 2, 4, torch.int32, torch.device("cpu"))
    torch.compile(verify_tree_greedy, fullgraph=True, backend="aot_eager")(
        **outs, **trees, target_predict=logits.argmax(-1)
    )
    assert lists(outs) == [PREDICTS, ACCEPT_INDEX, ACCEPT_TOKEN_NUM]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("spelling", ["retrive", "retrieve"])
@pytest.mark.parametrize("thresholds", [(1, 1), (0, 0), (0.5, 1), (1, 0)])
def test_published_sampling_vector(device, dtype, spelling, thresholds) -> None:
    """SGLang before 0.5.23 accepted drafts of probability 0 with thresholds 0."""
    trees, logits = published(device)
    outs = outputs(12, 2, 4, dtype, device)
    generator = torch.Generator().manual_seed(1)
    draft_probs = torch.zeros(2, 6, 20, device=device)
    tree_speculative_sampling_target_only(
        **outs,
        **respell(trees, spelling),
        uniform_samples=torch.rand(2, 6, generator=generator).to(device),
        uniform_samples_for_final_sampling=torch.rand(2, generator=generator).to(device),
        target_probs=(logits / 0.01).softmax(-1),
        draft_probs=draft_probs,
        threshold_single=thresholds[0],
        threshold_acc=thresholds[1],
        deterministic=True,
    )
    assert lists(outs) == [PREDICTS, ACCEPT_INDEX, ACCEPT_TOKEN_NUM]
    assert not draft_probs.any()


# From SGLang's test_target_only_sampling_cdf_boundaries: siblings, probabilities, coin, threshold_single, results.
BOUNDARIES = {
    "no mass, threshold 0": ([2], [0.0, 1.0, 0.0], 0.0, 0.0, 1, 0),
    "no mass": ([2], [0.0, 1.0, 0.0], 0.0, 1.0, 1, 0),
    "interior": ([1, 2, 3], [0.0, 0.25, 0.0, 0.75], 0.25, 1.0, 3, 1),
    "lower end": ([1], [0.0, 0.25, 0.75], 0.0, 1.0, 1, 1),
    "upper end": ([1], [0.0, 1.0], 1 - 2**-24, 1.0, 1, 1),
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_published_boundaries(on_device, name) -> None:
    siblings, distribution, coin, threshold, token, accepted = BOUNDARIES[name]
    n, vocab = len(siblings) + 1, len(distribution)
    outs = outputs(n, 1, 2, torch.int32)
    tree_speculative_sampling_target_only(
        **outs,
        candidates=torch.tensor([[0, *siblings]]),
        retrive_index=torch.arange(n)[None],
        retrive_next_token=torch.tensor([[1] + [-1] * (n - 1)]),
        retrive_next_sibling=torch.tensor([[-1, *range(2, n), -1]]),
        uniform_samples=torch.full((1, n), coin),
        uniform_samples_for_final_sampling=torch.zeros(1),
        target_probs=torch.tensor([distribution]).expand(1, n, vocab).contiguous(),
        draft_probs=torch.zeros(1, n, vocab),
        threshold_single=threshold,
    )
    assert (outs["predicts"][0].item(), outs["accept_token_num"].item()) == (token, accepted)


# Random trees: nodes, sibling lists and flat rows in any order --------------------------------------------------------


def random_case(
    rng: np.random.Generator, bs: int, n: int, vocab: int, dtype=torch.int64
) -> tuple[dict[str, Tensor], list[list[int]], np.ndarray]:
    """Returns SGLang's arguments, parents with elder siblings first, and node names [bs, n]."""
    parents = [random_tree(rng, n).parents.tolist() for _ in range(bs)]
    names = np.zeros((bs, n), dtype=np.int64)
    links = np.full((2, bs, n), -1)
    for b in range(bs):
        names[b, 1:] = 1 + rng.permutation(n - 1)
        for i in reversed(range(1, n)):
            node, parent = names[b, i], names[b, parents[b][i]]
            links[1, b, node], links[0, b, parent] = links[0, b, parent], node
    ids = {"candidates": rng.integers(0, vocab, (bs, n)), "retrive_index": rng.permutation(bs * n).reshape(bs, n)}
    arguments = {**ids, "retrive_next_token": links[0], "retrive_next_sibling": links[1]}
    return {name: placed(torch.from_numpy(value)).to(dtype) for name, value in arguments.items()}, parents, names


def check_paths(outs: dict[str, Tensor], index: Tensor, paths: list[tuple[np.ndarray, list[int]]]) -> None:
    """Compares outputs with paths of names and the tokens after their nodes."""
    predicts = [-1] * outs["predicts"].numel()
    width = outs["accept_index"].shape[1]
    for b, (path, tokens) in enumerate(paths):
        rows = index[b].cpu().numpy()[path].tolist()
        assert outs["accept_index"][b].tolist() == rows + [-1] * (width - len(rows))
        assert outs["accept_token_num"][b] == len(rows) - 1
        for row, token in zip(rows, tokens, strict=True):
            predicts[row] = token
    assert outs["predicts"].tolist() == predicts


SHAPES = [(1, 1, 1), (4, 2, 2), (7, 13, 5), (3, 33, 4), (2, 70, 40), (600, 9, 4), (0, 5, 3)]


@pytest.mark.parametrize(("bs", "n", "width"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_greedy_on_random_trees(on_device, bs, n, width, dtype) -> None:
    rng = np.random.default_rng(n + 3)
    case, parents, names = random_case(rng, bs, n, 2, dtype)
    target = placed(torch.from_numpy(rng.integers(0, 2, (bs, n)))).to(dtype)
    for ids in (target, case["candidates"]):
        ids *= 1_000_003  # past any small vocabulary
    outs = outputs(bs * n + 3, bs, width, dtype)
    verify_tree_greedy(**outs, **case, target_predict=target)
    paths = []
    for b in range(bs):
        drafts = case["candidates"][b].cpu().numpy()[names[b]].tolist()
        predicted = target.flatten()[case["retrive_index"][b]].cpu().numpy()[names[b]].tolist()
        path, tokens = walk(parents[b], drafts, lambda node, _, predicted=predicted: predicted[node])
        paths.append((names[b][path[:width]], tokens[:width]))
    assert bs == 0 or n == 1 or max(len(path) for path, _ in paths) > 1
    check_paths(outs, case["retrive_index"], paths)


@pytest.mark.each_value
@pytest.mark.parametrize(("bs", "n", "width"), SHAPES)
@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.3, 1.0), (1.0, 0.4), (0.35, 0.7)])
def test_sampling_on_random_trees(on_device, bs, n, width, thresholds) -> None:
    rng = np.random.default_rng(n + 2)
    single, acc = thresholds
    vocab = 6
    case, parents, names = random_case(rng, bs, n, vocab + 1)  # a draft outside the vocabulary is never accepted
    probs = rng.dirichlet(np.full(vocab, 0.4), (bs, n))
    probs[rng.random((bs, n, vocab)) < 0.2] = 0
    probs += 1e-300
    probs /= probs.sum(-1, keepdims=True)
    probs = probs.astype(np.float32)
    coins, final = rng.random((bs, n)), rng.random(bs)
    outs = outputs(bs * n, bs, width, torch.int32)
    tree_speculative_sampling_target_only(
        **outs,
        **case,
        uniform_samples=placed(torch.from_numpy(coins)).float(),
        uniform_samples_for_final_sampling=placed(torch.from_numpy(final)).float(),
        target_probs=placed(torch.from_numpy(probs)),
        draft_probs=torch.zeros(bs, n, vocab),
        threshold_single=single,
        threshold_acc=acc,
    )
    paths = []
    for b in range(bs):
        drafts = case["candidates"][b].cpu().numpy()[names[b]]
        outside = (drafts == vocab) | (DraftTree(parents[b]).depths >= width)
        p = probs[b, names[b]].astype(np.float64)
        p /= p.sum(-1, keepdims=True)
        tried: dict[int, float] = {}

        def below(node: int, bound: float, coins=coins[b, names[b]], tried=tried) -> bool:
            mass = bound - tried.get(node, 0)
            tried[node] = bound
            return coins[node] < bound / acc or mass >= single

        path, residual = rejection(parents[b], np.where(outside, -1, drafts).tolist(), p, p, "onehot", below)
        bonus = int(np.searchsorted(np.cumsum(residual), final[b] * sum(residual), side="right"))
        paths.append((names[b][path], [*drafts[path[1:]].tolist(), bonus]))
    assert n < 3 or bs == 0 or max(len(path) for path, _ in paths) > 1
    check_paths(outs, case["retrive_index"], paths)


def test_broken_links_end(on_device) -> None:
    """Cycles, dangling links and shared children cause no hang, stray read or missing root."""
    rng = np.random.default_rng(5)
    bs, n = 40, 9
    case, _, _ = random_case(rng, bs, n, 2)
    for name in ("retrive_next_token", "retrive_next_sibling"):
        case[name] = placed(torch.from_numpy(rng.integers(-(2**40), 2**40, (bs, n))))
        case[name][: bs // 2] = placed(torch.from_numpy(rng.integers(-1, n, (bs // 2, n))))
    outs = outputs(bs * n, bs, 5, torch.int32)
    verify_tree_greedy(**outs, **case, target_predict=placed(torch.from_numpy(rng.integers(0, 2, (bs, n)))))
    assert (outs["accept_index"][:, 0] == case["retrive_index"][:, 0]).all()
    assert ((outs["accept_token_num"] >= 0) & (outs["accept_token_num"] < 5)).all()
