"""Episodes opened and ended over HTTP: the ones that ended well have a reward, all are kept."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, InternalServerError
from typer.testing import CliRunner

from agentrl.agents.external import RecordFolder
from agentrl.agents.recorder import Recorder
from agentrl.chat.template import Renderer
from agentrl.cli.app import app
from agentrl.errors import ConfigError
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.limits import EpisodeLimits
from agentrl.run_folder.records import PARTIAL_FILE, read_episodes, read_records, recorded_steps
from agentrl.run_folder.search_index import Query
from agentrl.serve.listen import running
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import say
from agentrl.view.library import Library

USER: Any = {"role": "user", "content": "1+2?"}


@asynccontextmanager
async def server(
    folder: Path, *, api_key: str | None = None, answer: Callable[[Any], Any] = lambda turn: say("3")
) -> AsyncIterator[httpx.AsyncClient]:
    tokenizer = folder.parent / "tokenizer"
    if not tokenizer.is_dir():
        tokenizer.mkdir()
        make_tokenizer(tokenizer, ["Use the calculator, then answer. "] * 4, vocab=330, max_context=2048)
    renderer = Renderer.from_directory(tokenizer)
    engine = ScriptedEngine(renderer, answer)
    episodes = RecordFolder(Recorder(engine, renderer, EpisodeLimits()), folder, api_key=api_key, temperature=1.0)
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
        silent = await begin(http, task={"id": "t3"})
        told = await http.post(f"/episodes/{silent['id']}/end", headers=key(silent), json={"reward": 1.0})
        assert told.json()["error"] == "it has no completions"
        await ask(await begin(http, task={"id": "t2"}))
    records = read_records(tmp_path / "r", 0)
    assert [(r.group, r.episode.reward, r.episode.error) for r in records] == [
        (0, 1.5, None),
        (0, None, "the browser died"),
        (1, None, "it has no completions"),
        (2, None, "the session was not ended"),
    ]
    assert records[0].episode.rewards == {"solved": 1.5}
    assert records[0].episode.task.row == {"a": 1}
    assert [s.origin for s in records[0].episode.segments][-1] == "sampled"
    (turn,) = records[0].episode.turns
    assert 0 < turn.start_s < records[0].episode.seconds
    assert records[0].episode.start_s < records[3].episode.start_s


async def served_once(folder: Path, task: str) -> None:
    """A server that records one episode."""
    async with server(folder) as http:
        one = await begin(http, task={"id": task})
        await ask(one)
        await http.post(f"/episodes/{one['id']}/end", headers=key(one), json={"reward": 0.0})


async def test_a_later_server_adds_to_the_folder(tmp_path: Path):
    for task in ("a", "b"):
        await served_once(tmp_path / "r", task)
    assert [e.task.id for e in read_episodes(tmp_path / "r", 0)] == ["a", "b"]


async def test_a_line_that_a_killed_server_left_torn_takes_no_other_along(tmp_path: Path):
    for task in ("a", "b"):
        await served_once(tmp_path / "r", task)
        if task == "a":
            with (tmp_path / "r" / PARTIAL_FILE).open("ab") as file:
                file.write(b'{"step":0,"gro')
    assert [e.task.id for e in read_episodes(tmp_path / "r", 0)] == ["a", "b"]


async def record_and_die(folder: Path) -> None:
    """Record two episodes, leave a third open, and be killed."""
    async with server(folder) as http:
        for task in ("b", "c"):
            one = await begin(http, task={"id": task})
            await ask(one)
            await http.post(f"/episodes/{one['id']}/end", headers=key(one), json={"reward": 1.0})
        await ask(await begin(http, task={"id": "open"}))
        with (folder / PARTIAL_FILE).open("ab") as file:
            file.write(b'{"step":0,"gro')
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("earlier", [False, True])
async def test_the_recording_of_a_killed_server_can_be_read(tmp_path: Path, earlier: bool):
    folder = tmp_path / "recordings" / "r"
    folder.parent.mkdir()
    if earlier:
        await served_once(folder, "a")
    run = [sys.executable, "-c", f"from {__name__} import *; asyncio.run(record_and_die(Path('r')))"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    died = await asyncio.to_thread(subprocess.run, run, cwd=folder.parent, env=environment)
    assert died.returncode == -signal.SIGKILL
    tasks = ["a", "b", "c"] if earlier else ["b", "c"]
    assert recorded_steps(folder) == [0]
    assert [e.task.id for e in read_episodes(folder, 0)] == tasks
    shown = CliRunner().invoke(app, ["show", str(folder)])
    assert f"step 0: {len(tasks)} episodes" in shown.output
    library = Library([folder.parent], index=tmp_path / "index")
    assert [group["task"] for group in library.step("r", 0)["groups"]] == tasks
    assert library.search(Query("1+2"))["total"] == len(tasks)
    await served_once(folder, "d")
    assert [group["task"] for group in library.step("r", 0)["groups"]] == [*tasks, "d"]
    assert library.search(Query("1+2"))["total"] == len(tasks) + 1


async def test_an_episode_that_met_a_bug_of_ours_has_no_reward(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    answers = iter([say("3")])

    def answer(turn: object) -> Any:
        try:
            return next(answers)
        except StopIteration:
            raise RuntimeError("ours") from None

    async with server(tmp_path / "r", answer=answer) as http:
        one = await begin(http)
        assert await ask(one) == "3"
        with pytest.raises(InternalServerError):
            await ask(one)
        ended = await http.post(f"/episodes/{one['id']}/end", headers=key(one), json={"reward": 1.0})
    caplog.clear()
    assert ended.json()["error"] == "a bug in agentrl: RuntimeError: ours"
    (episode,) = read_episodes(tmp_path / "r", 0)
    assert (episode.reward, episode.rewards, episode.solved) == (None, {}, None)


async def test_an_episode_that_cannot_be_written_is_still_there(tmp_path: Path):
    async with server(tmp_path / "r") as http:
        for full in (False, True):
            one = await begin(http, task={"id": f"full: {full}"})
            await ask(one)
            path = f"/episodes/{one['id']}/end"
            if full:
                size, before = (tmp_path / "r" / PARTIAL_FILE).stat().st_size, getrlimit(RLIMIT_FSIZE)
                heeded = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                setrlimit(RLIMIT_FSIZE, (size + 100, before[1]))
                try:
                    refused = await http.post(path, headers=key(one), json={"reward": 1.0})
                finally:
                    setrlimit(RLIMIT_FSIZE, before)
                    signal.signal(signal.SIGXFSZ, heeded)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_written")
                assert (tmp_path / "r" / PARTIAL_FILE).stat().st_size == size
            assert (await http.post(path, headers=key(one), json={"reward": 1.0})).status_code == 200
    assert [e.task.id for e in read_episodes(tmp_path / "r", 0)] == ["full: False", "full: True"]


async def test_two_servers_do_not_record_into_one_folder_and_none_into_a_run(tmp_path: Path):
    async with server(tmp_path / "r"):
        with pytest.raises(ConfigError, match=r"held by .*; wait for it to end, stop it, or give another folder"):
            async with server(tmp_path / "r"):
                pass
    await served_once(tmp_path / "r", "after")
    (tmp_path / "r" / "config.yaml").touch()
    with pytest.raises(ConfigError, match="is the folder of a run"):
        async with server(tmp_path / "r"):
            pass


async def test_an_episode_that_ends_while_its_end_is_being_read_ends_once(tmp_path: Path):
    async with server(tmp_path / "r") as http:
        one = await begin(http)
        await ask(one)
        begun, done = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b'{"reward": '
            begun.set()
            await done.wait()
            yield b"2.0}"

        path, headers = f"/episodes/{one['id']}/end", key(one)
        late = asyncio.ensure_future(http.post(path, headers=headers, content=slow()))
        await begun.wait()
        await http.get("/health")  # a round trip, in which the head of the slow request has come
        assert (await http.post(path, headers=headers, json={"reward": 1.0})).status_code == 200
        done.set()
        refused = await late
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert [e.reward for e in read_episodes(tmp_path / "r", 0)] == [1.0]


async def test_paths_that_are_not_there_get_the_form_of_all_errors(tmp_path: Path):
    async with server(tmp_path / "r") as http:
        one = await begin(http)
        text = await http.post(f"/episodes/{one['id']}/v1/completions", headers=key(one), json={})
        assert (text.status_code, text.json()["error"]["code"]) == (404, "not_found")
        listed = await http.get("/episodes")
        assert (listed.status_code, listed.json()["error"]["code"]) == (405, "method_not_supported")


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
    assert read_episodes(tmp_path / "r", 0)[0].error == "it has no completions", "nothing to train on"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses/r"])
async def test_who_asks_without_an_episode_is_told_how_to_open_one(tmp_path: Path, path: str):
    async with server(tmp_path / "r") as http:
        answer = await http.post(path, json={})
    assert answer.status_code == 404
    assert "POST /episodes" in answer.json()["error"]["message"]
    assert ("type" in answer.json()) == (path == "/v1/messages"), "Anthropic's format"


@pytest.mark.parametrize("command", ["doctor", "replay", "rescore"])
async def test_commands_for_runs_say_what_reads_a_recording(tmp_path: Path, command: str):
    async with server(tmp_path / "r") as http:
        await ask(await begin(http))
    found = CliRunner().invoke(app, [command, str(tmp_path / "r")])
    assert found.exit_code != 0
    assert "it has no config.yaml; it holds recorded episodes, which `agentrl show`" in str(found.exception)
