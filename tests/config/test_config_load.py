"""Reading a run's YAML: every mistake at once, with its place, its value and what to do."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from agentrl.config import RunConfig, load_config
from agentrl.config.source import MAX_NODES
from agentrl.errors import ConfigError

GOOD = """\
env: shop.env:Shop
model:
  tiny: {}
"""


def write(folder: Path, text: str, name: str = "tools.yaml") -> Path:
    path = folder / name
    path.write_text(inspect.cleandoc(text) + "\n" if text.startswith("\n") else text, encoding="utf-8")
    return path


def complaint(folder: Path, text: str, *overrides: str) -> str:
    """The error for a file, with the folder's path cut away."""
    path = write(folder, text)
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return str(error.value).replace(f"{folder}/", "")


def test_defaults_fill_what_the_file_does_not_say(tmp_path: Path):
    config = load_config(write(tmp_path, GOOD + "optim: {lr: 1e-6, betas: [0.8, 0.9]}\nrollout:\n"))
    assert config.env.use == "shop.env:Shop"
    assert config.optim.lr == 1e-6
    assert config.optim.betas == (0.8, 0.9)
    assert config.rollout == RunConfig.model_fields["rollout"].default
    assert config.name == tmp_path.name.replace("[", "-").replace("]", "").strip("-.")


def test_the_words_of_yaml_1_2(tmp_path: Path):
    text = GOOD + "data: {options: {a: no, b: 0o10, c: 2026-01-02, d: 1_000, e: .inf, f: 'x', g: 010, h: on}}\n"
    options = load_config(write(tmp_path, text)).data.options
    assert options == {
        **{"a": "no", "b": 8, "c": "2026-01-02", "d": 1000, "e": float("inf")},
        **{"f": "x", "g": 10, "h": "on"},
    }
    assert all(type(value) in (str, int, float) for value in options.values())


