"""Sessions with the requests of Claude Code, Codex and OpenCode, replayed against the recorder.

Each client shapes its requests as the real one does: system blocks with moving cache marks, parallel tool results,
items with ids and encrypted reasoning, title generation, sub-agents, retries, aborted streams, compaction. A turn
begins a branch only where the client really started or edited a conversation, and every sampled token is kept.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from agentrl.agents.recorder import EpisodeRecording, Recorder
from agentrl.chat.demonstrate import completion_of
from agentrl.chat.template import Renderer
from agentrl.engine.base import EngineCapabilities, GenerateOptions, TokenLogprob
from agentrl.rollout.limits import EpisodeLimits
from agentrl.run_folder.records import EpisodeRecord, encode
from agentrl.serve.listen import running
from agentrl.testing.engine import ScriptedEngine
from agentrl.types import Completion, Episode, Message, Sampling, StopReason, Task, ToolCall
from agentrl.view import episode_page as page
from tests.agents.test_recorder import renderer as renderer

Json = dict[str, Any]
SHELL: Json = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
NAMES = ("Bash", "Read")
WIRED: list[Json] = [{"type": "function", "function": {"name": name, "parameters": SHELL}} for name in NAMES]


def runs(*commands: str, text: str = "", reasoning: str | None = None) -> Message:
    calls = tuple(ToolCall(f"c{n:08d}", NAMES[n % 2], {"command": text}) for n, text in enumerate(commands))
    return Message("assistant", text, calls, reasoning=reasoning)


def says(text: str) -> Message:
    return Message("assistant", text)


class Engine(ScriptedEngine):
    """Draws the next line for whoever asks, token by token, and counts what it drew to the end."""

    capabilities = EngineCapabilities(streaming=True, masks=True)

    def __init__(self, renderer: Renderer, lines: Sequence[Message]) -> None:
        super().__init__(renderer, [], max_context=32_768)
        self.lines, self.drawn, self.wait_s, self.tokenizer = list(lines), 0, 0.0, renderer

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        return await self.generate_streaming(ids, sampling, GenerateOptions(), session=session)

    async def generate_streaming(
        self, ids: Sequence[int], sampling: Sampling, options: GenerateOptions, *, session: str | None = None
    ) -> Completion:
        completion = completion_of(self.tokenizer, self.lines.pop(0), WIRED)
        for id in completion.ids:
            await asyncio.sleep(self.wait_s)
            if options.on_token is not None:
                options.on_token(TokenLogprob(id, 0.0, 0))
        self.drawn += len(completion.ids)
        return completion


class Session:
    """A client of one episode that streams, retries, and can hang up."""

    def __init__(self, http: httpx.AsyncClient, engine: Engine) -> None:
        self.http, self.engine = http, engine

    async def events(self, path: str, body: Json, **headers: str) -> list[Json]:
        answer = await self.http.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]

    async def hang_up(self, path: str, body: Json, after: str) -> None:
        """Disconnect as soon as `after` has been streamed."""
        self.engine.wait_s = 0.05
        async with self.http.stream("POST", path, json=body) as answer:
            async for line in answer.aiter_lines():
                if after in line:
                    break
        self.engine.wait_s = 0.0


@asynccontextmanager
async def session(renderer: Renderer, *lines: Message) -> AsyncIterator[tuple[Session, EpisodeRecording]]:
    engine = Engine(renderer, lines)
    recorder = Recorder(engine, renderer, EpisodeLimits(token_budget=30_000, max_turns=100))
    recording = recorder.open(temperature=1.0, seed=1)
    async with running(recorder.app()) as url:
        headers = {"authorization": f"Bearer {recording.key}"}
        async with httpx.AsyncClient(base_url=url + recording.path, headers=headers, timeout=60) as http:
            yield Session(http, engine), recording
    assert engine.lines == [], "every line was asked for"
    sampled = [s for s in recording.ledger.segments if s.origin == "sampled"]
    assert sum(len(s.ids) for s in sampled) == engine.drawn, "nothing sampled is lost"
    assert sum(sum(row.loss_mask) for row in recording.ledger.rows()) == engine.drawn, "and all of it trains once"
    await recorder.close(recording)


def branches(recording: EpisodeRecording) -> dict[str, int]:
    """The branches by reason; what was rendered again for each of them is counted, and nothing else."""
    metrics = recording.metrics()
    again = [turn for turn in recording.turns() if turn.branch is not None]
    assert bool(metrics.get("agent/rerendered_tokens")) == bool(again)
    found = {name.removeprefix("agent/branch_"): int(n) for name, n in metrics.items() if "/branch_" in name}
    assert sum(found.values()) == len(again)
    roots = sum(segment.parent == -1 for segment in recording.ledger.segments)
    assert roots + found.get("history", 0) + found.get("rewind", 0) == len(again) + 1
    return found


def shown(recording: EpisodeRecording) -> list[str]:
    """Why each branch but the first begins, as `agentrl view` says it."""
    ledger = recording.ledger
    said = ledger.messages, tuple(recording.turns()), ledger.segments
    episode = Episode("e", Task("t"), *said, StopReason.ANSWERED, 1.0, metrics=recording.metrics())
    record = json.loads(encode(EpisodeRecord(0, 0, episode)))
    return [branch["reason"] for branch in page.episode(record, "run", (), None)["branches"]][1:]


# -- Claude Code -----------------------------------------------------------------------------------------------

ANTHROPIC = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking"}
CACHED = {"cache_control": {"type": "ephemeral"}}
AGENT = "You are an agent for Claude Code. Search files and report."


class ClaudeCode:
    def __init__(self, client: Session) -> None:
        self.client = client
        self.system = ["You are Claude Code, a CLI.", "\nWorking directory: /repo\nPlatform: linux"]
        self.messages: list[Json] = []

    def user(self, *blocks: Json | str) -> None:
        whole = [{"type": "text", "text": one} if isinstance(one, str) else one for one in blocks]
        self.messages.append({"role": "user", "content": whole})

    def body(self, *, tools: Sequence[str] = NAMES, **more: Any) -> Json:
        """The whole conversation; the cache marks are on the last blocks, so they move from request to request."""
        messages = json.loads(json.dumps(self.messages))
        for message in messages[-2:]:
            if isinstance(message["content"], list) and message["content"][-1]["type"] != "thinking":
                message["content"][-1] |= CACHED
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **SHELL,
            "additionalProperties": False,
        }
        return {
            "model": "claude-sonnet-4-5-20250929",
            "messages": messages,
            "system": [{"type": "text", "text": text, **CACHED} for text in self.system],
            "tools": [{"name": name, "description": f"Use {name}.", "input_schema": schema} for name in tools],
            "metadata": {"user_id": "user_1_account__session_2"},
            "max_tokens": 32_000,
            "thinking": {"type": "enabled", "budget_tokens": 31_999},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "temperature": 1,
            "stream": True,
            **more,
        }

    async def ask(
        self, *, remember: bool = True, headers: Mapping[str, str] | None = None, **more: Any
    ) -> list[Json]:
        events = await self.client.events("/messages?beta=true", self.body(**more), **ANTHROPIC, **(headers or {}))
        blocks: list[Json] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(dict(event["content_block"]))
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[-1]
                if delta["type"] == "input_json_delta":
                    block["input"] = json.loads(delta["partial_json"])
                else:
                    key = delta["type"].removesuffix("_delta")
                    block[key] = block.get(key, "") + delta[key]
        if remember:
            self.messages.append({"role": "assistant", "content": blocks})
        return blocks

    def results(self, blocks: Sequence[Json], *more: Json | str) -> None:
        """The results of parallel calls in one message, an error among them, and a reminder behind them."""
        uses = [block for block in blocks if block["type"] == "tool_use"]
        given = [
            {
                "tool_use_id": use["id"],
                "type": "tool_result",
                "content": f"out {n}",
                **({"is_error": True} if n else {}),
            }
            for n, use in enumerate(uses)
        ]
        self.user(*given, *more)


REMINDER = "<system-reminder>\nThe todo list is empty.\n</system-reminder>"


async def test_claude_code_is_one_branch_with_its_sub_agents_and_titles_beside_it(renderer: Renderer):
    lines = [
        says("Fix the bug"),
        runs("ls", "cat a", text="Let me look.", reasoning="First the files."),
        runs("grep x"),
        says("Found in a.py."),
        runs("sed b", reasoning="Then the mend."),
        says("Done."),
    ]
    async with session(renderer, *lines) as (client, recording):
        main, helper, title = (ClaudeCode(client) for _ in range(3))
        main.user(REMINDER, "fix the bug")
        count = {k: v for k, v in main.body().items() if k in ("model", "messages", "system", "tools", "thinking")}
        assert (await client.http.post("/messages/count_tokens?beta=true", json=count)).status_code == 200
        title.system = ["Summarize this conversation in a title."]
        title.user("fix the bug")
        await title.ask(tools=(), max_tokens=512)
        blocks = await main.ask()
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
        main.results(blocks, REMINDER)
        helper.system = [AGENT]
        helper.user("find x")
        helper.results(await helper.ask(tools=("Read",)))
        await helper.ask(tools=("Read",))
        main.results(await main.ask())
        again = await main.ask(remember=False)
        assert again == await main.ask(headers={"x-stainless-retry-count": "1"})
    assert branches(recording) == {"sub_agent": 2}
    assert recording.metrics()["agent/retries"] == 1
    assert "agent/forks" not in recording.metrics()
    assert shown(recording) == ["a conversation with another system prompt, or without one"] * 2
    (leaf,) = [one for one in recording.leaves() if one.messages[one._context[-1]].content == "Done."]
    assert [message.role for message in leaf.context].count("assistant") == 3


async def test_claude_code_interrupted_compacted_and_cleared(renderer: Renderer):
    lines = [
        runs("ls"),
        says("I begin to write a long text, " * 8),
        says("Yes."),
        says("Summary: ls was run."),
        says("On."),
    ]
    lines += [says("Still here.")]
    async with session(renderer, *lines) as (client, recording):
        main = ClaudeCode(client)
        main.user("look around")
        main.results(await main.ask())
        await client.hang_up("/messages?beta=true", main.body(), "text_delta")
        main.messages.append({"role": "assistant", "content": [{"type": "text", "text": "I begin to"}]})
        main.user("[Request interrupted by user]", "are you there?")
        await main.ask()
        assert branches(recording) == {}, "what it keeps of an interrupted turn is prompt behind the known turns"
        main.user("Your task is to create a detailed summary of the conversation so far.")
        (summary,) = await main.ask()
        compacted = ClaudeCode(client)
        compacted.user(f"This session is being continued from a previous one.\n{summary['text']}", "go on")
        await compacted.ask()
        main.messages[2]["content"][0]["content"] = "[Old tool result content cleared]"
        main.user("and now?")
        await main.ask()
    assert branches(recording) == {"opening": 1, "history": 1}
    assert recording.metrics()["agent/drift_foreign"] >= 1
    assert shown(recording) == [
        "of the two requests behind this turn, one got no answer, because its client had left",
        "a conversation with another opening",
        "the client's history differed: history",
    ]
    assert recording.num_turns == 5, "the interrupted turn left no tokens"
    assert recording.metrics()["agent/unanswered"] == 1


# -- Codex -----------------------------------------------------------------------------------------------------


class Codex:
    def __init__(self, client: Session) -> None:
        self.client, self.instructions = client, "You are Codex, a coding agent running in the Codex CLI."
        self.items: list[Json] = [
            self.message(
                "developer", "<permissions instructions>Sandbox: workspace-write</permissions instructions>"
            ),
            self.message("user", "<environment_context>\n  <cwd>/repo</cwd>\n</environment_context>"),
        ]

    @staticmethod
    def message(role: str, text: str) -> Json:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    def body(self) -> Json:
        tools = [
            {"type": "function", "name": name, "description": "d", "strict": False, "parameters": SHELL}
            for name in NAMES
        ]
        return {
            "model": "gpt-5-codex",
            "instructions": self.instructions,
            "input": self.items,
            "tools": tools,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199-session",
            "text": {"verbosity": "medium"},
        }

    async def ask(self, **headers: str) -> list[Json]:
        events = await self.client.events("/responses", self.body(), session_id="0199", **headers)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert events[-1]["response"]["output"] == items
        for item in items:
            kept = {key: value for key, value in item.items() if key not in ("id", "status")}
            self.items.append({**kept, "encrypted_content": None} if item["type"] == "reasoning" else kept)
        return items

    def outputs(self, items: Sequence[Json]) -> None:
        for item in items:
            if item["type"] == "function_call":
                text = json.dumps({"output": "ok\n", "metadata": {"exit_code": 0, "duration_seconds": 0.1}})
                self.items.append({"type": "function_call_output", "call_id": item["call_id"], "output": text})


async def test_codex_is_one_branch_and_its_compaction_another(renderer: Renderer):
    lines = [
        runs("ls", "cat a", text="Looking.", reasoning="Hm."),
        says("I start to explain at length, " * 8),
        runs("pytest"),
        says("All pass."),
        says("We ran the tests."),
        says("Going on."),
    ]
    async with session(renderer, *lines) as (client, recording):
        codex = Codex(client)
        codex.items.append(codex.message("user", "fix it"))
        codex.outputs(await codex.ask())
        await client.hang_up("/responses", codex.body(), "output_text.delta")
        codex.items.append(codex.message("user", "<turn_aborted>The user interrupted.</turn_aborted>"))
        codex.items.append(codex.message("user", "run the tests"))
        codex.outputs(await codex.ask())
        await codex.ask()
        assert branches(recording) == {}
        users = [item for item in codex.items if item.get("role") == "user"]
        codex.items.append(codex.message("user", "Create a handoff summary for another model."))
        (summary,) = await codex.ask()
        codex.items = [codex.items[0], *users[-1:]]
        codex.items.append(codex.message("user", f"Another model began: {summary['content'][0]['text']}"))
        await codex.ask()
    assert branches(recording) == {"opening": 1}
    assert recording.num_turns == 5


# -- OpenCode --------------------------------------------------------------------------------------------------


class OpenCode:
    def __init__(self, client: Session, *system: str) -> None:
        self.client, self.tools = client, True
        self.messages: list[Json] = [{"role": "system", "content": text} for text in system]

    async def ask(self, *, path: str = "/chat/completions", **headers: str) -> Json:
        body: Json = {
            "model": "policy",
            "max_tokens": 32_000,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "reasoning_effort": "medium",
            "promptCacheKey": "ses_1",
        }
        if self.tools:
            body |= {"tools": WIRED, "tool_choice": "auto"}
        said: Json = {"role": "assistant", "content": ""}
        calls: dict[int, Json] = {}
        for event in await self.client.events(path, body, **headers):
            for choice in event["choices"]:
                delta = choice["delta"]
                said["content"] += delta.get("content") or ""
                if delta.get("reasoning_content"):
                    said["reasoning_content"] = said.get("reasoning_content", "") + delta["reasoning_content"]
                for call in delta.get("tool_calls", ()):
                    known = calls.setdefault(call["index"], {"type": "function", "function": {"arguments": ""}})
                    known["id"] = call.get("id", known.get("id"))
                    known["function"]["name"] = call["function"].get("name", known["function"].get("name"))
                    known["function"]["arguments"] += call["function"].get("arguments", "")
        if calls:  # the AI SDK parses the arguments and writes them again
            said["tool_calls"] = [calls[n] for n in sorted(calls)]
            for call in said["tool_calls"]:
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
        self.messages.append(said)
        return said

    def results(self, said: Json) -> None:
        for call in reversed(said.get("tool_calls", ())):  # in the order in which they end
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "out"})


async def test_opencode_is_one_branch_with_its_titles_and_sub_agents_beside_it(renderer: Renderer):
    lines = [
        says("Bug hunt"),
        runs("ls", "cat a", reasoning="Look."),
        runs("rg x"),
        says("In a.py"),
        says("Done."),
    ]
    async with session(renderer, *lines) as (client, recording):
        title = OpenCode(client, "You are a title generator.")
        title.messages += [{"role": "user", "content": "Generate a title:\n"}, {"role": "user", "content": "hunt"}]
        title.tools = False
        main = OpenCode(client, "You are opencode.", "<env>\n  Working directory: /repo\n</env>")
        main.messages.append({"role": "user", "content": [{"type": "text", "text": "hunt the bug"}]})
        helper = OpenCode(client, "You are a file search specialist.")
        helper.messages.append({"role": "user", "content": "find x"})
        await title.ask()
        main.results(await main.ask())
        helper.results(await helper.ask())
        await helper.ask()
        await main.ask()
    assert branches(recording) == {"sub_agent": 2}
    assert "agent/forks" not in recording.metrics()
    assert recording.metrics()["agent/drift_echo"] >= 1, "arguments were written again, which changes nothing"


@pytest.mark.parametrize("edit", ["reworded", "without calls", "tools", "foreign", "repeat", "rewind"])
async def test_each_edit_of_a_history_is_a_branch_with_its_reason(renderer: Renderer, edit: str):
    async with session(renderer, runs("ls", text="Look."), says("Fine."), says("Again.")) as (client, recording):
        main = OpenCode(client, "You are opencode.")
        main.messages.append({"role": "user", "content": "hi"})
        main.results(await main.ask())
        await main.ask()
        if edit == "rewind":
            main.messages.pop()
        elif edit == "repeat":
            main.messages = main.messages[:2]
        elif edit == "tools":
            main.tools = False
        elif edit == "reworded":
            main.messages[2]["content"] = "Look somewhere else."
        elif edit == "without calls":
            main.messages = [*main.messages[:2], {"role": "assistant", "content": "Look."}]
        else:
            main.messages = [*main.messages[:2], {"role": "assistant", "content": "I never said this."}]
        if edit != "repeat":
            main.messages.append({"role": "user", "content": "and?"})
        await main.ask()
    reason = "reworded" if edit == "without calls" else edit
    assert branches(recording) == {reason: 1}
    again = recording.turns()[-1]
    assert again.branch == reason
    last = recording._said[-1].turn
    shared = 0 if last.parent is None else len(recording._said[last.parent].turn.branch.ids)
    assert recording.metrics()["agent/rerendered_tokens"] == last.prompt_tokens - shared
