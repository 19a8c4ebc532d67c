"""Run, model, data, env and rollout of a verl configuration, translated; `compute.py` has the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from agentrl.config.datafiles import data_files
from agentrl.config.loggers import LOGGERS
from agentrl.env.rows import count_rows
from agentrl.errors import ConfigError
from agentrl.extras import installed
from agentrl.import_verl.compute import import_compute
from agentrl.import_verl.found import Imported
from agentrl.import_verl.keys import MODEL, ROLLOUT
from agentrl.import_verl.read_config import read_yaml

_TURNS, _VAL = ROLLOUT + "multi_turn.", ROLLOUT + "val_kwargs."
_UNBOUNDED_TURNS = 100
_BUILT_IN_SCORE = "agentrl.env.verl_scores:compute_score"


def import_setting(found: Imported) -> None:
    """Everything but the objective."""
    _run(found)
    _model(found)
    _data(found)
    _env(found)
    _rollout(found)
    import_compute(found)


# --- the run ------------------------------------------------------------------------------------------------


def _run(found: Imported) -> None:
    if name := found.keys.values.get("trainer.experiment_name"):
        known = re.sub(r"\$\([^)]*\)|\$\{[^}]*\}|\$\w+", "", str(name))
        found.set("name", re.sub(r"[^A-Za-z0-9._-]+", "-", known).strip("-._") or "verl")
    if found.has("data.seed"):
        found.set("seed", found.whole("data.seed"))
    _steps(found)
    if found.has("data.val_files"):
        found.set("eval.every", max(0, found.whole("trainer.test_freq")))
    else:
        found.say("trainer.test_freq", "no effect", "there are no data.val_files")
    if not found.flag("trainer.val_before_train"):
        found.set("eval.before_training", False)
    _evaluation(found)
    found.set("checkpoint.every", max(0, found.whole("trainer.save_freq")))
    if kept := found.whole("trainer.max_actor_ckpt_to_keep"):
        found.set("checkpoint.keep", max(1, kept))
    _loggers(found)
    if found.text("trainer.resume_mode") == "disable":
        found.say(
            "trainer.resume_mode", "by hand", "give the run a new `name`: a run of the same folder is continued"
        )


def _loggers(found: Imported) -> None:
    """Dashboards that get the metrics, each with verl's project."""
    given = found.value("trainer.logger")
    names = [str(name) for name in (given if isinstance(given, list) else [given]) if name]
    known = [name for name in dict.fromkeys(names) if name in LOGGERS]
    project = found.text("trainer.project_name") if found.has("trainer.project_name") else ""
    with_project = [name for name in known if name != "tensorboard"]
    if found.has("trainer.logger") and known:
        found.set(
            "loggers", [{"use": n, "project": project} if project and n in with_project else n for n in known]
        )
    if not (found.has("trainer.logger") and with_project):
        found.say("trainer.project_name", "same", "a run is a folder under runs/ (see name)")
    others = [name for name in names if name not in (*LOGGERS, "console", "file")]
    if others:
        text = f"{', '.join(others)}: write a logger of your own (docs/loggers.md)"
        found.say("trainer.logger", "by hand", text + (f"; taken: {', '.join(known)}" if known else ""))
    elif known:
        found.say("trainer.logger", "taken", f"loggers: {', '.join(known)}")
    else:
        found.say("trainer.logger", "same", "the live screen, and metrics.jsonl in the run folder")


def _evaluation(found: Imported) -> None:
    """How held-out tasks are played. verl ignores the temperature where `do_sample` is false."""
    if (tasks := found.whole("data.val_max_samples")) and tasks > 0:
        found.set("eval.tasks", tasks)
    given, temperature = f"{_VAL}do_sample", found.number(f"{_VAL}temperature") or 0.0
    attempts = found.whole(f"{_VAL}n") or 1
    if temperature <= 0 or (found.has(given) and not found.flag(given)):
        for key in ("temperature", "top_p", "top_k", "min_p"):
            found.say(_VAL + key, "no effect", "evaluation is greedy")
        found.say(given, "same" if not found.flag(given) else "no effect", "evaluation is greedy")
        if attempts > 1:
            found.say(f"{_VAL}n", "no effect", "greedy episodes of one task are all the same")
        return
    found.set("eval.temperature", temperature)
    if attempts > 1:
        found.set("eval.attempts", attempts)
    for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value = found.whole(_VAL + key) if key == "top_k" else found.number(_VAL + key)
        if value is not None and max(value, 0) != off:
            found.set(f"eval.{key}", max(value, 0))


