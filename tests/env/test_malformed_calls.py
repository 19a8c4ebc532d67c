"""Ten thousand and more malformed calls: nothing raises, each is answered, each is counted.

Calls as messages, completions of every format damaged as text, and raw completions through engine, parser, ledger
and rollout. What ran and what was counted as a mistake together are all that was asked for.
"""

import dataclasses
import json
import random
from collections import Counter
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from typing_extensions import TypedDict

from agentrl.chat.parsers import choose_parser, parser_names
from agentrl.chat.template import Renderer, to_message
from agentrl.env import ToolEnv, ToolSettings, tool
from agentrl.env.toolenv.dispatch import MISTAKES
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.episode import Player, run_episode
from agentrl.rollout.limits import EpisodeLimits
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import random_arguments
from agentrl.types import Message, Sampling, StopReason, Task, ToolCall


class Line(TypedDict):
    sku: Annotated[str, Field(min_length=1)]
    qty: Annotated[int, Field(ge=1)]


@dataclasses.dataclass
class Place:
    street: str
    inside: "Place | None" = None


class Desk(ToolEnv):
    """Take orders."""

    def setup(self) -> str:
        self.ran = 0
        return "Begin."

    def respond(self, message: Message) -> str:
        return "Go on."

    @tool(inline=True)
    def order(self, items: list[Line], express: bool = False, note: str | None = None) -> str:
        """Order."""
        self.ran += 1
        return f"{len(items)}"

    @tool(inline=True)
    def move(self, to: Place, by: Literal["van", "bike"], weights: dict[str, float]) -> str:
        """Move."""
        self.ran += 1
        return to.street

    @tool(inline=True)
    def ring(self) -> str:
        """Ring."""
        self.ran += 1
        return "ding"

    @tool(inline=True)
    def refuse(self, why: int | str) -> str:
        """Refuse."""
        raise ValueError(why)


TOOLS = list(Desk().tools)
FUNCTIONS = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}
NAMES = [
    *FUNCTIONS,
    "Order",
    "order ",
    "",
    "ord\x00er",
    "__class__",
    "ring()",
    "x" * 5000,
    "é👩‍🔬",
    "\ud800",
    "None",
]


def deep(depth: int) -> Any:
    value: Any = "end"
    for _ in range(depth):
        value = [value] if depth % 2 else {"a": value}
    return value


def junk(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON, or a lenient reader of JSON, can come to."""
    if depth < 3 and rng.random() < 0.4:
        if rng.random() < 0.5:
            return [junk(rng, depth + 1) for _ in range(rng.randint(0, 4))]
        return {
            rng.choice(["items", "sku", "qty", "to", "why", "", "\x00", "é"]): junk(rng, depth + 1)
            for _ in range(3)
        }
    return rng.choice(
        [None, True, 0, -1, 3.5, 1e308, 10**30, "", "two", "\ud800", "x" * 300, float("nan"), float("inf"), [], {}]
    )


def damaged(value: Any, rng: random.Random) -> Any:
    """`value` with one part of it replaced, removed or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key, changed = rng.choice(list(value)), dict(value)
        match rng.randrange(4):
            case 0:
                del changed[key]
            case 1:
                changed[f"{key}_"] = changed.pop(key)
            case 2:
                changed[key] = damaged(changed[key], rng)
            case _:
                changed["more"] = junk(rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], damaged(value[at], rng), *value[at + 1 :]]
    return junk(rng)


def malformed_call(rng: random.Random, number: int) -> ToolCall:
    name = rng.choice(NAMES) if rng.random() < 0.3 else rng.choice(list(FUNCTIONS))
    schema = FUNCTIONS.get(name, FUNCTIONS["order"])
    kind = rng.random()
    if kind < 0.05:
        arguments = deep(rng.choice([3, 60, 3000]))
    elif kind < 0.3:
        arguments = junk(rng)
    else:
        arguments = damaged(random_arguments(schema, rng), rng)
    return ToolCall(f"c{number}", name, arguments)


