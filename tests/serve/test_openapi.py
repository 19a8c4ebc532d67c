"""Whatever the description of the endpoint allows, and much that it does not, is answered below 500.

AGENTRL_SCHEMA_CASES sets how many requests are made of each operation that takes a body; the full number is 1700
(8,500 requests over the five of them), which takes minutes.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from starlette.testclient import TestClient

from agentrl.chat.template import Renderer
from agentrl.serve.conversations import Conversations
from agentrl.serve.endpoint import Settings, create_app
from agentrl.serve.openapi import describe
from agentrl.serve.prometheus import Metrics
from agentrl.serve.service import ChatService, Gate
from tests.serve.serve_kit import Fixed

schemathesis = pytest.importorskip("schemathesis")

CASES = int(os.environ.get("AGENTRL_SCHEMA_CASES", "40"))


@pytest.mark.timeout(120 + CASES)
@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"],
)
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_is_answered_with_a_5xx(renderer: Renderer, path: str, mode: str):
    service = ChatService(Fixed(renderer), renderer, gate=Gate(4096), metrics=Metrics())
    session = Conversations(renderer, max_tokens=10_000)
    app = create_app(service, Settings(names=("tiny",), accept_any_model=True), session=session)
    schema = schemathesis.openapi.from_dict(describe())
    generation = getattr(schemathesis.GenerationMode, mode.upper())
    seen: dict[int, int] = {}
    with warnings.catch_warnings(), TestClient(app, raise_server_exceptions=True) as client:
        warnings.simplefilter("ignore")

        @settings(
            max_examples=max(1, CASES // 2),
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=schema[path]["POST"].as_strategy(generation_mode=generation))
        def requests(case: Any) -> None:
            answer = client.request("POST", path, json=case.body if _is_json(case.body) else None)
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
            assert answer.status_code < 500, (case.body, answer.text)
            if answer.status_code >= 400:
                anthropic = {"message", "type"}
                fields = anthropic if "messages" in path else anthropic | {"param", "code"}
                assert set(answer.json()["error"]) == fields

        requests()
    assert sum(seen.values()) >= CASES // 2 - 5
    assert set(seen) <= ({200, 400} if mode == "positive" else {200, 400, 404, 413}), seen


def _is_json(body: Any) -> bool:
    return body is None or isinstance(body, dict | list | str | int | float | bool)
