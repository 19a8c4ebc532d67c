"""Requests that no honest agent would send: exact tokens or a clear refusal, and nothing is left behind.

Late bodies, races for the last turn, abandoned retries, huge conversations, and random sessions that mix dialects,
rewrite their history, hang up and ask twice.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from agentrl.agents.recorder import EpisodeRecording, Recorder
from agentrl.chat.demonstrate import completion_of
from agentrl.chat.template import Renderer
from agentrl.engine.base import EngineCapabilities, GenerateOptions, TokenLogprob
from agentrl.rollout.limits import EpisodeLimits
from agentrl.serve.listen import running
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import say
from agentrl.types import Completion, Message, Sampling, StopReason, ToolCall
from tests.agents.test_recorder import TOOLS, USER, by_turn, recorded
from tests.agents.test_recorder import renderer as renderer

Json = dict[str, Any]
BODY: Json = {"model": "m", "messages": [USER]}


def sampled_of(recording: EpisodeRecording) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What each sampled segment continues, and its ids."""
    segments, found = recording.ledger.segments, []
    for segment in segments:
        if segment.origin == "sampled":
            before: list[int] = []
            at = segment.parent
            while at >= 0:
                before[:0] = segments[at].ids
                at = segments[at].parent
            found.append((tuple(before), tuple(segment.ids)))
    return found


# -- after the end ---------------------------------------------------------------------------------------------


async def test_a_request_whose_body_ends_after_the_episode_is_refused(renderer: Renderer):
    async with recorded(renderer, [say("late")]) as one:
        body = json.dumps(BODY).encode()
        host, port = one.address.removeprefix("http://").split(":")
        head = f"POST {one.recording.keyed_path}/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:10])
        await writer.drain()
        await asyncio.sleep(0.2)
        one.recording.seal()
        writer.write(body[10:])
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 410")
    assert one.recording.num_turns == 0
    assert sampled_of(one.recording) == []


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_whoever_waits_when_the_episode_ends_is_told_that_it_is_over(renderer: Renderer, stream: bool):
    async with recorded(renderer, lambda turn: say("late"), delay_s=0.5) as one:
        headers = {"authorization": f"Bearer {one.recording.key}"}
        async with httpx.AsyncClient(base_url=one.address + one.recording.path, headers=headers) as http:
            asked = [http.post("/chat/completions", json={**BODY, "stream": stream}) for _ in range(2)]
            waiting = [asyncio.ensure_future(one) for one in asked]  # the same request twice, and no retry
            await asyncio.sleep(0.25)
            one.recording.seal()
            answers = await asyncio.gather(*waiting)
            await asyncio.sleep(0.6)
    assert [answer.status_code for answer in answers] == [410, 410]
    assert {answer.json()["error"]["code"] for answer in answers} == {"episode_ended"}
    assert one.recording.num_turns == 0
    assert sampled_of(one.recording) == []
    assert one.recording.metrics() == {}


# -- limits and races ------------------------------------------------------------------------------------------


async def test_requests_at_once_do_not_get_more_turns_than_there_are(renderer: Renderer):
    async with recorded(renderer, lambda turn: say("hi"), delay_s=0.1, max_turns=3) as one:
        headers = {"authorization": f"Bearer {one.recording.key}"}
        async with httpx.AsyncClient(base_url=one.address + one.recording.path, headers=headers) as http:
            asked = [
                http.post("/chat/completions", json={**BODY, "stream": bool(n % 2), "seed": n}) for n in range(12)
            ]
            answers = await asyncio.gather(*asked)
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [400] * 9
    refused = [answer.json()["error"]["code"] for answer in answers if answer.status_code == 400]
    assert set(refused) == {"episode_limit_reached"}
    assert one.recording.num_turns == 3
    assert one.recording.stop is StopReason.MAX_TURNS
    assert len(sampled_of(one.recording)) == 3


async def test_a_turn_that_its_client_abandons_is_left_for_the_next(renderer: Renderer):
    async with recorded(renderer, lambda turn: say("hi"), delay_s=0.6, max_turns=1) as one:
        first = asyncio.ensure_future(one.chat([USER]))
        await asyncio.sleep(0.2)
        second = asyncio.ensure_future(one.chat([{"role": "user", "content": "other"}]))
        await asyncio.sleep(0.2)
        first.cancel()
        assert (await second).choices[0].message.content == "hi"
    assert one.recording.num_turns == 1
    assert one.recording.metrics() == {"agent/unanswered": 1.0}