def counted(metrics: dict[str, float]) -> int:
    """Mistakes, one a call: a cut result is one beside its call's own end."""
    return int(sum(v for k, v in metrics.items() if k in MISTAKES and k != "output_truncated"))


async def desk() -> Desk:
    env = Desk()
    await env.reset(Task("t"))
    return env


@pytest.mark.timeout(120)
async def test_four_thousand_malformed_calls_are_answered_and_counted():
    rng, env, totals = random.Random(0), await desk(), Counter()
    asked = 0
    while asked < 4000:
        calls = tuple(malformed_call(rng, n) for n in range(rng.choice([1, 1, 2, 3, 9])))
        errors = ("not JSON",) * rng.choice([0, 0, 1])
        ran = env.ran
        message = Message("assistant", "", calls, parse_errors=errors)
        observation, reward, terminated, truncated, info = await env.step(message)
        assert [m.tool_call_id for m in observation] == [*(c.id for c in calls), *[None] * len(errors)]
        assert all(isinstance(m.content, str) for m in observation)
        assert counted(info.metrics) + env.ran - ran == len(calls) + len(errors), message
        assert [r.outcome for r in info.calls].count("ok") == env.ran - ran
        assert (reward, terminated, truncated) == (0, False, False)
        "".join(m.content for m in observation).encode()  # no lone surrogate comes back
        totals.update(info.metrics)
        asked += len(calls) + len(errors)
    assert {"unknown_tool", "invalid_args", "tool_exception", "too_many_calls", "parse_error"} <= set(totals)
    assert sum(totals.values()) > 3500


