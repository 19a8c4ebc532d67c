"""Runs that learn from a teacher: in a folder, behind `agentrl serve`, and those that are refused."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types import Model
from safetensors.torch import load_file

from agentrl.chat.template import Renderer
from agentrl.config import RunConfig
from agentrl.config.run import TinyModel
from agentrl.config.teacher import TeacherConfig
from agentrl.doctor.examine import findings
from agentrl.engine.local.local_engine import LocalEngine
from agentrl.errors import AgentRLError, ConfigError
from agentrl.learner.teacher_server import TeacherServer
from agentrl.models.tiny import make_tiny_model
from agentrl.preflight.plan import make_plan
from agentrl.reporting.report import Silent
from agentrl.run_folder.records import read_metrics, read_records
from agentrl.run_folder.store import RunStore
from agentrl.run_folder.token_records import read_tokens
from agentrl.trainer.run import train_run
from agentrl.trainer.samples import episode_samples
from agentrl.trainer.teacher_check import check_teacher_folder, check_teacher_server
from agentrl.types import Sample
from tests.serve.serve_kit import serving

ENV = '''
from agentrl import Task, TextEnv


class Silence(TextEnv):
    """Say something; nobody rewards it."""

    @classmethod
    def tasks(cls, split, seed, size=20):
        return [Task(f"{split}-{n}", {"number": n}) for n in range(size)]

    async def setup(self, number: int) -> str:
        return f"Say something about {number}"

    def reply(self, text):
        return None
'''
TINY = {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "max_context": 512}
ADAPTERS_APART = {"lora": {"rank": 2}, "reference_ranks": 1}
CORPUS = ["Say something about 12", "You are a helpful assistant."] * 20


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A larger model than the policy, with its own tokenizer."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shape = TinyModel(hidden=48, layers=2, heads=4, intermediate=96, vocab=330, max_context=512)
    make_tiny_model(folder, CORPUS, shape, seed=7)
    return folder


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("silence.py").write_text(ENV)


def settings(teacher: dict[str, Any] | None, **changes: Any) -> RunConfig:
    base: dict[str, Any] = {
        "name": "student",
        "steps": 4,
        "env": {"use": f"{Path.cwd()}/silence.py:Silence"},
        "model": {"tiny": TINY},
        "teacher": teacher,
        "rollout": {"groups_per_step": 4, "group_size": 2, "max_turns": 1, "max_tokens": 8, "token_budget": 300},
        "algorithm": {"advantage": "none", "kl": {"coef": 1.0}},
        "optim": {"lr": 1e-2, "warmup_steps": 0},
        "eval": {"every": 0, "tasks": 1},
        "checkpoint": {"every": 1, "keep": 10},
    }
    return RunConfig.model_validate(base | changes)


def run(config: RunConfig, folder: str) -> list[dict[str, float]]:
    """Train; returns the metrics of each step."""
    with RunStore.open(config, Path(folder)) as store:
        train_run(config, store, Silent())
    return [line for line in read_metrics(Path(folder)) if line["step"] > 0]


def test_a_run_without_rewards_approaches_its_teacher_and_resumes_exactly(teacher: Path):
    given = {"path": str(teacher)}
    lines = run(settings(given, steps=8), "whole")
    assert lines[-1]["kl"] < 0.7 * lines[0]["kl"]
    assert [line["loss"] for line in lines] == pytest.approx([line["kl"] for line in lines], rel=1e-5)
    assert (Path("whole/start/tokenizer.json")).read_bytes() == (teacher / "tokenizer.json").read_bytes()
    assert not {f.name for f in findings(Path("whole"))} & {"no-signal", "never-solved", "all-solved"}
    run(settings(given, steps=3), "parts")
    moved = Path("elsewhere")
    shutil.copytree(teacher, moved)
    run(settings({"path": str(moved.absolute())}, steps=8), "parts")  # the same model at another place
    a, b = (
        load_file(next(Path(f"{name}/checkpoints/step-8").glob("model*.safetensors")))
        for name in ("whole", "parts")
    )
    assert all(a[name].equal(b[name]) for name in a)


def test_rewards_and_a_teacher_train_together_with_adapters(teacher: Path):
    policy = Path("policy")
    make_tiny_model(policy, [], TinyModel(**TINY), tokenizer_of=teacher)
    config = settings(
        {"path": str(teacher)},
        model={"path": str(policy.absolute())},
        algorithm={"advantage": "rloo", "kl": {"coef": 0.5, "kind": "centered"}},
        learner={"lora": {"rank": 4}},
        steps=2,
        env={"use": "agentrl.envs.calculator:Calculator"},
        rollout={"groups_per_step": 2, "group_size": 2, "max_turns": 1, "max_tokens": 4, "token_budget": 500},
    )
    lines = run(config, "adapters")
    assert lines[0]["kl"] > 0.05, "the reference would be at 0"


def test_another_teacher_at_resume_is_refused(teacher: Path):
    run(settings({"path": str(teacher)}, steps=1), "r")
    other = Path("other")
    make_tiny_model(other, [], TinyModel(**TINY), seed=9, tokenizer_of=teacher)
    with pytest.raises(ConfigError, match=r"teacher\.path"):
        run(settings({"path": str(other.absolute())}, steps=2), "r")


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The model behind the endpoint of `agentrl serve`, in another thread."""
    ready, url = threading.Event(), ""
    loop, ended = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        nonlocal url
        engine = LocalEngine.from_directory(model)
        try:
            async with serving(engine, Renderer.from_directory(model)) as where:
                url = where.base_url
                ready.set()
                await ended.wait()
        finally:
            await engine.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield url
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def test_a_teacher_behind_agentrl_serve_says_what_one_in_a_folder_says(teacher: Path):
    policy = Path("policy")
    make_tiny_model(policy, [], TinyModel(**TINY), tokenizer_of=teacher)
    same = {
        "model": {"path": str(policy.absolute())},
        "algorithm": {"advantage": "none", "kl": {"coef": 1.0, "kind": "centered"}},
    }
    here = run(settings({"path": str(teacher)}, steps=2, **same), "here")
    with served(teacher) as url:
        there = run(settings({"url": url, "model": "tiny"}, steps=2, **same), "there")
        alien = Path("alien")
        make_tiny_model(alien, ["quite other words of a language far away"] * 9, TinyModel(**TINY, vocab=330))
        with pytest.raises(ConfigError, match="another tokenizer"):
            run(settings({"url": url, "model": "tiny"}, model={"path": str(alien.absolute())}), "alien-run")
        check_its_context({"url": url, "model": "tiny"}, policy)
    for a, b in zip(here, there, strict=True):
        assert b["kl"] == pytest.approx(a["kl"], rel=1e-3)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)


