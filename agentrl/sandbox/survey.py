"""Test what each back-end can enforce on this machine, as a table."""

from __future__ import annotations

import asyncio
import os

from agentrl.errors import AgentRLError
from agentrl.sandbox.contract import PROMISES, Capabilities, Sandbox
from agentrl.sandbox.pool import SandboxPool, backend_names


async def examine(backend: str) -> Capabilities | str:
    """Return the capabilities of a back-end, or why it does not work here."""
    spec = Sandbox(backend=backend, trusted=backend == "process", require=())
    try:
        async with SandboxPool(spec, min_idle=0) as pool:
            assert pool.capabilities is not None
            return pool.capabilities
    except AgentRLError as error:
        return str(error)


def table(found: dict[str, Capabilities | str]) -> str:
    """Format the findings as a Markdown table, followed by the reasons."""
    names = list(found)
    width = max(len(name) for name in PROMISES)
    lines = [
        f"| {'promise':{width}} | " + " | ".join(f"{name:9}" for name in names) + " | meaning |",
        f"|{'-' * (width + 2)}|" + "|".join("-" * 11 for _ in names) + "|---|",
    ]
    for promise, meaning in PROMISES.items():
        cells = []
        for name in names:
            capabilities = found[name]
            if isinstance(capabilities, str):
                cells.append("-")
            else:
                cells.append("kept" if promise in capabilities.kept else "no")
        lines.append(f"| {promise:{width}} | " + " | ".join(f"{cell:9}" for cell in cells) + f" | {meaning} |")
    for name, capabilities in found.items():
        if isinstance(capabilities, str):
            lines.append(f"\n{name}: not usable here: {capabilities}")
        for promise, note in [] if isinstance(capabilities, str) else capabilities.notes.items():
            lines.append(f"\n{name}: {promise}: {note}")
    return "\n".join(lines)


def doctor() -> str:
    """Return the table for this machine and user; starts and ends one sandbox of each kind."""
    found = {name: asyncio.run(examine(name)) for name in backend_names() if name != "remote"}
    return f"Sandboxes on this machine, as user id {os.getuid()}:\n\n{table(found)}\n"
