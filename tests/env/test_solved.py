"""What counts as solved is declared by the env or the run; a positive reward alone says nothing."""

from pathlib import Path

import numpy
import pytest

from agentrl.config import RunConfig
from agentrl.env import ToolEnv, reward
from agentrl.env.compose import ComposedEnv
from agentrl.env.env import Env, StepInfo
from agentrl.env.gym import GymnasiumEnv
from agentrl.env.load import load_env
from agentrl.envs import SHIPPED
from agentrl.errors import ConfigError, JudgeError
from agentrl.eval.finetune_rows import Selection
from agentrl.eval.result import EvalSpec, result_of
from agentrl.eval.tables import result_text
from agentrl.rollout.content import Content, env_factory, require_solved
from agentrl.run_folder.records import EpisodeRecord, decode, encode
from agentrl.run_folder.store import RunStore
from agentrl.testing.policy import ScriptedPolicy, play, say
from agentrl.types import Message, StopReason, Task


class Graded(ToolEnv):
    """Several parts, none of them declared."""

    grade = 0.875

    def setup(self) -> str:
        return "go"

    @reward(weight=2.0)
    def correct(self) -> float:
        return self.grade

    @reward(weight=0.1)
    def form(self) -> bool:
        return True


class Marked(Graded):
    @reward(weight=0.0, solved=True)
    def right(self) -> bool:
        return self.grade == 1


class Threshold(Graded):
    @reward(weight=0.5, solved=0.8)
    def correct(self) -> float:
        return self.grade


class Both(Threshold):
    @reward(solved=True)
    def late(self) -> bool:
        return False


class Named(Graded):
    @reward(weight=-3.0)
    def solved(self) -> bool:
        return self.grade > 0.5


class Single(ToolEnv):
    @reward
    def done(self) -> bool:
        return True


class SingleNumber(ToolEnv):
    @reward
    def done(self) -> float:
        return 1.0


class Total(Graded):
    solved_at = 1.8


class Float32(Graded):
    """0.9 as float32 is 0.89999998, and so reads each part that a model or numpy computed."""

    grade = float(numpy.float32(0.9))

    @reward(solved=0.9)
    def correct(self) -> float:
        return self.grade


async def verdict(env: Env, **row):
    return (await play(env, Task("t", row), ScriptedPolicy([say("x")]))).solved


@pytest.mark.parametrize(
    ("env", "rule", "found"),
    [
        (Graded, "None", None),
        (Marked, "right (@reward(solved=...))", False),
        (Threshold, "correct at least 0.8 (@reward(solved=...))", True),
        (Both, "correct at least 0.8 and late (@reward(solved=...))", False),
        (Named, "solved (the reward named `solved`)", True),
        (Single, "done (the only reward, a bool)", True),
        (SingleNumber, "None", None),
        (Total, "total reward at least 1.8 (solved_at)", True),
        (Float32, "correct at least 0.9 (@reward(solved=...))", True),
    ],
)
async def test_who_declares_what(env, rule, found):
    assert str(env().solved_rule()) == rule
    assert await verdict(env()) is found


async def test_the_run_decides_over_the_class_and_parts_count_before_their_weight():
    env = Marked()
    env.solved_at = {"correct": 0.8, "form": 1}
    assert str(env.solved_rule()) == "correct at least 0.8 and form (solved_at)"
    assert [await verdict(env), await verdict(env)] == [True, True]
    env.solved_at = {"correct": 0.9}
    assert await verdict(env) is False
    env.solved_at = 1.9
    assert await verdict(env) is False


def write(folder: Path) -> Path:
    (folder / "parts.py").write_text(
        "from agentrl.env import ToolEnv\n"
        "def parts(episode):\n    return {'solved': 0.5, 'form': 1.0}\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.1\n"
        "def exact(episode) -> bool:\n    return True\n"
    )
    return folder / "parts.py"


async def test_composed_rewards_and_verls_compute_score(tmp_path):
    file = write(tmp_path)
    row = {"prompt": "go", "reward_model": {"ground_truth": "x"}}
    assert await verdict(ComposedEnv(reward=f"{file}:parts"), **row) is False, "half solved is not solved"
    assert await verdict(ComposedEnv(reward=f"{file}:exact"), **row) is True
    scored = ComposedEnv(reward=f"{file}:compute_score")
    assert await verdict(scored, **row) is None, "0.1 for the form is no solution"
    scored.solved_at = {"compute_score": 1.0}
    assert await verdict(scored, **row) is False
    scored.solved_at = 0.1
    assert await verdict(scored, **row) is True
    scored.solved_at = {"acc": 1.0}
    with pytest.raises(JudgeError, match="solved_at names the reward 'acc'; the episode only has: compute_score"):
        await verdict(scored, **row)


