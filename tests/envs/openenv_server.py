"""A server made with the `openenv` package, run by the Python that has it: `openenv_server.py KIND PORT`."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from pydantic import Field


class GuessAction(Action):
    """Guess the number."""

    number: int = Field(ge=0, le=20)
    crash: str = ""


class GuessObservation(Observation):
    hint: str


class Guess(Environment):
    """A number from 0 to 20, from the seed or the task; a hit earns 1, each miss costs 0.1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="none", step_count=0)

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str = "",
        index: int = 0,
        over: bool = False,
        **_: Any,
    ) -> Observation:
        self.target = index % 21 if split else random.Random(seed).randint(0, 20)
        self._state = State(episode_id=episode_id, step_count=0)
        return GuessObservation(hint="Guess a number from 0 to 20.", done=over)

    def step(self, action: GuessAction, timeout_s: float | None = None, **_: Any) -> Observation:
        if action.crash == "error":
            raise ValueError("the dice fell off the table")
        if action.crash == "exit":
            os._exit(3)
        self._state.step_count += 1
        if action.number == self.target:
            return GuessObservation(hint="Right.", done=True, reward=1.0)
        over = self._state.step_count >= 8
        hint = "Too low." if action.number < self.target else "Too high."
        return GuessObservation(hint=hint, done=over, reward=-0.1)

    @property
    def state(self) -> State:
        return self._state

    def list_splits(self) -> list[Any]:
        return ["train", "test"]

    def num_tasks(self, split: str) -> int:
        return {"train": 40, "test": 7}[split]


class Ledger(MCPEnvironment):
    """Tools over MCP: bring the balance to the target, then submit."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("ledger")

        @server.tool
        def add(amount: int) -> str:
            """Add an amount to the balance."""
            self.balance += amount
            return f"The balance is {self.balance}."

        @server.tool
        def fail() -> str:
            """Fail."""
            raise ValueError("no such account")

        super().__init__(server)
        self._state = State(episode_id="none", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        rng = random.Random(seed)
        self.balance, self.target = rng.randint(0, 9), rng.randint(10, 99)
        return Observation(metadata={"balance": self.balance, "target": self.target})

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        seen = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction):
            seen.done = self.balance == self.target
            seen.reward = float(seen.done)
        return seen

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError("only tools")

    @property
    def state(self) -> State:
        return self._state


def main() -> None:
    kind, port = sys.argv[1], int(sys.argv[2])
    sessions = int(sys.argv[3]) if len(sys.argv) > 3 else 64
    app = (
        create_app(Guess, GuessAction, GuessObservation, env_name="guess", max_concurrent_envs=sessions)
        if kind == "guess"
        else create_app(
            Ledger, CallToolAction, CallToolObservation, env_name="ledger", max_concurrent_envs=sessions
        )
    )
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
