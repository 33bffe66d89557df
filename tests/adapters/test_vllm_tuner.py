"""The tuner of vLLM's drafters in a simulated server; refusals of the vLLM adapter."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from pagedtree.generation.tree_tuner import StepCosts
from pagedtree.integrations.vllm.limits import SCHEDULER, check_config
from pagedtree.integrations.vllm.proposals import NO_GUESS, Proposal, cut_at
from pagedtree.integrations.vllm.tuned import BatchTuner, Pass, accepted_path

PLAIN, ROW = 0.020, 0.001  # seconds of a pass without drafts, and of each draft token
DEPTH = 6


def chain(tokens: list[int]) -> Proposal:
    return Proposal(tokens, np.arange(-1, len(tokens), dtype=np.int32))


class Server:
    """Texts count upwards; hits: right tokens in a request's next guess."""

    def __init__(self, hits: Callable[[str], int]) -> None:
        self.hits, self.now = hits, 0.0
        self.tuner = BatchTuner(DEPTH, clock=lambda: self.now)
        self.texts: dict[str, int] = {}
        self.proposed: dict[str, Proposal] = {}
        self.drafted: list[int] = []  # draft tokens of each step
        self.asked = 0

    @property
    def costs(self) -> StepCosts:
        return self.tuner.tuner.costs[len(self.texts)]

    def guess(self, request: str) -> Proposal:
        right = self.hits(request)
        return chain([self.texts[request] + 1 + i if i < right else 0 for i in range(DEPTH)])

    def step(self, read: dict[str, int] | None = None, ended: tuple[str, ...] = ()) -> None:
        """Runs a pass of the target and the next proposals.

        read: new requests and their prompts' tokens; ended: finished requests.
        """
        read = read or {}
        for request in ended:
            del self.texts[request]
        new, rows = {}, 0
        for request in self.texts:
            proposal = self.proposed.get(request, NO_GUESS)
            right = 0
            while right < len(proposal.tokens) and proposal.tokens[right] == self.texts[request] + right + 1:
                right += 1
            new[request] = [self.texts[request] + 1 + i for i in range(right + 1)]
            rows += 1 + len(proposal.tokens)
        num_drafted = rows - len(self.texts)
        new |= {request: [1] for request in read}
        self.texts |= dict.fromkeys(read, 0)
        seconds = (PLAIN if self.texts else 0.0) + ROW * (num_drafted + sum(read.values()))
        self.now += seconds
        for request, tokens in new.items():
            self.texts[request] += len(tokens)
        self.drafted.append(num_drafted)
        requests = list(new)
        if not requests:
            return
        plan = self.tuner.plan(Pass(requests, [*new.values()], rows + sum(read.values()), seconds), requests)
        proposals = [NO_GUESS] * len(requests)
        if plan.depth is not None:
            self.asked += 1
            proposals = self.tuner.keep([self.guess(request) for request in requests])
        self.proposed = dict(zip(requests, proposals, strict=True))

    def run(self, steps: int) -> float:
        """Returns the mean number of drafts in the last 30 steps."""
        for _ in range(steps):
            self.step()
        return float(np.mean(self.drafted[-30:]))


def test_tuner_follows_changing_acceptance():
    server, right = Server(lambda _: right[0]), [0]
    server.step({"a": 100})
    server.run(60)
    right[0] = DEPTH
    assert server.run(60) > 0.9 * DEPTH
    right[0] = 0
    assert server.run(250) < 0.2


def test_costs_are_those_of_passes_of_decoding_alone():
    """Prompts in the same pass, finished requests and pauses are not charged."""
    server = Server(lambda _: 0)
    server.step({"a": 100, "b": 100})
    for i in range(40):
        server.step()
        if i % 3 == 0:
            server.step({"c": 4000})
            server.step(ended=("c",))
    assert server.tuner.tuner.costs[2].plain == pytest.approx(PLAIN)
    assert server.tuner.tuner.seconds_of_token == pytest.approx(ROW, rel=0.1)
    server.step(ended=("a", "b"))
    server.now += 60.0
    server.step({"d": 100, "e": 100})
    server.step()
    assert server.tuner.tuner.costs[2].plain == pytest.approx(PLAIN)


def test_a_busy_server_learns_from_its_tokens_alone():
    """A prompt in every pass leaves costs at guesses; tokens count."""
    server = Server(lambda request: DEPTH if request == "good" else 0)
    server.step({"good": 100, "bad": 100})
    for i in range(60):
        server.step({f"{i}": 50}, ended=(f"{i - 1}",) if i else ())
    assert len(server.proposed["good"].tokens) > 0
    odds = server.tuner.tuner.odds
    assert sum(tried for _, tried in odds._seen.values()) > 15


def test_drafts_that_found_no_room_are_not_charged():
    server = Server(lambda _: DEPTH)
    server.step({"a": 100})
    server.run(20)
    before = server.costs.row, server.costs.plain, server.costs.age
    cut = server.proposed["a"]
    assert len(cut.tokens) > 1
    server.proposed["a"] = chain(cut.tokens[:1])
    server.step()
    assert (server.costs.row, server.costs.plain, server.costs.age) == before


def test_a_drafter_that_costs_much_is_not_asked_where_it_guesses_wrong():
    server = Server(lambda _: 0)
    keep = server.tuner.keep

    def slow(proposals):
        server.now += 0.010
        return keep(proposals)

    server.tuner.keep = slow
    server.step({"a": 100})
    server.run(300)
    assert server.asked < 30


def test_the_accepted_path_follows_the_new_tokens():
    tree = Proposal([5, 6, 7, 8, 9], np.array([-1, 0, 0, 1, 2, 4]))
    assert accepted_path(tree, [6, 8, 9, 3]) == [(0, 6), (2, 8), (4, 9), (5, 3)]
    assert accepted_path(tree, [5, 7, 1]) == [(0, 5), (1, 7), (3, 1)]
    assert accepted_path(tree, [4]) == [(0, 4)]
    assert accepted_path(tree, [5, 8]) == [(0, 5), (1, 8)]
    assert accepted_path(tree, []) == []
    # A text unlike the proposal only determines its first token.
    assert accepted_path(NO_GUESS, [1, 2, 3]) == [(0, 1)]


def test_log_probabilities_stay_with_their_nodes():
    tree = Proposal([5, 6, 7, 8], np.array([-1, 0, 1, 0, 3]), -np.arange(5, dtype=np.float32))
    tokens, parents, log_probs = cut_at(1, tree)
    assert (tokens, parents.tolist(), log_probs.tolist()) == ([5, 7], [-1, 0, 0], [0, -1, -3])
    assert cut_at(2, tree) is tree


def test_the_surest_nodes_are_kept():
    """The drafter's confidence chooses among nodes worth as much as a plain step."""
    server = Server(lambda _: 0)
    server.step({"a": 100, "b": 100})
    server.run(10)
    plan = server.tuner._step.plan
    assert plan.depth is not None
    sure = Proposal([1, 2, 3], np.arange(-1, 3, dtype=np.int32), np.zeros(4, dtype=np.float32))
    unsure = sure._replace(log_probs=np.array([0.0, -8.0, -16.0, -24.0], dtype=np.float32))
    drafts = server.tuner.keep([unsure, sure])
    assert len(drafts[0].tokens) == 0 and len(drafts[1].tokens) > 0


# ---- configurations that are refused, without vLLM itself

WORKER = "pagedtree.integrations.vllm.worker.TreeCPUWorker"


@pytest.fixture(autouse=True)
def plugins(monkeypatch):
    monkeypatch.setenv("PAGEDTREE_PLUGINS", "vllm")


def config_of(**model):
    """Makes a configuration that `check_config` accepts."""
    sizes = {f"{kind}_parallel_size": 1 for kind in ("pipeline", "data", "decode_context", "prefill_context", "tensor")}
    of_model = {
        "logits_processors": None,
        "uses_mrope": False,
        "has_inner_state": False,
        "is_encoder_decoder": False,
        "is_diffusion": False,
        "attention_chunk_size": None,
        "use_mla": False,
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": 20,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**of_model, **model}),
        parallel_config=SimpleNamespace(**sizes, _api_process_count=1, enable_dbo=False, worker_cls=WORKER),
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        scheduler_config=SimpleNamespace(async_scheduling=False, scheduler_cls=SCHEDULER),
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
        use_v2_model_runner=False,
        watermark_config=None,
    )


@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        ({"has_inner_state": True}, "cpu", "recurrent layers, whose states .*: expected False, got"),
        ({"use_mla": True}, "cuda", "latent attention on a GPU"),
    ],
)
def test_models_are_refused(options, device, message):
    """vLLM sets has_inner_state for models with recurrent layers, such as Qwen3-Next."""
    check_config(config_of(use_mla=True))
    config = config_of(**options)
    config.device_config.device_type = device
    with pytest.raises(ValueError, match=message):
        check_config(config)


@pytest.mark.parametrize("worker", ["auto", "vllm.v1.worker.gpu_worker.Worker", None])
def test_workers_of_vllm_are_refused(worker):
    config = config_of()
    config.parallel_config.worker_cls = worker
    with pytest.raises(ValueError, match=rf"worker_cls: expected pagedtree\..*TreeCPUWorker\), got {worker}"):
        check_config(config)
