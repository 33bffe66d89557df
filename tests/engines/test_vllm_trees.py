"""Draft trees in vLLM: greedy output is stock vLLM's, seeded output independent of the trees."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from vllm_case import (
    DRAFT,
    LLM,
    RUNNER,
    TARGET,
    V1_ONLY,
    SamplingParams,
    TreeRunner,
    accepted,
    engine,
    generate,
    metrics_of,
    of_runner,
    runner_of,
    texts_of,
    token_prompts,
    tree_options,
)

from pagedtree.integrations.vllm.attention import PagedTreeBackend
from pagedtree.integrations.vllm.proposals import present_nodes

PROMPTS = token_prompts()
STOPS = [316, 320, 271, 10, 4, 13, 9, 81, 27]


@pytest.fixture
def steps(monkeypatch) -> list[tuple[list[int], list[int]]]:
    """Records scheduled and proposed drafts of each step, by request."""
    records: list[tuple[list[int], list[int]]] = []
    lay_out = TreeRunner._lay_out_trees

    def spy(runner, batch, *args):
        step = lay_out(runner, batch, *args)
        if RUNNER == "V2":
            proposed = runner.req_states.draft_tokens[batch.idx_mapping] >= 0
            counts = batch.num_draft_tokens_per_req.tolist()
            found = [int(row[:count].sum()) for row, count in zip(proposed, counts, strict=True)]
            records.append((found, proposed.sum(dim=1).tolist()))
        elif step is not None:
            ids = [i for i, count in zip(runner.input_batch.req_ids, step.num_drafts, strict=True) if count]
            records.append(([int(n) for n in step.num_drafts if n], [len(runner._proposed[i]) - 1 for i in ids]))
        return step

    monkeypatch.setattr(TreeRunner, "_lay_out_trees", spy)
    return records


@pytest.mark.parametrize("drafter", [None, "ngram", "model"])
@pytest.mark.parametrize("block_size", [8, 16, 48, 128])
def test_greedy_output_is_stock(stock, steps, drafter, block_size):
    with engine(**tree_options(drafter), block_size=block_size) as llm:
        runner = runner_of(llm)
        assert runner.attn_groups[0][0].backend is PagedTreeBackend
        assert runner.kv_caches[0].shape[2] == block_size
        assert generate(llm, PROMPTS) == stock
        assert drafter is None or accepted(llm) > len(PROMPTS)
    if drafter == "ngram":
        assert any(len(set(scheduled)) > 1 for scheduled, _ in steps)


@V1_ONLY
@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_chosen_trees_give_stock_output(stock, steps, drafter):
    """Steps also read prompts, and requests come and go."""
    with engine(**tree_options(drafter, tree="auto"), max_num_batched_tokens=40) as llm:
        assert generate(llm, PROMPTS) == stock
        assert runner_of(llm).drafter._tuner.tuner.costs
    assert sum(sum(scheduled) for scheduled, _ in steps) > 0


def test_chunked_prefill_beside_trees_cut_off_by_the_scheduler(stock, steps):
    assert texts_of(PROMPTS, **tree_options("model"), max_num_batched_tokens=40, max_num_seqs=4) == stock
    assert any(scheduled != proposed for scheduled, proposed in steps)


@pytest.mark.parametrize("drafter", [None, "model", "medusa"])
def test_prefix_cache_hits(stock, drafter):
    with engine(**tree_options(drafter), block_size=8, enable_prefix_caching=True) as llm:
        first = generate(llm, PROMPTS)
        longer = [prompt + output for prompt, output in zip(PROMPTS, first, strict=True)]
        hits = metrics_of(llm)["vllm:prefix_cache_hits"]
        continued = generate(llm, longer)  # reads blocks with compacted trees
        assert metrics_of(llm)["vllm:prefix_cache_hits"] > hits
    assert first == stock
    with engine() as llm:
        assert continued == generate(llm, longer)


@V1_ONLY  # Triton's interpreter and torch.compile exclude each other
@pytest.mark.parametrize("drafter", [None, "model", "medusa", "eagle"])
@pytest.mark.slow
def test_compiled_model(stock, drafter, tmp_path):
    options = {"enforce_eager": False, "enable_prefix_caching": False, "env": {"VLLM_CACHE_ROOT": str(tmp_path)}}
    with engine(**tree_options(drafter), **options) as llm:  # with vLLM's warm-up runs
        assert generate(llm, PROMPTS) == stock
        assert drafter is None or accepted(llm) > len(PROMPTS)


def test_longest_sequences_and_stop_tokens(stock):
    longest = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    stops = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stock[0][5], stock[3][7]])
    with engine(max_model_len=96) as llm:
        expected = [generate(llm, PROMPTS, longest), generate(llm, PROMPTS, stops)]
    assert any(len(output) < 24 for output in expected[1])
    with engine(**tree_options("model"), max_model_len=96, block_size=16) as llm:
        assert [generate(llm, PROMPTS, longest), generate(llm, PROMPTS, stops)] == expected


@V1_ONLY
@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_no_node_is_deeper_than_its_request_may_grow(monkeypatch, drafter):
    """Some node has the last depth, as a text's last token is never read."""
    rooms, set_positions = [], TreeRunner._set_positions

    def spy(runner, step):
        set_positions(runner, step)
        positions, offsets = runner.positions[step.rows].tolist(), step.trees.cu_nodes.tolist()
        for i, request_id in enumerate(runner.input_batch.req_ids):
            request = runner.requests[request_id]
            end = min(len(request.prompt_token_ids) + request.sampling_params.max_tokens, 96)
            rooms.append(end - 2 - max(positions[offsets[i] : offsets[i + 1]]))

    monkeypatch.setattr(TreeRunner, "_set_positions", spy)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 200, 24, 9, 2, 60)]
    expected = texts_of(PROMPTS, params, max_model_len=96)
    assert texts_of(PROMPTS, params, **tree_options(drafter), max_model_len=96, block_size=16) == expected
    assert min(rooms) == 0


