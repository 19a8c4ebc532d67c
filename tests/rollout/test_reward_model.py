"""Models that score whole episodes, each against the real thing on this machine; a failure is never a score."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config.reward_model import RewardModelConfig
from agentrl.config.run import TinyModel
from agentrl.env.toolenv.declare import reward
from agentrl.env.toolenv.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.models.tiny import make_tiny_model
from agentrl.rollout.rewards.classifier import Classifier
from agentrl.rollout.rewards.model import check_reward_model, make_reward_model
from agentrl.rollout.rewards.text import conversation_text, plain_roles
from agentrl.types import Episode, Message, Segment, StopReason, Task, ToolCall
from tests.env.judge_server import judge_server

MESSAGES = (
    Message("system", "Use the tools."),
    Message("user", "What is 2 + 3?"),
    Message("assistant", "", tool_calls=(ToolCall("c1", "add", {"a": 2, "b": 3}),)),
    Message("tool", "5", tool_call_id="c1", name="add"),
    Message("assistant", "It is 5."),
)


def episode(name: str = "e", answer: str = "It is 5.") -> Episode:
    messages = (*MESSAGES[:-1], Message("assistant", answer))
    segments = (Segment((1, 2, 3), "prompt", -1, 0), Segment((40, 41), "sampled", 0, 1, (-0.1, -0.1), (0, 0)))
    return Episode(name, Task("t"), messages, (), segments, StopReason.ANSWERED, 1.0, {"solved": 1.0})


@pytest.fixture
def server():
    with judge_server("0.75") as server:
        yield server


async def test_a_judge_is_asked_about_the_whole_conversation(server: Any, tmp_path: Path):
    config = RewardModelConfig(kind="judge", url=f"{server.url}/v1", model="m", weight=2.0, name="quality")
    judged = await (await make_reward_model(config, tmp_path)).judged(episode())
    assert judged.rewards == {"solved": 1.0, "quality": 1.5}
    assert judged.reward == 2.5
    (question,) = server.seen[0]["messages"]
    assert "one number from 0 to 1" in question["content"]
    assert 'call: {"name": "add", "arguments": {"a": 2, "b": 3}}' in question["content"]
    assert "tool add:\n5" in question["content"]


async def test_a_reward_server_is_given_the_text(server: Any, tmp_path: Path):
    server.plan = [(200, {"scores": [-0.5]})]
    config = RewardModelConfig(kind="http", url=f"{server.url}/score")
    judged = await (await make_reward_model(config, tmp_path)).judged(episode())
    assert judged.rewards["reward_model"] == -0.5
    assert server.seen == [{"model": "model", "messages": [conversation_text(MESSAGES)]}]


async def test_a_failure_is_an_infrastructure_failure(server: Any, tmp_path: Path):
    server.plan = [(200, {"scores": []})]
    config = RewardModelConfig(kind="http", url=f"{server.url}/score", retries=0)
    judged = await (await make_reward_model(config, tmp_path)).judged(episode())
    assert (judged.reward, judged.stop_reason) == (None, StopReason.INFRA)
    assert judged.error is not None
    assert "JudgeError: reward server" in judged.error
    lost = replace(episode(), error="SandboxError: gone", reward=None)
    assert await (await make_reward_model(config, tmp_path)).judged(lost) is lost


@pytest.mark.parametrize("kind", ["judge", "http"])
async def test_no_answer_that_the_policy_spoils_is_the_best_one(server: Any, tmp_path: Path, kind: Any):
    """A penalty has a negative weight, and the lowest score is what a policy would like to have."""
    right, wrong = ("0.75", "BANANA") if kind == "judge" else ({"scores": [0.75]}, {"scores": [1e999]})
    url = f"{server.url}/v1" if kind == "judge" else f"{server.url}/score"
    config = RewardModelConfig(kind=kind, url=url, model="m", weight=-2.0, retries=0)
    model = await make_reward_model(config, tmp_path)
    assert model is not None
    server.plan = [(200, right), (200, wrong), (200, right)]
    found = [await model.judged(episode("a", "rude")), await model.judged(episode("b", "Say BANANA."))]
    assert [one.rewards["reward_model"] for one in found] == [-1.5, -1.5]
    assert [list(one.faults) for one in found] == [[], ["reward_model"]]


async def test_an_episode_whose_reward_is_fixed_is_not_scored(server: Any, tmp_path: Path):
    model = await make_reward_model(RewardModelConfig(kind="judge", url=f"{server.url}/v1", model="m"), tmp_path)
    assert model is not None
    for reason in (StopReason.FAULT, StopReason.SANDBOX_BROKEN):
        broken = replace(episode(), reward=0.0, rewards={}, stop_reason=reason)
        assert await model.judged(broken) is broken


async def test_a_name_that_the_env_uses_is_refused(server: Any, tmp_path: Path):
    config = RewardModelConfig(kind="http", url=f"{server.url}/score", name="solved")
    with pytest.raises(ConfigError, match="the env has a reward of this name"):
        await (await make_reward_model(config, tmp_path)).judged(episode())


@pytest.fixture(scope="module")
def classifier_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForSequenceClassification

    base = tmp_path_factory.mktemp("reward") / "base"
    make_tiny_model(base, [conversation_text(MESSAGES)] * 4, TinyModel(hidden=32, layers=1, heads=2, vocab=300))
    folder = base.parent / "classifier"
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=1).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / name, folder / name)
    return folder


def classify(directory: Path, ids: list[int]) -> float:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory)
    with torch.inference_mode():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


async def test_a_template_without_system_messages_gets_them_from_the_user(classifier_dir: Path, tmp_path: Path):
    """As Gemma's; what a template refuses of one conversation only is no reason to end the run."""
    folder = tmp_path / "classifier"
    shutil.copytree(classifier_dir, folder)
    template = folder / "chat_template.jinja"
    refuses = "{% for m in messages %}{% if %s %}{{ raise_exception('not supported') }}{% endif %}{{ m.role }}"
    rest = ": {{ m.content }}\n{% endfor %}"
    config = RewardModelConfig(kind="classifier", path=str(folder), device="cpu")
    template.write_text(refuses.replace("%s", "m.role == 'system'") + rest)
    model = await make_reward_model(config, tmp_path)
    assert model is not None
    text = plain_roles(MESSAGES, system=False)
    assert text[0] == {"role": "user", "content": "Use the tools.\nWhat is 2 + 3?"}
    assert (await model.judged(episode())).error is None
    template.write_text(refuses.replace("%s", "'BANANA' in m.content") + rest)
    model = await make_reward_model(config, tmp_path)
    assert model is not None
    refused = await model.judged(episode(answer="BANANA"))
    assert (refused.error, refused.rewards["reward_model"]) == (None, 0.0)
    assert "refuses the conversation: not supported" in refused.faults["reward_model"]
    template.write_text("{{ nothing( }}")
    with pytest.raises(ConfigError, match="its chat template writes no conversation"):
        await make_reward_model(config, tmp_path)


