"""Harbor task folders for tests: find the number, with graded tests."""

from __future__ import annotations

from pathlib import Path

TOML = """
schema_version = "1.1"
[verifier]
timeout_sec = 300.0
[environment]
memory_mb = 512
"""
TEST = """#!/bin/bash
# The answer in /app/answer.txt, graded by degrees; a helper next to this file knows the number.
python3 "$(dirname "$0")/grade.py"
"""
GRADE = """
import json, pathlib
want = {number}
answer = pathlib.Path("/app/answer.txt")
said = answer.read_text().strip() if answer.exists() else ""
right = float(said == str(want))
near = 0.0 if not said.lstrip("-").isdigit() else max(0.0, 1 - abs(int(said) - want) / 10)
logs = pathlib.Path("/logs/verifier")
if {parts}:
    (logs / "reward.json").write_text(json.dumps({{"right": 0.75 * right, "near": 0.25 * near}}))
else:
    (logs / "reward.txt").write_text(str(right))
"""
SOLVE = "#!/bin/bash\npython3 -c 'print(sum(map(int, open(\"/app/data/numbers.txt\"))))' > /app/answer.txt\n"


def make_tasks(root: Path, num: int, *, base: str = "python:3.12") -> Path:
    """Write `num` task folders; every other one grades in parts."""
    for i in range(num):
        numbers = [i, i * 3 + 1, 7]
        write(
            root / f"sum-{i:02d}",
            {
                "task.toml": TOML,
                "instruction.md": "Write the sum of the numbers in data/numbers.txt to answer.txt.\n",
                "environment/Dockerfile": f"FROM {base}\nWORKDIR /app\nCOPY data /app/data\n",
                "environment/data/numbers.txt": "".join(f"{n}\n" for n in numbers),
                "tests/test.sh": TEST,
                "tests/grade.py": GRADE.format(number=sum(numbers), parts=i % 2),
                "solution/solve.sh": SOLVE,
            },
        )
    return root


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write files below a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder
