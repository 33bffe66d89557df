"""The vLLM adapter refuses unsupported configurations, without vLLM itself."""

from types import SimpleNamespace

import pytest

from pagedtree.integrations.vllm.limits import SCHEDULER, check_config

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
        (
            {"has_inner_state": True},
            "cpu",
            r"model \(recurrent layers, whose states follow no trees here\): expected False, got",
        ),
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