# Each call is `order` with one line of two.
SOUND = {
    "hermes": '<tool_call>{"name": "order", "arguments": {"items": [{"sku": "a", "qty": 2}]}}</tool_call>',
    "qwen3_coder": '<tool_call><function=order><parameter=items>[{"sku": "a", "qty": 2}]</parameter></function>'
    "</tool_call>",
    "glm": "<tool_call>order\n<arg_key>items</arg_key>\n"
    '<arg_value>[{"sku": "a", "qty": 2}]</arg_value>\n</tool_call>',
    "llama3_json": '{"name": "order", "parameters": {"items": [{"sku": "a", "qty": 2}]}}',
    "pythonic": "[order(items=[{'sku': 'a', 'qty': 2}])]",
    "mistral": '[TOOL_CALLS]order[CALL_ID]x[ARGS]{"items": [{"sku": "a", "qty": 2}]}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>order\n```json\n"
    '{"items": [{"sku": "a", "qty": 2}]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>order<｜tool▁sep｜>"
    '{"items": [{"sku": "a", "qty": 2}]}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.order:0<|tool_call_argument_begin|>"
    '{"items": [{"sku": "a", "qty": 2}]}<|tool_call_end|><|tool_calls_section_end|>',
    "harmony": "<|channel|>commentary to=functions.order <|constrain|>json<|message|>"
    '{"items": [{"sku": "a", "qty": 2}]}',
    "minimax_m2": '<minimax:tool_call><invoke name="order"><parameter name="items">[{"sku": "a", "qty": 2}]'
    "</parameter></invoke></minimax:tool_call>",
    "minimax_m3": ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="order">]<]minimax[>[<items>'
    "]<]minimax[>[<item>]<]minimax[>[<sku>a]<]minimax[>[</sku>]<]minimax[>[<qty>2]<]minimax[>[</qty>]<]minimax[>[</item>"
    "]<]minimax[>[</items>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
    "minicpm5": '<function name="order"><param name="items">[{"sku": "a", "qty": 2}]</param></function>',
    "muse_glimmer": ' to=order<|message|><atem:function_calls><atem:invoke name="order">'
    '<atem:parameter name="items">[{"sku": "a", "qty": 2}]</atem:parameter></atem:invoke></atem:function_calls>',
    "gemma": '<|tool_call>call:order{items:[{sku:<|"|>a<|"|>,qty:2}]}<tool_call|>',
    "lfm2": "<|tool_call_start|>[order(items=[{'sku': 'a', 'qty': 2}])]<|tool_call_end|>",
    "seed_oss": '<seed:tool_call><function=order><parameter=items>[{"sku": "a", "qty": 2}]</parameter></function>'
    "</seed:tool_call>",
    "deepseek_v32": '<｜DSML｜tool_calls><｜DSML｜invoke name="order">'
    '<｜DSML｜parameter name="items" string="false">'
    '[{"sku": "a", "qty": 2}]</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>',
    "llama4_json": '{"name": "order", "parameters": {"items": [{"sku": "a", "qty": 2}]}}',
    "functionary_v31": '<function=order>{"items": [{"sku": "a", "qty": 2}]}</function>',
    "functionary_v32": 'order\n{"items": [{"sku": "a", "qty": 2}]}',
    "apertus": '<|tools_prefix|>[{"order": {"items": [{"sku": "a", "qty": 2}]}}]<|tools_suffix|>',
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "order", "parameters": {"items": '
    '[{"sku": "a", "qty": 2}]}}]<|END_ACTION|>',
    "internlm": '<|action_start|><|plugin|>{"name": "order", "parameters": {"items": [{"sku": "a", "qty": 2}]}}'
    "<|action_end|>",
}
LISTED = '[{"name": "order", "arguments": {"items": [{"sku": "a", "qty": 2}]}}]'
SOUND |= {
    "granite": f"<|tool_call|>{LISTED}",
    "phi4_mini": f"<|tool_call|>{LISTED}<|/tool_call|>",
    "functools": f"functools{LISTED}",
    "hunyuan": f"<tool_calls>{LISTED}</tool_calls>",
    "nemotron": f"<TOOLCALL>{LISTED}</TOOLCALL>",
    "gigachat": f"<|function_call|>{LISTED[1:-1]}",
    "xlam": LISTED,
}
NOISE = [
    '"',
    "{",
    "}",
    "]",
    ",",
    "\\",
    "<",
    ">",
    "two",
    " ",
    "\n",
    "\x00",
    "é",
    "null",
    "<think>",
    "</think>",
    "``",
]


def damaged_text(text: str, rng: random.Random) -> str:
    """`text` with up to three cuts, doublings or insertions."""
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.randint(0, 12))
        match rng.randrange(4):
            case 0:
                text = text[:start]
            case 1:
                text = text[:start] + text[end:]
            case 2:
                text = text[:end] + text[start:]
            case _:
                text = text[:start] + rng.choice(NOISE) + text[end:]
    return text


@pytest.mark.parametrize("name", [name for name in parser_names() if name != "plain"])
async def test_every_format_damaged_as_text_is_answered_and_counted(name):
    parser, rng, env = choose_parser(name), random.Random(name), await desk()
    totals, plain = Counter(), 0
    assert (await env.step(to_message(parser.parse(SOUND[name], tools=TOOLS), 0)))[0][0].content == "1"
    for number in range(400):
        text = damaged_text(SOUND[name], rng)
        message, ran = to_message(parser.parse(text, tools=TOOLS), number), env.ran
        observation, _, terminated, truncated, info = await env.step(message)
        wanted = len(message.tool_calls) + len(message.parse_errors)
        plain += not wanted
        assert len(observation) == max(wanted, 1), text
        assert counted(info.metrics) + env.ran - ran == wanted, text
        assert (terminated, truncated) == (False, False)
        totals.update(info.metrics)
    # Damage may leave a sound call, or so little that it is plain text; most of it is neither.
    assert totals["parse_error"] + totals["invalid_args"] + totals["unknown_tool"] > 100, (totals, plain)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("malformed")
    make_tokenizer(directory, [json.dumps(TOOLS), *SOUND.values()] * 4, vocab=700, max_context=1 << 20)
    return Renderer.from_directory(directory)


def raw_malformed(rng: random.Random) -> str:
    """A completion with one call that is sure to be malformed: its markers stay, what is between them breaks."""
    body = SOUND["hermes"].removeprefix("<tool_call>").removesuffix("</tool_call>")
    match rng.randrange(6):
        case 0:
            body = body[: rng.randrange(len(body))]
        case 1:
            body = body.replace(rng.choice(['"name"', '"arguments"', ":"]), rng.choice(["", "'", "name"]))
        case 2:
            body = json.dumps({"name": rng.choice(NAMES[6:]), "arguments": {}})
        case 3:
            body = json.dumps({"name": "order", "arguments": junk(rng)})
        case 4:
            body = json.dumps(
                {"name": "order", "arguments": {"items": [{"sku": "", "qty": rng.choice([0, "2", None])}]}}
            )
        case _:
            body = rng.choice(["", "order", "[]", "null", "3", '"order"', body + body, body + "}", "{" * 300])
    before = rng.choice(["", "I order.\n", "<think>\nwell</think>\n", "é👩‍🔬 \x00"])
    return f"{before}<tool_call>{body}" + rng.choice(["</tool_call>", "</tool_call>", "\n</tool_call>", ""])


@pytest.mark.timeout(180)
async def test_two_thousand_raw_completions_through_the_rollout_are_each_a_turn_and_a_count(renderer):
    rng, totals, turns = random.Random(1), Counter(), 0
    for number in range(20):
        script = [raw_malformed(rng) for _ in range(100)]
        env = Desk()
        engine = ScriptedEngine(renderer, script, tools=TOOLS, max_context=1 << 20)
        limits = EpisodeLimits(max_turns=100, max_tokens=1 << 16, token_budget=1 << 20, timeout_s=600)
        player = Player(engine, renderer, lambda env=env: env, limits, Sampling())
        episode = await run_episode(player, Task("t"), episode_id=f"e{number}", seed=0)
        assert (episode.error, episode.stop_reason, len(episode.turns)) == (None, StopReason.MAX_TURNS, 100)
        assert env.ran == 0
        for text, turn in zip(script, episode.turns, strict=True):
            wanted = len(turn.message.tool_calls) + len(turn.message.parse_errors)
            assert wanted >= 1, text
            assert [m.role for m in turn.observation] == ["tool"] * wanted, text
            assert all(m.content.startswith("Error: ") for m in turn.observation)
            turns += wanted
        totals.update({name: count for name, count in episode.metrics.items() if name in MISTAKES})
    assert sum(totals.values()) == turns >= 2000
    assert set(totals) == {"parse_error", "unknown_tool", "invalid_args"}


async def test_a_call_inside_a_think_block_that_never_closes_does_not_run(renderer):
    env = Desk()
    script = [f"<think>\nI might {SOUND['hermes']}", "Fine."]
    engine = ScriptedEngine(renderer, script, tools=TOOLS, max_context=1 << 20)
    player = Player(
        engine, renderer, lambda: env, EpisodeLimits(max_turns=2, max_tokens=4096, token_budget=9999), Sampling()
    )
    episode = await run_episode(player, Task("t"), episode_id="e", seed=0)
    assert (env.ran, episode.metrics["parse_error"], episode.turns[0].calls) == (0, 1.0, ())


async def test_each_mistake_may_end_or_cost_the_episode_as_raw_text_too(renderer):
    bad = "<tool_call>{</tool_call>"
    for policy, reward, stop in [
        ("penalise", -0.75, StopReason.MAX_TURNS),
        ("terminate", 0, StopReason.TERMINATED),
    ]:

        def make(policy=policy):
            env = Desk()
            env.settings = ToolSettings(mistakes={"parse_error": policy}, mistake_penalty=0.25)
            return env

        engine = ScriptedEngine(renderer, [bad] * 3, tools=TOOLS)
        player = Player(engine, renderer, make, EpisodeLimits(max_turns=3), Sampling())
        episode = await run_episode(player, Task("t"), episode_id="e", seed=0)
        assert (episode.reward, episode.stop_reason) == (reward, stop)
