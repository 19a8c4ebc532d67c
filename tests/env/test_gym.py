import io
import json
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

import agentrl.envs
from agentrl.env import Stop, ToolEnv, reward, tool
from agentrl.env.ansi import without_colors
from agentrl.env.gym import AnyText, GymnasiumEnv, TextGym, read_action
from agentrl.env.gym_actions import reader_of
from agentrl.env.toolenv.json_schema import InvalidArguments
from agentrl.envs.calculator import Calculator
from agentrl.errors import ConfigError, InfraError, RewardError
from agentrl.testing.env import check_env as check_contract
from agentrl.testing.policy import ScriptedPolicy, call, play
from agentrl.types import Episode, Message, StopReason, Task


@pytest.mark.parametrize("name", sorted(agentrl.envs.SHIPPED))
def test_a_shipped_env_passes_gymnasiums_own_checker(name):
    env = gymnasium.make(f"agentrl/{name}-v0").unwrapped
    check_env(env)
    env.close()


def action(message: Message) -> str:
    if message.tool_calls:
        return json.dumps([{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls])
    return str(message.content)


def test_an_episode_is_played_through_gymnasium():
    env = gymnasium.make("agentrl/Calculator-v0", render_mode="ansi", split="held_out")
    task = Calculator.tasks("held_out")[3]
    text, info = env.reset(options={"task": 3})
    assert text.endswith(Calculator().setup(**task.row))
    assert info == {"task_id": task.id}
    policy = Calculator.oracle(task)
    first = env.step(action(policy([])))
    assert first[1:4] == (0.0, False, False)
    _, reward, terminated, truncated, info = env.step(action(policy([])))
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert (info["stop_reason"], info["rewards"]) == ("answered", {"solved": 1.0})
    assert "[assistant] calculator(" in env.render()
    env.close()


class Watched(ToolEnv):
    """Answer."""

    def setup(self) -> str:
        return "Answer."

    @reward(per="turn")
    def spoke(self) -> float:
        return 0.5

    @reward
    def mistakes(self, episode: Episode) -> float:
        return -episode.metrics.get("unknown_tool", 0.0)

    @reward
    def of_turns(self, episode: Episode) -> float:
        return sum(turn.rewards["spoke"] for turn in episode.turns)


async def test_rewards_read_the_same_episode_through_gymnasium():
    task = Task("t", {}, 1)
    played = await play(Watched(), task, ScriptedPolicy([call("nothing"), "done"]))
    assert played.rewards == {"mistakes": -1.0, "of_turns": 1.0}
    env = TextGym(Watched, [task])
    for _ in range(2):  # nothing of an episode is left in the next
        env.reset(seed=0)
        env.step('{"name": "nothing"}')
        *_, info = env.step("done")
        assert info["rewards"] == played.rewards
    env.close()


def test_the_seed_draws_the_task_and_envs_vectorise():
    envs = gymnasium.make_vec("agentrl/Calculator-v0", num_envs=3, vectorization_mode="sync")
    first, _ = envs.reset(seed=5)
    again, _ = envs.reset(seed=5)
    assert list(first) == list(again)
    assert len(set(first)) == 3
    _, rewards, terminated, _, _ = envs.step(
        ["1", "2", '{"name": "calculator", "arguments": {"expression": "1"}}']
    )
    assert list(terminated) == [True, True, False]
    assert rewards.shape == (3,)
    envs.close()


VECTOR = """
import gymnasium, agentrl.envs
gymnasium.make("agentrl/Calculator-v0").reset(seed=0)  # the parent's own loop does not disturb the children
envs = gymnasium.make_vec(
    "agentrl/Calculator-v0", 3, vectorization_mode="async", vector_kwargs={"shared_memory": False}
)
first, _ = envs.reset(seed=5)
call = '{"name": "calculator", "arguments": {"expression": "1+2"}}'
texts, _, ended, *_ = envs.step([call, "2", "3"])
print(len(set(first)), texts[0], list(map(bool, ended)))
envs.close()
"""


def test_envs_vectorise_over_processes():
    # A process of its own: Gymnasium forks, which a test process with threads should not.
    done = subprocess.run([sys.executable, "-c", VECTOR], capture_output=True, text=True, timeout=50)
    assert done.stdout == "3 3 [False, True, True]\n", done.stderr


def test_actions_are_calls_or_text():
    assert read_action("[1]").content == "[1]"
    assert read_action('{"name": 3}').tool_calls == ()
    message = read_action('{"name": "f", "arguments": {"x": 1}}', 2)
    assert (message.tool_calls[0].name, message.tool_calls[0].arguments, message.tool_calls[0].id) == (
        "f",
        {"x": 1},
        "call_2_0",
    )
    assert read_action('[{"name": "f", "arguments": {"x": 1}}]', 2) == message
    assert AnyText(5).contains("äöü🙂!")
    assert not AnyText(5).contains("too long")


async def test_a_game_becomes_tools():
    env = GymnasiumEnv("FrozenLake-v1", actions=("left", "down", "right", "up"), is_slippery=False)
    assert env.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"action": {"type": "string", "enum": ["left", "down", "right", "up"]}},
        "required": ["action"],
    }
    way = [call("act", action=a) for a in ("down", "down", "right", "right", "down", "right")]
    episode = await play(env, Task("t", seed=3), ScriptedPolicy(way))
    assert (episode.reward, episode.stop_reason) == (1.0, StopReason.TERMINATED)
    seen = [m.content for m in episode.messages if m.role in ("user", "tool")]
    assert seen[0] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert str(seen[1]).endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert not any("\x1b" in str(text) for text in seen), "no colors of a terminal"
    episode = await play(env, Task("t"), ScriptedPolicy([call("act", action="fly"), *way]))
    assert episode.turns[0].observation[0].content == (
        "Error: invalid arguments: args.action: expected 'left' or 'down' or 'right' or 'up', got 'fly'"
    )
    assert episode.reward == 1.0


