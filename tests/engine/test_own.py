"""`engine.kind: module:Name`: an engine of the user's own, tried before it is used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.config.engine import SERVERS, EngineConfig
from agentrl.config.load import load_config
from agentrl.config.run import RunConfig
from agentrl.engine.local.local_engine import LocalEngine
from agentrl.engine.open import open_engine
from agentrl.engine.servers.kinds import KINDS
from agentrl.errors import ConfigError, EngineError
from agentrl.rollout.build import make_engine
from agentrl.types import Sampling

HERE = "tests.engine.own_engine"


async def test_it_samples_like_the_local_engine(models: dict[str, Path]) -> None:
    config = EngineConfig.model_validate({"kind": f"{HERE}:PlainEngine", "options": {"max_context": 100}})
    own, local = await open_engine(config, models["qwen3"]), LocalEngine.from_directory(models["qwen3"])
    try:
        assert own.max_context == 100
        sampling = Sampling(temperature=0.0, max_tokens=6)
        assert (await own.generate([5, 6, 7], sampling)).ids == (await local.generate([5, 6, 7], sampling)).ids
        (mine,) = (await own.logprobs_by_server([[5, 6, 7, 8]])).values()  # by default from prompt_logprobs
        (theirs,) = (await local.logprobs_by_server([[5, 6, 7, 8]])).values()
        assert mine[0] == pytest.approx(theirs[0], abs=1e-4)
    finally:
        await local.close()


async def test_a_function_and_a_file_name_it_too(models: dict[str, Path]) -> None:
    assert (await open_engine(EngineConfig(kind=f"{HERE}:make_plain"), models["qwen3"])).max_context == 64
    file = Path(__file__).with_name("own_engine.py")
    assert (await open_engine(EngineConfig(kind=f"{file}:PlainEngine"), models["qwen3"])).max_context == 512


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("WrongLogprobs", {}, "generate and prompt_logprobs differ by 1 per token"),
        ("Short", {}, "returned 4 ids, 3 logprobs and 4 versions"),
        ("Boastful", {}, "Boastful cannot stream tokens: its capabilities say so"),
        ("Partial", {}, "does not implement generate, policy_version"),
        ("not_an_engine", {}, "must be an agentrl.engine.base.Engine, got object"),
        ("PlainEngine", {"max_context": "many"}, "max_context must be a number of tokens, got 'many'"),
        ("PlainEngine", {"depth": 1}, "raised TypeError"),
        ("Nothing", {}, "engine.kind '"),
        ("Nothing", {}, "has no 'Nothing'"),
        ("NUMBER", {}, "must be a class or a function, got a value of type int"),
        ("leaves", {}, "raised SystemExit: 3"),
        ("Versionless", {}, "max_context or policy_version raised RuntimeError: no version yet"),
    ],
)
async def test_what_is_wrong_with_it_is_said_before_the_run(
    models: dict[str, Path], name: str, options: dict[str, object], error: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        await open_engine(EngineConfig(kind=f"{HERE}:{name}", options=options), models["qwen3"])


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("raise", "generate raised RuntimeError: out of slots"),
        ("nothing", "generate must return an agentrl.types.Completion, got None"),
        ("ids", "generate must return ids as a tuple of whole numbers, got ["),
        ("logprobs", "generate returned the log-probability nan"),
        ("versions", "generate returned the policy version 7; the newest is 0"),
        ("finish", "generate returned finish 'eos'"),
    ],
)
async def test_what_is_wrong_later_is_one_error(models: dict[str, Path], how: str, error: str) -> None:
    config = EngineConfig(kind=f"{HERE}:Turning", options={"how": how})
    engine = await open_engine(config, models["qwen3"])
    with pytest.raises(ConfigError, match=re.escape(f"engine.kind {HERE}:Turning: {error}")):
        await engine.generate([1, 2, 3], Sampling(temperature=1.0, max_tokens=3))


async def test_what_a_frozen_engine_does_is_checked_too(models: dict[str, Path]) -> None:
    engine = await open_engine(EngineConfig(kind=f"{HERE}:Frozen"), models["qwen3"])
    with pytest.raises(ConfigError, match="generate returned 4 tokens with max_tokens 3"):
        await engine.generate([1, 2, 3], Sampling(temperature=1.0, max_tokens=3))


async def test_an_engine_must_have_the_new_version_and_may_lose_an_episode(models: dict[str, Path]) -> None:
    engine = await open_engine(EngineConfig(kind=f"{HERE}:Turning", options={"how": "lose"}), models["qwen3"])
    with pytest.raises(EngineError, match="lost"):
        await engine.generate([1, 2, 3], Sampling(temperature=1.0, max_tokens=3))
    with pytest.raises(ConfigError, match=r"policy_version is 0 after update_weights\(weights, 1\)"):
        await engine.update_weights({}, 1)


async def test_an_engine_with_fixed_weights_evaluates_but_does_not_train(models: dict[str, Path]) -> None:
    config = RunConfig.model_validate(
        {
            "env": "agentrl.envs.calculator:Calculator",
            "model": {"path": str(models["qwen3"])},
            "engine": {"kind": f"{HERE}:Fixed"},
        }
    )
    await (await make_engine(config, models["qwen3"])).close()
    with pytest.raises(ConfigError, match="cannot take new weights"):
        await make_engine(config, models["qwen3"], trains=True)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"kind": "locl"}, "did you mean 'local'?"),
        ({"kind": "tgi"}, "must be one of local, sglang, vllm, or `module:Name`"),
        ({"kind": "a:B", "sync": "disk"}, "sync has no effect unless kind is sglang or vllm (it is a:B)"),
        (
            {"kind": "a:B", "server": {"replicas": 2}},
            "server.replicas has no effect unless kind is sglang or vllm (it is a:B)",
        ),
        ({"kind": "a:B", "cuda_graphs": "off"}, "cuda_graphs has no effect unless kind is local (it is a:B)"),
        ({"kind": "sglang", "options": {"x": 1}}, "options has no effect while kind is sglang"),
    ],
)
def test_settings_that_do_not_reach_it_are_errors(data: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        EngineConfig.model_validate(data)


def test_a_file_is_found_from_the_folder_of_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine: ...\n")
    (tmp_path / "run.yaml").write_text(
        "env: agentrl.envs.calculator:Calculator\nmodel: {tiny: {}}\nengine: {kind: 'mine.py:Mine'}\n"
    )
    assert load_config(tmp_path / "run.yaml").engine.kind == f"{tmp_path / 'mine.py'}:Mine"
    (tmp_path / "mine.py").unlink()
    with pytest.raises(ConfigError, match=r"there is no file .*mine\.py"):
        load_config(tmp_path / "run.yaml")


def test_the_configuration_names_every_kind_of_server() -> None:
    assert KINDS.keys() == SERVERS.keys()
