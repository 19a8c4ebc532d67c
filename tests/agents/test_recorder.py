"""The recorder, driven by the official client over HTTP: recorded is what was sampled, and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from agentrl.agents.recorder import EpisodeRecording, Recorder
from agentrl.chat.template import Renderer
from agentrl.errors import EngineError
from agentrl.learner.prefix_tree import tree_size
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.limits import EpisodeLimits
from agentrl.serve.listen import running
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import call, say
from agentrl.types import Message, StopReason

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate arithmetic.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
ASK = call("calculator", expression="1+2")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    directory = tmp_path_factory.mktemp("tokenizer")
    text = '{"name": "calculator", "arguments": {"expression": "1+2"}} Use the calculator, then answer. '
    make_tokenizer(directory, [text] * 4, vocab=360, max_context=4096)
    return Renderer.from_directory(directory)


class Recorded:
    """A recorder on a port with one episode, and the official client of that episode."""

    def __init__(self, recorder: Recorder, recording: EpisodeRecording, address: str) -> None:
        self.recorder, self.recording, self.address = recorder, recording, address
        self.client = self.new_client()

    def new_client(self, **options: Any) -> AsyncOpenAI:
        url = self.address + self.recording.path
        return AsyncOpenAI(base_url=url, api_key=self.recording.key, **({"max_retries": 0} | options))

    async def chat(self, messages: Sequence[Any], **options: Any) -> Any:
        return await self.client.chat.completions.create(
            model="any", messages=list(messages), **({"tools": TOOLS} | options)
        )


@asynccontextmanager
async def recorded(
    renderer: Renderer,
    script: Any,
    *,
    delay_s: float = 0.0,
    temperature: float = 1.0,
    max_context: int = 1 << 20,
    **limits: Any,
) -> AsyncIterator[Recorded]:
    engine = ScriptedEngine(renderer, script, tools=TOOLS, delay_s=delay_s, max_context=max_context)
    recorder = Recorder(engine, renderer, EpisodeLimits(**({"token_budget": 100_000} | limits)))
    async with running(recorder.app()) as address:
        one = Recorded(recorder, recorder.open(temperature=temperature, seed=1), address)
        try:
            yield one
        finally:
            await one.client.close()
            await recorder.close(one.recording)


def by_turn(*said: Message | BaseException) -> Any:
    """A script that counts completions over all sessions."""
    left = iter(said)
    return lambda turn: next(left)


USER = {"role": "user", "content": "1+2?"}


def result(answer: Any, content: str = "3") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": content}


async def test_a_tool_loop_is_one_branch_with_the_sampled_ids(renderer: Renderer):
    async with recorded(renderer, [ASK, say("3")]) as one:
        first = (await one.chat([USER])).choices[0].message
        last = await one.chat([USER, first, result(first)])
        assert last.choices[0].message.content == "3"
        one.recording.seal()
        segments, turns = one.recording.ledger.segments, one.recording.turns()
    sampled = [s for s in segments if s.origin == "sampled"]
    assert [renderer.parse(s.ids).content for s in sampled] == ["", "3"]
    assert sampled[0].logprobs == (0.0,) * len(sampled[0].ids)
    assert [i for i, s in enumerate(segments) if s.parent == -1] == [0], "one root"
    assert [t.message.content for t in turns] == ["", "3"]
    assert [m.content for m in turns[0].observation] == ["3"]
    assert (turns[0].calls[0].result, turns[0].calls[0].outcome) == ("3", "ok")
    assert one.recording.metrics() == {}
    assert last.usage.prompt_tokens == sum(len(s.ids) for s in segments[:-1])


async def test_a_streaming_client_sees_normal_streaming_and_is_recorded_alike(renderer: Renderer):
    async with recorded(renderer, [ASK, say("the answer is 3")]) as one:
        stream = await one.chat([USER], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        calls = [c for d in deltas for c in d.tool_calls or ()]
        assert calls[0].id
        assert calls[0].function.name == "calculator"
        assert json.loads("".join(c.function.arguments or "" for c in calls)) == {"expression": "1+2"}
        wire = {"id": calls[0].id, "type": "function"} | {
            "function": {"name": "calculator", "arguments": '{"expression":"1+2"}'}
        }
        said = {"role": "assistant", "content": None, "tool_calls": [wire]}
        stream = await one.chat(
            [USER, said, {"role": "tool", "tool_call_id": calls[0].id, "content": "3"}], stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        assert text == "the answer is 3"
        assert one.recording.num_turns == 2
        assert len([s for s in one.recording.ledger.segments if s.parent == -1]) == 1


async def test_the_responses_dialect_is_recorded_alike(renderer: Renderer):
    tool = {"type": "function", **TOOLS[0]["function"]}
    async with recorded(renderer, [ASK, say("3")]) as one:
        first = await one.client.responses.create(model="m", input="1+2?", tools=[tool])
        made = next(item for item in first.output if item.type == "function_call")
        follow = [
            {"role": "user", "content": "1+2?"},
            made.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": made.call_id, "output": "3"},
        ]
        last = await one.client.responses.create(model="m", input=follow, tools=[tool])
        assert last.output_text == "3"
        assert one.recording.num_turns == 2
        assert len([s for s in one.recording.ledger.segments if s.parent == -1]) == 1


async def test_the_run_decides_how_tokens_are_drawn(renderer: Renderer):
    seen = []

    class Engine(ScriptedEngine):
        async def generate(self, ids, sampling, *, session=None):
            seen.append(sampling)
            return await super().generate(ids, sampling, session=session)

    engine = Engine(renderer, [say("a"), say("b")])
    recorder = Recorder(engine, renderer, EpisodeLimits(max_tokens=64, token_budget=10_000))
    async with running(recorder.app()) as address:
        one = Recorded(recorder, recorder.open(temperature=1.0, seed=1), address)
        await one.chat([USER], temperature=0.1, top_p=0.3, seed=5, max_tokens=9999, extra_body={"min_p": 0.5})
        await one.chat([USER], temperature=0.1, max_tokens=7)
        await one.client.close()
        await recorder.close(one.recording)
    assert [(s.temperature, s.top_p, s.top_k, s.min_p) for s in seen] == [(1.0, 1.0, 0, 0.0)] * 2
    assert [s.max_tokens for s in seen] == [64, 7]
    assert len({s.seed for s in seen}) == 2


class TestForks:
    async def test_a_turn_that_the_client_made_up_is_a_branch_and_is_counted(self, renderer: Renderer):
        async with recorded(renderer, by_turn(ASK, say("3"), say("4"))) as one:
            first = (await one.chat([USER])).choices[0].message
            await one.chat([USER, first, result(first)])
            invented = {"role": "assistant", "content": "I never said this"}
            await one.chat([USER, invented, {"role": "user", "content": "and?"}])
            again = one.recording._said[-1].turn.prompt_tokens
            found = {"agent/drift_foreign": 1.0, "agent/forks": 1.0, "agent/branch_foreign": 1.0}
            assert one.recording.metrics() == found | {"agent/rerendered_tokens": again}
            segments = one.recording.ledger.segments
            roots = [i for i, s in enumerate(segments) if s.parent == -1]
            assert len(roots) == 2
            made_up = [s for s in segments if s.message is not None and "never" in renderer.decode(s.ids)]
            assert [s.origin for s in made_up] == ["prompt"], "it does not train"
            assert len(one.recording.leaves()) == 2

    async def test_rewritten_history_is_a_branch(self, renderer: Renderer):
        async with recorded(renderer, by_turn(ASK, say("3"))) as one:
            first = (await one.chat([USER])).choices[0].message
            await one.chat([{"role": "user", "content": "something else"}, first, result(first)])
            metrics = one.recording.metrics()
            assert metrics.pop("agent/rerendered_tokens") > 0
            assert metrics == {"agent/drift_history": 1.0, "agent/forks": 1.0, "agent/branch_history": 1.0}

    async def test_two_answers_to_one_prompt_are_siblings(self, renderer: Renderer):
        async with recorded(renderer, by_turn(ASK, say("3"), say("no, 4"))) as one:
            first = (await one.chat([USER])).choices[0].message
            both = [await one.chat([USER, first, result(first)]) for _ in range(2)]
            assert [b.choices[0].message.content for b in both] == ["3", "no, 4"]
            assert one.recording.num_turns == 3
            assert [len(s.ids) > 0 for s in one.recording.ledger.segments if s.parent == -1] == [True]
            assert len(one.recording.leaves()) == 2


class TestRetries:
    async def test_a_request_that_comes_again_gets_the_same_answer(self, renderer: Renderer):
        async with recorded(renderer, by_turn(say("first"), say("second"))) as one:
            body = {"model": "m", "messages": [USER]}
            headers = {"Authorization": f"Bearer {one.recording.key}"}
            async with httpx.AsyncClient(base_url=one.address + one.recording.path, headers=headers) as http:
                said = []
                for again in ("0", "1", "2"):
                    answer = await http.post(
                        "/chat/completions", json=body, headers={"x-stainless-retry-count": again}
                    )
                    said.append(answer.json()["choices"][0]["message"]["content"])
                streamed = await http.post(
                    "/chat/completions", json={**body, "stream": True}, headers={"x-stainless-retry-count": "3"}
                )
            assert said == ["first"] * 3
            assert '"first"' in streamed.text
            assert one.recording.num_turns == 1
            assert one.recording.metrics() == {"agent/retries": 3.0}

    async def test_an_idempotency_key_names_the_request(self, renderer: Renderer):
        async with recorded(renderer, by_turn(say("first"), say("second"))) as one:
            for key, text in (("a", "first"), ("a", "first"), ("b", "second")):
                answer = await one.chat([USER], extra_headers={"Idempotency-Key": key})
                assert answer.choices[0].message.content == text

    async def test_one_idempotency_key_for_two_requests_gives_two_answers(self, renderer: Renderer):
        async with recorded(renderer, by_turn(say("first"), say("second"))) as one:
            headers = {"Idempotency-Key": "of the whole client"}
            first = await one.chat([USER], extra_headers=headers)
            second = await one.chat(
                [USER, first.choices[0].message, {"role": "user", "content": "On."}], extra_headers=headers
            )
            assert [a.choices[0].message.content for a in (first, second)] == ["first", "second"]
            assert one.recording.num_turns == 2

    async def test_two_that_wait_for_one_completion_both_get_it(self, renderer: Renderer):
        async with recorded(renderer, by_turn(say("first"), say("second")), delay_s=0.2) as one:
            headers = [{"x-stainless-retry-count": n} for n in ("0", "1")]
            first = asyncio.ensure_future(one.chat([USER], extra_headers=headers[0]))
            await asyncio.sleep(0.1)
            again = await one.chat([USER], extra_headers=headers[1])
            assert (await first).choices[0].message.content == again.choices[0].message.content == "first"
            assert one.recording.num_turns == 1

    async def test_a_client_that_goes_away_leaves_nothing(self, renderer: Renderer):
        async with recorded(renderer, by_turn(say("kept")), delay_s=0.3) as one:
            client = one.new_client(timeout=0.1)
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model="m", messages=[USER])
            await client.close()
            await asyncio.sleep(0.05)
            kept = await one.chat([USER], extra_headers={"x-stainless-retry-count": "1"})
            assert kept.choices[0].message.content == "kept"
            assert one.recording.num_turns == 1

    async def test_an_engine_failure_is_forgotten_only_when_the_request_is_answered(self, renderer: Renderer):
        async with recorded(renderer, by_turn(EngineError("lost"), say("fine"))) as one:
            with pytest.raises(openai.InternalServerError):
                await one.chat([USER])
            assert one.recording.trouble == "lost"
            await one.chat([USER], extra_headers={"x-stainless-retry-count": "1"})
            assert one.recording.trouble is None


class TestDoors:
    async def test_each_episode_has_its_own_key(self, renderer: Renderer):
        async with recorded(renderer, [say("hi")]) as one:
            other = one.recorder.open(temperature=1.0, seed=2)
            wrong = AsyncOpenAI(base_url=one.address + one.recording.path, api_key=other.key, max_retries=0)
            with pytest.raises(openai.AuthenticationError):
                await wrong.chat.completions.create(model="m", messages=[USER])
            await wrong.close()
            async with httpx.AsyncClient() as http:
                for path in ("/episodes/0000/v1/models", one.recording.path + "/models"):
                    assert (await http.get(one.address + path)).status_code == 401
            assert one.recording.num_turns == other.num_turns == 0

    async def test_the_key_may_be_in_the_path_alone(self, renderer: Renderer):
        async with recorded(renderer, [say("hi")]) as one:
            other = one.recorder.open(temperature=1.0, seed=2)
            wrong = other.keyed_path.replace(other.key, one.recording.key)
            body = {"model": "m", "messages": [USER]}
            async with httpx.AsyncClient(base_url=one.address, headers={"authorization": "Bearer none"}) as http:
                answer = await http.post(one.recording.keyed_path + "/chat/completions", json=body)
                refused = await http.post(wrong + "/chat/completions", json=body)
            assert (answer.status_code, refused.status_code) == (200, 401)
            assert (one.recording.num_turns, other.num_turns) == (1, 0)

    async def test_a_sealed_episode_takes_no_more(self, renderer: Renderer):
        async with recorded(renderer, [say("hi"), say("late")]) as one:
            await one.chat([USER])
            one.recording.seal()
            with pytest.raises(openai.APIStatusError) as late:
                await one.chat([USER])
            assert late.value.status_code == 410
            assert one.recording.num_turns == 1

    @pytest.mark.parametrize(
        ("limits", "stop", "text"),
        [
            ({"max_turns": 1}, StopReason.MAX_TURNS, "has met its limit"),
            ({"token_budget": 60}, StopReason.TOKEN_BUDGET, "maximum context length is 60"),
        ],
    )
    async def test_a_limit_refuses_the_next_request_for_good(self, renderer: Renderer, limits, stop, text):
        async with recorded(renderer, by_turn(say("hi"), say("no"), say("no")), **limits) as one:
            await one.chat([USER], tools=openai.NOT_GIVEN) if stop is StopReason.MAX_TURNS else None
            long = {"role": "user", "content": "tell me more " * 40}
            with pytest.raises(openai.BadRequestError) as refused:
                await one.chat([long])
            assert text in str(refused.value)
            assert one.recording.stop is stop
            with pytest.raises(openai.BadRequestError, match="has met its limit"):
                await one.chat([USER])

    async def test_conversations_share_the_token_budget(self, renderer: Renderer):
        turns = [{"role": "user", "content": f"{n} tell me more " * 40} for n in range(5)]
        async with recorded(renderer, lambda turn: say("hi")) as one:
            for turn in turns:
                await one.chat([turn])
            whole, shared = one.recording.ledger.spent, len(one.recording.session.turns[0].branch.ids)
        budget = whole - shared // 2
        async with recorded(renderer, lambda turn: say("hi"), token_budget=budget, max_tokens=9) as one:
            for turn in [*turns[:4], turns[0]]:  # what begins alike counts once
                await one.chat([turn])
            with pytest.raises(openai.BadRequestError, match=r"has met its limit \(token_budget\)"):
                await one.chat([turns[4]])
            assert one.recording.stop is StopReason.TOKEN_BUDGET
            assert one.recording.ledger.spent <= budget

    async def test_tools_that_several_conversations_are_offered_count_once(self, renderer: Renderer):
        async with recorded(renderer, lambda turn: say("hi")) as one:
            for n in range(4):
                await one.chat([{"role": "user", "content": f"{n}+2?"}])
            rows = [row.ids for row in one.recording.ledger.rows()]
            assert len(rows) == 4
            assert one.recording.ledger.spent == tree_size(rows) < sum(map(len, rows)) / 2

    async def test_conversations_at_the_same_time_share_the_token_budget(self, renderer: Renderer):
        turns = [{"role": "user", "content": f"{n} tell me more " * 40} for n in range(9)]
        async with recorded(renderer, lambda turn: say("hi")) as one:
            await one.chat([turns[0]])
            size = one.recording.ledger.spent
        budget = 2 * size
        limits = {"token_budget": budget, "max_tokens": 9}
        async with recorded(renderer, lambda turn: say("hi"), delay_s=0.1, **limits) as one:
            asked = [one.chat([turn]) for turn in turns]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert sum(isinstance(answer, openai.BadRequestError) for answer in answers) > 3
            assert one.recording.num_turns > 1
            assert one.recording.ledger.spent <= budget

    async def test_a_completion_is_not_cut_by_what_others_in_progress_do_not_use(self, renderer: Renderer):
        words = "and so on " * 12
        async with recorded(renderer, lambda turn: say(words)) as one:
            answer = await one.chat([USER])
        prompt, said = answer.usage.prompt_tokens, answer.usage.completion_tokens
        limits = {"token_budget": 3 * prompt + 2 * (said + 50) + 20, "max_tokens": said + 50}
        assert said > 40
        async with recorded(renderer, lambda turn: say(words), delay_s=0.1, **limits) as one:
            asked = [one.chat([{"role": "user", "content": f"{n}+2?"}]) for n in range(3)]
            answers = await asyncio.gather(*asked)
        assert [each.choices[0].finish_reason for each in answers] == ["stop"] * 3

    @pytest.mark.parametrize(
        ("limits", "ending"),
        [
            ({"max_tokens": 20}, StopReason.MAX_TOKENS),
            ({"token_budget": 20}, StopReason.TOKEN_BUDGET),
            ({"max_context": 20}, StopReason.CONTEXT_FULL),
            ({}, StopReason.ANSWERED),
        ],
    )
    async def test_the_limit_that_cuts_the_last_completion_is_named(
        self, renderer: Renderer, limits: dict[str, int], ending: StopReason
    ):
        async with recorded(renderer, lambda turn: say("and so on " * 12)) as one:
            prompt = (await one.chat([USER])).usage.prompt_tokens
        limits = {name: most if name == "max_tokens" else prompt + most for name, most in limits.items()}
        async with recorded(renderer, lambda turn: say("and so on " * 12), **limits) as one:
            answer = await one.chat([USER])
            assert (answer.choices[0].finish_reason == "stop") is (ending is StopReason.ANSWERED)
            assert one.recording.ending is ending
            (turn,) = one.recording.turns()
            assert one.recording.ledger.messages[turn.place] is turn.message

    async def test_several_choices_are_refused(self, renderer: Renderer):
        async with recorded(renderer, [say("hi")]) as one:
            with pytest.raises(openai.BadRequestError, match="continues from a single choice"):
                await one.chat([USER], n=2)


async def test_responses_that_go_on_from_one_another_are_one_branch_also_when_one_is_asked_for_again(
    renderer: Renderer,
):
    flat: Any = [{"type": "function", "strict": False, **TOOLS[0]["function"]}]
    async with recorded(renderer, [ASK, say("3"), say("Sure.")]) as one:

        async def ask(given: Any, after: Any = None, **options: Any) -> Any:
            id = None if after is None else after.id
            return await one.client.responses.create(
                model="any", input=given, tools=flat, previous_response_id=id, **options
            )

        first = await ask("1+2?")
        output = [{"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "3"}]
        lost = await ask(output, first)
        again = await ask(output, first, extra_headers={"x-stainless-retry-count": "1"})
        assert (lost.output_text, again.output_text) == ("3", "3")
        assert lost.id != again.id
        last = await ask("Sure?", again)
        assert last.output_text == "Sure."
        assert one.recording.num_turns == 3
        assert one.recording.metrics() == {"agent/retries": 1.0}
        (leaf,) = one.recording.leaves()
        assert [message.role[0] for message in leaf.context] == list("uataua")


CUT = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2'
INVALID = '<tool_call>\n{"name": "calculator", "arguments": {"expression": }}\n</tool_call>'
NAMED = {"tool_choice": {"type": "function", "function": {"name": "calculator"}}}


@pytest.mark.parametrize("written", [CUT, INVALID], ids=["unfinished", "invalid"])
@pytest.mark.parametrize("limit", [True, False])
@pytest.mark.parametrize("options", [{}, {"parallel_tool_calls": False}, NAMED], ids=["any", "one", "named"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_only_call_that_cannot_be_read_is_recorded_as_any_other(
    renderer: Renderer, written: str, limit: bool, options: Any, stream: bool
):
    tokens = len(renderer.vocabulary.encode_raw(written))
    async with recorded(renderer, [written], **({"max_tokens": tokens} if limit else {})) as one:
        answer = await one.chat([USER], stream=stream, **options)
        choice = [chunk.choices[0] async for chunk in answer][-1] if stream else answer.choices[0]
        (turn,) = one.recording.turns()
        cut = limit and (written == CUT or not options)  # an only call that is complete ends its completion
        assert choice.finish_reason == ("length" if cut else "tool_calls")
        assert turn.finish == ("length" if cut else "stop")
        assert one.recording.ending is (StopReason.MAX_TOKENS if cut else StopReason.ANSWERED)
        assert len(turn.message.parse_errors) == 1
        assert turn.message.content == written
