"""Episodes opened and ended over HTTP: the ones that ended well have a reward, all are kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from agentrl.chat.template import Renderer
from agentrl.records import read_episodes, read_records
from agentrl.rollout.frame import Limits
from agentrl.serve.record import Recorder
from agentrl.serve.record_folder import RecordFolder
from agentrl.serve.run import running
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import say
from agentrl.testing.tiny_model import make_tokenizer

USER: Any = {"role": "user", "content": "1+2?"}


@asynccontextmanager
async def server(folder: Path, *, api_key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    tokenizer = folder.parent / "tokenizer"
    if not tokenizer.is_dir():
        tokenizer.mkdir()
        make_tokenizer(tokenizer, ["Use the calculator, then answer. "] * 4, vocab=330, max_context=2048)
    renderer = Renderer.from_directory(tokenizer)
    engine = ScriptedEngine(renderer, lambda turn: say("3"))
    episodes = RecordFolder(Recorder(engine, renderer, Limits()), folder, api_key=api_key, temperature=1.0)
    async with running(episodes.app()) as address, httpx.AsyncClient(base_url=address) as http:
        yield http
    await episodes.close()


async def begin(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await http.post("/episodes", json=body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def ask(episode: dict[str, Any]) -> str:
    async with AsyncOpenAI(base_url=episode["base_url"], api_key=episode["api_key"], max_retries=0) as client:
        answer = await client.chat.completions.create(model="m", messages=[USER])
        return answer.choices[0].message.content or ""


def key(episode: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {episode['api_key']}"}


async def test_what_is_ended_is_kept_and_what_is_not_has_no_reward(tmp_path: Path):
    async with server(tmp_path / "r") as http:
        good = await begin(http, task={"id": "t1", "row": {"a": 1}})
        assert await ask(good) == "3"
        shown = (await http.get(f"/episodes/{good['id']}", headers=key(good))).json()
        assert (shown["turns"], shown["messages"][-1]["content"]) == (1, "3")
        ended = await http.post(
            f"/episodes/{good['id']}/end", headers=key(good), json={"reward": 1.5, "rewards": {"solved": 1.5}}
        )
        assert ended.json()["turns"] == 1
        assert ended.json()["sampled_tokens"] > 0
        late = await http.post("/episodes/" + good["id"] + "/v1/chat/completions", headers=key(good), json={})
        assert late.status_code == 401
        failed = await begin(http, task={"id": "t1"})
        await ask(failed)
        await http.post(f"/episodes/{failed['id']}/end", headers=key(failed), json={"error": "the browser died"})
        await ask(await begin(http, task={"id": "t2"}))
    records = read_records(tmp_path / "r", 0)
    assert [(r.group, r.episode.reward, r.episode.error) for r in records] == [
        (0, 1.5, None),
        (0, None, "the browser died"),
        (1, None, "the session was not ended"),
    ]
    assert records[0].episode.rewards == {"solved": 1.5}
    assert records[0].episode.task.row == {"a": 1}
    assert [s.origin for s in records[0].episode.segments][-1] == "sampled"


async def test_a_later_server_adds_to_the_folder(tmp_path: Path):
    for task in ("a", "b"):
        async with server(tmp_path / "r") as http:
            one = await begin(http, task={"id": task})
            await ask(one)
            await http.post(f"/episodes/{one['id']}/end", headers=key(one), json={"reward": 0.0})
    assert [e.task.id for e in read_episodes(tmp_path / "r", 0)] == ["a", "b"]


async def test_who_may_open_and_what_is_refused(tmp_path: Path):
    async with server(tmp_path / "r", api_key="admin") as http:
        assert (await http.post("/episodes", json={})).status_code == 401
        answer = await http.post("/episodes", json={}, headers={"Authorization": "Bearer admin"})
        one = answer.json()
        assert answer.status_code == 201
        for body, text in (
            ({}, "give exactly one of `reward` and `error`"),
            ({"reward": "high"}, "reward"),
            ({"reward": 1, "score": 2}, "score"),
        ):
            refused = await http.post(f"/episodes/{one['id']}/end", headers=key(one), json=body)
            assert refused.status_code == 400
            assert text in refused.json()["error"]["message"]
        stranger = await http.post(
            f"/episodes/{one['id']}/end", headers={"Authorization": "Bearer admin"}, json={}
        )
        assert stranger.status_code == 401
        empty = await http.post(f"/episodes/{one['id']}/end", headers=key(one), json={"reward": 1.0})
        assert empty.json()["turns"] == 0
    assert read_episodes(tmp_path / "r", 0)[0].error == "there is no completion in it", "nothing to train on"
