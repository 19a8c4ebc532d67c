"""The environment: a folder in a sandbox, a few tools on files, one request."""

from __future__ import annotations

import json
import random
import re
import secrets
from collections.abc import Sequence

from agentrl.env import ToolEnv, reward
from agentrl.env.play import ScriptedPolicy, call
from agentrl.env.tasks import Split, generated
from agentrl.envs.files.project import build
from agentrl.sandbox import Sandbox
from agentrl.tools.files import Files as FileTools
from agentrl.tools.shell import Shell
from agentrl.types import Message, Task

# Results are compared outside of the sandbox; what they should be never enters it.
_HARNESS = """
import importlib, json, sys
asked = json.load(sys.stdin)
sys.path.insert(0, asked["home"])
results = [getattr(importlib.import_module(m), f)(*args) for m, f, args in asked["calls"]]
print("\\n" + asked["mark"] + json.dumps(results))
"""


class Files(ToolEnv):
    """Do what is asked with the files of the current folder. When done, say so without a tool call."""

    sandbox = Sandbox(wall_s=5.0, memory_mb=256, stdout_bytes=1 << 16, stderr_bytes=1 << 14)
    toolboxes = (FileTools, Shell)

    async def setup(self, project: int) -> str:
        self.project = build(project)
        await self.box.put_tree(self.project.files)
        return self.project.request

    @reward(solved=True)
    async def solved(self) -> bool:
        """Settings, names and behaviour are exactly as they should be."""
        try:
            tree = await self.box.get_tree(max_bytes=1 << 20, max_files=500)
            settings = json.loads(tree["settings.json"])
        except (OSError, KeyError, ValueError, RecursionError):
            return False
        code = {p: t.decode("utf-8", "replace") for p, t in tree.items() if p.endswith(".py")}
        words = {word for text in code.values() for word in re.findall(r"\w+", text)}
        wanted = self.project
        if settings != wanted.settings or (wanted.gone and wanted.gone in words):
            return False
        if wanted.there and wanted.there not in words:
            return False
        return await self._behaves()

    async def _behaves(self) -> bool:
        mark = secrets.token_hex(8)
        calls = [[module, function, arguments] for module, function, arguments, _ in self.project.calls]
        asked = json.dumps({"calls": calls, "mark": mark, "home": self.box.home})
        result = await self.box.python(_HARNESS, stdin=asked.encode())
        line = result.text().rstrip().rpartition("\n")[2]
        try:
            found = json.loads(line.removeprefix(mark)) if line.startswith(mark) else None
            return bool(found == [r for *_, r in self.project.calls])
        except (ValueError, RecursionError):
            return False

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, size: int | None = None) -> Sequence[Task]:
        """Projects by number; every tenth number is held out."""

        def row(rng: random.Random) -> dict[str, object]:
            number = rng.getrandbits(30) * 10
            return {"project": number if split == "held_out" else number + rng.randint(1, 9)}

        return generated(
            "files", split, seed, (1_000_000 if split == "train" else 1_000) if size is None else size, row
        )

    @classmethod
    def oracle(cls, task: Task) -> ScriptedPolicy:
        """Looks around, makes the edits, and says so."""
        look: list[Message] = [call("shell", command="ls -R"), call("view", path="settings.json")]
        project = build(task.row["project"])
        edits = [
            call("shell", command=f"sed -i s/{old}/{new}/g {path}")
            if project.kind == "rename"
            else call("replace", path=path, old=old, new=new)
            for path, old, new in project.edits
        ]
        return ScriptedPolicy([*look, *edits, "It is done."])
