"""`agentrl env`: offer an environment to other trainers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentrl.cli.options import client_secret
from agentrl.errors import ConfigError
from agentrl.extras import require
from agentrl.sigterm import set_at_end

if TYPE_CHECKING:
    from agentrl.config import RunConfig
    from agentrl.env_server.open_sessions import Sessions
    from agentrl.env_server.served import EnvSource

app = typer.Typer(no_args_is_help=True, help="Offer an environment to other trainers.")

Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the env, its data or its limits, e.g. `--set env.options.size=500`. Repeatable.",
        show_default=False,
    ),
]
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

MaxTurns = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Turns of an episode. [default: rollout.max_turns of the YAML file, else 50]",
        show_default=False,
    ),
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
    max_turns: MaxTurns = None,
    idle_s: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which a session without a connection is closed.")
    ] = 900.0,
    until_eof: Annotated[
        bool,
        typer.Option(
            "--until-eof", help="Also end when standard input is closed, with the program that started this."
        ),
    ] = False,
    env: Part = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Serve an environment through OpenEnv (WebSocket sessions, MCP tools) and MCP, until Ctrl-C.

    OpenEnv's clients connect to http://HOST:PORT, MCP clients to http://HOST:PORT/mcp. Tasks, tools, sandboxes and
    rewards are those of a run.
    """
    from agentrl.env_server.open_sessions import Sessions

    require("serve", "agentrl env serve")
    require("openenv", "agentrl env serve")
    token = client_secret(host, token_env, "--token-env", "token", "server")
    source = _source(target, env, overrides, max_turns)
    sessions = Sessions(source, max_sessions, idle_s)
    asyncio.run(_serve(sessions, host, port, token, until_eof))


@app.command()
def package(
    target: Annotated[
        str,
        typer.Argument(
            metavar="ENV|TOOLS.YAML|URL",
            help="What `agentrl env serve` accepts, or the address of a running one.",
            show_default=False,
        ),
    ],
    form: Annotated[
        Literal["verifiers"],
        typer.Option("--as", help="Package format: a taskset of verifiers.", show_default=False),
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the package. [default: that of the env]", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write. [default: ./NAME]", show_default=False)
    ] = None,
    python: Annotated[
        Path | None, typer.Option(help="Python that will serve the env. [default: this one]", show_default=False)
    ] = None,
    max_turns: MaxTurns = None,
    env: Part = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Write a package that other frameworks play the environment with.

    The package starts `agentrl env serve` in this Python when it is used, or connects to a running server, so the
    other framework does not need agentrl.
    """
    from agentrl.env_server.package import PACKAGE_SESSIONS, Served, served_url, write_verifiers_package

    if target.startswith(("http://", "https://")):
        if env is not None or overrides or max_turns is not None or python is not None:
            raise typer.BadParameter(
                "--env, --set, --max-turns and --python belong to `agentrl env serve` at this URL"
            )
        source, served = None, served_url(target)
    else:
        require("serve", "agentrl env package")
        source = _source(target, env, overrides, max_turns)
        options = [*(["--env", env] if env else []), *(f"--set={item}" for item in overrides)]
        options += [] if max_turns is None else ["--max-turns", str(max_turns)]
        options += ["--max-sessions", str(PACKAGE_SESSIONS)]
        served = Served(source.name, target, tuple(options), str(python or sys.executable), str(Path.cwd()))
    split = next(iter(source.splits)) if source else "train"
    written = write_verifiers_package(served, name or served.name, output, split)
    typer.echo(written.next_steps)


def run_config(target: str, env: str | None, overrides: list[str]) -> RunConfig:
    """The configuration that a YAML file, a run folder or the name of an env stands for.

    Raises:
        ConfigError: there is no such env, or an override is wrong or has no effect on the env.
    """
    from agentrl.config.load import load_sampling_config, make_config
    from agentrl.config.overrides import keys_set
    from agentrl.eval.target import of_env

    for text in overrides:
        if not all(map(_counts, keys_set(text))):
            raise ConfigError(
                f"--set {text}: has no effect on serving an env; only the keys of `env` and `data`, `seed`, "
                "rollout.max_turns and rollout.timeout_s do, also under `envs.NAME`"
            )
    path = Path(target)
    if (path / "config.yaml").is_file():
        return of_env(load_sampling_config(path / "config.yaml", overrides, check_paths=False), env)
    if path.suffix in (".yaml", ".yml"):
        return of_env(load_sampling_config(path, overrides, check_paths=True), env)
    bare = {"name": "env", "model": {"tiny": {}}}
    return of_env(make_config(bare, [f"env.use={target}", *overrides], target), env)


def _counts(loc: tuple[str, ...]) -> bool:
    """Whether a key can change what is served: the env, its tasks or the limits of an episode."""
    from agentrl.config.run import EnvConfig

    if loc[0] == "envs":
        return len(loc) < 3 or loc[2] in EnvConfig.model_fields or _counts(loc[2:])
    if loc[0] == "rollout":
        return loc in (("rollout", "max_turns"), ("rollout", "timeout_s"))
    return loc[0] in ("env", "seed") or (
        loc[0] == "data" and loc[1:2] not in (("sampler",), ("overlong_prompts",))
    )


def _source(target: str, env: str | None, overrides: list[str], max_turns: int | None) -> EnvSource:
    from agentrl.env_server.serve import load_source

    config = run_config(target, env, overrides)
    limit = config.rollout.max_turns if "max_turns" in config.rollout.model_fields_set else 50
    return load_source(config, max_turns=max_turns or limit)


async def _serve(sessions: Sessions, host: str, port: int, token: str | None, until_eof: bool) -> None:
    """Answer until a signal comes, or the end of standard input."""
    from agentrl.env_server.serve import serving_env

    ended, loop, source = asyncio.Event(), asyncio.get_running_loop(), sessions.source
    set_at_end(ended)
    if until_eof:
        threading.Thread(target=_read_to_end, args=(loop, ended), daemon=True).start()
    async with serving_env(sessions, host=host, port=port, token=token) as url:
        tasks = ", ".join(f"{len(tasks):,} {split}" for split, tasks in source.splits.items())
        with_token = " (with the token)" if token else ""
        print(f"{source.name} at {url}, MCP at {url}/mcp{with_token}; tasks: {tasks}; Ctrl-C ends", flush=True)
        await ended.wait()
        if (len(sessions) or sessions.closing) and not until_eof:
            print("closing sessions; Ctrl-C again ends now", file=sys.stderr)


def _read_to_end(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(ended.set)
