"""`agentrl env`: offer an environment to other trainers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import Overrides

if TYPE_CHECKING:
    from agentrl.config import RunConfig
    from agentrl.env_server.served import EnvSource

app = typer.Typer(no_args_is_help=True, help="Offer an environment to other trainers.")

EnvTarget = Annotated[
    str,
    typer.Argument(
        metavar="ENV|TOOLS.YAML",
        help="What `env:` of a run accepts (`module:Class`, `file.py:Class`, `SCHEME:REST`), the YAML file of a "
        "run, or a run folder.",
        show_default=False,
    ),
]
Part = Annotated[
    str | None,
    typer.Option("--env", metavar="NAME", help="Env to serve, if the run has several.", show_default=False),
]


@app.command()
def serve(
    target: EnvTarget,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any other than loopback requires --token-env.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8000,
    token_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Environment variable with the token that clients must send.", show_default=False
        ),
    ] = None,
    max_sessions: Annotated[
        int, typer.Option(min=1, help="Maximum concurrent episodes; further sessions are refused.")
    ] = 64,
    max_turns: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Turns of an episode. [default: rollout.max_turns of the YAML file, else 50]",
            show_default=False,
        ),
    ] = None,
    idle_s: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which a session without a connection is closed.")
    ] = 900.0,
    env: Part = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Serve an environment through OpenEnv (WebSocket sessions, MCP tools) and MCP, until Ctrl-C.

    OpenEnv's clients connect to http://HOST:PORT, MCP clients to http://HOST:PORT/mcp. Tasks, tools, sandboxes and
    rewards are those of a run.
    """
    from agentrl.extras import require

    require("serve", "agentrl env serve")
    require("openenv", "agentrl env serve")
    token = _token(host, token_env)
    source = _source(target, env, overrides, max_turns)
    asyncio.run(_serve(source, host, port, token, max_sessions, idle_s))


def run_config(target: str, env: str | None, overrides: list[str]) -> RunConfig:
    """The configuration that a YAML file, a run folder or the name of an env stands for.

    Raises:
        ConfigError: there is no such env, or an override is wrong.
    """
    from agentrl.cli.eval import of_env
    from agentrl.config import load_config
    from agentrl.config.load import make_config

    path = Path(target)
    if (path / "config.yaml").is_file():
        return of_env(load_config(path / "config.yaml", overrides, check_paths=False), env)
    if path.suffix in (".yaml", ".yml"):
        return of_env(load_config(path, overrides), env)
    bare = {"name": "env", "model": {"tiny": {}}}
    return of_env(make_config(bare, [f"env.use={target}", *overrides], target), env)


def _source(target: str, env: str | None, overrides: list[str], max_turns: int | None) -> EnvSource:
    from agentrl.env_server.serve import load_source

    config = run_config(target, env, overrides)
    limit = config.rollout.max_turns if "max_turns" in config.rollout.model_fields_set else 50
    return load_source(config, max_turns=max_turns or limit)


def _token(host: str, name: str | None) -> str | None:
    """The token that clients must send.

    Raises:
        ConfigError: the variable is not set, or others could reach the server without a token.
    """
    from agentrl.errors import ConfigError
    from agentrl.serve.listen import is_loopback

    if name is None:
        if not is_loopback(host):
            raise ConfigError(
                f"--host {host}: others could use the server; put a token into an environment variable, name it "
                "with --token-env, or listen on 127.0.0.1"
            )
        return None
    if not (token := os.environ.get(name, "")):
        raise ConfigError(f"--token-env {name}: this environment variable is not set")
    return token


async def _serve(
    source: EnvSource, host: str, port: int, token: str | None, max_sessions: int, idle_s: float
) -> None:
    """Answer until a signal comes."""
    from agentrl.env_server.open_sessions import Sessions
    from agentrl.env_server.serve import serving_env

    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    sessions = Sessions(source, max_sessions, idle_s)
    async with serving_env(sessions, host=host, port=port, token=token) as url:
        tasks = ", ".join(f"{len(tasks):,} {split}" for split, tasks in source.splits.items())
        with_token = " (with the token)" if token else ""
        print(f"{source.name} at {url}, MCP at {url}/mcp{with_token}; tasks: {tasks}; Ctrl-C ends", flush=True)
        await ended.wait()
