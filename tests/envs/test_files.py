import pytest

from agentrl.envs.files.env import Files
from agentrl.envs.files.project import build
from agentrl.testing.policy import ScriptedPolicy, call, play
from agentrl.types import Task


def project_of(kind: str) -> int:
    return next(n for n in range(100) if build(n).kind == kind)


@pytest.mark.parametrize("kind", ["setting", "rename", "bug"])
async def test_the_final_state_decides(kind):
    task = Task("t", {"project": project_of(kind)})
    assert (await play(Files(), task, Files.oracle(task))).rewards == {"solved": 1.0}
    assert (await play(Files(), task, ScriptedPolicy(["It is done."]))).rewards == {"solved": 0.0}
    oracle = Files.oracle(task)
    edits = [oracle([]) for _ in range(2 + len(build(task.row["project"]).edits))]
    for harm in (
        call("shell", command="rm -r app"),
        call("shell", command="echo '{}' > settings.json"),
        call("shell", command="for f in app/*.py; do echo 'raise SystemExit' > $f; done"),
        call("shell", command="rm settings.json; ln -s /etc/passwd settings.json"),
        call("create", path="json.py", text="import os; os._exit(0)"),
    ):
        episode = await play(Files(), task, ScriptedPolicy([*edits, harm]))
        allowed = harm.tool_calls[0].arguments.get("path") == "json.py"
        assert episode.rewards["solved"] == float(allowed), harm


async def test_half_a_rename_is_none():
    number = project_of("rename")
    path, old, new = build(number).edits[0]
    script = [call("shell", command=f"sed -i s/{old}/{new}/g {path}")]
    assert (await play(Files(), Task("t", {"project": number}), ScriptedPolicy(script))).rewards == {"solved": 0.0}


async def test_mistakes_with_files_are_observations():
    script = [
        call("view", path="nowhere.txt"),
        call("replace", path="settings.json", old="no such text", new=""),
        call("create", path="/etc/passwd", text="x"),
        call("shell", command="exit 3"),
        call("shell", command="sleep 100"),
    ]
    episode = await play(Files(), Task("t", {"project": 1}), ScriptedPolicy(script))
    results = [t.observation[0].content for t in episode.turns[:5]]
    assert results[0].startswith("Error: FileNotFoundError")
    assert results[1].startswith("Error: ValueError: the old text occurs 0 times in settings.json")
    assert results[2].startswith("Error: ")
    assert "exit code 3" in results[3]
    assert "took too long" in results[4]