def test_two_envs_learn_from_two_teachers_and_one_from_rewards(teacher: Path):
    policy, other = Path("policy"), Path("other")
    make_tiny_model(policy, [], TinyModel(**TINY), tokenizer_of=teacher)
    make_tiny_model(other, [], TinyModel(**TINY), seed=9, tokenizer_of=teacher)
    Path("question.py").write_text(ENV.replace("Say something about", "What would you like to know of"))
    rewarded = {"use": "agentrl.envs.calculator:Calculator", "algorithm": {"advantage": "rloo", "kl_coef": 0}}
    same: dict[str, Any] = {
        "env": None,
        "model": {"path": str(policy.absolute())},
        "log": {"tokens": "all"},
        "rollout": {"groups_per_step": 6, "group_size": 2, "max_turns": 1, "max_tokens": 8, "token_budget": 500},
    }
    with served(teacher) as first, served(other) as second:
        taught = {
            name: {"use": f"{Path.cwd()}/{file}.py:Silence", "teacher": {"url": url, "model": "tiny"}}
            for name, file, url in (("a", "silence", first), ("b", "question", second))
        }
        lines = run(settings(None, steps=8, envs={**taught, "c": rewarded}, **same), "whole")
        scored = read_records(Path("whole"), 1)
        for env, url in (("a", first), ("b", second)):
            rows = [row for one in scored if one.episode.task.env == env for row in episode_samples(one.episode)]
            distance = apart(TeacherServer(TeacherConfig(url=url, model="tiny")), rows)
            assert lines[0][f"env/{env}/kl"] == pytest.approx(distance, abs=1e-5)
        run(settings(None, steps=3, envs={**taught, "c": rewarded}, **same), "parts")
        run(settings(None, steps=8, envs={**taught, "c": rewarded}, **same), "parts")
        taught["a"]["teacher"]["model"] = "another"
        with pytest.raises(ConfigError, match=r"envs\.a\.teacher\.model"):
            run(settings(None, steps=9, envs={**taught, "c": rewarded}, **same), "parts")
    assert "env/c/kl" not in lines[0]
    a, b = (
        load_file(next(Path(f"{name}/checkpoints/step-8").glob("model*.safetensors")))
        for name in ("whole", "parts")
    )
    assert all(a[name].allclose(b[name], atol=1e-4) for name in a), "a server's rounding depends on its batches"
    recorded = read_tokens(Path("whole"), 1)
    known = {record.episode.task.env: recorded[record.episode.id].ref_logprobs is not None for record in scored}
    assert known == {"a": True, "b": True, "c": False}


