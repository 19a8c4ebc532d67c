"""Every shipped env passes its checks, its oracle solves everything, a random policy almost nothing."""

import asyncio

import pytest

import agentrl.envs
from agentrl.env.load import load_env
from agentrl.testing.env import check_env
from agentrl.testing.policy import RandomPolicy, play

RANDOM_AT_MOST = {
    "Calculator": 0.02,
    "CliffWalking": 0.0,
    "Files": 0.0,
    "FrozenLake": 0.02,
    "PythonCode": 0.0,
    "Retail": 0.0,
    "Search": 0.03,
    "Sqlite": 0.0,
    "Taxi": 0.0,
}
NUM, NUM_IN_SANDBOXES = 200, 60
"""Tasks that are played; each sandbox takes tens of milliseconds to make."""


@pytest.fixture(params=sorted(agentrl.envs.SHIPPED))
def shipped(request):
    return load_env(agentrl.envs.SHIPPED[request.param])


async def test_it_passes_the_checker(shipped):
    await check_env(shipped, shipped.tasks("train", 0)[:4], oracle=shipped.oracle, max_turns=60)


def some(tasks, shipped):
    return tasks[: NUM if shipped.sandbox is None else NUM_IN_SANDBOXES]


async def all_of(shipped, tasks, make_policy, max_turns):
    """Episodes of all tasks, eight at a time."""
    places = asyncio.Semaphore(8)

    async def one(number, task):
        async with places:
            env = shipped()
            return await play(env, task, make_policy(env, number, task), max_turns=max_turns)

    return await asyncio.gather(*[one(number, task) for number, task in enumerate(tasks)])


@pytest.mark.timeout(120)
async def test_the_oracle_solves_all_of_many_held_out_tasks(shipped):
    tasks = some(shipped.tasks("held_out", 1), shipped)
    episodes = await all_of(shipped, tasks, lambda env, number, task: shipped.oracle(task), 60)
    assert [e.task.id for e in episodes if e.rewards["solved"] != 1.0] == []


@pytest.mark.timeout(120)
async def test_a_random_policy_solves_next_to_nothing(shipped):
    tasks = some(shipped.tasks("train", 2), shipped)
    episodes = await all_of(shipped, tasks, lambda env, number, task: RandomPolicy(env.tools, number), 30)
    assert sum(e.rewards["solved"] for e in episodes) / len(tasks) <= RANDOM_AT_MOST[shipped.__name__]


def test_train_and_held_out_rows_are_different(shipped):
    if shipped.__name__ == "CliffWalking":
        pytest.skip("the game has one board and one start")
    train = {repr((dict(t.row), t.seed)) for t in shipped.tasks("train", 0)[:500]}
    assert not train & {repr((dict(t.row), t.seed)) for t in shipped.tasks("held_out", 0)[:500]}
