"""`agentrl view`: look at runs in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import given_options, no_run
from agentrl.errors import ConfigError
from agentrl.extras import require

if TYPE_CHECKING:
    from agentrl.view.library import Library


def view(
    context: typer.Context,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN|FOLDER]...", help="Run folders, or folders with runs. [default: runs]"),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Write the page as FILE.html or a folder instead; it opens from disk.", show_default=False
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=0, help="With --export: steps per run, spread over it; 0 for all.")
    ] = 5,
    episodes: Annotated[int, typer.Option(min=0, help="With --export: episodes per step in full; 0 for all.")] = 8,
    redact: Annotated[
        bool, typer.Option("--redact", help="With --export: leave out texts, tokens, paths and configuration.")
    ] = False,
) -> None:
    """Show runs on a local page: curves, steps, episodes token by token, tools and search.

    The page is served on 127.0.0.1 to whoever has the address with its token, needs no network, and follows runs
    while they train.
    """
    import asyncio
    import contextlib

    from agentrl.run_folder.run_reader import find_runs

    for option in given_options(context):
        if export is None and option == "--redact":
            raise ConfigError(
                "--redact: has an effect with --export only; the page on this machine shows everything"
            )
        if export is None and option in ("--steps", "--episodes"):
            raise ConfigError(f"{option}: has an effect with --export only; the page shows all of a run")
        if export is not None and option in ("--port", "--open"):
            raise ConfigError(f"{option} has no effect with --export, which writes the page and serves nothing")
    given = paths or [Path("runs")]
    for path in given:
        if not path.is_dir():
            raise ConfigError(f"{path}: no such folder; name a run, or a folder with runs")
    if paths and not find_runs(given):
        raise no_run(", ".join(map(str, given)))
    if export is not None:
        from agentrl.view.export import Extent
        from agentrl.view.export import export as write
        from agentrl.view.library import Library

        print(f"{export}: {write(Library(given), export, Extent(steps or None, episodes or None, redact))}")
        return

    require("serve", "agentrl view")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(given, port, browse))


async def _serve(paths: list[Path], port: int, browse: bool) -> None:
    import asyncio
    import contextlib
    import secrets
    import threading
    import webbrowser
    from urllib.parse import urlsplit

    from agentrl.serve.listen import running
    from agentrl.view.library import Library
    from agentrl.view.preferences import Preferences, preferences_file
    from agentrl.view.view_server import Events, create_view

    token, library, hosts = secrets.token_urlsafe(24), Library(paths), set[str]()
    events = Events(library)
    app = create_view(library, token, hosts, Preferences(preferences_file()), events)
    async with running(app, port=port) as address:
        bound = urlsplit(address).port
        hosts |= {f"127.0.0.1:{bound}", f"localhost:{bound}"}
        url = f"{address}/?token={token}"
        print(f"{url}\nstop with Ctrl-C", flush=True)
        if browse:
            webbrowser.open(url)
        # Index in the background for the first search; a daemon thread does not delay Ctrl-C.
        threading.Thread(target=_index, args=[library], daemon=True).start()
        with contextlib.closing(events):
            await asyncio.Event().wait()


def _index(library: Library) -> None:
    import sys

    try:
        library.indexed()
    except ConfigError as e:  # all other pages work without the index
        print(f"no search: {e}", file=sys.stderr)