def test_a_penalty_in_the_reward_is_reported_for_the_envs_with_a_teacher(teacher: Path):
    policy = Path("policy")
    make_tiny_model(policy, [], TinyModel(**TINY), tokenizer_of=teacher)
    with served(teacher) as url:
        taught = {"use": f"{Path.cwd()}/silence.py:Silence", "teacher": {"url": url, "model": "tiny"}}
        rewarded = {"use": "agentrl.envs.calculator:Calculator", "algorithm": {"kl_coef": 0}}
        config = settings(
            None,
            steps=1,
            env=None,
            envs={"a": taught, "c": rewarded},
            model={"path": str(policy.absolute())},
            algorithm={"advantage": "rloo", "kl": {"coef": 1.0, "where": "reward"}},
            rollout={"groups_per_step": 4, "group_size": 2, "max_turns": 1, "max_tokens": 8, "token_budget": 500},
        )
        (line,) = run(config, "r")
        episodes = [record.episode for record in read_records(Path("r"), 1) if record.episode.task.env == "a"]
        rows = [row for episode in episodes for row in episode_samples(episode)]
        distance = apart(TeacherServer(TeacherConfig(url=url, model="tiny")), rows)
    assert line["kl_in_reward"] == pytest.approx(distance, abs=1e-5)
    assert line["env/a/kl"] == pytest.approx(distance, abs=1e-5)
    assert "env/c/kl" not in line


def apart(server: TeacherServer, rows: list[Sample]) -> float:
    """How far the sampler of these rows is from a teacher."""
    found = server.annotate([(row,) for row in rows], frozenset({"ref_logprobs"}))
    server.close()
    pairs = [
        pair
        for row, said in zip(rows, found, strict=True)
        for pair in zip(own(row), said["ref_logprobs"], strict=True)
    ]
    return sum(mine - theirs for mine, theirs in pairs) / len(pairs)


def own(row: Sample) -> list[float]:
    return [value for value, on in zip(row.logprobs, row.loss_mask, strict=True) if on]


def check_its_context(given: dict[str, Any], policy: Path, context: int = 512) -> None:
    """It scores all of its context but one token, and a run whose episodes may be longer is refused."""
    server, most = TeacherServer(TeacherConfig(**given, retry_s=0)), context - 1
    assert server.longest() == most
    assert len(server.scored([5] * most)[0]) == most
    with pytest.raises(ConfigError, match="HTTP 400"):
        server.scored([5] * context)
    server.close()
    for budget in (most, context):
        config = settings(given, rollout={"max_turns": 1, "max_tokens": 8, "token_budget": budget})
        if budget == most:
            asyncio.run(check_teacher_server(config, policy))
        else:
            with pytest.raises(
                ConfigError,
                match=rf"an episode may have {context}: set rollout\.token_budget to at most {most}",
            ):
                asyncio.run(check_teacher_server(config, policy))


def test_a_teacher_whose_context_is_shorter_than_the_vocabulary_is_checked(teacher: Path):
    make_tiny_model(Path("short"), [], TinyModel(**TINY | {"max_context": 100}), tokenizer_of=teacher)
    with served(Path("short")) as url:
        check_its_context({"url": url, "model": "tiny"}, teacher, context=100)


def test_a_teacher_on_sglang_scores_less_than_its_context(monkeypatch: pytest.MonkeyPatch):
    server = TeacherServer(TeacherConfig(url="http://127.0.0.1:9/v1", model="t"))
    models = [Model(id="t", created=0, object="model", owned_by="sglang", max_model_len=256)]
    client = SimpleNamespace(models=SimpleNamespace(list=lambda: SimpleNamespace(data=models)))
    monkeypatch.setattr(server, "_connected", lambda: client)
    assert server.longest() == 249


