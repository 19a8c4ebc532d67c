"""A server that says when to ask again is asked then."""

from __future__ import annotations

import asyncio
import email.utils
import time
from typing import Any

import httpx
import pytest

from agentrl.config.teacher import TeacherConfig
from agentrl.engine.chat_client import ChatClient, Endpoint
from agentrl.env.judge import Judge, RewardApi
from agentrl.errors import ConfigError, EngineError, JudgeError
from agentrl.learner.teacher_server import TeacherServer
from agentrl.retry_after import LONGEST_S, retry_after
from tests.eval.eval_server import Answer, Server, serving

SCORED: Answer = 200, {"scores": [0.5]}, {}


def busy(*waits: str, then: Answer | None = None) -> Server:
    """A server that asks for these waits in seconds, then answers."""

    def trouble(number: int) -> Answer | None:
        if number > len(waits):
            return then
        return 429, {"error": {"message": "busy"}}, {"Retry-After": waits[number - 1]}

    return Server(lambda messages: {"content": "fine"}, trouble)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each `asyncio.sleep`, which takes none."""
    waited: list[float] = []

    async def sleep(seconds: float, result: Any = None, *, real: Any = asyncio.sleep) -> Any:
        if seconds:
            waited.append(seconds)
        return await real(0, result)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return waited


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("300", 300), ("0.5", 0.5), ("", 0), ("soon", 0), ("-3", 0), ("nan", 0), ("inf", 0), ("86400", 0)],
)
def test_the_header_as_seconds(value: str, seconds: float):
    response = httpx.Response(429, headers={"Retry-After": value}, request=httpx.Request("GET", "http://h"))
    assert retry_after(httpx.HTTPStatusError("busy", request=response.request, response=response)) == seconds
    assert retry_after(ValueError("no response")) == 0


def test_the_header_as_a_date():
    date = email.utils.formatdate(time.time() + 300, usegmt=True)
    response = httpx.Response(503, headers={"Retry-After": date}, request=httpx.Request("GET", "http://h"))
    assert 200 < retry_after(httpx.HTTPStatusError("", request=response.request, response=response)) <= 300
    response.headers["Retry-After"] = "Mon, 01 Jan 99999 00:00:00 GMT"
    assert retry_after(httpx.HTTPStatusError("", request=response.request, response=response)) == 0


@pytest.mark.parametrize(("value", "seconds"), [("12500", 12.5), ("soon", 13), ("-1", 0), ("600001", 0)])
def test_milliseconds_of_openai_come_before_seconds(value: str, seconds: float):
    headers = {"Retry-After": "13", "Retry-After-Ms": value}
    response = httpx.Response(429, headers=headers, request=httpx.Request("GET", "http://h"))
    assert retry_after(httpx.HTTPStatusError("busy", request=response.request, response=response)) == seconds


async def test_an_endpoint_is_asked_again_after_the_wait(slept: list[float]):
    with serving(busy("300", "200")) as server:
        client = ChatClient(Endpoint(server.url, "m", retries=2))
        assert client._client.max_retries == 0, "some versions of the SDK do not wait longer than a minute"
        _, reply = await client.ask([{"role": "user", "content": "?"}], temperature=0, max_tokens=9, tools=())
        await client.close()
    assert reply.message.content == "fine"
    assert [s for s in slept if s > 100] == [300, 200]


@pytest.mark.parametrize("wait", ["300", f"{LONGEST_S + 1}"])
async def test_an_endpoint_is_given_up_in_the_end(slept: list[float], wait: str):
    with serving(busy(*[wait] * 9)) as server:
        client = ChatClient(Endpoint(server.url, "m", retries=2))
        with pytest.raises(EngineError, match="status 429: busy"):
            await client.ask([{"role": "user", "content": "?"}], temperature=0, max_tokens=9, tools=())
        await client.close()
    assert slept == ([300, 300] if wait == "300" else [])
    assert len(server.requests) == (3 if wait == "300" else 1), "it need not be asked before a longer wait ends"


async def test_a_judge_and_a_reward_server_are_asked_again_after_the_wait(slept: list[float]):
    with serving(busy("300", "20")) as server:
        judge = Judge(server.url, "m", retries=2)
        assert await judge.ask("?") == "fine"
        await (await judge._clients.get(judge._new_client)).close()
    with serving(busy("200", then=SCORED)) as server:
        assert await RewardApi(server.url, retries=1).score(["t"]) == [0.5]
    assert slept == [300, 20, 200]
    with serving(busy(*["300"] * 9)) as server:
        judge = Judge(server.url, "m", retries=1)
        with pytest.raises(JudgeError, match="429"):
            await judge.ask("?")
        await (await judge._clients.get(judge._new_client)).close()


@pytest.mark.parametrize(("retry_s", "first"), [(600, 300.0), (100, 0.5)])
def test_a_teacher_is_asked_again_after_the_wait_if_there_is_time_for_it(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, retry_s: int, first: float
):
    with serving(busy("300", then=(200, {"choices": []}, {}))) as server:
        teacher = TeacherServer(TeacherConfig(url=server.url, model="t", retry_s=retry_s))
        waited: list[float] = []
        monkeypatch.setattr(teacher._closed, "wait", waited.append)
        with pytest.raises(ConfigError, match="scores 0 of 2 given tokens"):
            teacher.scored([1, 2])
        teacher.close()
    assert waited == [first]