def test_an_unknown_key_shows_its_line_and_the_nearest_one(tmp_path: Path):
    assert complaint(tmp_path, GOOD + "algorithm:\n  loss:\n    clip_lwo: 0.2\n") == (
        "tools.yaml:6:5: algorithm.loss.clip_lwo: unknown key; did you mean 'clip_low'?\n"
        "    6 |     clip_lwo: 0.2\n"
        "      |     ^"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("group_size: 4", "group_size: unknown key; `group_size` belongs under `rollout:`"),
        ("algorithm: {steps: 3}", "algorithm.steps: unknown key; `steps` belongs at the top level"),
        (
            "learner: {ranks: 2, ray: auto}",
            "learner.ray: unknown key; a run has one Ray cluster, whose address is now `ray: auto` at the top",
        ),
        (
            "rollout: {workers: 2, ray: '1.2.3.4:6379'}",
            "rollout.ray: unknown key; a run has one Ray cluster, whose",
        ),
        ("engine: {server: {ray: local}}", "`engine: {server: {launch: ray}}` starts the servers on it"),
        ("lr: 1", "lr: unknown key; `lr` belongs under `warmup:` or `critic:` or `optim:`"),
        ("groupsize: 4", "groupsize: unknown key; did you mean `group_size`, which belongs under `rollout:`?"),
        ("rollout: {top_p: 0.9}", "rollout.top_p: training samples from the whole distribution"),
        ("rollout: {min_p: 0.1}", "and the same flags of `agentrl eval`"),
        ("rollout.group_size: 4", "unknown key; write `rollout:` and, indented below it, `group_size:`"),
        ("eval: {qqq: 4}", "eval.qqq: unknown key; the keys here are every, tasks"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_where_it_belongs(tmp_path: Path, text: str, said: str):
    assert said in complaint(tmp_path, GOOD + text + "\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("algorithm: {loss: {clip_low: 2.0}}", "4:30: algorithm.loss.clip_low must be in (0, 1), got 2.0"),
        ("optim: {lr: -1}", "4:13: optim.lr must be greater than 0, got -1"),
        ("eval: {every: -1}", "4:15: eval.every must be at least 0, got -1"),
        ("steps: many", "4:8: steps must be a whole number, got 'many'"),
        ("steps: true", "4:8: steps must be a whole number, got true"),
        ("steps: '8'", "4:8: steps must be a whole number, got '8'"),
        ("steps: 1.5", "4:8: steps must be a whole number, got 1.5"),
        ("steps:", "4:1: steps must be a whole number, got nothing"),
        ("optim: {lr: .nan}", "4:13: optim.lr must be a finite number, got nan"),
        ("optim: 3", "4:8: optim must be a section (keys and values), got 3"),
        ("optim: {betas: 0.9}", "4:16: optim.betas must be a list of 2 numbers, got 0.9"),
        ("optim: {betas: [1.9, 0.9]}", "4:17: optim.betas[0] must be less than 1, got 1.9"),
        ("learner: {device: gpu}", "4:19: learner.device must be `auto`, `cpu`, `cuda` or `cuda:N`, got 'gpu'"),
        ("engine: {device: 'cuda:x'}", "engine.device must be `auto`, `cpu`, `cuda` or `cuda:N`, got 'cuda:x'"),
        ("data: {options: [1]}", "4:17: data.options must be a section (keys and values), got [1]"),
        ("env: {use: 'a:B', reward_weights: {x: y}}", "env.reward_weights.x must be a number, got 'y'"),
        ("env: {use: 'a:B', reward_weights: {x: '2'}}", "3:39: env.reward_weights.x must be a number, got '2'"),
        ("env: {use: 'a:B', reward_weights: {x: true}}", "env.reward_weights.x must be a number, got true"),
        ("name: a/b", "4:7: name must be made of letters, digits, '.', '_' and '-' (it names a folder)"),
        ("name: ..", "4:7: name must not begin with a dot"),
        ("name: 7", "4:7: name must be text, got 7"),
        (
            "algorithm: {advantage: grp}",
            "algorithm.advantage must be one of dr_grpo, gae, gdpo, gpg, grpo, ",
        ),
        ("algorithm: {loss: gsop}", "or `module:function`, got 'gsop'; did you mean 'gspo'?"),
        (
            "algorithm: {gspo: {clip_low: 0.1}}",
            "4:13: algorithm.gspo: unknown key; parameters belong to the name: "
            "write `loss: {name: gspo, clip_low: 0.1}`",
        ),
        (
            "algorithm: {correction: {reject: {seq_k1: 2}}}",
            "reject has no statistic 'seq_k1'; did you mean",
        ),
        ("rollout: {group_size: 1}", "4:11: rollout.group_size is 1: a group of one has no advantage"),
        (
            "algorithm: {kl: {coef: 0, kind: k3}}",
            "4:27: algorithm.kl.kind has no effect while algorithm.kl.coef is 0",
        ),
        (
            "rollout: {overlong_penalty: 0.1}",
            "4:11: rollout.overlong_penalty has no effect unless rollout.overlong",
        ),
        ("data: {sampler: {floor: 0.2}}", "4:18: data.sampler.floor has no effect unless data.sampler.order is"),
        (
            "engine: {server: {replicas: 1}}",
            "4:19: engine.server.replicas has no effect unless engine.kind is sglang or vllm (it is local)",
        ),
        ("data: {sampler: {order: shuffled, window: 8, floor: 0.1}}", "4:35: data.sampler.window has no effect"),
        ("data: {sampler: {order: shuffled, window: 8, floor: 0.1}}", "4:46: data.sampler.floor has no effect"),
        (
            "data: {sampler: {order: shuffled, options: {until: 1}}}",
            "4:35: data.sampler.options has no effect while data.sampler.order is shuffled",
        ),
        (
            "data: {sampler: {order: 'os:path', window: 2}}",
            "4:36: data.sampler.window has no effect unless data.sampler.order is weighted (it is os:path)",
        ),
        (
            "data: {sampler: {order: shufled}}",
            "4:18: data.sampler.order must be one of sequential, shuffled, weighted, or `module:Class`, got "
            "'shufled'; did you mean 'shuffled'?",
        ),
        ("data: {sampler: {order: missing.py:Levels}}", "4:25: data.sampler.order: there is no file missing.py"),
        (
            "rollout: {refill_zero_signal: 2, group_filter: good}",
            "4:48: rollout.group_filter must be `module:function`",
        ),
        (
            "rollout: {group_filter: 'os:path'}",
            "rollout.group_filter has no effect while rollout.refill_zero_signal is 0: set it",
        ),
        (
            "optim: {warmup_steps: 5, warmup_ratio: 0.1}",
            "warmup_steps has no effect while optim.warmup_ratio",
        ),
        ("rollout: {overlong_penalty: 0.5}", "has no effect unless rollout.overlong is penalise (it is train)"),
        (
            "critic: {}",
            "4:1: critic has no effect unless algorithm.advantage is gae or a function of your own (it is grpo): ",
        ),
        (
            "learner: {device: cpu, cpu_offload: false}",
            "cpu_offload has no effect while learner.device is cpu",
        ),
        ("agent: {use: 'a:f'}\nrollout: {workers: 0}", "5:11: rollout.workers has no effect while agent is given"),
        (
            "rollout: {timeout_s: 60}\nagent: {command: [a], sandbox: {wall_s: 60}}",
            "5:33: agent.sandbox.wall_s is 60 and rollout.timeout_s 60: the program must end first",
        ),
        (
            "rollout: {timeout_s: 60}\nagent: {command: [a], sandbox: {ttl_s: 30}}",
            "5:33: agent.sandbox.ttl_s is 30 and rollout.timeout_s 60: the sandbox would end during an episode",
        ),
        ("learner: {reference_ranks: 0}\nalgorithm: {kl: {coef: 0}}", "while algorithm.kl.coef is 0"),
        (
            "reward_model: {kind: http, url: 'http://a', model: m, low: 0.0}",
            "low has no effect unless",
        ),
        ("reward_model: {kind: http, url: 'http://a', name: ''}", "reward_model.name must have at least 1"),
        ("reward_model: {kind: judge, url: 'http://a', model: ''}", "reward_model.model must have at least 1"),
        ("warmup:", "4:1: warmup: the section is empty; write `warmup: {}` for the defaults or remove it"),
        ("name: " + "x" * 5000, "4:7: name must have at most 200 characters, got 'xxx"),
        ("name: ." + "x" * 5000, "4:7: name must not begin with a dot, got '.xxx"),
        (
            "rollout: {groups_per_step: 99999999999999999999}",
            "must be at most 1000000000, got 9999",
        ),
        ("rollout: {groups_per_step: 100000}", "rollout.groups_per_step must be in (0, 65536], got 100000"),
        ("eval: {tasks: 99999999999999999999}", "eval.tasks must be at most 1000000000, got 9999"),
        ("seed: 99999999999999999999", "seed must be in [-9223372036854775808, 9223372036854775808), got"),
        (
            "engine: {kind: sglang, server: {urls: ['127.0.0.1:30000']}}",
            "not an http or https URL with a host",
        ),
        (
            "engine: {kind: sglang, server: {urls: ['localhost:30000']}}",
            "not an http or https URL with a host",
        ),
        ("engine: {kind: sglang, server: {urls: ['http://']}}", "not an http or https URL with a host"),
        (
            "warmup: {demonstrations: a, num: 3}",
            "warmup.num has no effect while warmup.demonstr",
        ),
        ("warmup: {demonstrations: a, options: {b: 1}}", "warmup.options has no effect while warmup.demonstr"),
        ("seed: 1\nseed: 2", "5:1: seed: written twice; the first is on line 4"),
        ("data: {options: {a: !!python/name:os.system x}}", "data.options.a must be a number, text, true"),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_allowed(tmp_path: Path, text: str, said: str):
    good = GOOD if not text.startswith("env") else GOOD.replace("env: shop.env:Shop\n", "")
    assert said in complaint(tmp_path, good + text + "\n")


def test_all_mistakes_come_at_once_in_the_order_of_the_file(tmp_path: Path):
    text = """
    env: shop
    model: {path: nowhere, tiny: {hiden: 3}}
    stepz: 4
    rollout:
      group_size: eight
      max_turns: 2
      max_turns: 3
    """
    said = complaint(tmp_path, text, "optim.lr=0", "seed=x")
    heads = [line.split(": ")[0] for line in said.splitlines() if not line.startswith(" ")]
    assert heads == [
        *("tools.yaml:1:6", "tools.yaml:2:15", "tools.yaml:2:31", "tools.yaml:3:1"),
        *("tools.yaml:5:15", "tools.yaml:7:3", "--set optim.lr=0", "--set seed=x"),
    ]


def test_what_is_missing_is_named_with_its_meaning(tmp_path: Path):
    said = complaint(tmp_path, "steps: 3\n")
    assert "tools.yaml: env is missing" in said
    assert "tools.yaml: model is missing" in said
    said = complaint(tmp_path, "env: {options: {a: 1}}\nmodel: {}\n")
    assert "tools.yaml:1:1: env.use is missing: `module:Class` or" in said
    said = complaint(tmp_path, "env: 'a:B'\nmodel: {}\n")
    assert "tools.yaml:2:1: model: give exactly one of `path`" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty; at least `env` and `model` are needed"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n- b\n", "tools.yaml:1:1: the file must hold keys and values, found a list"),
        ("hello\n", "tools.yaml:1:1: the file must hold keys and values, found the value 'hello'"),
        ("a: [1, 2\nb: 3\n", "not valid YAML"),
        ("a: 'open\n", "tools.yaml:1:9: not valid YAML"),
        ("a:\n\tb: 1\n", "(YAML is indented with spaces, not tabs)"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a: *b\n", "not valid YAML"),
        ("a: \x00\n", "not valid YAML"),
        ("a: &a {b: *a}\n", "contains itself"),
        ("a: " + "[" * 200 + "]" * 200 + "\n", "nested more than 50 levels deep"),
        ("a: " + "{b: " * 20000 + "}" * 20000 + "\n", "nested more than 50 levels deep"),
        ("".join(" " * i + "a:\n" for i in range(900)), "nested more than 50 levels deep"),
    ],
)
def test_a_file_that_is_no_configuration_gives_one_error(tmp_path: Path, text: str, said: str):
    got = complaint(tmp_path, text)
    assert said in got
    assert sum("tools.yaml" in line for line in got.splitlines()) == 1


def test_a_bomb_of_aliases_ends_at_once(tmp_path: Path):
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    text += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30))
    assert f"more than {MAX_NODES} values" in complaint(tmp_path, text)