def test_colors_of_a_terminal_become_signs():
    assert without_colors("\x1b[41mS\x1b[0mFF") == "[S]FF"
    assert without_colors("|\x1b[34;1mR\x1b[0m|\x1b[43m \x1b[0m|") == "|R(blue)|[  yellow]|"
    assert without_colors("\x1b[1mbold\x1b[0m \x1b[2J\x1b]0;title\x07plain\x1b[0m") == "bold plain"


def test_a_game_that_is_only_named_has_tasks_by_seed():
    train, held_out = GymnasiumEnv.tasks("train", 3), GymnasiumEnv.tasks("held_out", 0)
    assert (train[0].id, dict(train[0].row), len(held_out)) == ("game-train-3-0", {}, 10_000)
    assert len({task.seed for task in (*train[:50], *held_out[:50])}) == 100
    with pytest.raises(ConfigError, match=r"in YAML env\.options: {env_id: FrozenLake-v1}"):
        GymnasiumEnv()


async def test_a_time_limit_truncates():
    env = GymnasiumEnv("CartPole-v1", max_episode_steps=3)
    steps = 0

    def policy(messages):
        nonlocal steps
        steps += 1
        return call("act", action=steps % 2)

    episode = await play(env, Task("t", seed=1), policy)
    assert len(episode.turns) == 3
    assert (episode.reward, episode.stop_reason) == (3.0, StopReason.MAX_TURNS)
    assert len(json.loads(episode.messages[1].content)) == 4


class GivesUp(GymnasiumEnv):
    """Play, or give up."""

    env_id = "FrozenLake-v1"

    @tool
    def give_up(self) -> Stop:
        """End the game."""
        return Stop("You gave up.")


async def test_another_tool_than_that_of_the_game_may_end_the_episode():
    episode = await play(
        GivesUp(), Task("t"), ScriptedPolicy([call("act", action=0), call("give_up"), "still here"])
    )
    assert (episode.stop_reason, len(episode.turns)) == (StopReason.STOPPED_BY_TOOL, 2)


