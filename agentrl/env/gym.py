"""Gymnasium adapters: an agentrl env as a `gymnasium.Env`, and a Gymnasium env as tools for a language model.

In the first direction, observations and actions are text. An action that is a JSON object
`{"name": ..., "arguments": {...}}` (or a list of them) is a tool call; any other text is a plain message. The
reward of the last step includes the episode's rewards.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator

from agentrl.env.ansi import without_colors
from agentrl.env.env import DeclaredReward, Env
from agentrl.env.gym_actions import ActionReader, reader_of
from agentrl.env.tasks import Split, generated
from agentrl.env.toolenv.background import background
from agentrl.env.toolenv.calls import add_counts
from agentrl.env.toolenv.declare import ToolResult
from agentrl.env.toolenv.dispatch import BoundTool, call_function
from agentrl.env.toolenv.env import Step, ToolEnv
from agentrl.env.toolenv.observe import plain_text
from agentrl.errors import ConfigError, InfraError
from agentrl.types import Episode, Message, StopReason, Task, ToolCall, Turn


class AnyText(spaces.Text):
    """Text of up to `max_length` arbitrary characters; samples are at most 40 printable ASCII characters."""

    def __init__(self, max_length: int = 1_000_000) -> None:
        super().__init__(max_length, charset=frozenset(string.printable))

    def contains(self, x: object) -> bool:
        """Whether `x` is text within the length limit."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: object = None, probability: object = None) -> str:
        """Short random text."""
        length = int(self.np_random.integers(1, 41))
        return "".join(self.np_random.choice(sorted(string.printable), length))


