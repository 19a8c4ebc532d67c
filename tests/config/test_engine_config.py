"""Settings of engines that would have no effect are errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from agentrl.config.engine import EngineConfig
from agentrl.config.run import RunConfig

URLS = ["http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"sync": "disk"}, "sync has no effect unless kind is sglang or vllm"),
        ({"sync": "auto"}, "sync has no effect unless kind is sglang or vllm"),
        ({"sync_tolerance": 0.1}, "sync_tolerance has no effect"),
        ({"server": {"replicas": 1}}, "server.replicas has no effect unless kind is sglang or vllm"),
        ({"server": {"urls": []}}, "server.urls has no effect unless kind is sglang or vllm"),
        ({"server": {"replicas": 2}}, "server.replicas has no effect unless kind is sglang or vllm"),
        (
            {"kind": "sglang", "server": {"urls": URLS, "replicas": 2}},
            "replicas has no effect while urls is given",
        ),
        (
            {"kind": "sglang", "server": {"urls": URLS, "args": ["--x"]}},
            "args has no effect while urls is given",
        ),
        (
            {"kind": "sglang", "server": {"urls": URLS, "tensor_parallel": 2}},
            "server.tensor_parallel has no effect",
        ),
        (
            {"kind": "sglang", "server": {"sync_folder": "/x"}},
            "sync_folder has no effect unless",
        ),
        ({"kind": "sglang", "sync": "disk", "server": {"bucket_mb": 1}}, "bucket_mb has no effect"),
        ({"kind": "vllm", "server": {"args": ["--port", "80"]}}, "--port has no effect"),
        ({"kind": "vllm", "server": {"args": ["--port=80"]}}, "--port has no effect"),
        ({"kind": "vllm", "server": {"environment": {"A=B": "1"}}}, "'A=B' cannot be set"),
        ({"kind": "vllm", "server": {"environment": {"": "1"}}}, "'' cannot be set"),
        ({"kind": "vllm", "server": {"environment": {"A": "1\0"}}}, "'A' cannot be set"),
        ({"kind": "sglang", "sync": "tensor", "device": "cuda", "server": {"urls": URLS}}, "this machine only"),
        ({"kind": "vllm", "sync": "broadcast"}, "does not exist for vllm"),
        ({"sync": "lora"}, "sync has no effect unless kind is sglang or vllm"),
        ({"kind": "sglang", "sync": "lora", "server": {"bucket_mb": 1}}, "bucket_mb has no effect"),
        ({"kind": "sglang", "sync": "lora", "server": {"sleep": True}}, "sync: lora sends only the adapter"),
        ({"kind": "sglang", "sync": "broadcast", "server": {"sleep": True}}, "needs servers on other GPUs"),
        ({"device": "cpu", "cuda_graphs": "off"}, "cuda_graphs has no effect while device is cpu"),
        ({"kind": "vllm", "cuda_graphs": "off"}, r"cuda_graphs has no effect unless kind is local \(it is vllm\)"),
    ],
)
def test_dead_settings_are_errors(data: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        EngineConfig.model_validate(data)


@pytest.mark.parametrize(
    ("data", "sync"),
    [
        ({"kind": "sglang"}, "tensor"),
        ({"kind": "sglang", "server": {"urls": URLS}}, "disk"),
        ({"kind": "sglang", "sync": "broadcast", "server": {"urls": URLS, "tensor_parallel": 2}}, "broadcast"),
        ({"kind": "vllm"}, "disk"),
        ({"kind": "vllm", "sync": "tensor", "device": "cuda", "server": {"urls": URLS}}, "tensor"),
        ({"kind": "vllm", "sync": "delta", "dtype": "bfloat16"}, "delta"),
        ({"kind": "vllm", "sync": "lora", "server": {"sync_folder": "/x"}}, "lora"),
    ],
)
def test_auto_chooses_a_way_for_weights(data: dict[str, Any], sync: str) -> None:
    assert EngineConfig.model_validate(data).resolved_sync == sync


def test_an_adapter_can_only_be_sent_where_there_is_one() -> None:
    run = {"env": "agentrl.envs.calculator:Calculator", "model": {"path": "x"}}
    engine = {"kind": "sglang", "sync": "lora"}
    with pytest.raises(ValidationError, match=r"set learner\.lora"):
        RunConfig.model_validate(run | {"engine": engine})
    RunConfig.model_validate(run | {"engine": engine, "learner": {"lora": {}}})


def test_auto_precision_follows_the_device() -> None:
    assert EngineConfig(device="cpu").resolved_dtype == "float32"
    assert EngineConfig(device="cuda:1").resolved_dtype == "bfloat16"
    assert EngineConfig(device="cuda", dtype="float32").resolved_dtype == "float32"
    here = "bfloat16" if torch.cuda.is_available() else "float32"
    assert EngineConfig().resolved_dtype == here


def test_the_tolerance_follows_the_precision() -> None:
    assert EngineConfig(kind="sglang").resolved_tolerance < EngineConfig(dtype="bfloat16").resolved_tolerance
    assert EngineConfig(kind="sglang", sync_tolerance=0.5).resolved_tolerance == 0.5