def test_small_spaces_of_every_kind_can_be_named():
    assert reader_of(spaces.Discrete(3, start=2), (), "g").schema == {
        "type": "integer",
        "minimum": 2,
        "maximum": 4,
    }
    box = reader_of(spaces.Box(-1.0, 1.0, (2,), np.float32), (), "g")
    assert box.schema["items"] == {"type": "number", "minimum": -1.0, "maximum": 1.0}
    assert box.read([0.5, -1]).dtype == np.float32
    multi = reader_of(spaces.MultiDiscrete([2, 3]), (), "g")
    assert multi.read([1, 2]).tolist() == [1, 2]
    assert reader_of(spaces.MultiBinary(2), (), "g").read([0, 1]).tolist() == [0, 1]
    for bad in ([0.5], [0.5, 2], "no", [True, 0], None):
        with pytest.raises(InvalidArguments):
            box.read(bad)
    with pytest.raises(InvalidArguments, match=r"args\.action\[1\]: must be from 0 to 2, got 3"):
        multi.read([1, 3])


def test_a_text_that_a_class_of_its_own_checks_may_have_any_character():
    reader = reader_of(AnyText(5), (), "g")
    assert reader.schema == {"type": "string", "minLength": 1, "maxLength": 5}
    assert reader.arguments({"action": "äöü"}) == "äöü"


def test_what_its_own_space_refuses_is_the_policys_mistake():
    class Even(spaces.Discrete):
        def contains(self, x):
            return super().contains(x) and x % 2 == 0

    reader = reader_of(Even(5), (), "g")
    assert reader.arguments({"action": 4}) == 4
    with pytest.raises(InvalidArguments, match=r"args\.action: not in the action space .*, got 3"):
        reader.arguments({"action": 3})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: reader_of(spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))}), (), "g"), "cannot be played"),
        (lambda: reader_of(spaces.Dict({}), (), "g"), "cannot be played"),
        (
            lambda: reader_of(spaces.Tuple((spaces.Discrete(2),)), ("a", "b"), "g"),
            "names the actions of a Discrete",
        ),
        (lambda: GymnasiumEnv(), "say which game"),
        (lambda: GymnasiumEnv("NoSuchGame-v0"), "gymnasium.make"),
        (lambda: GymnasiumEnv("FrozenLake-v1", actions=("left",)), "4 different action names are needed"),
        (lambda: GymnasiumEnv("FrozenLake-v1", no_such_option=1), "gymnasium.make"),
        (lambda: reader_of(spaces.Box(0, 255, (84, 84), np.uint8), (), "g"), "cannot be played through a tool"),
    ],
)
def test_what_cannot_be_played_is_said(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


def test_a_step_without_reset_is_refused():
    env = TextGym(Calculator, Calculator.tasks())
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("1")
    with pytest.raises(ValueError, match="render_mode"):
        TextGym(Calculator, Calculator.tasks(), "human")


@pytest.mark.parametrize("of_class", [True, False])
def test_a_game_is_made_twice_only_where_no_class_says_how_it_renders(monkeypatch, of_class):
    made = []

    class Coin(gymnasium.Env):
        metadata = {"render_modes": ["ansi"]}  # noqa: RUF012
        action_space = observation_space = spaces.Discrete(2)

        def __init__(self, render_mode=None):
            self.render_mode = render_mode
            made.append(self)

    maker = Coin if of_class else lambda **options: Coin(**options)
    monkeypatch.setitem(gymnasium.registry, "Coin-v0", gymnasium.envs.registration.EnvSpec("Coin-v0", maker))
    GymnasiumEnv("Coin-v0")  # asks a game for its actions
    made.clear()
    assert GymnasiumEnv("Coin-v0").game.render_mode == "ansi"
    assert len(made) == (1 if of_class else 2)


class Door(gymnasium.Env):
    """Counts how often it is opened and closed."""

    metadata = {"render_modes": []}  # noqa: RUF012
    action_space, observation_space = spaces.Discrete(2), spaces.Discrete(2)
    opened, closed = 0, 0

    def __init__(self):
        Door.opened += 1

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return action, 0.0, bool(action), False, {}

    def close(self):
        Door.closed += 1


async def test_every_game_that_was_made_is_closed():
    gymnasium.register("Door-v0", Door)
    env = GymnasiumEnv("Door-v0")
    for n in range(3):
        episode = await play(env, Task(f"t{n}"), ScriptedPolicy([call("act", action=1)]))
        assert episode.stop_reason is StopReason.TERMINATED
        assert Door.opened == Door.closed
    assert (await env.reset(Task("t")))[0]
    await env.reset(Task("again"))
    await env.close()
    for _ in range(5):
        assert GymnasiumEnv("Door-v0").tools
    assert Door.opened == Door.closed > 3


class Shop(Door):
    """Has several parts to an action."""

    action_space = spaces.Dict(
        {
            "item": spaces.Text(min_length=2, max_length=5, charset="ab-]"),
            "where": spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiBinary(2))),
            "pay": spaces.Dict({"cash": spaces.Box(0.0, 9.0, (1,), np.float32)}),
        }
    )

    def step(self, action):
        assert self.action_space.contains(action)
        return int(action["where"][1][1]), 1.0, True, False, {}


