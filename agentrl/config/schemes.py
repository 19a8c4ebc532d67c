"""The short names of other ecosystems' environments: `env: SCHEME:REST`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.suggest import nearest


@dataclass(frozen=True, slots=True)
class EnvScheme:
    """How `SCHEME:REST` becomes an env.

    Attributes:
        adapter: `module:Class` of the adapter, a subclass of `agentrl.env.adapter.Adapter`.
        rest: what follows the colon, for help texts.
        about: one line for `agentrl envs`.
        modules: modules that must be installed.
        install: the arguments of `pip install` that install them.
        path: REST starts with a path (up to an `@`), relative to the YAML file.
        needs: what else must be there, which is known only when an env is used.
    """

    adapter: str
    rest: str
    about: str
    modules: tuple[str, ...] = ()
    install: str = ""
    path: bool = False
    needs: str = ""


SCHEMES: Mapping[str, EnvScheme] = {
    "bfcl": EnvScheme(
        "agentrl.envs.others.bfcl:Bfcl",
        "CATEGORY",
        "Berkeley Function Calling Leaderboard v4, multi-turn, e.g. bfcl:multi_turn_base",
        ("bfcl_eval", "mpmath"),
        "--no-deps bfcl-eval==2026.3.23 mpmath==1.3.0",
    ),
    "gem": EnvScheme(
        "agentrl.envs.others.gem:Gem",
        "ID",
        "GEM games and rg: tasks, e.g. gem:game:Sudoku-v0-easy",
        ("gem", "reasoning_gym"),
        "--no-deps gem-llm==0.1.0",
    ),
    "gymnasium": EnvScheme(
        "agentrl.envs.others.gymnasium:GymnasiumGame",
        "ID",
        "any Gymnasium env, played through one tool, e.g. gymnasium:FrozenLake-v1",
        ("gymnasium",),
        "gymnasium",
    ),
    "harbor": EnvScheme(
        "agentrl.envs.others.harbor:Harbor",
        "DIR",
        "Harbor task folders, in our sandboxes, e.g. harbor:tasks/hello",
        path=True,
        needs="agentrl-train[docker], unless its backend is namespace",
    ),
    "inspect": EnvScheme(
        "agentrl.envs.others.inspect_ai:InspectTask",
        "FILE@TASK",
        "Inspect tasks with their scorers, e.g. inspect:evals/sums.py@sums",
        path=True,
        needs="inspect-ai, in any Python",
    ),
    "mcp": EnvScheme(
        "agentrl.envs.others.mcp:McpEnv",
        "COMMAND|URL",
        "the tools of an MCP server, e.g. mcp:http://127.0.0.1:8000/mcp",
        ("mcp",),
        "'agentrl-train[mcp]'",
    ),
    "nemo_gym": EnvScheme(
        "agentrl.envs.others.nemo_gym:NemoGym",
        "URL",
        "a resources server of NeMo Gym, e.g. nemo_gym:http://127.0.0.1:8000",
    ),
    "openenv": EnvScheme(
        "agentrl.envs.others.openenv:OpenEnv",
        "URL",
        "an OpenEnv server, e.g. openenv:http://127.0.0.1:8000",
        ("websockets",),
        "'agentrl-train[openenv]'",
    ),
    "reasoning_gym": EnvScheme(
        "agentrl.envs.others.reasoning_gym:ReasoningGym",
        "DATASET",
        "procedural reasoning tasks, e.g. reasoning_gym:sudoku",
        ("reasoning_gym",),
        "'agentrl-train[reasoning-gym]'",
    ),
    "textarena": EnvScheme(
        "agentrl.envs.others.textarena:TextArena",
        "ID",
        "text games for one or two players, e.g. textarena:2048-v0",
        ("textarena",),
        "'agentrl-train[textarena]'",
    ),
    "verifiers": EnvScheme(
        "agentrl.envs.others.verifiers:Verifiers",
        "ID",
        "tasksets of verifiers, e.g. verifiers:gsm8k-v1",
        needs="verifiers, in any Python",
    ),
}
"""The adapters by scheme; each is imported when it is used."""


def scheme_of(text: str) -> tuple[str, str] | None:
    """The scheme and the rest of `SCHEME:REST`; None if the text has no known scheme."""
    name, colon, rest = text.partition(":")
    return (name, rest) if colon and name in SCHEMES else None


def scheme_meant(text: str) -> str | None:
    """`SCHEME:REST` for a misspelled scheme, or a scheme alone; None if no scheme is similar."""
    name, _, rest = text.partition(":")
    if "/" in name or "." in name:
        return None
    simple = name.lower().replace("-", "_")
    near = next((s for s in SCHEMES if len(simple) > 2 and s.startswith(simple)), None) or nearest(simple, SCHEMES)
    return None if near is None else f"{near}:{rest or SCHEMES[near].rest}"
