"""TextArena: `textarena:2048-v0`. The reward is TextArena's for the policy's player."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.config.address import address_problem, without_credentials
from agentrl.env.adapter import Adapter
from agentrl.env.tasks import Split, generated
from agentrl.env.textenv import TextEnv
from agentrl.env.toolenv.declare import Stop, reward
from agentrl.envs.others.own_random import OwnRandom
from agentrl.errors import ConfigError, InfraError
from agentrl.suggest import did_you_mean
from agentrl.types import Task

MOVES_IN_A_ROW = 1000
"""Moves of the opponent until it is the policy's turn; more are a game that does not go on."""
_MOVES = re.compile(r"\[[^\[\]\n]{1,20}\]")


@dataclass(frozen=True)
class TextArenaOptions:
    """Options of `textarena:ID`."""

    opponent: Literal["", "random", "scripted", "endpoint"] = ""
    """The other player of a two-player game."""
    player: Literal[0, 1] = 0
    """The policy's player."""
    moves: tuple[str, ...] = ()
    """Moves of a random opponent; by default, what the game shows in brackets and every number it shows."""
    script: tuple[str, ...] = ()
    """Moves of a scripted opponent, in order, then from the start."""
    url: str = ""
    """OpenAI-compatible base URL of an endpoint that plays the opponent."""
    model: str = ""
    """Its model."""
    make: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `textarena.make`."""
    system: str = ""
    """System prompt; none by default, because the games explain themselves."""

    def __post_init__(self) -> None:
        needs = {"scripted": ("script",), "endpoint": ("url", "model")}
        for opponent, keys in needs.items():
            for key in keys:
                if (self.opponent == opponent) != bool(getattr(self, key)):
                    raise ConfigError(f"env.options.{key}: give it with `opponent: {opponent}`, and only there")
        if self.moves and self.opponent != "random":
            raise ConfigError("env.options.moves: give it with `opponent: random`, and only there")
        if self.opponent == "endpoint" and (problem := address_problem(self.url)):
            raise ConfigError(f"env.options.url {without_credentials(self.url)!r}: {problem}")


class TextArena(TextEnv, Adapter):
    """A game of TextArena."""

    Options = TextArenaOptions
    options: TextArenaOptions
    num_players: int = 1

    def system(self) -> str:
        """The configured system prompt."""
        return self.options.system

    def setup(self) -> str:
        """Start the game with the task's seed; the opponent moves first if it is player 0."""
        self.random, self.seen, self.moved = OwnRandom(self.task.seed), "", 0
        with self.random:
            self.game = self.make()
            self.game.reset(num_players=self.num_players, seed=self.task.seed)
        self.over = self.opponents()
        return self.look()

    def reply(self, text: str) -> Any:
        """Play one move, then those of the opponent; nothing if the opponent's first move has ended the game."""
        if self.over or self.move(text) or self.opponents():
            return Stop(self.ending())
        return self.look()

    def move(self, text: str) -> bool:
        """Play a move of the current player; returns whether the game is over."""
        with self.random:
            done, _ = self.game.step(text)
        return bool(done)

    def opponents(self) -> bool:
        """Play the opponent's moves up to the policy's turn; returns whether the game is over."""
        first = self.moved
        while self.num_players == 2 and self.game.state.current_player_id != self.options.player:
            if self.moved - first == MOVES_IN_A_ROW:
                made = f"the opponent made {MOVES_IN_A_ROW} moves in a row"
                raise ConfigError(f"env textarena:{self.rest}: {made}, and it is still not the policy's turn")
            with self.random:
                _, observation = self.game.get_observation()
            if self.move(self.answer(str(observation))):
                return True
        return False

    def look(self) -> str:
        """What is new to the policy's player since its last look."""
        with self.random:
            _, observation = self.game.get_observation()
        seen, self.seen = self.seen, str(observation)
        return self.seen.removeprefix(seen).strip() or "Your turn."

    def ending(self) -> str:
        """Why the game ended."""
        swapped = self.rewards().get(self.options.player)
        if isinstance(swapped, str):
            return f"Invalid Move: {swapped}"
        info = self.game.state.game_info.get(self.options.player, {})
        return str(info.get("reason") or "The game is over.")

    def answer(self, observation: str) -> str:
        """The opponent's move."""
        options, self.moved = self.options, self.moved + 1
        if options.opponent == "scripted":
            return options.script[(self.moved - 1) % len(options.script)]
        if options.opponent == "endpoint":
            return self.asked(observation)
        numbers = [f"[{n}]" for n in re.findall(r"\b\d{1,2}\b", observation)]
        moves: list[str] = sorted(set(options.moves or [*_MOVES.findall(observation), *numbers]))
        random.Random(f"{self.task.seed}/{self.moved}").shuffle(moves)
        for move in moves:
            if self.allowed(move):
                return move
        raise ConfigError(
            f"env textarena:{self.rest}: a random opponent finds no move; list them in env.options.moves"
        )

    def allowed(self, move: str) -> bool:
        """Whether a move is valid, tried on a copy of the game."""
        with self.random:
            tried = copy.deepcopy(self.game)
            player = tried.state.current_player_id
            state = random.getstate()
            done, _ = tried.step(move)
            random.setstate(state)
        invalid = tried.state.game_info[player].get("invalid_move")
        return not invalid and (bool(done) or tried.state.current_player_id != player)

    def asked(self, observation: str) -> str:
        """The move of the endpoint."""
        import openai

        options = self.options
        client = openai.OpenAI(base_url=options.url, api_key="none", max_retries=2, timeout=60)
        try:
            answer = client.chat.completions.create(
                model=options.model, messages=[{"role": "user", "content": observation}]
            )
        except openai.OpenAIError as e:
            raise InfraError(f"the opponent at {without_credentials(options.url)} does not answer: {e}") from e
        finally:
            client.close()
        return answer.choices[0].message.content or ""

    @reward(solved=True)
    def game_reward(self) -> float:
        """The game's reward for the policy's player; 0 for a game that has not ended."""
        given = self.rewards().get(self.options.player, 0.0)
        if isinstance(given, str):  # Countdown and others swap the reward and the reason of an invalid move
            given = self.game.state.game_info[self.options.player]["reason"].removeprefix("Invalid Move: ")
        return float(given)

    def rewards(self) -> Mapping[int, Any]:
        """The game's rewards by player; none before it ends."""
        return self.game.state.rewards or {}

    @classmethod
    def make(cls) -> Any:
        """A new game."""
        import textarena

        return textarena.make(cls.rest, **cls.options.make)

    @classmethod
    def check_name(cls) -> None:
        """Make the game once and find out for how many players it is."""
        from textarena.envs.registration import ENV_REGISTRY

        where, opponent = f"env textarena:{cls.rest}", cls.options.opponent
        if cls.rest not in ENV_REGISTRY:
            hint = did_you_mean(cls.rest, ENV_REGISTRY, otherwise="see textarena.envs.registration.ENV_REGISTRY")
            raise ConfigError(f"{where}: no such game; {hint}")
        cls.num_players = cls.players()
        if cls.num_players > 2:
            raise ConfigError(f"{where} is a game for more than two players, which is not supported")
        if cls.num_players == 2 and not opponent:
            raise ConfigError(
                f"{where} is a game for two: set env.options.opponent to random, scripted (with `script`) or "
                "endpoint (with `url` and `model`)"
            )
        if cls.num_players == 1 and (opponent or cls.options.player):
            raise ConfigError(f"{where} is a game for one player: remove env.options.opponent and player")

    @classmethod
    def players(cls) -> int:
        """The number of players; 3 for more than two."""
        import textarena

        where, refused = f"env textarena:{cls.rest}", None
        for number in (1, 2):
            with OwnRandom(0):
                try:
                    game = cls.make()
                    game.reset(num_players=number, seed=0)
                except AssertionError:
                    continue
                except ValueError as e:  # the number of players, or anything else, such as a missing API key
                    refused = e
                    continue
                except LookupError as e:
                    raise ConfigError(f"{where} needs data that is not installed: {e}") from e
            # Some games ignore the number; others start with one player, and never end.
            alone = number == 1 and isinstance(game.state, textarena.FFAMultiPlayerState)
            if game.state.num_players == number and not alone:
                return number
        if refused is not None:
            raise ConfigError(f"{where}: {refused}") from refused
        return 3

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, size: int = 10_000) -> Sequence[Task]:
        """Games by seed."""
        return generated(f"textarena-{cls.rest}", split, seed, size, lambda rng: {})