async def test_a_space_of_several_parts_has_an_argument_for_each():
    gymnasium.register("Shop-v0", Shop)
    env = GymnasiumEnv("Shop-v0")
    parameters = env.tools[0]["function"]["parameters"]
    assert parameters["required"] == ["item", "pay", "where"]
    assert parameters["properties"]["item"] == {
        **{"type": "string", "minLength": 2, "maxLength": 5, "pattern": r"^[\-\]ab]*$"}
    }
    assert parameters["properties"]["where"]["prefixItems"][0] == {"type": "integer", "minimum": 1, "maximum": 3}
    good = {"item": "a-b]", "where": [3, [0, 1]], "pay": {"cash": [2.5]}}
    wrong = {
        "args.item: must not contain 'c'; it may: '-]ab'": good | {"item": "abc"},
        "args.item: must have 2 to 5 characters, has 1": good | {"item": "a"},
        "args.item: expected string, got 3": good | {"item": 3},
        "args.where: expected array of 2 values, got [3]": good | {"where": [3]},
        "args.where[0]: must be from 1 to 3, got 0": good | {"where": [0, [0, 1]]},
        "args.where[1][1]: must be from 0 to 1, got 2": good | {"where": [1, [0, 2]]},
        "args.pay: expected object, got 1": good | {"pay": 1},
        "args.pay.cash: required": good | {"pay": {}},
        "args.action: unknown argument (known: item, pay, where)": good | {"action": 1},
        "args.item: required": {},
    }
    for text, given in wrong.items():
        with pytest.raises(InvalidArguments) as refused:
            env.reader.arguments(given)
        assert str(refused.value) == text
    policy = ScriptedPolicy([call("act", **wrong["args.pay: expected object, got 1"]), call("act", **good)])
    episode = await play(env, Task("t"), policy)
    said = [turn.observation[0].content for turn in episode.turns]
    assert said == ["Error: invalid arguments: args.pay: expected object, got 1", "1\nThe game is over."]
    assert episode.reward == 1.0
    await check_contract(lambda: GymnasiumEnv("Shop-v0"), [Task(f"t{n}", seed=n) for n in range(3)])


class Stuck(Door):
    """Cannot be closed while it is played."""

    playing = False

    def reset(self, *, seed=None, options=None):
        self.playing = True
        return 0, {}

    def close(self):
        if self.playing:
            raise OSError("no display")


async def test_a_game_that_cannot_be_closed_is_infrastructure():
    gymnasium.register("Stuck-v0", Stuck)
    env = GymnasiumEnv("Stuck-v0")
    await env.reset(Task("t"))
    with pytest.raises(InfraError, match="GymnasiumEnv: closing Stuck-v0: OSError: no display"):
        await env.close()


def test_a_number_that_the_space_cannot_hold_is_refused():
    reader = reader_of(spaces.Box(-np.inf, np.inf, (1,), dtype=np.float32), (), "Box-v0")
    assert reader.read([1.5]).tolist() == [1.5]
    with pytest.raises(InvalidArguments, match="too large for float32"):
        reader.read([1e300])
    with pytest.raises(InvalidArguments, match="too large for float32"):
        reader.read([10**400])


