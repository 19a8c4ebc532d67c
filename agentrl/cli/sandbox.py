"""`agentrl sandbox`: share this machine's sandboxes over the network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Share this machine's sandboxes over the network.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Share this machine's sandboxes over the network."""


@app.command("serve")
def serve(
    token_file: Annotated[
        Path, typer.Argument(help="File with the token that clients must send; readable only by you.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8750,
    backend: Annotated[str, typer.Option(help="Sandbox back-end: namespace, docker or landlock.")] = "namespace",
    min_idle: Annotated[int, typer.Option(help="Idle sandboxes to keep ready.")] = 2,
    max_total: Annotated[int, typer.Option(help="Maximum number of sandboxes.")] = 256,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="Maximum a client may request: memory_mb=1024, pids=256, network=true, ..."),
    ] = None,
) -> None:
    """Serve this machine's sandboxes over HTTP until Ctrl-C.

    Envs use them with `Sandbox(backend="remote", ...)`.
    """
    import asyncio

    from agentrl.sandbox import Sandbox
    from agentrl.sandbox.remote_server import limits_from
    from agentrl.sandbox.remote_server import serve as run

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