def test_a_missing_file_names_those_that_are_there(tmp_path: Path):
    write(tmp_path, GOOD, "calculator.yaml")
    with pytest.raises(ConfigError, match=r"tools\.yaml: no such file \(there is calculator\.yaml\)"):
        load_config(tmp_path / "tools.yaml")
    with pytest.raises(ConfigError, match=r"is a folder, not a YAML file; give the file in it \(there is calc"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.yaml: not UTF-8 text \(byte 3"):
        load_config(tmp_path / "binary.yaml")


def test_anchors_and_merges(tmp_path: Path):
    text = """
    env: shop.env:Shop
    model: {tiny: &small {hidden: 32, layers: 1}}
    data:
      options: {<<: *small, layers: 5, extra: 1}
    """
    options = load_config(write(tmp_path, text)).data.options
    assert options == {"hidden": 32, "layers": 5, "extra": 1}
    said = complaint(tmp_path, text.replace("options: {<<: *small, layers: 5, extra: 1}", "<<: *small"))
    assert "tools.yaml:2:23: data.hidden: unknown key" in said


class TestOverrides:
    def test_null_takes_a_key_of_the_file_back(self, tmp_path: Path):
        path = write(tmp_path, GOOD + "data: {sampler: {order: weighted, floor: 0.3}}\nsteps: 7\n")
        said = complaint(tmp_path, path.read_text(), "data.sampler.order=shuffled")
        assert "data.sampler.floor has no effect unless data.sampler.order is weighted (it is shuffled)" in said
        config = load_config(path, ["data.sampler.order=shuffled", "data.sampler.floor=null", "steps=null"])
        assert (config.data.sampler.floor, config.steps) == (0.1, 100)

    def test_values_are_yaml_and_later_ones_win(self, tmp_path: Path):
        path = write(tmp_path, GOOD + "optim: {lr: 1}\n")
        overrides = ["optim.lr=1e-6", "optim.betas=[0.5, 0.6]", "seed=1", "seed=2", "warmup.num=3", "name=x=y-z"]
        config = load_config(path, overrides[:-1])
        assert (config.optim.lr, config.optim.betas, config.seed) == (1e-6, (0.5, 0.6), 2)
        assert config.warmup is not None
        assert config.warmup.num == 3
        with pytest.raises(ConfigError, match="--set name=x=y-z: name must be made of"):
            load_config(path, overrides)

    def test_a_section_can_be_replaced_or_switched_off(self, tmp_path: Path):
        (tmp_path / "m").mkdir()
        path = write(tmp_path, GOOD + "warmup: {num: 3}\n")
        config = load_config(path, ["model.tiny=null", f"model.path={tmp_path}/m", "warmup=null"])
        assert config.model.path == f"{tmp_path}/m"
        assert config.warmup is None

    def test_the_short_form_of_env_can_be_widened(self, tmp_path: Path):
        config = load_config(write(tmp_path, GOOD), ["env.options.level=3"])
        assert (config.env.use, config.env.options) == ("shop.env:Shop", {"level": 3})

    def test_it_heals_what_it_replaces(self, tmp_path: Path):
        config = load_config(write(tmp_path, GOOD + "rollout: {group_size: x}\n"), ["rollout.group_size=4"])
        assert config.rollout.group_size == 4

    @pytest.mark.parametrize(
        ("flag", "said"),
        [
            ("rollout.grop_size=3", "rollout.grop_size: unknown key; did you mean 'group_size'?"),
            ("rollout.max_turns=0", "rollout.max_turns must be greater than 0, got 0"),
            ("seed", "write `--set section.key=value`"),
            (".=3", "write `--set section.key=value`"),
            ("name.x=3", "name is 'n', not a section; it has no keys"),
            ("seed=[1", "not valid YAML"),
            ("data.train=*.jsonl", "(put the value in quotes)"),
            ("warmup.demonstrations=no.jsonl", "warmup.demonstrations: there is no file"),
            ("data.train=~nobody-here/rows.jsonl", "data.train: there is no file"),
        ],
    )
    def test_mistakes_name_the_flag(self, tmp_path: Path, flag: str, said: str):
        got = complaint(tmp_path, GOOD + "name: n\n", flag)
        assert got.startswith(f"--set {flag}:")
        assert said in got


class TestPaths:
    def test_they_are_relative_to_the_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "models/qwen").mkdir(parents=True)
        (tmp_path / "conf").mkdir()
        (tmp_path / "conf/shop.py").write_text("")
        (tmp_path / "rows.jsonl").write_text("")
        monkeypatch.chdir(tmp_path)
        write(
            tmp_path,
            "env: shop.py:Shop\nmodel: {path: ../models/qwen}\ndata: {train: ../rows.jsonl}\n",
            "conf/a.yaml",
        )
        config = load_config("conf/a.yaml", ["data.held_out=rows.jsonl"])
        assert config.env.use == f"{tmp_path}/conf/shop.py:Shop"
        assert config.model.path == f"{tmp_path}/models/qwen"
        assert config.data.train == f"{tmp_path}/rows.jsonl"
        assert config.data.held_out == f"{tmp_path}/rows.jsonl"  # a flag: relative to the current folder
        assert config.name == "conf"

    def test_a_folder_that_the_run_makes_is_relative_to_the_file_too(self, tmp_path: Path):
        text = GOOD + "engine: {kind: vllm, server: {sync_folder: new/shared}}\n"
        config = load_config(write(tmp_path, text))
        assert config.engine.server.sync_folder == f"{tmp_path}/new/shared"
        (tmp_path / "new").write_text("")
        assert "must be a folder" in complaint(tmp_path, text.replace("new/shared", "new"))

    @pytest.mark.parametrize("address", ["http://h:5000", "sqlite:///runs.db", "file:/x", "databricks"])
    def test_the_store_of_mlflow_is_a_folder_or_an_address(self, tmp_path: Path, address: str):
        text = GOOD + "loggers: [{use: mlflow, tracking_uri: WHERE}]\n"
        for given, meant in (("new/mlruns", f"{tmp_path}/new/mlruns"), (address, address)):
            config = load_config(write(tmp_path, text.replace("WHERE", given)))
            assert config.loggers[0].tracking_uri == meant

    @pytest.mark.parametrize("text", ["", " "])
    def test_an_empty_path_is_not_the_folder_of_the_file(self, tmp_path: Path, text: str):
        said = complaint(tmp_path, GOOD, f"model.path='{text}'")
        assert f"model.path must be the path of a folder, got '{text}'" in said

    @pytest.mark.parametrize("value", ['""', "[rows.jsonl, '']"])
    def test_an_empty_name_of_a_file_of_rows_is_refused(self, tmp_path: Path, value: str):
        (tmp_path / "rows.jsonl").write_text("")
        assert "data.train must name files" in complaint(tmp_path, GOOD + f"data: {{train: {value}}}\n")

    def test_what_is_missing_stops_with_its_place(self, tmp_path: Path):
        (tmp_path / "models").mkdir()
        (tmp_path / "shop.py").write_text("")
        text = "env: {use: shopp.py:Shop}\nmodel: {path: model/qwen}\ndata: {train: rows.jsonl}\n"
        said = complaint(tmp_path, text)
        assert "tools.yaml:1:12: env.use: there is no file shopp.py; did you mean shop.py?" in said
        assert "tools.yaml:2:15: model.path: there is no folder model/qwen; did you mean models?" in said
        assert "tools.yaml:3:15: data.train: there is no file rows.jsonl" in said
        config = load_config(tmp_path / "tools.yaml", check_paths=False)
        assert config.model.path == f"{tmp_path}/model/qwen"

    def test_a_name_that_no_file_can_have_is_missing(self, tmp_path: Path):
        path = write(tmp_path, GOOD + "warmup: {demonstrations: " + "x" * 5000 + "}\n")
        with pytest.raises(ConfigError, match=r"warmup\.demonstrations: there is no file"):
            load_config(path)

    def test_a_folder_is_no_file_and_a_file_no_folder(self, tmp_path: Path):
        (tmp_path / "shop.py").write_text("")
        said = complaint(tmp_path, "env: shop.py:Shop\nmodel: {path: shop.py}\ndata: {train: .}\n").replace(
            f"{tmp_path} ", ". "
        )
        assert "tools.yaml:2:15: model.path must be a folder, shop.py is a file" in said
        assert "tools.yaml:3:15: data.train: " in said
        assert "no .jsonl, .json or .parquet file of the split train in" in said

    def test_rows_may_lie_in_the_folder_of_a_saved_dataset(self, tmp_path: Path):
        (tmp_path / "rows").mkdir()
        (tmp_path / "rows/dataset_info.json").write_text("{}")
        assert load_config(write(tmp_path, GOOD + "data: {train: rows}\n")).data.train == f"{tmp_path}/rows"

    @pytest.mark.parametrize("use", ["shop", "shop.py", ":Shop", "shop:", "shop:not a name"])
    def test_an_env_must_name_a_class(self, tmp_path: Path, use: str):
        said = complaint(tmp_path, GOOD.replace("shop.env:Shop", f'"{use}"'))
        assert "must be `module:Class` or `path/to/file.py:Class`" in said

    def test_a_template_of_the_house_is_a_name(self, tmp_path: Path):
        text = GOOD.replace("tiny: {}", "{tiny: {}, chat_template: chatml}").replace("model:\n  {", "model: {")
        assert load_config(write(tmp_path, text)).model.chat_template == "chatml"
        assert "there is no file" in complaint(tmp_path, text.replace("chatml", "chatmll"))


def test_a_function_of_ones_own_is_found_beside_the_file(tmp_path: Path):
    (tmp_path / "own.py").write_text("def plain(): ...\n")
    config = load_config(write(tmp_path, GOOD + "algorithm: {loss: own.py:plain, advantage: pkg.mod:f}\n"))
    assert config.algorithm.loss.use == f"{tmp_path}/own.py:plain"
    assert config.algorithm.advantage.use == "pkg.mod:f"
    assert "there is no file" in complaint(tmp_path, GOOD + "algorithm: {loss: owm.py:plain}\n")