class TextGym(gymnasium.Env[str, str]):
    """An agentrl env with Gymnasium's interface.

    Args:
        env: an env class (or any factory of instances).
        tasks: `reset` samples from them with its seed; `options={"task": Task | int}` picks one.
        render_mode: "ansi" renders the conversation.
    """

    metadata: dict[str, object] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  # as Gymnasium declares it

    def __init__(
        self, env: Callable[[], Env], tasks: Sequence[Task], render_mode: str | None = None, max_turns: int = 50
    ) -> None:
        if render_mode not in (None, "ansi"):
            raise ValueError(f"render_mode {render_mode!r} must be None or 'ansi'")
        self.observation_space, self.action_space = AnyText(), AnyText(20_000)
        self.render_mode = render_mode
        self._env, self._tasks, self._max_turns = env(), tasks, max_turns
        self._task: Task | None = None
        self._messages: list[Message] = []
        self._turns: list[Turn] = []
        self._metrics: dict[str, float] = {}

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:
        """The tool schemas that a policy needs in addition to the text."""
        return self._env.tools

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, object]]:
        """Start an episode on a task sampled with the env's generator."""
        super().reset(seed=seed)
        wanted = (options or {}).get("task")
        if wanted is None:
            wanted = int(self.np_random.integers(len(self._tasks)))
        self._task = self._tasks[wanted] if isinstance(wanted, int) else wanted
        background.run(self._env.close())
        opening, _ = background.run(self._env.reset(self._task))
        self._messages, self._turns, self._metrics = list(opening), [], {}
        return _text(opening), {"task_id": self._task.id}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Play one assistant message."""
        if self._task is None:
            raise gymnasium.error.ResetNeeded("call reset before step")
        message = read_action(action, len(self._turns))
        observation, reward, terminated, truncated, info = background.run(self._env.step(message))
        self._messages += [message, *observation]
        self._turns.append(
            Turn(message, tuple(observation), reward, "stop", 0, 0.0, 0.0, info.calls, info.rewards)
        )
        add_counts(self._metrics, info.metrics)
        stop = info.stop_reason
        if not terminated and len(self._turns) >= self._max_turns:
            truncated, stop = True, stop or StopReason.MAX_TURNS
        said: dict[str, object] = {"metrics": dict(info.metrics)}
        if terminated or truncated:
            episode = self._episode(stop or StopReason.TERMINATED)
            rewards = background.run(self._env.score(episode))
            reward += sum(rewards.values())
            said |= {"stop_reason": str(episode.stop_reason), "rewards": dict(rewards)}
        return _text(observation), float(reward), terminated, truncated, said

    def render(self) -> str | None:
        """The conversation so far."""
        if self.render_mode != "ansi":
            return None
        return "\n".join(f"[{m.role}] {plain_text(m.content) or _calls_text(m)}" for m in self._messages)

    def close(self) -> None:
        """Close the env."""
        background.run(self._env.close())

    def _episode(self, stop: StopReason) -> Episode:
        assert self._task is not None
        return Episode(
            self._task.id, self._task, tuple(self._messages), tuple(self._turns), (), stop, None,
            metrics=dict(self._metrics), tools=tuple(self._env.tools),
        )  # fmt: skip


def read_action(action: str, turn: int = 0) -> Message:
    """The assistant message that an action text represents."""
    try:
        value = json.loads(action)
    except (ValueError, RecursionError):
        return Message("assistant", action)
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(i, dict) and isinstance(i.get("name"), str) for i in items):
        return Message("assistant", action)
    return Message(
        "assistant",
        tool_calls=tuple(
            ToolCall(f"call_{turn}_{i}", item["name"], item.get("arguments", {})) for i, item in enumerate(items)
        ),
    )


def _render_modes(env_id: str) -> Sequence[str]:
    """How a game can show itself. Most classes say so; only where one does not, a game is made to ask it."""
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    spec = gymnasium.spec(name)
    maker = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    of_class: Mapping[str, Sequence[str]] = getattr(maker, "metadata", {})
    if modes := of_class.get("render_modes"):
        return modes
    with contextlib.closing(spec.make()) as game:
        return list(game.metadata.get("render_modes", []))


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(plain_text(m.content) for m in messages)


def _calls_text(message: Message) -> str:
    return " ".join(f"{c.name}({json.dumps(c.arguments, default=repr)})" for c in message.tool_calls)


_READERS: dict[tuple[object, ...], ActionReader] = {}


class GymnasiumEnv(ToolEnv):
    """Play the game: call act with your next action until it ends."""

    env_id: str = ""
    """Gymnasium id of the env."""
    make_options: Mapping[str, object] = {}
    """Keyword arguments of `gymnasium.make`."""
    actions: tuple[str, ...] = ()
    """Names of a Discrete space's actions; numbers if it is empty."""
    reward_scale: float = 1.0
    """Factor for the game's rewards, which become turn rewards."""
    _game: gymnasium.Env[object, object] | None = None

    def __init__(
        self, env_id: str | None = None, *, actions: Sequence[str] | None = None, **make_options: object
    ) -> None:
        self.env_id = env_id or self.env_id
        self.actions = tuple(actions) if actions is not None else self.actions
        self.make_options = {**self.make_options, **make_options}
        if not self.env_id:
            raise ConfigError(
                f'{type(self).__name__}: say which game, e.g. GymnasiumEnv("FrozenLake-v1"), or in YAML '
                "env.options: {env_id: FrozenLake-v1}"
            )
        self.reader = self._known_reader()

    @property
    def game(self) -> gymnasium.Env[object, object]:
        """The game of this episode, made when it is first needed; it is closed with the episode."""
        if self._game is None:
            self._game = self.make_game()
        return self._game

    @game.setter
    def game(self, game: gymnasium.Env[object, object]) -> None:
        self._close_game()
        self._game = game

    def _close_game(self) -> None:
        game, self._game = self._game, None
        if game is not None:
            game.close()

    def _known_reader(self) -> ActionReader:
        """The reader of the game's actions; games with the same options have the same actions."""
        made_by = getattr(gymnasium.registry.get(self.env_id.rpartition(":")[2]), "entry_point", None)
        key = (type(self), self.env_id, made_by, repr(sorted(self.make_options.items())), self.actions)
        if key not in _READERS:
            with contextlib.closing(self.make_game()) as game:
                _READERS[key] = reader_of(game.action_space, self.actions, self.env_id)
        return _READERS[key]

    def _restore(self) -> None:
        self._close_game()
        super()._restore()

    async def release(self) -> None:
        """Close the game as well."""
        try:
            await super().release()
        finally:
            try:
                await call_function(self._close_game, {}, self.settings.teardown_timeout_s)
            except Exception as e:
                raise InfraError(f"{type(self).__name__}: closing {self.env_id}: {type(e).__name__}: {e}") from e

    def make_game(self, **options: Any) -> gymnasium.Env[Any, object]:
        """Create the game, with text rendering if supported."""
        wanted = {**self.make_options, **options}
        try:
            if "render_mode" not in wanted and "ansi" in _render_modes(self.env_id):
                try:
                    return gymnasium.make(self.env_id, render_mode="ansi", **wanted)
                except TypeError as e:  # it declares ansi, but cannot be asked for it
                    if "'render_mode'" not in str(e):
                        raise
            return gymnasium.make(self.env_id, **wanted)
        except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as e:
            raise ConfigError(f"gymnasium.make({self.env_id!r}): {e}") from e

    def more_tools(self) -> Sequence[BoundTool]:
        """The only tool, `act`, with arguments derived from the action space."""
        return [_Act(self)]

    def setup(self) -> str:
        """Reset the game with the task's seed."""
        observation, _ = self.game.reset(seed=self.task.seed)
        self.end: tuple[bool, bool] = (False, False)
        return self.describe(observation)

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, size: int = 10_000) -> Sequence[Task]:
        """Games by seed; each task has no row."""
        return generated(cls.env_id.lower() or "game", split, seed, size, lambda rng: {})

    def declared_rewards(self) -> Mapping[str, DeclaredReward] | None:
        """Those of the class; undeclared if it has none, because the game's rewards are rewards of turns."""
        return super().declared_rewards() or None

    def describe(self, observation: object) -> str:
        """What the policy sees: the rendered text if the game supports it, else the observation, as JSON if it is
        not text."""
        if getattr(self.game, "render_mode", None) == "ansi":
            shown: Any = self.game.render()
            shown = shown.getvalue() if isinstance(shown, io.StringIO) else shown  # as Gym allowed
            if isinstance(shown, str):
                return without_colors(shown).strip("\n")
        if isinstance(observation, str):
            return observation
        return json.dumps(_plain(observation), ensure_ascii=False, default=str)

    def act(self, action: object) -> ToolResult:
        """Play one action of the game's action space.

        Raises:
            InfraError: the game was written for Gym before 0.26.
        """
        try:
            observation, reward, terminated, truncated, _ = self.game.step(action)
        except ValueError as e:  # raised here, or by a wrapper of Gymnasium, which no longer adapts such games
            if str(e) != "not enough values to unpack (expected 5, got 4)":
                raise
            raise InfraError(
                f"{self.env_id}: `step` returns four values, as in Gym before 0.26: return observation, reward, "
                "terminated, truncated and info, or wrap the game in shimmy's GymV21CompatibilityV0"
            ) from e
        self.end = (terminated, truncated)
        text = self.describe(observation)
        if terminated or truncated:
            text += "\nThe game is over."
        earned: Any = reward
        with contextlib.suppress(TypeError, ValueError):  # what is no number is refused as every reward is
            earned = self.reward_scale * float(reward)
        return ToolResult(text, reward=earned, stop=terminated or truncated)

    async def step(self, message: Message) -> Step:
        """Like any ToolEnv; the game's ending is `terminated`, its time limit `truncated`."""
        observation, reward, terminated, truncated, info = await super().step(message)
        if info.stop_reason is StopReason.STOPPED_BY_TOOL and any(self.end):  # else another tool has ended it
            over, out_of_time = self.end
            terminated, truncated = over, out_of_time and not over
            info.stop_reason = StopReason.TERMINATED if over else StopReason.MAX_TURNS
        return observation, reward, terminated, truncated, info


class _Act:
    """The tool `act` of one GymnasiumEnv."""

    name = "act"
    parallel = False
    timeout_s: float | None = None

    def __init__(self, env: GymnasiumEnv) -> None:
        self._env = env
        self.schema: Mapping[str, object] = {
            "type": "function",
            "function": {
                "name": "act",
                "description": "Do one action.",
                "parameters": env.reader.parameters,
            },
        }

    def validate(self, arguments: Mapping[str, object]) -> dict[str, object]:
        return {"action": self._env.reader.arguments(arguments)}

    async def call(self, arguments: dict[str, object], timeout_s: float | None) -> object:
        return await call_function(self._env.act, arguments, timeout_s)


def _plain(value: object) -> object:
    """A Gymnasium observation as JSON data."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value
