"""The renames of the shipped `files` env, for an agent that has nothing but bash.

mini-swe-agent brings its own loop and its own shell: only the tasks, the folder and the reward are used while it
plays. The tool below has its schema and answers as its shell does, so that the demonstrations of the cold start
look like its episodes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl import Stop, reward, tool
from agentrl.env.play import ScriptedPolicy, call
from agentrl.env.tasks import Split, generated
from agentrl.envs.files import Files
from agentrl.envs.files.project import Project, build
from agentrl.types import Message, Task

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SUBMITTED = "Submitted"
"""What the agent says of an episode that ended with that command; `play.py` prints it."""
SILENT = "<returncode>0</returncode>\n<output>\n</output>"
"""What the shell answers to a command that prints nothing."""


class Chores(Files):
    """Do it with bash, then submit."""

    toolboxes = ()

    @tool
    async def bash(self, command: str) -> str | Stop:
        """Execute a bash command

        Args:
            command: The bash command to execute
        """
        if command == SUBMIT:
            self.outcome = SUBMITTED
            return Stop("")
        result = await self.box.run(f"exec 2>&1\n{command}")
        return f"<returncode>{result.exit_code}</returncode>\n<output>\n{result.text()}</output>"

    @reward(solved=True)
    async def solved(self) -> bool:
        """The files are as they should be, and the agent has submitted."""
        return str(self.outcome).strip() == SUBMITTED and await super().solved()

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, size: int | None = None) -> Sequence[Task]:
        """The renames among the projects of the `files` env; every tenth number is held out, as there."""

        def row(rng: random.Random) -> dict[str, object]:
            while True:
                number = rng.getrandbits(30) * 10 + (0 if split == "held_out" else rng.randint(1, 9))
                if build(number).kind == "rename":
                    return {"project": number}

        return generated(
            "chores", split, seed, (1_000_000 if split == "train" else 1_000) if size is None else size, row
        )

    @classmethod
    def oracle(cls, task: Task) -> ScriptedPolicy:
        """One command renames it everywhere; then it submits."""
        project = build(task.row["project"])
        return ScriptedPolicy([call("bash", command=rename(project, "g")), call("bash", command=SUBMIT)])

    @classmethod
    def demonstrations(cls, seed: int, num: int, *, careful: float = 1.0) -> list[list[Message]]:
        """`num` episodes on training tasks, a share of `careful` right.

        The others forget that a line may hold the name twice: their `sed` is without `g`, and one use of the old
        name stays.
        """
        rng = random.Random(f"chores/demonstrations/{seed}")
        episodes = []
        for task in cls.tasks("train", seed, size=num):
            project = build(task.row["project"])
            first = call("bash", command=rename(project, "g" if rng.random() < careful else ""))
            answer = Message("tool", SILENT, tool_call_id=first.tool_calls[0].id, name="bash")
            opening = [Message("system", cls().system()), Message("user", project.request)]
            episodes.append([*opening, first, answer, call("bash", command=SUBMIT)])
        return episodes


def rename(project: Project, flags: str) -> str:
    """The command that renames what the project asks for."""
    _, old, new = project.edits[0]
    return f"sed -i s/{old}/{new}/{flags} app/*.py"
