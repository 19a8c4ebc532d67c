"""The environment: try code in a sandbox, hand in a function; inputs that the policy never saw decide."""

from __future__ import annotations

import hashlib
import json
import random
import secrets
from collections.abc import Sequence

from agentrl.env import Stop, ToolEnv, reward, tool
from agentrl.env.play import ScriptedPolicy, call
from agentrl.env.tasks import Split, generated
from agentrl.envs.python_code.problems import describe, draw
from agentrl.sandbox import Sandbox
from agentrl.tools.python import PythonProgram
from agentrl.types import Task

_NUM_TESTS = 12
# The expected results never enter the sandbox: whatever the submitted code does there, it has to compute them.
_HARNESS = """
import json, sys
asked = json.load(sys.stdin)
space = {"__name__": "submitted"}
exec(compile(asked["code"], "<submitted>", "exec"), space)
results = []
for value in asked["inputs"]:
    try:
        results.append([True, space["solve"](value)])
    except Exception as error:
        results.append([False, repr(error)])
print("\\n" + asked["mark"] + json.dumps(results))
"""


class PythonCode(ToolEnv):
    """Write the Python function. Try it with python, then hand it in with submit."""

    sandbox = Sandbox(wall_s=5.0, memory_mb=256, stdout_bytes=1 << 16, stderr_bytes=1 << 14)
    toolboxes = (PythonProgram,)

    def setup(self, steps: list[tuple[str, int]], takes: str, inputs: int) -> str:
        self.problem = describe(tuple((name, number) for name, number in steps), takes)
        self.input_seed, self.submitted = inputs, ""
        example = self.problem.inputs(inputs, 2)[1]
        return f"{self.problem.text}\nExample: solve({example!r}) == {self.problem.reference(example)!r}"

    @tool
    def submit(self, code: str) -> Stop:
        """Hand in code that defines solve. Ends the task."""
        self.submitted = code
        return Stop("Submitted.")

    @reward(solved=True)
    async def solved(self) -> bool:
        """Right on every one of the hidden inputs."""
        if not self.submitted:
            return False
        inputs = self.problem.inputs(self.input_seed + 1, _NUM_TESTS)
        mark = secrets.token_hex(8)
        asked = {"code": self.submitted, "inputs": inputs, "mark": mark}
        result = await self.box.python(_HARNESS, stdin=json.dumps(asked).encode())
        line = result.text().rstrip().rpartition("\n")[2]
        if not line.startswith(mark):
            return False
        wanted = [[True, self.problem.reference(value)] for value in inputs]
        try:
            return json.dumps(json.loads(line.removeprefix(mark))) == json.dumps(wanted)
        except (ValueError, RecursionError):  # nested without an end
            return False

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, size: int | None = None) -> Sequence[Task]:
        """Problems drawn by seed; a hash of the text decides the split."""

        def row(rng: random.Random) -> dict[str, object]:
            while True:
                problem = draw(rng)
                digest = hashlib.blake2b(problem.text.encode(), digest_size=2).digest()
                if (int.from_bytes(digest) % 10 == 0) == (split == "held_out"):
                    steps = [list(step) for step in problem.steps]
                    return {"steps": steps, "takes": problem.takes, "inputs": rng.getrandbits(30)}

        return generated(
            "python_code", split, seed, (1_000_000 if split == "train" else 1_000) if size is None else size, row
        )

    @classmethod
    def oracle(cls, task: Task) -> ScriptedPolicy:
        """Tries the reference and hands it in."""
        steps = tuple((name, number) for name, number in task.row["steps"])
        problem = describe(steps, task.row["takes"])
        source, example = problem.source, problem.inputs(task.row["inputs"], 2)[1]
        attempt = f"{source}\nprint(solve({example!r}))"
        return ScriptedPolicy([call("python", code=attempt), call("submit", code=source)])