def test_a_teacher_that_nobody_serves_is_refused_before_the_run(teacher: Path):
    with pytest.raises(AgentRLError, match=r"teacher\.url .* nothing accepts connections there"):
        run(settings({"url": "http://127.0.0.1:9/v1", "model": "t"}, model={"path": str(teacher)}), "r")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"teacher": None}, "advantage none leaves the rewards out"),
        ({"algorithm": {"advantage": "none", "kl": {"coef": 0}}}, "teacher has no effect while"),
        ({"teacher": {}}, "one of path .* got none of them"),
        ({"teacher": {"path": "T", "url": "http://x/v1"}}, "one of path .* got path and url"),
        ({"teacher": {"url": "http://127.0.0.1:1/v1"}}, "teacher.model is missing"),
        ({"teacher": {"url": "localhost", "model": "t"}}, "teacher.url 'localhost'"),
        ({"teacher": {"path": "T", "retry_s": 5}}, "retry_s has no effect without url"),
        ({"model": {"tiny": {"vocab": 400}}}, "model.tiny.vocab has no effect with teacher.path"),
        ({"learner": ADAPTERS_APART, "teacher": None, "algorithm": {}}, "reference_ranks has no effect with"),
        ({"algorithm": {"advantage": "none", "loss": "gspo"}}, "algorithm.loss has no effect with algorithm"),
        ({"algorithm": {"advantage": "none", "kl": {"where": "reward"}}}, "algorithm.kl.where has no effect with"),
        ({"algorithm": {"advantage": "none", "drop_zero_signal_groups": True}}, "drops every group"),
        ({"algorithm": {"advantage": "none", "entropy_top": 0.2}}, "algorithm.entropy_top has no effect with"),
        ({"algorithm": {"advantage": "none", "ratio_veto": 10.0}}, "algorithm.ratio_veto has no effect with"),
        ({"algorithm": {"advantage": "none", "old_logprobs": "learner"}}, "algorithm.old_logprobs has no effect"),
        ({"algorithm": {"advantage": "none", "correction": {"importance": "token"}}}, "importance has no effect"),
        ({"teacher": {"path": ""}}, "one of path .* got none of them"),
        ({"teacher": {"url": "http://127.0.0.1:1/v1", "model": ""}}, "teacher.model is missing"),
        ({"algorithm": {"kl": {"where": "reward", "kind": "full"}}}, "full differs in its gradient"),
        ({"algorithm": {"kl": {"kind": "unbiased", "top": 9}}}, "algorithm.kl.top has no effect"),
        ({"algorithm": {"kl": {"jsd_beta": 0.5}}, "teacher": None}, "algorithm.kl.jsd_beta has no effect"),
        ({"learner": {"reference_ranks": 2}, "algorithm": {"kl": {"kind": "full"}}}, "full compares whole"),
        ({"rollout": {"refill_zero_signal": True}}, "compares no siblings"),
        ({"algorithm": {"advantage": "max_rl", "kl": {"where": "both"}}}, "both can make rewards"),
        ({"algorithm": {"advantage": "max_rl"}, "rollout": {"overlong": "penalise"}}, "penalise can lead to"),
        ({"algorithm": {"observation_coef": 0.1}, "rollout": {"max_turns": 1}}, "observation_coef has no effect"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_refused(changes: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        settings(**{"teacher": {"path": "T"}, **changes})


def test_what_has_no_effect_without_rewards_may_serve_another_env():
    with_rewards = {"loss": "gspo", "entropy_top": 0.5, "ratio_veto": 100.0, "kl": {"coef": 0.5, "where": "both"}}
    sole = f"{Path.cwd()}/silence.py:Silence"
    envs: dict[str, Any] = {"a": {"use": sole, "algorithm": {"advantage": "none"}}, "b": {"use": sole}}
    config = settings({"path": "T"}, env=None, envs=envs, algorithm={"advantage": "rloo", **with_rewards})
    assert [view.algorithm.advantage.name for view in config.by_env.values()] == ["none", "rloo"]
    with pytest.raises(ValueError, match=r"envs\.a: algorithm.advantage none leaves the rewards out"):
        settings(None, env=None, envs=envs, algorithm={"advantage": "rloo", **with_rewards})


def test_an_env_that_a_teacher_trains_keeps_its_groups():
    envs = {name: {"use": "agentrl.envs.calculator:Calculator"} for name in ("graded", "taught")}
    envs["taught"]["algorithm"] = {"advantage": "none"}
    algorithm = {"kl": {"coef": 1.0}, "drop_zero_signal_groups": True}
    given = {"name": "m", "envs": envs, "model": {"tiny": TINY}, "teacher": {"path": "T"}, "algorithm": algorithm}
    with pytest.raises(ValueError, match=r"envs\.taught: algorithm\.drop_zero_signal_groups drops every group"):
        RunConfig.model_validate(given)


OWN = {"url": "http://127.0.0.1:9/v1", "model": "t"}
OTHER = {**OWN, "model": "u"}


@pytest.mark.parametrize(
    ("a", "b", "changes", "text"),
    [
        ({"teacher": OWN}, {}, {}, r"envs\.b has no teacher, and envs\.a has one"),
        ({"teacher": OWN}, {}, {"teacher": {"path": "T"}}, r"envs\.a\.teacher is on a server, and `teach"),
        ({"teacher": OTHER}, {"teacher": OTHER}, {"teacher": OWN}, "teacher has no effect: every env"),
        ({"teacher": OWN}, {}, {"teacher": OWN}, r"envs\.a\.teacher has no effect: it equals `teacher`"),
        (
            {"teacher": OWN, "algorithm": {"advantage": "rloo", "kl_coef": 0}},
            {"teacher": OWN},
            {},
            r"envs\.a\.teacher has no effect while envs\.a\.algorithm\.kl_coef is 0",
        ),
        (
            {"teacher": OWN},
            {"teacher": OWN},
            {"algorithm": {"kl": {"coef": 0}}},
            r"envs\.a\.teacher has no effect while algorithm\.kl\.coef is 0",
        ),
        ({"teacher": OWN}, {}, {"teacher": {**OWN, "hint": "env"}}, "teacher.hint cannot be combined with envs.a"),
        ({"teacher": OWN}, {"teacher": OWN}, {"learner": {"reference_ranks": 1}}, "reference_ranks has no effect"),
        ({"teacher": OWN}, {"teacher": OWN}, {"rollout": {"temperature": 0.5}}, "scores at temperature 1"),
        ({"teacher": {"url": "x", "model": "t"}}, {}, {}, r"(?s)envs\.a\.teacher.*url 'x'"),
        ({"teacher": {"url": "http://x/v1"}}, {}, {}, r"envs\.a\.teacher\.model"),
        ({"teacher": {**OWN, "path": "T"}}, {}, {}, r"envs\.a\.teacher\.path"),
        (
            {"teacher": OWN},
            {"teacher": OWN},
            {"algorithm": {"advantage": "none", "kl": {"coef": 1.0, "kind": "full"}}},
            "full compares whole distributions",
        ),
    ],
)  # fmt: skip
def test_teachers_of_envs_that_have_no_effect_are_refused(a: Any, b: Any, changes: dict[str, Any], text: str):
    sole = {"use": f"{Path.cwd()}/silence.py:Silence"}
    given = {"teacher": None, "env": None, "envs": {"a": {**sole, **a}, "b": {**sole, **b}}, **changes}
    with pytest.raises(ValueError, match=text):
        settings(**given)


def test_the_plan_knows_the_teachers_of_envs():
    sole = {"use": f"{Path.cwd()}/silence.py:Silence"}
    second = {"url": "http://127.0.0.1:8/v1", "model": "u"}
    envs = {"a": {**sole, "teacher": OWN}, "b": sole, "c": {**sole, "teacher": OWN}}
    config = settings(second, env=None, envs=envs)
    assert {name: found.url for name, found in config.teachers_on_servers.items()} == {
        "a": OWN["url"],
        "b": second["url"],
        "c": OWN["url"],
    }
    plan = make_plan(config)
    assert [line for line in plan.placement if line.startswith("teacher: ")] == [
        "teacher: t at http://127.0.0.1:9/v1",
        "teacher: u at http://127.0.0.1:8/v1",
    ]
    (about,) = [f for f in plan.findings if "teachers are on servers, which score every episode" in f.text]
    assert about.fix == "remove envs.a.teacher and teacher and envs.c.teacher to do without"
    with pytest.raises(AgentRLError, match=r"envs\.a\.teacher\.url .* nothing accepts connections there"):
        run(settings(second, env=None, envs=envs), "r")


def test_credentials_in_the_address_of_a_teacher_are_not_shown():
    teacher = TeacherConfig(url="http://me:secret@127.0.0.1:9/v1", model="t", retry_s=0)
    assert "secret" not in TeacherServer(teacher).where
    plan = make_plan(settings({"url": teacher.url, "model": "t"}))
    assert not [line for line in plan.placement if "secret" in line]
    with pytest.raises(ValueError, match=r"\(hidden\)@") as refused:
        TeacherConfig.model_validate_json('{"url": "me:secret@host", "model": "t"}')
    assert "secret@host'" not in str(refused.value).split("[type=")[0]


def test_a_server_scores_at_temperature_one():
    given = {"url": "http://127.0.0.1:9/v1", "model": "t"}
    with pytest.raises(ValueError, match=r"scores at temperature 1, and rollout.temperature is 0.7"):
        settings(given, rollout={"temperature": 0.7})


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9/v1", "http://localhost:9/v1/", "http://[::1]:9/v1", "http://0.0.0.0:9/v1"]
)
def test_a_teacher_cannot_be_a_server_that_gets_the_policy_weights(address: str):
    given = {"url": address, "model": "t"}
    server: dict[str, Any] = {"urls": ["http://127.0.0.1:8", "http://127.0.0.1:9"]}
    with pytest.raises(ValueError, match=r"teacher\.url http://.*:9/v1/? is a server of engine\.server\.urls"):
        settings(given, engine={"kind": "vllm", "device": "cpu", "server": server})
    adapters = {"kind": "vllm", "device": "cpu", "sync": "lora", "server": server}
    assert settings(given, engine=adapters, learner={"device": "cpu", "lora": {"rank": 2}}).teacher is not None
    for other in ("http://127.0.0.1:8", "http://127.0.0.1:9/policy"):  # of the same gateway
        engine: dict[str, Any] = {"kind": "vllm", "device": "cpu", "server": {"urls": [other]}}
        assert settings(given, engine=engine).teacher is not None


def test_a_teacher_that_reads_other_tokens_is_refused(teacher: Path, tmp_path: Path):
    policy = tmp_path / "policy"
    make_tiny_model(policy, ["quite different text"] * 9, TinyModel(**TINY, vocab=330))
    with pytest.raises(ConfigError, match=r"another tokenizer: \d+ of \d+ tokens differ"):
        check_teacher_folder(settings({"path": str(teacher)}), policy)
    small = tmp_path / "small"
    shutil.copytree(teacher, small)
    data = json.loads((small / "config.json").read_text())
    for key, value, text in (
        ("max_position_embeddings", 128, "its context is 128 tokens, and an episode may have 300"),
        ("vocab_size", 50, "has 50 embeddings"),
    ):
        (small / "config.json").write_text(json.dumps({**data, key: value}))
        with pytest.raises(ConfigError, match=text):
            check_teacher_folder(settings({"path": str(small)}), teacher)
    padded = tmp_path / "padded"
    shutil.copytree(teacher, padded)
    (padded / "config.json").write_text(json.dumps({**data, "vocab_size": data["vocab_size"] + 10}))
    last = data["vocab_size"] + 9
    with pytest.raises(ConfigError, match=rf"the policy samples ids up to {last}: enlarge those of the teacher"):
        check_teacher_folder(settings({"path": str(teacher)}), padded)
    assert check_teacher_folder(settings({"path": str(padded)}), teacher) == []
    (small / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer.json to compare"):
        check_teacher_folder(settings({"path": str(small)}), teacher)
    with pytest.raises(ConfigError, match="does not exist"):
        check_teacher_folder(settings({"path": str(tmp_path / "nowhere")}), teacher)


def test_tokens_that_the_teacher_does_not_know_are_a_note(teacher: Path, tmp_path: Path):
    older = tmp_path / "older"
    shutil.copytree(teacher, older)
    data = json.loads((older / "tokenizer.json").read_text())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] != "</think>"]
    (older / "tokenizer.json").write_text(json.dumps(data))
    (note,) = check_teacher_folder(settings({"path": str(older)}), teacher)
    assert "was not trained with 1 of the policy's tokens ('</think>')" in note


def test_the_plan_knows_the_size_and_place_of_the_teacher(teacher: Path):
    here = make_plan(settings({"path": str(teacher)}))
    alone = make_plan(settings(None, algorithm={"kl": {"coef": 0.1}}))
    assert any(line.startswith("teacher: ") for line in here.placement), here.placement
    assert any("the teacher is a frozen model" in f.text for f in here.findings)
    assert here != alone
    there = make_plan(settings({"url": "http://127.0.0.1:9/v1", "model": "t"}))
    assert any("teacher: t at http://127.0.0.1:9/v1" in line for line in there.placement)