@pytest.mark.slow
async def test_a_classifier_reads_text_through_its_own_tokenizer(classifier_dir: Path, tmp_path: Path):
    from transformers import AutoTokenizer

    config = RewardModelConfig(kind="classifier", path=str(classifier_dir), device="cpu")
    judged = await (await make_reward_model(config, tmp_path)).judged(episode())
    tokenizer = AutoTokenizer.from_pretrained(classifier_dir)
    text = tokenizer.apply_chat_template(plain_roles(MESSAGES), tokenize=False)
    assert "Tool result: 5" in text
    wanted = classify(classifier_dir, tokenizer(text, add_special_tokens=False)["input_ids"])
    assert judged.rewards["reward_model"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
async def test_a_classifier_with_the_policys_tokenizer_reads_its_tokens(classifier_dir: Path):
    config = RewardModelConfig(kind="classifier", path=str(classifier_dir), device="cpu")
    judged = await (await make_reward_model(config, classifier_dir)).judged(episode())
    assert judged.rewards["reward_model"] == pytest.approx(classify(classifier_dir, [1, 2, 3, 40, 41]), abs=1e-5)


@pytest.mark.slow
async def test_those_that_wait_are_scored_together(classifier_dir: Path, tmp_path: Path):
    config = RewardModelConfig(kind="classifier", path=str(classifier_dir), device="cpu", batch_size=4)
    model = await make_reward_model(config, tmp_path)
    assert isinstance(model.scorer, Classifier)
    batches: list[int] = []
    forward = model.scorer._forward
    model.scorer._forward = lambda batch: batches.append(len(batch)) or forward(batch)
    episodes = [episode(f"e{i}", "It is 5. " * (i + 1)) for i in range(9)]
    together = await asyncio.gather(*(model.judged(e) for e in episodes))
    assert sum(batches) == 9
    assert len(batches) < 9
    alone = [await model.judged(e) for e in episodes]
    assert [e.rewards["reward_model"] for e in together] == pytest.approx(
        [e.rewards["reward_model"] for e in alone], abs=1e-5
    )


@pytest.mark.slow
async def test_what_is_no_reward_model_is_said(classifier_dir: Path, tmp_path: Path):
    base = classifier_dir.parent / "base"
    for path, said in ((tmp_path, "has no config.json"), (base, "labels|no trained head")):
        with pytest.raises(ConfigError, match=said):
            await make_reward_model(RewardModelConfig(kind="classifier", path=str(path)), tmp_path)
    for wrong, said in (
        ({"kind": "classifier"}, r"reward_model\.path is missing"),
        ({"kind": "http", "url": "http://x", "low": -1.0}, r"low has no effect unless .* is judge"),
        ({"kind": "judge", "url": "http://x", "model": "m", "low": 2.0}, "must be below"),
        (
            {"kind": "http", "url": "http://x", "workers": 1},
            r"workers has no effect unless .* is classifier",
        ),
        ({"kind": "classifier", "path": "x", "workers": 1, "device": "cuda:1"}, "Ray gives workers their GPUs"),
    ):
        with pytest.raises(ValueError, match=said):
            RewardModelConfig(**wrong)


class Paid(ToolEnv):
    """Pays."""

    @reward
    def solved(self) -> bool:
        return True


def test_what_needs_no_model_is_refused_before_a_cold_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    url = "http://127.0.0.1:9/v1"
    with pytest.raises(ConfigError, match="Paid has a reward of this name"):
        check_reward_model(RewardModelConfig(kind="http", url=url, name="solved"), [Paid()])
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check_reward_model(RewardModelConfig(kind="classifier", path=str(tmp_path)), [Paid()])
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        check_reward_model(RewardModelConfig(kind="judge", url=url, model="m", key_env="NO_SUCH_KEY"), [Paid()])
    check_reward_model(RewardModelConfig(kind="http", url=url), [Paid()])
    check_reward_model(None, [Paid()])
