"""Agent frameworks, unmodified: each completes a tool loop, plain and streamed, on the tokens of one transcript.

They pin different versions of the openai SDK, so they run in a separate Python: the one that `make others` builds,
or the one in AGENTRL_CLIENTS_PYTHON.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.chat.template import Renderer
from agentrl.testing.engine import ScriptedEngine
from agentrl.types import Message
from tests.serve.serve_kit import TOOLS, call, serving

CLIENTS = Path(__file__).parent / "clients"
PYTHON = Path(os.environ.get("AGENTRL_CLIENTS_PYTHON", f"{sys.prefix}/clients/bin/python"))
needs_clients = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no Python with the clients at {PYTHON}: make {PYTHON.parents[1]}/.done"
)
LOOPS = {
    "with_anthropic": 1,
    "with_openai": 1,
    "with_openai_agents": 2,
    "with_pydantic_ai": 1,
    "with_langchain": 1,
    "with_litellm": 1,
}
"""How many loops each program plays each way."""
SCRIPT = [call(2, 3), Message("assistant", "The answer is 5.")]


@needs_clients
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_every_client_completes_its_loop_on_one_transcript(renderer: Renderer):
    for program, loops in LOOPS.items():
        await _completes(renderer, [str(PYTHON), str(CLIENTS / f"{program}.py")], loops)


NODE_CLIENTS = {
    "with_anthropic": (["@anthropic-ai/sdk@1.12"], 1),
    "with_ai_sdk": (["ai@6", "@ai-sdk/openai@3", "@ai-sdk/anthropic@3"], 3),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NODE_CLIENTS)
async def test_a_client_in_node_completes_its_loop(renderer: Renderer, tmp_path: Path, name: str):
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("Node.js is not installed")
    packages, loops = NODE_CLIENTS[name]
    shutil.copy(CLIENTS / f"{name}.mjs", tmp_path)
    command = [npm, "install", "--no-audit", "--no-fund", *packages]
    installed = await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"the SDK could not be installed: {installed.stderr.strip()[-300:]}")
    await _completes(renderer, [node, str(tmp_path / f"{name}.mjs")], loops)


async def _completes(renderer: Renderer, program: list[str], loops: int) -> None:
    """A program gets the answer plain and streamed; its second request continues the tokens of the first."""

    def endpoint():
        return serving(ScriptedEngine(renderer, SCRIPT, tools=TOOLS), renderer)

    async with endpoint() as plain, endpoint() as stream:
        process = await asyncio.create_subprocess_exec(
            *program, plain.base_url, stream.base_url, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await process.communicate()
        assert process.returncode == 0, f"{program}: {err.decode()[-3000:]}"
        said = json.loads(out.decode().strip().splitlines()[-1].replace("'", '"'))
        assert said == ["The answer is 5."] * 2, program
        for way, served in (("plain", plain), ("stream", stream)):
            turns = served.session.turns
            assert len(turns) == 2 * loops, f"{program} {way}"
            for first, second in zip(turns[::2], turns[1::2], strict=True):
                assert second.parent == first.number, f"{program} {way}: {second.matched} {second.drift}"
                known = tuple(first.branch.ids)
                assert tuple(second.branch.ids)[: len(known)] == known, f"{program} {way}"