async def test_an_env_that_is_no_tool_env_and_a_game():
    class Plain(Env):
        async def reset(self, task):
            return [Message("user", "go")], {}

        async def step(self, message):
            return [], 0.4, True, False, StepInfo(stop_reason=StopReason.TERMINATED)

        async def score(self, episode):
            return {"a": 0.6}

    assert await verdict(Plain()) is None
    env = Plain()
    env.solved_at = 1.0
    assert await verdict(env) is True

    class Lake(GymnasiumEnv):
        env_id = "FrozenLake-v1"
        solved_at = 1.0

    assert GymnasiumEnv("FrozenLake-v1").solved_rule() is None
    assert await verdict(Lake()) is False


def run_config(**env) -> RunConfig:
    return RunConfig.model_validate(
        {"name": "r", "env": {"use": f"{__name__}:Graded"} | env, "model": {"path": "/m"}}
    )


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (
            {"corect": 1.0},
            "env.solved_at.corect: Graded has no such reward per episode; did you mean 'correct'",
        ),
        ({}, "env.solved_at: name at least one reward"),
    ],
)
def test_thresholds_that_cannot_be_are_refused(at, text):
    with pytest.raises(ConfigError, match=text):
        env_factory(Graded, run_config(solved_at=at))


@pytest.mark.parametrize("at", [float("nan"), {"form": float("inf")}, {"form": "1"}, True, {}])
def test_a_class_with_a_threshold_that_cannot_be_is_refused(at):
    env = Graded()
    env.solved_at = at
    with pytest.raises(ConfigError, match="solved_at"):
        env.solved_rule()


def test_a_declaration_on_a_reward_per_turn_or_group_is_refused():
    for per in ("turn", "group"):

        class Wrong(ToolEnv):
            @reward(per=per, solved=True)
            def late(self, **_) -> bool:
                return True

        with pytest.raises(ConfigError, match=f"solved= is for a reward per episode; this one is per {per}"):
            Wrong.spec()


def test_what_needs_to_know_is_refused_where_nothing_is_declared():
    content = Content(Graded, (), (), ())
    with pytest.raises(
        ConfigError, match=r"warmup.until_pass has to know when an episode of Graded is solved: not de"
    ):
        require_solved(content, "warmup.until_pass")
    make = env_factory(Graded, run_config(solved_at=2.0))
    require_solved(Content(make, (), (), ()), "warmup.until_pass")


def test_shipped_envs_declare_it():
    for where in SHIPPED.values():
        assert str(load_env(where)().solved_rule()) == "solved (@reward(solved=...))"


async def test_evaluation_and_export_say_so_and_guess_nothing(tmp_path):
    undeclared = await play(Graded(), Task("a"), ScriptedPolicy([say("x")]))
    records = [EpisodeRecord.of(0, 0, undeclared, None)]
    assert decode(encode(records[0])).episode.solved is None
    spec = EvalSpec("p", "e", "train", 1, 1, 0.0, 0, "d")
    result = result_of(tmp_path, spec, records, lost=0, seconds=1.0, prices=None)
    assert set(result.estimates) == {"reward", "reward/correct", "reward/form"}
    assert "solved          not declared (mark a reward with @reward(solved=True)" in result_text(result).plain
    with RunStore.open(run_config(), tmp_path / "run") as store:
        store.write_episodes(1, records)
    with pytest.raises(ConfigError, match="--solved: `solved` is not declared"):
        list(Selection(solved=True).records(tmp_path / "run"))

    wrong, right = Threshold(), Threshold()
    wrong.grade, right.grade = 0.7, 0.9
    episodes = [await play(env, Task("a"), ScriptedPolicy([say("x")])) for env in (wrong, right)]
    records = [EpisodeRecord.of(2, 0, episode, None) for episode in episodes]
    rule = str(Threshold().solved_rule())
    result = result_of(tmp_path, spec, records, lost=0, seconds=1.0, prices=None, solved=rule)
    assert result.estimates["solved"].mean == 0.5
    assert "that is: correct at least 0.8 (@reward(solved=...))" in result_text(result).plain
    with RunStore.open(run_config(), tmp_path / "run") as store:
        store.write_episodes(2, records)
    chosen = list(Selection(steps=(2, 2), solved=True).records(tmp_path / "run"))
    assert [record.episode.solved for record in chosen] == [True]
