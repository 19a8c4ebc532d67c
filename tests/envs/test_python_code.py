import pytest

from agentrl.envs.python_code.env import PythonCode
from agentrl.envs.python_code.problems import STEPS, describe
from agentrl.testing.policy import ScriptedPolicy, call, play
from agentrl.types import Task

TASK = Task("t", {"steps": [["keep_even", 2], ["square", 2], ["total", 2]], "takes": "numbers", "inputs": 5})
RIGHT = "def solve(value):\n    return sum(x * x for x in value if x % 2 == 0)\n"


def test_the_text_says_what_the_reference_does():
    problem = describe((("keep_even", 2), ("plus", 3), ("largest", 0)), "numbers")
    assert problem.text == (
        "Write a Python function solve(value) of a list of integers: keep the even ones, then add 3 to each, "
        "then return the largest, or 0 if there is none."
    )
    assert [problem.reference(v) for v in ([], [1], [2, 5, -4])] == [0, 0, 5]
    assert all("{}" not in text or "{}" in source for text, source in STEPS.values())


@pytest.mark.parametrize(
    ("code", "solved"),
    [
        (RIGHT, 1),
        (RIGHT + "print('noise ' * 1000)\n", 1),
        ("def solve(value): return 0", 0),
        ("def solve(value): raise SystemExit(0)", 0),
        ("import os; os._exit(0)", 0),
        ("this is no Python", 0),
        ("solve = 3", 0),
        ("def solve(value): return float(sum(x * x for x in value if x % 2 == 0))", 0),
        ("while True: pass", 0),
        (
            "import sys\n"
            "frame = sys._getframe(1)\n"
            "print(frame.f_globals.get('asked'))\n"
            "def solve(value): return frame.f_globals['asked'].get('expected')",
            0,
        ),
        ("import json\njson.dumps = lambda *a, **k: '[[true, 0]]'\ndef solve(value): return 0", 0),
    ],
)
async def test_only_a_function_that_computes_the_results_passes(code, solved):
    episode = await play(PythonCode(), TASK, ScriptedPolicy([call("submit", code=code)]))
    assert episode.rewards["solved"] == solved


async def test_what_a_program_does_is_an_observation():
    script = [
        call("python", code="print(1 + 1)"),
        call("python", code="raise ValueError('no')"),
        call("python", code="print('x' * 10**6)"),
        call("python", code="print(open('/etc/shadow').read())"),
    ]
    env = PythonCode()
    episode = await play(env, TASK, ScriptedPolicy(script))
    results = [t.observation[0].content for t in episode.turns[:4]]
    assert results[0] == "2"
    assert "ValueError: no" in results[1]
    assert results[1].endswith("[exit code 1]")
    assert "left out" in results[2]
    assert results[3].endswith("[exit code 1]")
    assert episode.metrics == {"output_truncated": 1.0}
