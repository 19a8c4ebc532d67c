"""Shipped environments; importing this package lets `gymnasium.make("agentrl/Calculator-v0")` find them."""

from __future__ import annotations

from typing import Any

import gymnasium

SHIPPED = {
    "Calculator": "agentrl.envs.calculator:Calculator",
    "CliffWalking": "agentrl.envs.gym_text:CliffWalking",
    "Files": "agentrl.envs.files:Files",
    "FrozenLake": "agentrl.envs.gym_text:FrozenLake",
    "PythonCode": "agentrl.envs.python_code:PythonCode",
    "Retail": "agentrl.envs.retail:Retail",
    "Search": "agentrl.envs.search:Search",
    "Sqlite": "agentrl.envs.sqlite:Sqlite",
    "Taxi": "agentrl.envs.gym_text:Taxi",
}
"""Names in Gymnasium (`agentrl/<name>-v0`) and the classes behind them, which are imported when they are made."""


def make_gym(env: str, split: str = "train", seed: int = 0, **options: Any) -> Any:
    """The shipped env `env` (`module:Name`) as a Gymnasium env over its own tasks."""
    from agentrl.env.gym import TextGym
    from agentrl.env.load import load_env

    found: Any = load_env(env)
    render_mode = options.pop("render_mode", None)
    return TextGym(found, found.tasks(split, seed, **options), render_mode)


for _name, _where in SHIPPED.items():
    gymnasium.register(f"agentrl/{_name}-v0", entry_point="agentrl.envs:make_gym", kwargs={"env": _where})