def test_a_draft_model_with_fewer_positions(stock, tmp_path):
    """It drafts up to its last position and no further."""
    shutil.copytree(DRAFT, tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    drafted = []
    with engine(**tree_options("model", model=str(tmp_path / "draft"))) as llm:
        drafter = runner_of(llm).drafter
        draft = drafter.draft

        def spy(request_ids, tokens):
            proposals = draft(request_ids, tokens)
            drafted.extend((len(text), len(proposal[0])) for text, proposal in zip(tokens, proposals, strict=True))
            return proposals

        drafter.draft = spy
        assert generate(llm, PROMPTS) == stock
    assert any(count > 0 for length, count in drafted if length <= 40)
    assert any(length > 40 for length, _ in drafted) and not any(count for length, count in drafted if length > 40)


def test_filters_that_leave_one_token_are_greedy(stock):
    samplings = [dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0), dict(extra_args={"min_p": 1.0})]
    with engine(**tree_options("model")) as llm:
        for sampling in samplings:
            params = SamplingParams(**sampling, temperature=1.0, max_tokens=24, ignore_eos=True)
            assert generate(llm, PROMPTS, params) == stock


def test_requests_without_a_seed_differ_and_outcomes_are_many():
    params = SamplingParams(temperature=1.0, n=4, max_tokens=12, ignore_eos=True)
    with engine(**tree_options("ngram")) as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPTS[1]}], params, use_tqdm=False)
    assert len({tuple(outcome.token_ids) for outcome in output.outputs}) == 4


def test_absent_nodes_are_left_out():
    tokens = np.array([7, 5, -1, 6, 9, 8])
    parents = np.array([-1, 0, 0, 2, 1, 4], dtype=np.int32)
    depths = np.array([0, 1, 1, 2, 2, 3], dtype=np.int32)
    log_probs = -np.arange(6, dtype=np.float32)
    ids, tree, scores = present_nodes(tokens, parents, depths, log_probs)
    assert (ids, tree.tolist()) == ([5, 9, 8], [-1, 0, 1, 2])
    assert scores.tolist() == [0, -1, -4, -5]
    assert present_nodes(tokens[:0], parents[:0], depths[:0]).tokens == []


def sessions(llm: LLM) -> tuple[list[list[int]], int]:
    """Returns the sessions' answers, each of which precedes the next part, and the most tokens of a step."""
    core = llm.llm_engine.engine_core.engine_core
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=STOPS)
    parts = {f"s{n}": [PROMPTS[n], PROMPTS[n - 1][:20], PROMPTS[n - 2][:30]] for n in range(4)}
    answers: dict[str, list[int]] = {name: [] for name in parts}
    waiting, most = set(parts), 0
    while parts:
        for name in waiting & set(parts):
            prompt = {"prompt_token_ids": [*parts[name].pop(0)]}  # the session extends it
            request = llm.llm_engine.input_processor.process_inputs(
                name, prompt, params, supported_tasks=("generate",), resumable=True
            )
            core.add_request(*core.preprocess_add_request(request))
        found, is_executed = core.step_fn()
        core.post_step(is_executed)
        for outputs in (found or {}).values():
            for output in outputs.outputs:
                answers[output.request_id] += output.new_token_ids
                most = max(most, len(output.new_token_ids))
        requests = core.scheduler.requests.values()
        waiting = {request.request_id for request in requests if request.status.name == "WAITING_FOR_STREAMING_REQ"}
        core.abort_requests([name for name in waiting if not parts[name]])
        parts = {name: rest for name, rest in parts.items() if rest or name not in waiting}
    return [*answers.values()], most


@pytest.mark.parametrize("drafter", of_runner(["model", "eagle"], ["ngram"]))
def test_sessions_whose_parts_end_inside_a_path(drafter):
    """Accepted tokens after a stop are no part of the session."""
    own = {"model": TARGET, "depth": 8, "width": 1} if drafter == "model" else {}
    with engine() as llm:
        expected, _ = sessions(llm)
    with engine(**tree_options(drafter, **own), enable_prefix_caching=False) as llm:
        found, most = sessions(llm)
    assert found == expected and most > 1


@V1_ONLY
def test_placeholders_are_verified_as_a_chain(stock, monkeypatch):
    """Placeholders that vLLM schedules are verified and rejected."""
    monkeypatch.setattr(TreeRunner, "_proposed", property(lambda self: {}, lambda self, value: None), raising=False)
    with engine(**tree_options("model", width=1, depth=3, num_nodes=4)) as llm:
        assert runner_of(llm)._proposed == {}
        assert generate(llm, PROMPTS) == stock
        assert accepted(llm) > len(PROMPTS)