async def test_a_retry_that_meets_an_abandoned_completion_is_answered(renderer: Renderer):
    async with recorded(renderer, by_turn(say("first"), say("second")), delay_s=0.2) as one:
        headers = {"Idempotency-Key": "k", "authorization": f"Bearer {one.recording.key}"}
        url = one.address + one.recording.path + "/chat/completions"
        async with httpx.AsyncClient(headers=headers) as http:
            first = asyncio.ensure_future(http.post(url, json=BODY))
            while not one.recording.sampling:  # noqa: ASYNC110 - the recorder counts, it tells nobody
                await asyncio.sleep(0.005)
            (job,) = one.recording.jobs.values()
            job.drop()  # as for a client that has just left
            again = await http.post(url, json=BODY)
            answers = [await first, again]
    assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {"first"}
    assert one.recording.num_turns == 1


async def test_a_bug_of_ours_is_kept_for_the_run_to_stop_on(renderer: Renderer, caplog: pytest.LogCaptureFixture):
    async with recorded(renderer, by_turn(RuntimeError("ours"), say("on"))) as one:
        headers = {"authorization": f"Bearer {one.recording.key}"}
        async with httpx.AsyncClient(base_url=one.address + one.recording.path, headers=headers) as http:
            answer = await http.post("/chat/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert repr(one.recording.bug) == "RuntimeError('ours')"
    caplog.clear()


# -- sizes -----------------------------------------------------------------------------------------------------

MANY = 10 << 20
HUGE: dict[str, Json] = {
    "one text": {"messages": [{"role": "user", "content": "tell me more " * (MANY // 13)}]},
    "many messages": {"messages": [{"role": "user", "content": "hi"}] * (MANY // 34)},
    "many parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}] * (MANY // 30)}]},
    "a long turn": {
        "messages": [
            USER,
            {"role": "assistant", "content": "word " * (MANY // 5)},
            {"role": "user", "content": "?"},
        ]
    },
    "long arguments": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "function": {"name": "calculator", "arguments": "1" * MANY}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "3"},
        ]
    },
    "a long tool": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "f", "description": "word " * (MANY // 5)}}],
    },
    "many tools": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(MANY // 60)],
    },
}


@pytest.mark.parametrize("kind", HUGE)
async def test_ten_megabytes_are_refused_while_other_episodes_are_answered(renderer: Renderer, kind: str):
    async with recorded(renderer, lambda turn: say("hi"), token_budget=4000) as one:
        other = one.recorder.open(temperature=1.0, seed=2)
        body = json.dumps({"model": "m", **HUGE[kind]}).encode()
        assert len(body) > 0.9 * MANY
        async with httpx.AsyncClient(base_url=one.address, timeout=60) as http:
            huge = asyncio.ensure_future(http.post(one.recording.keyed_path + "/chat/completions", content=body))
            answered = 0
            while not huge.done():
                answer = await http.get(other.keyed_path + "/models")
                assert answer.status_code == 200
                answered += 1
                await asyncio.sleep(0.01)
            refused = (await huge).json()["error"]
            asked = await http.post(other.keyed_path + "/chat/completions", json=BODY)
        assert (refused["code"], one.recording.stop) == ("request_too_large", StopReason.TOKEN_BUDGET)
        assert answered >= 1
        assert asked.status_code == 200
        assert (one.recording.num_turns, other.num_turns) == (0, 1)
        assert one.recording.ledger.segments == ()
        await one.recorder.close(other)


def smaller(value: Any) -> Any:
    """The same with fewer items, and shorter texts."""
    if isinstance(value, dict):
        return {name: smaller(one) for name, one in value.items()}
    if isinstance(value, list):
        return [smaller(one) for one in value[:4000]]
    return value[: 1 << 19] if isinstance(value, str) else value


@pytest.mark.parametrize("kind", HUGE)
async def test_what_is_read_and_does_not_fit_is_refused_as_well(renderer: Renderer, kind: str):
    async with recorded(renderer, lambda turn: say("hi"), token_budget=4000) as one:
        body = json.dumps({"model": "m", **smaller(HUGE[kind])}).encode()
        assert len(body) < 1 << 20
        async with httpx.AsyncClient(base_url=one.address + one.recording.keyed_path, timeout=60) as http:
            answer = await http.post("/chat/completions", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert one.recording.stop is StopReason.TOKEN_BUDGET


async def test_a_history_of_many_short_messages_is_rendered_in_one_go(renderer: Renderer):
    async with recorded(renderer, lambda turn: say("hi"), token_budget=60_000) as one:
        many = [{"role": role, "content": f"word {n}"} for n in range(600) for role in ("user", "assistant")]
        for messages in ([*many, USER], [USER, {"role": "assistant", "content": "hi"}, *many, USER]):
            begun = time.process_time()
            answer = await one.chat(messages)
            assert time.process_time() - begun < 5, "each message was rendered with all before it"
            assert answer.usage.prompt_tokens > 5000
        for turn in one.recording.session.turns:
            whole = renderer.encode(turn.branch.context[:-1], TOOLS, generation_prompt=True)
            assert list(turn.branch.ids[: turn.prompt_tokens]) == whole
        assert one.recording.num_turns == 2


# -- dialects --------------------------------------------------------------------------------------------------


class Engine(ScriptedEngine):
    """Draws random turns, each with a word of its own, and remembers what it drew behind which prompt."""

    capabilities = EngineCapabilities(streaming=True, masks=True)

    def __init__(self, renderer: Renderer, seed: int) -> None:
        super().__init__(renderer, [], max_context=32_768)
        self.rng, self.tokenizer, self.count = random.Random(seed), renderer, 0
        self.drawn: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def line(self) -> Message:
        self.count += 1
        rng, word = self.rng, f"w{self.count}w"
        calls = tuple(
            ToolCall(f"c{n:08d}", "calculator", {"expression": rng.choice(("1+2", f"{word} ", "3 * 4"))})
            for n in range(rng.choice((0, 1, 1, 2)))
        )
        text = rng.choice((word, f" {word}  ", f"{word}\n\n", "")) if calls else f"{word} says the policy"
        if not text and not any(word in call.arguments["expression"] for call in calls):
            text = word
        return Message("assistant", text, calls, reasoning=rng.choice((None, "Hm. ", "Let me think")))

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        return await self.generate_streaming(ids, sampling, GenerateOptions(), session=session)

    async def generate_streaming(
        self, ids: Sequence[int], sampling: Sampling, options: GenerateOptions, *, session: str | None = None
    ) -> Completion:
        completion, prompt = completion_of(self.tokenizer, self.line(), TOOLS), tuple(ids)
        for id in completion.ids:
            await asyncio.sleep(0)
            if options.on_token is not None:
                options.on_token(TokenLogprob(id, 0.0, 0))
        self.drawn.append((prompt, tuple(completion.ids)))
        return completion


Item = tuple[str, Any]
"""An item of a conversation, apart from any dialect: user text, a turn of the policy, or the result of a call."""


def in_chat(items: Sequence[Item]) -> Json:
    messages: list[Json] = []
    for kind, value in items:
        if kind == "turn":
            message = {"role": "assistant", "content": value["text"] or None}
            if value["reasoning"]:
                message["reasoning_content"] = value["reasoning"]
            if value["calls"]:
                message["tool_calls"] = [
                    {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
                    for id, name, text in value["calls"]
                ]
            messages.append(message)
        elif kind == "result":
            messages.append({"role": "tool", "tool_call_id": value[0], "content": value[1]})
        else:
            messages.append({"role": "user", "content": value})
    return {"messages": messages, "tools": TOOLS}


def in_messages(items: Sequence[Item]) -> Json:
    messages: list[Json] = []
    for kind, value in items:
        if kind == "turn":
            blocks = [{"type": "thinking", "thinking": value["reasoning"], "signature": ""}]
            blocks = blocks if value["reasoning"] else []
            blocks += [{"type": "text", "text": value["text"]}] if value["text"].strip() else []
            blocks += [
                {"type": "tool_use", "id": id, "name": name, "input": json.loads(text)}
                for id, name, text in value["calls"]
            ]
            messages.append({"role": "assistant", "content": blocks})
            continue
        block: Json = {"type": "text", "text": value}
        if kind == "result":
            block = {"type": "tool_result", "tool_use_id": value[0], "content": value[1]}
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append(block)
        else:
            messages.append({"role": "user", "content": [block]})
    function = TOOLS[0]["function"]
    tool = {"name": function["name"], "description": function["description"]}
    return {
        "messages": messages,
        "max_tokens": 400,
        "tools": [{**tool, "input_schema": function["parameters"]}],
    }


def in_responses(items: Sequence[Item]) -> Json:
    found: list[Json] = []
    for kind, value in items:
        if kind == "turn":
            if value["reasoning"]:
                summary = [{"type": "summary_text", "text": value["reasoning"]}]
                found.append({"type": "reasoning", "id": "rs_1", "summary": summary})
            if value["text"]:
                content = [{"type": "output_text", "text": value["text"], "annotations": []}]
                found.append({"type": "message", "role": "assistant", "content": content})
            found += [
                {"type": "function_call", "call_id": id, "name": name, "arguments": text}
                for id, name, text in value["calls"]
            ]
        elif kind == "result":
            found.append({"type": "function_call_output", "call_id": value[0], "output": value[1]})
        else:
            found.append({"role": "user", "content": value})
    return {"input": found, "tools": [{"type": "function", "strict": False, **TOOLS[0]["function"]}]}


def read_chat(answer: Json) -> Item:
    message = answer["choices"][0]["message"]
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    said = {"text": message["content"] or "", "reasoning": message.get("reasoning_content") or "", "calls": calls}
    return "turn", said


def read_messages(answer: Json) -> Item:
    blocks = answer["content"]
    calls = [(b["id"], b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"]
    text = "".join(b["text"] for b in blocks if b["type"] == "text")
    return "turn", {"text": text, "reasoning": _thought(blocks), "calls": calls}


def _thought(blocks: Sequence[Json]) -> str:
    return "".join(block["thinking"] for block in blocks if block["type"] == "thinking")


def read_responses(answer: Json) -> Item:
    output = answer["output"]
    calls = [(i["call_id"], i["name"], i["arguments"]) for i in output if i["type"] == "function_call"]
    text = "".join(part["text"] for i in output if i["type"] == "message" for part in i["content"])
    return "turn", {"text": text, "reasoning": "", "calls": calls}


DIALECTS: dict[str, Any] = {
    "/chat/completions": (in_chat, read_chat),
    "/messages": (in_messages, read_messages),
    "/responses": (in_responses, read_responses),
}


def goes_on(turn: Item, rng: random.Random) -> list[Item]:
    """What a client adds to a turn: the results of its calls in some order, or the user's next words."""
    results: list[Item] = [("result", (id, rng.choice(("3", "", "two\nlines")))) for id, _, _ in turn[1]["calls"]]
    return results or [("user", rng.choice(("and now?", "go on")))]


def rewritten(items: list[Item], rng: random.Random) -> list[Item]:
    """The same conversation, subtly changed, or cut."""
    items = [(kind, dict(value) if kind == "turn" else value) for kind, value in items]
    at = rng.randrange(len(items))
    kind, value = items[at]
    change = rng.choice(("white space", "thinking", "order", "words", "cut", "drop", "ids"))
    if change == "cut":
        return [*items[: rng.randrange(len(items)) + 1], ("user", "again")]
    if change == "drop" and len(items) > 2:
        return [*items[:at], *items[at + 1 :], ("user", "again")]
    if change == "order":
        swapped = [n for n in range(len(items) - 1) if items[n][0] == items[n + 1][0] == "result"]
        for n in swapped[:1]:
            items[n], items[n + 1] = items[n + 1], items[n]
    elif kind == "turn":
        if change == "thinking":
            value["reasoning"] = ""
        elif change == "ids":
            value["calls"] = [(f"x{n}", name, text) for n, (_, name, text) in enumerate(value["calls"])]
        else:
            value["text"] = f" {value['text']}\n" if change == "white space" else value["text"] + "!"
    elif kind == "user":
        items[at] = (kind, value + (" " if change == "white space" else "?"))
    return items


async def one_episode(http: httpx.AsyncClient, rng: random.Random) -> set[str]:
    """A session of random requests; the words of the policy that came back."""
    items: list[Item] = [("user", "1+2?")]
    words: set[str] = set()
    for _ in range(rng.randint(6, 14)):
        path = rng.choice(list(DIALECTS))
        write, read = DIALECTS[path]
        given = rewritten(items, rng) if rng.random() < 0.35 else items
        body, act = {"model": "m", **write(given)}, rng.random()
        if act < 0.12:
            async with http.stream("POST", path, json={**body, "stream": True}) as streamed:
                left = rng.randrange(12)
                async for _ in streamed.aiter_lines():
                    left -= 1
                    if left < 0:
                        break
            continue
        if act < 0.2:
            await http.post("/messages/count_tokens", json={"model": "m", **in_messages(given)})
            continue
        headers = {"x-stainless-retry-count": "1"} if rng.random() < 0.2 else {}
        asked = [http.post(path, json=body, headers=headers) for _ in range(2 if rng.random() < 0.2 else 1)]
        for answer in await asyncio.gather(*asked):
            if answer.status_code != 200:  # a result without its call, for example
                assert answer.status_code == 400, answer.text
                assert answer.json()["error"]["message"]
                continue
            turn = read(answer.json())
            words |= {word for word in json.dumps(turn).replace('"', " ").split() if word.startswith("w")}
            items = [*given, turn, *goes_on(turn, rng)]
    return words


@pytest.mark.parametrize("seed", range(12))
async def test_random_sessions_keep_exact_tokens(renderer: Renderer, seed: int):
    engine = Engine(renderer, seed)
    recorder = Recorder(engine, renderer, EpisodeLimits(token_budget=30_000, max_turns=100))
    async with running(recorder.app()) as url:
        recordings = [recorder.open(temperature=1.0, seed=n) for n in range(2)]
        clients = [httpx.AsyncClient(base_url=url + one.keyed_path, timeout=60) for one in recordings]
        sessions = [one_episode(http, random.Random(seed * 2 + n)) for n, http in enumerate(clients)]
        heard = await asyncio.gather(*sessions)
        for http, recording in zip(clients, recordings, strict=True):
            await http.aclose()
            recording.seal()
    for recording, words in zip(recordings, heard, strict=True):
        assert recording.bug is None
        kept = sampled_of(recording)
        assert len(kept) == len(set(kept)) == recording.num_turns
        assert set(kept) <= set(engine.drawn), "every turn continues the very tokens that the engine was given"
        text = " ".join(renderer.decode(ids) for _, ids in kept)
        assert all(word.rstrip("\\n") in text for word in words), "whatever a client heard is recorded"
        rows = recording.ledger.rows()
        assert sum(sum(row.loss_mask) for row in rows) == sum(len(ids) for _, ids in kept), "and trains once"
        await recorder.close(recording)
    both = [{ids for _, ids in sampled_of(recording)} for recording in recordings]
    assert not both[0] & both[1], "nothing of one episode is in the other"


async def test_an_episode_may_change_its_dialect_with_every_turn(renderer: Renderer):
    engine = Engine(renderer, 3)
    recorder = Recorder(engine, renderer, EpisodeLimits(token_budget=30_000, max_turns=100))
    recording = recorder.open(temperature=1.0, seed=1)
    items: list[Item] = [("user", "1+2?")]
    async with running(recorder.app()) as url, httpx.AsyncClient(base_url=url + recording.keyed_path) as http:
        for n in range(9):
            path = list(DIALECTS)[n % 3]
            write, read = DIALECTS[path]
            answer = await http.post(path, json={"model": "m", **write(items)})
            assert answer.status_code == 200, answer.text
            turn = read(answer.json())
            items += [turn, *goes_on(turn, random.Random(n))]
    assert len([s for s in recording.ledger.segments if s.parent == -1]) == 1
    assert len(recording.leaves()) == 1
    assert not [name for name in recording.metrics() if "branch" in name or "forks" in name]
    assert sampled_of(recording) == engine.drawn
    await recorder.close(recording)
