"""A console on which text from outside cannot control the terminal."""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult

from agentrl.clean import visible


class SafeConsole(Console):
    """Shows the text of everything it prints as `visible` does; styles and its own control codes stay. Output to a
    closed terminal is dropped: it is not an error."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.push_render_hook(_Hook())

    def _check_buffer(self) -> None:
        """Once its terminal is closed, it prints nothing more."""
        try:
            super()._check_buffer()
        except OSError as e:
            if e.errno != errno.EIO:
                raise
            self.quiet = True


class RunConsole(SafeConsole):
    """The console of a run. Output that cannot be written is dropped and does not end the run.

    The reader of a pipe (`| tee`) may have gone, or the disk of a log be full.
    """

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            del self._buffer[:]  # or it would be kept, and written again with the next line

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):  # of rich, which also redirects standard output to the null device
            super().on_broken_pipe()


class _Hook(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Visible(renderable) for renderable in renderables]


class _Visible:
    def __init__(self, inner: RenderableType) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.inner, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
