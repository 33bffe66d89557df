"""SGLang's verification of draft trees."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedtree import SamplingParams, TreeBatch, Verdict, verify_rejection, verify_tokens
from pagedtree._arguments import checked, expect_shape, refusal
from pagedtree.integrations.sglang.trees import LINKS, either_spelling, expect_links, trees_from_links

OUTPUTS = ("predicts", "accept_index", "accept_token_num")
INTEGERS = (*OUTPUTS, "candidates", *LINKS, "target_predict")


@either_spelling
@checked(integers=INTEGERS, written=OUTPUTS)
def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follows the drafts that equal the target's predictions (`pagedtree.verify_tokens`).

    Args:
        predicts: integers [bs * N] or longer, written at the accepted path: predicts[r] follows the node of flat row r.
        accept_index: integers [bs, S], written: flat rows of the root and of at most S - 1 accepted nodes, no others.
        accept_token_num: integers [bs], written: accepted nodes, without the root.
        candidates: integers [bs, N], the nodes' tokens.
        retrive_index: integers [bs, N], each node's flat row; retrive_next_token, retrive_next_sibling: integers
            [bs, N], first child and next sibling within the tree, -1: none. Siblings are tried in this order.
        target_predict: integers [bs, N], the target's argmax by flat row.

    Integers are int32 or int64. Links that lead nowhere or in circles end the path. Raises ValueError for wrong shapes.
    """
    links = retrive_index, retrive_next_token, retrive_next_sibling
    trees, order, rows = _tree_arguments(predicts, accept_index, accept_token_num, candidates, *links)
    expect_shape(candidates.shape, target_predict=target_predict)
    verdict = verify_tokens(target_predict.flatten()[rows].flatten(), candidates.gather(1, order).flatten(), trees)
    _write(predicts, accept_index, accept_token_num, verdict, rows)


