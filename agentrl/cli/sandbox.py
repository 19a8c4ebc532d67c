"""`agentrl sandbox`: sandboxes for other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Sandboxes for other machines.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Sandboxes for other machines."""


@app.command("serve")
def serve(
    token_file: Annotated[
        Path, typer.Argument(help="File with the token that clients send; nobody else may read it.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8750,
    backend: Annotated[str, typer.Option(help="Which sandboxes: namespace, docker, landlock.")] = "namespace",
    min_idle: Annotated[int, typer.Option(help="Sandboxes kept warm.")] = 2,
    max_total: Annotated[int, typer.Option(help="Sandboxes at once.")] = 256,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="The most that a client can ask for: memory_mb=1024, pids=256, network=true, ..."),
    ] = None,
) -> None:
    """Serve sandboxes of this machine to others over HTTP, until Ctrl-C.

    An env uses them with `Sandbox(backend="remote", ...)`.
    """
    import asyncio

    from agentrl.sandbox import Sandbox
    from agentrl.sandbox.server import limits_from
    from agentrl.sandbox.server import serve as run

    asyncio.run(
        run(
            Sandbox(backend=backend, **limits_from(limit or [])),
            str(token_file),
            host=host,
            port=port,
            min_idle=min_idle,
            max_total=max_total,
        )
    )