def test_the_limits_of_a_space_are_among_its_actions():
    space = spaces.Box(-0.9, 0.9, (2,), np.float32)
    reader = reader_of(space, (), "Box-v0")
    assert reader.schema["items"] == {"type": "number", "minimum": -0.9, "maximum": 0.9}
    assert space.contains(reader.read([0.9, -0.9]))
    with pytest.raises(InvalidArguments, match=r"must be from -0\.9 to 0\.9"):
        reader.read([0.90001, 0])


def test_a_game_can_be_named_with_its_module(tmp_path, monkeypatch):
    (tmp_path / "my_games.py").write_text(
        "import gymnasium\nfrom tests.env.test_gym import Door\ngymnasium.register('Gate-v0', Door)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert GymnasiumEnv("my_games:Gate-v0").tools[0]["function"]["name"] == "act"
    with pytest.raises(ConfigError, match="no_such_games"):
        GymnasiumEnv("no_such_games:Gate-v0")


def test_a_class_that_declares_ansi_without_an_argument_for_it_can_be_played():
    class Mute(Door):
        metadata = {"render_modes": ["ansi"]}  # noqa: RUF012

    gymnasium.register("Mute-v0", Mute)
    assert GymnasiumEnv("Mute-v0").game.render_mode is None


class Odd(Door):
    """Shows something else than numbers, and earns `earned`."""

    def __init__(self, shown=None, earned=0.0):
        super().__init__()
        self.shown, self.earned = shown, earned

    def reset(self, *, seed=None, options=None):
        return self.shown, {}

    def step(self, action):
        return self.shown, self.earned, True, False, {}


@pytest.mark.filterwarnings("ignore")  # Gymnasium's own checks complain as well
@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ('a "door"\nand a wäll', 'a "door"\nand a wäll'),
        ({"wall": "wäll", "n": np.int64(2)}, '{"wall": "wäll", "n": 2}'),
        ({1}, '"{1}"'),
    ],
)
async def test_text_is_shown_as_it_is_and_anything_else_as_json(shown, text):
    gymnasium.register("Odd-v0", Odd)
    env = GymnasiumEnv("Odd-v0", shown=shown)
    (opening,) = [m.content for m in (await env.reset(Task("t")))[0] if m.role == "user"]
    await env.close()
    assert opening == text


class Drawn(Door):
    """Renders `drawn`."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012

    def __init__(self, drawn=None, render_mode=None):
        super().__init__()
        self.drawn, self.render_mode = drawn, render_mode

    def render(self):
        return self.drawn and self.drawn()


@pytest.mark.filterwarnings("ignore")  # Gymnasium's own checks complain as well
@pytest.mark.parametrize(
    ("drawn", "text"), [(lambda: "a door", "a door"), (lambda: io.StringIO("a door\n"), "a door"), (None, "0")]
)
async def test_a_rendering_that_is_no_text_is_read_or_left_out(drawn, text):
    gymnasium.register("Drawn-v0", Drawn)
    env = GymnasiumEnv("Drawn-v0", drawn=drawn)
    (opening,) = [m.content for m in (await env.reset(Task("t")))[0] if m.role == "user"]
    await env.close()
    assert opening == text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("earned", ["much", np.zeros(2), float("nan")])
async def test_a_reward_that_is_no_number_is_no_mistake_of_the_policy(earned):
    gymnasium.register("Odd-v0", Odd)
    env = GymnasiumEnv("Odd-v0", earned=earned)
    with pytest.raises(RewardError, match="reward of tool 'act' of GymnasiumEnv: it returned"):
        await play(env, Task("t"), ScriptedPolicy([call("act", action=1)]))
    await env.close()


class FourValues(Door):
    """A game of Gym before 0.26."""

    def step(self, action):
        return 0, 1.0, True, {}


@pytest.mark.filterwarnings("ignore")  # Gymnasium deprecates it
@pytest.mark.parametrize("limits", [{}, {"max_episode_steps": 3}])
async def test_a_game_whose_step_returns_four_values_is_no_mistake_of_the_policy(limits):
    gymnasium.register("FourValues-v0", FourValues, **limits)
    env = GymnasiumEnv("FourValues-v0")
    with pytest.raises(InfraError, match="FourValues-v0: `step` returns four values"):
        await play(env, Task("t"), ScriptedPolicy([call("act", action=1)]))
    await env.close()
