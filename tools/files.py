"""File tools: view, create, replace, search. Mistakes come back as text that says what to do instead."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentrl.env.toolenv.declare import tool
from agentrl.sandbox import Box, Sandbox
from agentrl.tools.observation import observation, shorten

MAX_BYTES = 1 << 20
MAX_ENTRIES = 500
MAX_MATCHES = 100


class Files:
    """Paths are relative to the home directory of the sandbox."""

    sandbox = Sandbox()
    box: Box

    @tool
    async def view(
        self,
        path: str = ".",
        first: Annotated[int, Field(ge=1)] = 1,
        last: Annotated[int, Field(ge=1)] | None = None,
    ) -> str:
        """Show a file with line numbers, from line `first` to `last`, or the entries of a directory."""
        info = await self.box.stat(path)
        if info.kind == "directory":
            entries = await self.box.list_dir(path, max_entries=MAX_ENTRIES + 1)
            shown = "\n".join(_entry(e.name, e.kind, e.size) for e in entries[:MAX_ENTRIES])
            more = f"\n[more than {MAX_ENTRIES} entries: the first {MAX_ENTRIES} are shown]"
            return (shown or "[empty directory]") + (more if len(entries) > MAX_ENTRIES else "")
        lines = _lines(await self._text(path))
        if last is not None and last < first:
            raise ValueError(f"line {last} comes before line {first}: give the first and the last line to show")
        end = len(lines) if last is None else min(last, len(lines))
        if lines and first > len(lines):
            raise ValueError(f"{path} has {len(lines)} lines, none from line {first} on")
        width = len(str(end))
        shown = "\n".join(f"{n:>{width}}  {lines[n - 1]}" for n in range(first, end + 1))
        return shorten(shown) or "[empty file]"

    @tool
    async def create(self, path: str, text: str) -> str:
        """Write a file; directories above it are made, an old one is replaced."""
        await self.box.write_file(path, text)
        return f"wrote {path}: {_count(text)}"

    @tool
    async def replace(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs exactly once in a file; give enough lines around it to make it unique."""
        text = await self._text(path)
        found = text.count(old) if old else 0
        if found != 1:
            where = "; it has to be copied exactly, white space included" if not found else ""
            lines = [str(n) for n, line in enumerate(_lines(text), 1) if old and _lines(old)[0] in line]
            near = f" (it begins on lines {', '.join(lines[:10])})" if lines and found else ""
            raise ValueError(f"the old text occurs {found} times in {path}, it must be once{near}{where}")
        await self.box.write_file(path, text.replace(old, new), mode=(await self.box.stat(path)).mode)
        line = text[: text.index(old)].count("\n") + 1
        return f"replaced {_count(old)} at line {line} of {path} by {_count(new)}"

    @tool
    async def search(self, pattern: str, path: str = ".") -> str:
        """Search files below `path` for an extended regular expression; shows file:line:text."""
        command = ["grep", "-rnHIE", "--max-count", str(MAX_MATCHES), "-e", pattern, "--", path]
        result = await self.box.run(command)
        if result.outcome == "exit" and result.exit_code == 1:
            return "[no match]"
        lines = result.text().splitlines()
        if len(lines) > MAX_MATCHES:
            more = f"\n[{len(lines) - MAX_MATCHES} more matches]"
            return shorten("\n".join(lines[:MAX_MATCHES])) + more
        return observation(result)

    async def _text(self, path: str) -> str:
        data = await self.box.read_file(path, max_bytes=MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"{path} is larger than {MAX_BYTES} bytes: look at parts of it with a program")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not text") from None


def _lines(text: str) -> list[str]:
    """The lines as grep and other programs count them: `splitlines` also ends one at a form feed or U+2028."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _count(text: str) -> str:
    lines = text.count("\n") + (not text.endswith("\n") and text != "")
    return f"{lines} line{'' if lines == 1 else 's'}"


def _entry(name: str, kind: str, size: int) -> str:
    if kind == "directory":
        return f"{name}/"
    return f"{name}  {size} bytes" if kind == "file" else f"{name}  ({kind})"