@either_spelling
def verify_tree_greedy_func(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `verify_tree_greedy`, and returns predicts, accept_index and accept_token_num. topk has no effect."""
    outputs = predicts, accept_index, accept_token_num
    links = retrive_index, retrive_next_token, retrive_next_sibling
    verify_tree_greedy(*outputs, candidates, *links, target_predict)
    return outputs


@either_spelling
@checked(integers=INTEGERS, written=OUTPUTS)
def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Samples along trees of deterministic drafts (`pagedtree.verify_rejection`, draft_law "onehot").

    Args:
        uniform_samples: fp32 [bs, N] in [0, 1); the entry of a node decides among its children.
        uniform_samples_for_final_sampling: fp32 [bs] in [0, 1), for the token after the path.
        target_probs: fp32 [bs, N, V], the target's distribution at each node; rows sum to 1.
        draft_probs: neither read nor written. (sgl_kernel wants zeros and uses them as scratch.)
        threshold_single: below 1, a child of at least this probability is accepted: not lossless.
        threshold_acc: below 1, divides the children's cumulative probability: not lossless.
        deterministic: no effect, results always repeat bit by bit. The others: see `verify_tree_greedy`.

    A child is accepted if its probability is positive and the cumulative probability of the siblings so far exceeds the
    coin. Siblings that repeat a token count once (twice in sgl_kernel). Makes one temporary of target_probs' size;
    `pagedtree.verify_rejection`, for logits, makes none. Raises ValueError for wrong shapes or thresholds outside
    [0, 1].
    """
    for name, value in (("threshold_single", threshold_single), ("threshold_acc", threshold_acc)):
        if not 0 <= value <= 1:
            raise refusal(name, "a number in [0, 1]", value)
    floats = {
        "uniform_samples": uniform_samples,
        "uniform_samples_for_final_sampling": uniform_samples_for_final_sampling,
        "target_probs": target_probs,
    }
    for name, tensor in floats.items():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise refusal(name, "fp32", tensor.dtype)
    links = retrive_index, retrive_next_token, retrive_next_sibling
    trees, order, rows = _tree_arguments(predicts, accept_index, accept_token_num, candidates, *links)
    bs, n = candidates.shape
    expect_shape([bs, n], uniform_samples=uniform_samples)
    expect_shape([bs], uniform_samples_for_final_sampling=uniform_samples_for_final_sampling)
    expect_shape([bs, n, target_probs.shape[-1]], target_probs=target_probs)

    drafts = candidates.gather(1, order)
    flat = order + torch.arange(bs, device=order.device, dtype=torch.int64)[:, None] * n
    probs = target_probs.flatten(0, 1).index_select(0, flat.flatten()).float()
    coins = uniform_samples.gather(1, order)
    coins = _deciding_coins(coins, probs, drafts, trees, threshold_single, max(threshold_acc, 1e-9))
    streams = torch.zeros(bs, dtype=torch.int64, device=order.device)  # not used: all coins are given
    verdict = verify_rejection(
        probs.log_(),
        drafts.flatten(),
        trees,
        SamplingParams(),
        draft_law="onehot",
        seeds=streams,
        positions=streams,
        coins=coins.flatten(),
        final_coins=uniform_samples_for_final_sampling.float(),
    )
    _write(predicts, accept_index, accept_token_num, verdict, rows)


def _deciding_coins(
    coins: Tensor, probs: Tensor, drafts: Tensor, trees: TreeBatch, single: float, acc: float
) -> Tensor:
    """Coins in the middle of the chosen child's interval, or past all: rounding in `verify_rejection` would decide on a
    boundary."""
    bs, n = drafts.shape
    vocab = probs.shape[1]
    parents = trees.parents.view(bs, n).long().clamp(0, n - 1)
    rows = parents + torch.arange(bs, device=parents.device, dtype=torch.int64)[:, None] * n
    p = probs[rows, drafts.clamp(0, vocab - 1)].double().nan_to_num(0)
    child = trees.depths.view(bs, n) > 0
    elder = (parents[:, :, None] == parents[:, None, :]).tril(-1) & child[:, None, :]
    repeated = (elder & (drafts[:, :, None] == drafts[:, None, :])).any(-1)
    p = torch.where(child & (drafts >= 0) & (drafts < vocab) & ~repeated, p, 0)
    before = (elder * p[:, None, :]).sum(-1)
    accepted = (p > 0) & ((coins.double().gather(1, parents) < (before + p) / acc) | (p >= single))
    totals = probs.nansum(1).view(bs, n).double().clamp(min=1e-30)
    amid = torch.where(accepted, (before + p / 2) / totals.gather(1, parents), 1)
    behind = (torch.zeros_like(p).scatter_add(1, parents, p) / totals + 1) / 2
    return behind.scatter_reduce(1, parents, amid, "amin").float().clamp(max=1 - 2**-24)


def _tree_arguments(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, *links: Tensor
) -> tuple[TreeBatch, Tensor, Tensor]:
    """Returns the trees; order [bs, N], the caller's node for each tree node; and each one's flat row."""
    if candidates.dim() != 2:
        raise refusal("candidates", "2 dimensions", candidates.dim())
    bs, n = candidates.shape
    expect_shape([bs, accept_index.shape[-1]], accept_index=accept_index)
    expect_shape([bs], accept_token_num=accept_token_num)
    expect_links(bs, n, *links)
    if predicts.dim() != 1 or predicts.numel() < bs * n:
        raise refusal("predicts", f"at least {bs * n} elements in one dimension", [*predicts.shape])
    if accept_index.shape[1] < 1:
        raise refusal("accept_index", "at least one column", "none")
    rows, next_token, next_sibling = links
    trees, order = trees_from_links(next_token, next_sibling, min(accept_index.shape[1], n) - 1)
    return trees, order, rows.gather(1, order).long().clamp(0, max(bs * n - 1, 0))


def _write(predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, verdict: Verdict, rows: Tensor) -> None:
    """Writes the path's entries only; others become the root's, for fixed sizes."""
    path = verdict.accept_index.long()
    width = path.shape[1]
    on_path = path >= 0
    flat = rows.gather(1, path.clamp(min=0))
    columns = accept_index[:, :width]
    columns.copy_(torch.where(on_path, flat, columns))
    accept_token_num.copy_(verdict.num_accepted)
    flat = torch.where(on_path, flat, flat[:, :1])
    tokens = torch.where(on_path, verdict.tokens, verdict.tokens[:, :1])
    predicts.scatter_(0, flat.flatten(), tokens.flatten().to(predicts.dtype))
