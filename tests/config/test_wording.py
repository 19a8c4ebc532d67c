"""Wrong values of every shape: one error per mistake, with the key, the value and what is wanted instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError

HEAD = "env: m:C\nmodel: {tiny: {}}\n"
SECTION = "a section (keys and values)"
VARIABLES = "environment variables are not substituted: pass the value with --set, where the shell does it"


def complaints(folder: Path, text: str) -> list[str]:
    """The errors about a file, without its name and the lines that they quote."""
    path = folder / "tools.yaml"
    path.write_bytes(text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = [line for line in str(caught.value).splitlines() if " | " not in line]
    return [line.removeprefix(f"{path}:").strip() for line in lines]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("env: 3", f"1:6: env must be `module:Class`, `path/to/file.py:Class` or {SECTION}, got 3"),
        ("env: [a]", f"1:6: env must be `module:Class`, `path/to/file.py:Class` or {SECTION}, got ['a']"),
        ("env:", "1:1: env is missing: name the environment (or several, under `envs`)"),
        ("env: null", "1:1: env is missing: name the environment (or several, under `envs`)"),
        (
            "envs: {a: 3, b: m:C}",
            f"1:11: envs.a must be `module:Class`, `path/to/file.py:Class` or {SECTION}, got 3",
        ),
        ("envs: {'b c': m:C, d: m:C}", "1:1: envs.'b c': a name has up to 64 letters, digits, '_' and '-'"),
        (
            "envs: {null: m:C, a: m:C, b: m:C}",
            "1:8: envs: a key must be a plain word, got null; write a name before the colon",
        ),
        (
            "env: {use: m:C, solved_at: [1]}",
            f"1:28: env.solved_at must be a number or {SECTION} or null, got [1]",
        ),
        (
            "env: {use: m:C, solved_at: high}",
            f"1:28: env.solved_at must be a number or {SECTION} or null, got 'high'",
        ),
        ("env: {use: m:C, solved_at: {a: x}}", "1:32: env.solved_at.a must be a number, got 'x'"),
        ("env: {use: m:C, solved_at: {a: [1]}}", "1:32: env.solved_at.a must be a number, got [1]"),
        ("env: {use: m:C, solved_at: {a: .nan}}", "1:32: env.solved_at.a must be a finite number, got nan"),
        ("env: {use: m:C, reward_weights: {a: null}}", "1:37: env.reward_weights.a must be a number, got nothing"),
    ],
)
def test_the_env(tmp_path: Path, text: str, said: str):
    assert complaints(tmp_path, text + "\nmodel: {tiny: {}}\n") == [said]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: {train: 3}", "3:15: data.train must be text or a list or null, got 3"),
        ("data: {train: [1]}", "3:16: data.train[0] must be text, got 1"),
        ("data: {train: {a: b}}", "3:15: data.train must be text or a list or null, got a section with a"),
        ("eval: {sets: {a: {data: 3}}}", "3:25: eval.sets.a.data must be text or a list or null, got 3"),
        ("agent: {command: [1]}", "3:19: agent.command[0] must be text, got 1"),
        ("agent: m:f", f"3:8: agent must be {SECTION} or null, got 'm:f'; write `{{use: m:f}}`"),
        (
            "engine: {kind: sglang, sync: tensr}",
            "3:30: engine.sync must be 'auto', 'disk', 'tensor', 'broadcast', 'lora' or 'delta', got 'tensr'; "
            "did you mean 'tensor'?",
        ),
        (
            "engine: {kind: sglang, server: {urls: http://x}}",
            "3:39: engine.server.urls must be a list, got 'http://x'; write `[http://x]`",
        ),
        (
            "learner: {lora: {targets: q_proj}}",
            "3:27: learner.lora.targets must be 'all-linear' or a list, got 'q_proj'; write `[q_proj]`",
        ),
        ("learner: {lora: {targets: [q_proj, 3]}}", "3:36: learner.lora.targets[1] must be text, got 3"),
        (
            "learner: {lora: {targets: null}}",
            "3:27: learner.lora.targets must be 'all-linear' or a list, got nothing",
        ),
        (
            "learner: {lora: {targets: []}}",
            "3:18: learner.lora.targets is empty: name linear layers (`q_proj`), or write `all-linear`",
        ),
        (
            "algorithm: {correction: {reject: {token_k1: [1]}}}",
            "3:45: algorithm.correction.reject.token_k1 must be a number or a list of 2 numbers, got [1]",
        ),
        (
            "algorithm: {correction: {reject: {token_k1: {a: 1}}}}",
            "3:45: algorithm.correction.reject.token_k1 must be a number or a list of 2 numbers, got a "
            "section with a",
        ),
        (
            "algorithm: {correction: {reject: {token_k1: [a, 2]}}}",
            "3:46: algorithm.correction.reject.token_k1[0] must be a number, got 'a'",
        ),
        (
            "algorithm: {correction: {reject: {token_k1: true}}}",
            "3:45: algorithm.correction.reject.token_k1 must be a number or a list of 2 numbers, got true",
        ),
        ("optim: {betas: [0.9]}", "3:16: optim.betas must be a list of 2 numbers, got [0.9]"),
        ("optim: {betas: [0.9, 0.9, 0.9]}", "3:16: optim.betas must be a list of 2 numbers, got [0.9, 0.9, 0.9]"),
        ("optim: {betas: ['0.9', 0.9]}", "3:17: optim.betas[0] must be a number, got '0.9'"),
        ("loggers: [3]", f"3:11: loggers[0] must be the name of a logger or {SECTION}, got 3"),
        ("loggers: wandb", "3:10: loggers must be a list, got 'wandb'; write `[wandb]`"),
        (
            "loggers: [{use: wandb, series: 3}]",
            "3:32: loggers[0].series must be 'curated', 'all' or a list, got 3",
        ),
        ("loggers: [{use: wandb, seris: all}]", "3:24: loggers[0].seris: unknown key; did you mean 'series'?"),
        ("loggers: [{use: wandb, samples: '3'}]", "3:33: loggers[0].samples must be a whole number, got '3'"),
        (
            "loggers: [{use: tensorboard, project: x}]",
            "3:30: loggers[0].project has no effect unless loggers[0].use is wandb, mlflow or trackio (it is "
            "tensorboard): remove one of them",
        ),
        (
            "loggers: [own.py:Mine]",
            "3:11: loggers[0]: there is no file {folder}/own.py ({folder} has no 'own.py')",
        ),
    ],
)
def test_values_of_several_types(tmp_path: Path, text: str, said: str):
    assert complaints(tmp_path, f"{HEAD}{text}\n") == [said.replace("{folder}", str(tmp_path))]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("null: 3", "3:1: a key must be a plain word, got null; write a name before the colon"),
        ("rollout: {~: 3}", "3:11: rollout: a key must be a plain word, got ~; write a name before the colon"),
        (
            "loggers: [{'': 3, use: wandb}]",
            "3:12: loggers[0].'': unknown key; the keys here are use, series, samples, {more}",
        ),
        ("? \n: 3", "3:2: a key must be a plain word, got nothing; write a name before the colon"),
        ("[a, b]: 3", "3:1: a key must be a plain word, got a list; write a name before the colon"),
        (
            "r\u043ellout: {}",
            "3:1: r\u043ellout: unknown key (it has the characters U+043E); did you mean 'rollout'?",
        ),
        (
            "rollout\u200b: {}",
            "3:1: rollout\u200b: unknown key (it has the characters U+200B); did you mean 'rollout'?",
        ),
        ("steps: !!binary aGk=", "3:8: steps must be a number, text, true, false or null, got !!binary 'aGk='"),
        (
            "steps: \x07",
            "3:8: not valid YAML: the character U+0007 is not allowed; remove it, or escape it in quotes",
        ),
        (
            "steps: @x",
            "3:8: not valid YAML: found character '@' that cannot start any token (put the value in quotes)",
        ),
        ("steps:3", "3:8: not valid YAML: could not find expected ':' (a space is needed after the colon)"),
        (f"steps: {'9' * 5000}", "3:8: steps must be a number of at most 4,000 digits, got one of 5,000"),
        (f"steps: {'9' * 400}", "3:8: steps must be at most 1000000000, got a number of 400 digits"),
        ("seed: 1e30", "3:7: seed must be in [-9223372036854775808, 9223372036854775808), got 1e+30"),
        ("steps: $STEPS", f"3:8: steps must be a whole number, got '$STEPS'; {VARIABLES}"),
        ("critic: {path: $HOME/x}\nalgorithm: {advantage: gae}", "{gone}"),
        (
            "rollout: {max_turns: ${TURNS}}",
            f"3:23: not valid YAML: expected ',' or '}}', but got '{{' ({VARIABLES})",
        ),
        ("reward_model:", "3:1: reward_model: the section is empty; give it its keys or remove it"),
    ],
)
def test_keys_and_scalars(tmp_path: Path, text: str, said: str):
    more = "project, entity, mode, tracking_uri, options"
    said = said.replace("{more}", more)
    gone = f"there is no folder {tmp_path}/$HOME/x ({tmp_path} has no '$HOME'); {VARIABLES}"
    assert complaints(tmp_path, f"{HEAD}{text}\n") == [said.replace("{gone}", f"3:16: critic.path: {gone}")]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://x", "not an http or https URL with a host"),
        ("localhost:8000", "not an http or https URL with a host"),
        ("http://x:99999", "invalid port 99999"),
        ("''", "not an http or https URL with a host"),
    ],
)
@pytest.mark.parametrize("kind", ["judge", "http"])
def test_a_reward_model_is_reached_by_http(tmp_path: Path, kind: str, url: str, problem: str):
    (said,) = complaints(tmp_path, f"{HEAD}reward_model: {{kind: {kind}, model: m, url: {url}}}\n")
    shown = url.strip("'")
    assert said.endswith(
        f"reward_model.url {shown!r}: {problem}; give an address such as http://127.0.0.1:8000/v1"
    )


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("env: m:C\nrollout: {max_tokens: 5000}", "rollout.max_tokens"),
        ("envs: {a: {use: m:C, rollout: {max_tokens: 5000}}, b: m:C}", "envs.a: rollout.max_tokens"),
        ("envs: {a: {use: m:C, rollout: {token_budget: 90}}, b: m:C}\nrollout: {max_tokens: 5}", None),
    ],
)
def test_a_completion_fits_into_its_episode(tmp_path: Path, text: str, where: str | None):
    whole = f"{text}\nmodel: {{tiny: {{}}}}\n"
    if where is None:
        (tmp_path / "tools.yaml").write_text(whole)
        assert load_config(tmp_path / "tools.yaml").rollout.max_tokens == 5
        return
    (said,) = complaints(tmp_path, whole)
    assert f"{where} is 5000, and rollout.token_budget, for the whole episode with its prompt, is 4096" in said


def test_a_logger_of_ones_own_is_found_beside_the_file(tmp_path: Path):
    (tmp_path / "own.py").write_text("class Mine: ...\nclass Other: ...\n")
    path = tmp_path / "tools.yaml"
    path.write_text(f"{HEAD}loggers: [own.py:Mine, {{use: own.py:Other}}]\n")
    assert [logger.use for logger in load_config(path).loggers] == [
        f"{tmp_path}/own.py:{name}" for name in ("Mine", "Other")
    ]


@pytest.mark.parametrize("around", ["", "eval: {attempts: 1}\n"])
def test_an_error_in_the_section_of_an_env_names_its_key_and_place(tmp_path: Path, around: str):
    text = f"{around}model: {{tiny: {{}}}}\nenvs:\n  a: {{use: m:C, eval: {{attempts: 2}}}}\n  b: m:C\n"
    file = tmp_path / "tools.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, check_paths=False)
    line = text.splitlines().index("  a: {use: m:C, eval: {attempts: 2}}") + 1
    assert f"tools.yaml:{line}:24: envs.a.eval.attempts is 2, and greedy" in str(caught.value)
    assert "set envs.a.eval.temperature above 0, or remove envs.a.eval.attempts" in str(caught.value)
    with pytest.raises(ConfigError, match=r"^--set envs.b.eval.attempts=3: envs.b.eval.attempts is 3"):
        load_config(
            file, ["envs.a.eval.attempts=1", "envs.b={use: m:C}", "envs.b.eval.attempts=3"], check_paths=False
        )


def test_an_override_without_which_the_file_is_right_names_what_else_to_override(tmp_path: Path):
    file = tmp_path / "tools.yaml"
    file.write_text(f"{HEAD}engine: {{kind: sglang, sync: tensor, server: {{python: /bin/python}}}}\n")
    overrides = ["engine.kind=local"]
    for key in ("engine.sync", "engine.server.python"):
        hint = rf"{key} has no effect .*: remove one of them \(--set {key}=null takes it back\)\n"
        with pytest.raises(ConfigError, match=hint):
            load_config(file, overrides, check_paths=False)
        overrides.append(f"{key}=null")
    assert load_config(file, overrides, check_paths=False).engine.kind == "local"
    with pytest.raises(ConfigError, match=r"^--set engine.sync=disk: .*remove one of them$"):
        load_config(file, ["engine.sync=disk", *overrides[:1], *overrides[2:]], check_paths=False)