def _steps(found: Imported) -> None:
    """`total_training_steps`, else the epochs times the batches of the training files, where these are here."""
    if found.has("trainer.total_training_steps"):
        if (steps := found.whole("trainer.total_training_steps")) is not None and steps > 0:
            found.set("steps", steps)
        found.say("trainer.total_epochs", "no effect", "total_training_steps wins")
        return
    epochs, batch = found.whole("trainer.total_epochs"), found.whole("data.train_batch_size")
    rows = _rows(found)
    if rows is None:
        found.hint(
            "trainer.total_epochs",
            f"set `steps` to {epochs} times the rows of the training data divided by {batch}: the rows cannot be "
            "counted here",
        )
    elif rows < batch:
        found.hint("trainer.total_epochs", f"{rows} rows are less than one batch of {batch}; set `steps`")
    else:
        found.set("steps", epochs * (rows // batch))
        found.say(
            "trainer.total_epochs", "taken", f"steps: {epochs} epochs of {rows:,} rows in batches of {batch}"
        )


def _rows(found: Imported) -> int | None:
    paths = [found.keys.find(str(name)) for name in _listed(found.value("data.train_files"))]
    if not paths or None in paths:
        return None
    try:
        return sum(count_rows(file) for path in paths if path for file in data_files(str(path)))
    except ConfigError:
        return None


def _listed(value: Any) -> list[Any]:
    return [each for each in (value if isinstance(value, list) else [value]) if each not in (None, "")]


# --- model and data -----------------------------------------------------------------------------------------


def _model(found: Imported) -> None:
    if found.has(f"{MODEL}path"):
        found.set("model.path", found.text(f"{MODEL}path"))
    else:
        found.hint(f"{MODEL}path", "name the model in model.path")
    if found.text(f"{MODEL}tokenizer_path") in ("", found.text(f"{MODEL}path")):
        found.say(f"{MODEL}tokenizer_path", "same", "the tokenizer of model.path")
    if template := found.text(f"{MODEL}custom_chat_template"):
        found.set("model.chat_template", template)
        if found.keys.find(template) is None:
            found.say(
                f"{MODEL}custom_chat_template",
                "by hand",
                "save the template to a file, and name it in model.chat_template",
            )
            del found.config["model"]["chat_template"]
    place = "data.apply_chat_template_kwargs."
    for key in [key for key in found.keys.values if key.startswith(place) and found.has(key)]:
        found.set(f"model.template_options.{key.removeprefix(place)}", found.keys.values.get(key))
    found.set("learner.checkpoint_activations", found.flag(f"{MODEL}enable_gradient_checkpointing"))
    if found.flag(f"{MODEL}enable_activation_offload"):
        found.set("learner.offload_activations", True)
    attention = {"sdpa": "sdpa", "flash_attention_2": "flash"}.get(
        found.text(f"{MODEL}override_config.attn_implementation")
    )
    if found.has(f"{MODEL}override_config.attn_implementation"):
        if attention is None:
            found.say(
                f"{MODEL}override_config.attn_implementation",
                "by hand",
                "learner.attention is auto, sdpa, flex or flash",
            )
        else:
            found.set("learner.attention", attention)
    _lora(found)


def _lora(found: Imported) -> None:
    nested = not found.number(f"{MODEL}lora_rank") and bool(found.number(f"{MODEL}lora.rank"))
    place = f"{MODEL}lora." if nested else f"{MODEL}lora_"
    rank, adapter = found.whole(f"{place}rank"), found.text(f"{place}adapter_path")
    if not rank and not adapter:
        for key in ("lora_alpha", "target_modules"):
            found.say(MODEL + key, "no effect", "lora_rank is 0")
        found.say_below(f"{MODEL}lora.", "no effect", "lora.rank is 0")
        return
    if rank:
        found.set("learner.lora.rank", rank)
    found.set("learner.lora.alpha", found.number(f"{place}alpha"))
    targets = found.value(f"{MODEL}target_modules")
    if not nested and targets not in (None, "all-linear"):
        found.set("learner.lora.targets", [str(t) for t in _listed(targets)])
    if adapter:
        found.set("learner.lora.adapter", adapter)


def _data(found: Imported) -> None:
    for key, ours in (("data.train_files", "data.train"), ("data.val_files", "data.held_out")):
        files = [str(name) for name in _listed(found.keys.values.get(key))]
        if files:
            found.set(ours, files[0] if len(files) == 1 else files)
    if not found.has("data.train_files"):
        found.hint("data.train_files", "name the training rows in data.train")
    if (prompt := found.text("data.prompt_key")) != "prompt":
        found.set("data.columns", {"prompt": prompt})
    if found.flag("data.shuffle"):
        found.set("data.sampler.order", "shuffled")
    if found.flag("data.filter_overlong_prompts"):
        found.set("data.overlong_prompts", "drop")


# --- the env: tools, rewards, turns -------------------------------------------------------------------------


def _env(found: Imported) -> None:
    found.set("env.use", "agentrl.env.compose:ComposedEnv")
    tools = [*_tools(found), *_functions(found)]
    if tools:
        found.set("env.options.tools", tools)
    multi = (
        bool(tools) or found.flag(f"{_TURNS}enable") or "tool" in found.text(f"{ROLLOUT}agent.default_agent_loop")
    )
    multi = multi or found.has(f"{_TURNS}tool_config_path") or found.has(f"{_TURNS}function_tool_path")
    _rewards(found)
    assistant, user = found.whole(f"{_TURNS}max_assistant_turns"), found.whole(f"{_TURNS}max_user_turns")
    limits = [assistant] if assistant else []
    limits += [user + 1] if user else []
    found.set("rollout.max_turns", (min(limits) if limits else _UNBOUNDED_TURNS) if multi else 1)
    if multi and not limits:
        found.hint(
            f"{_TURNS}max_assistant_turns",
            f"verl has no limit without it; rollout.max_turns is {_UNBOUNDED_TURNS} here",
        )
    loop = found.text(f"{ROLLOUT}agent.default_agent_loop")
    if loop not in ("single_turn_agent", "tool_agent"):
        found.say(
            f"{ROLLOUT}agent.default_agent_loop",
            "by hand",
            "write the loop as an Env, or as a program under `agent`",
        )
    if multi:
        if found.has(f"{_TURNS}max_parallel_calls"):
            found.set("env.settings.max_calls_per_turn", max(1, found.whole(f"{_TURNS}max_parallel_calls")))
        if found.has(f"{_TURNS}max_tool_response_length"):
            letters = found.whole(f"{_TURNS}max_tool_response_length")
            found.set("env.settings.observation_tokens", max(1, math.ceil(letters / 4)))


def _tools(found: Imported) -> list[dict[str, Any]]:
    key = f"{_TURNS}tool_config_path"
    if not found.has(key):
        return []
    name = found.text(key)
    path = found.keys.find(name)
    if path is None or not path.is_file():
        found.say(key, "by hand", f"no file {name}; list its entries under env.options.tools")
        return []
    data = read_yaml(path, path.read_text(encoding="utf-8"))
    entries = data.get("tools") if isinstance(data, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(e, Mapping) and "class_name" in e for e in entries):
        raise ConfigError(f"{path}: wanted `tools:` with a list of class_name entries")
    tools: list[dict[str, Any]] = []
    for entry in entries:
        if str((entry.get("config") or {}).get("type", "native")) == "mcp":
            found.hint(
                key, f"{entry['class_name']}: write an MCP server as `mcp: {{url: ...}}` under env.options.tools"
            )
        else:
            tools.append(
                {k: entry[k] for k in ("class_name", "config", "tool_schema") if entry.get(k) is not None}
            )
    found.say(key, "taken", f"env.options.tools ({len(tools)} tools, one instance an episode)")
    for name in {str(tool["class_name"]) for tool in tools}:
        if name.startswith("verl.") and not installed("verl"):
            found.hint(
                f"{key}.class_name",
                f"{name} is verl's own class: install verl, or give a copy of it as path/to/file.py:Name",
            )
    return tools


def _functions(found: Imported) -> list[str]:
    """The decorated functions of a Python file, found by their text: nothing is run."""
    key = f"{_TURNS}function_tool_path"
    if not found.has(key):
        return []
    path = found.keys.find(found.text(key))
    source = path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
    names = re.findall(r"^@function_tool\b[^\n]*\n(?:@[^\n]*\n)*(?:async\s+)?def\s+(\w+)", source, re.MULTILINE)
    if not names:
        found.say(key, "by hand", "list its functions under env.options.tools as file.py:name")
    return [f"{found.text(key)}:{name}" for name in names]


def _rewards(found: Imported) -> None:
    for place in ("reward.custom_reward_function.", "custom_reward_function."):
        if found.has(f"{place}path"):
            spec = f"{found.text(f'{place}path')}:{found.text(f'{place}name') or 'compute_score'}"
            options = {
                key.removeprefix(f"{place}reward_kwargs."): value
                for key, value in found.keys.values.items()
                if key.startswith(f"{place}reward_kwargs.")
            }
            found.set("env.options.reward", [{"use": spec, "options": options}] if options else spec)
            found.say(f"{place}path", "taken", "env.options.reward; solution_str does not hold tool output")
            return
    if found.flag("reward_model.enable") or found.flag("reward.reward_model.enable"):
        return
    found.set("env.options.reward", _BUILT_IN_SCORE)
    found.hint(
        "reward.custom_reward_function.path",
        "none is given, so verl scores by the rows' data_source; agentrl has such scores for GSM8K, MATH, DAPO "
        "and Search-R1 (agentrl.env.verl_scores), and refuses other sources",
    )


# --- rollout ------------------------------------------------------------------------------------------------


def _lengths(found: Imported) -> tuple[int, int]:
    """Longest prompt and response; `rollout.*_length` is verl's copy of the data keys."""
    sizes = []
    for part in ("prompt", "response"):
        copy = f"{ROLLOUT}{part}_length"
        sizes.append(found.whole(copy if found.has(copy) else f"data.max_{part}_length"))
    return sizes[0], sizes[1]


def _rollout(found: Imported) -> None:
    found.set("rollout.groups_per_step", found.whole("data.train_batch_size"))
    found.set("rollout.group_size", found.whole(f"{ROLLOUT}n"))
    if (temperature := found.number(f"{ROLLOUT}temperature")) != 1:
        found.set("rollout.temperature", temperature)
    prompt, response = _lengths(found)
    found.set("rollout.max_tokens", response)
    found.set("rollout.token_budget", prompt + response)
    if found.text("trainer.v1.trainer_mode") != "sync":
        found.set("rollout.max_staleness", max(1, found.whole("trainer.v1.sampler.max_off_policy_threshold")))
    else:
        found.say("trainer.v1.sampler.max_off_policy_threshold", "no effect", "trainer_mode is sync")
    if found.flag("algorithm.filter_groups.enable"):
        batches = found.whole("algorithm.filter_groups.max_num_gen_batches") or 10
        found.set("rollout.refill_zero_signal", max(1, batches - 1) * found.whole("data.train_batch_size"))
    else:
        found.say("algorithm.filter_groups.max_num_gen_batches", "no effect", "filter_groups.enable is off")
