"""Model, data, env, engine, learner, critic, reward model and run of a verl configuration as ours."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from agentrl.config.datafiles import data_files
from agentrl.env.rows import count_rows
from agentrl.errors import ConfigError
from agentrl.import_verl.found import Imported
from agentrl.import_verl.keys import ACTOR, MODEL, ROLLOUT
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
    _optim(found)
    _learner(found)
    _engine(found)
    _critic(found)
    _reward_model(found)


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
    logger = found.value("trainer.logger")
    if set(logger if isinstance(logger, list) else [logger]) <= {"console", "file", None}:
        found.say("trainer.logger", "same", "the live screen, and metrics.jsonl in the run folder")
    if found.text("trainer.resume_mode") == "disable":
        found.say(
            "trainer.resume_mode", "by hand", "give the run a new `name`: a run of the same folder is continued"
        )


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
        found.set(f"model.template_options.{key.removeprefix(place)}", found.value_given(key))
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
        if name.startswith("verl.") and find_spec("verl") is None:
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


# --- rollout, engine, learner -------------------------------------------------------------------------------


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


def _optim(found: Imported) -> None:
    place = f"{ACTOR}optim."
    found.set("optim.lr", found.number(f"{place}lr"))
    betas = found.value(f"{place}betas")
    if isinstance(betas, list) and len(betas) == 2:
        found.set("optim.betas", betas)
    found.set("optim.weight_decay", found.number(f"{place}weight_decay"))
    _warmup(found, place)
    style = found.text(f"{place}warmup_style") or found.text(f"{place}lr_scheduler_type")
    if style in ("constant", "linear", "cosine"):
        found.set("optim.schedule", style)
    else:
        found.say(f"{place}lr_scheduler_type", "by hand", "choose optim.schedule: constant, linear or cosine")
    clip = (
        f"{place}clip_grad"
        if found.has(f"{place}clip_grad") and not found.has(f"{ACTOR}grad_clip")
        else f"{ACTOR}grad_clip"
    )
    found.set("optim.max_grad_norm", found.number(clip))


def _warmup(found: Imported, place: str) -> None:
    steps, share = found.whole(f"{place}lr_warmup_steps"), found.number(f"{place}lr_warmup_steps_ratio")
    if steps > 0:
        found.say(f"{place}lr_warmup_steps_ratio", "no effect", "lr_warmup_steps wins")
        found.set("optim.warmup_steps", int(steps))
    elif share:
        found.set("optim.warmup_ratio", share)
    else:
        found.set("optim.warmup_steps", 0)


def _gpus(found: Imported) -> int | None:
    """GPUs of the trainer; None where the source does not say."""
    if not found.has("trainer.n_gpus_per_node") and not found.has("trainer.nnodes"):
        return None
    return max(1, int(found.whole("trainer.nnodes")) * int(found.whole("trainer.n_gpus_per_node")))


def _learner(found: Imported) -> None:
    gpus = _gpus(found)
    if gpus is not None:
        found.set("learner.ranks", gpus)
    sequence = _sequence(found, gpus or 1)
    device = found.text("trainer.device")
    if found.has("trainer.device"):
        if device == "cpu":
            found.set("learner.device", device)
        elif device == "cuda":
            found.say("trainer.device", "same", "CUDA if available (learner.device)")
        else:
            found.say("trainer.device", "refused", "PyTorch on CUDA or the CPU only")
    dtype = found.text(f"{ACTOR}fsdp_config.mixed_precision.param_dtype") or found.text(
        f"{ACTOR}fsdp_config.dtype"
    )
    precision = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}.get(dtype)
    if precision is None:
        found.say(
            f"{ACTOR}fsdp_config.dtype", "by hand", "learner.precision is bfloat16 or float32; bfloat16 was taken"
        )
    found.set("learner.precision", precision or "bfloat16")
    offload = [f"{ACTOR}fsdp_config.{part}" for part in ("param_offload", "optimizer_offload", "offload_policy")]
    if any(found.flag(key) for key in offload):
        found.set("learner.cpu_offload", True)
    found.set("learner.tokens_per_micro_batch", _micro_batch(found, gpus or 8, sequence))


def _sequence(found: Imported, gpus: int) -> int:
    """How many ranks compute rows together; they must divide the GPUs."""
    key = f"{ACTOR}ulysses_sequence_parallel_size"
    if not found.has(key):
        key = f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size"
    size = max(1, int(found.whole(key)))
    if gpus % size:
        found.say(key, "by hand", f"set learner.sequence_ranks, and learner.ranks to a multiple of it: {size}")
        return 1
    if size > 1:
        found.say(key, "taken", "learner.sequence_ranks")
        found.set("learner.sequence_ranks", size)
    return size


def _micro_batch(found: Imported, gpus: int, sequence: int) -> int:
    """verl's token budget, or its rows times the longest episode; never less than one episode."""
    longest = -(-int(found.get("rollout.token_budget")) // sequence)
    if found.flag(f"{ACTOR}use_dynamic_bsz"):
        for key in ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size"):
            found.say(ACTOR + key, "no effect", "use_dynamic_bsz is on")
        return max(longest, int(found.whole(f"{ACTOR}ppo_max_token_len_per_gpu")))
    found.say(f"{ACTOR}ppo_max_token_len_per_gpu", "no effect", "use_dynamic_bsz is off")
    if each := found.whole(f"{ACTOR}ppo_micro_batch_size_per_gpu"):
        return longest * max(1, int(each))
    if rows := found.whole(f"{ACTOR}ppo_micro_batch_size"):
        return longest * max(1, int(rows) // gpus)
    return max(longest, 16384)


_FLAGS: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "vllm": {
        "enforce_eager": (True, "--enforce-eager"),
        "max_model_len": (None, "--max-model-len"),
        "max_num_batched_tokens": (None, "--max-num-batched-tokens"),
        "enable_chunked_prefill": (False, "--no-enable-chunked-prefill"),
        "enable_prefix_caching": (False, "--no-enable-prefix-caching"),
    },
    "sglang": {
        "enforce_eager": (True, "--disable-cuda-graph"),
        "max_model_len": (None, "--context-length"),
        "enable_chunked_prefill": (False, "--chunked-prefill-size=-1"),
        "enable_prefix_caching": (False, "--disable-radix-cache"),
    },
}
"""Server flags: the value at which one is set (None: it takes the value)."""
_SERVER_KEYS = (
    *("gpu_memory_utilization", "tensor_model_parallel_size", "data_parallel_size", "free_cache_engine"),
    *(
        "max_model_len",
        "max_num_batched_tokens",
        "enforce_eager",
        "enable_chunked_prefill",
        "enable_prefix_caching",
    ),
    *("checkpoint_engine.backend", "checkpoint_engine.update_weights_bucket_megabytes"),
)


def _engine(found: Imported) -> None:
    name = found.text(f"{ROLLOUT}name")
    if found.has(f"{ROLLOUT}max_num_seqs"):
        found.set("engine.max_slots", found.whole(f"{ROLLOUT}max_num_seqs"))
    if found.has(f"{ROLLOUT}dtype"):
        dtype = found.text(f"{ROLLOUT}dtype")
        known = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "auto": "auto"}.get(dtype)
        if known is None:
            found.say(f"{ROLLOUT}dtype", "by hand", "engine.dtype is auto, bfloat16 or float32")
        else:
            found.set("engine.dtype", known)
    if name in ("sglang_async", "vllm_async"):  # older releases listed these as separate engines
        name = name.removesuffix("_async")
    if name not in ("sglang", "vllm"):
        if name and name != "hf":
            found.say(f"{ROLLOUT}name", "by hand", "engine.kind is local, sglang or vllm")
        elif name:
            found.set("engine.kind", "local")
        for key in _SERVER_KEYS:
            found.say(ROLLOUT + key, "no effect", "engine.kind is local: there is no server")
        return
    found.set("engine.kind", name)
    _servers(found)
    if args := _server_args(found, name):
        found.set("engine.server.args", args)
    _sync(found, name)


def _servers(found: Imported) -> None:
    gpus = _gpus(found)
    parallel = max(1, found.whole(f"{ROLLOUT}tensor_model_parallel_size"))
    if not found.has(f"{ROLLOUT}tensor_model_parallel_size"):
        parallel = parallel if gpus is not None and gpus % parallel == 0 else 1
    if parallel > 1:
        found.set("engine.server.tensor_parallel", parallel)
    nodes = found.whole(f"{ROLLOUT}nnodes") or 0
    apart = nodes * (found.whole(f"{ROLLOUT}n_gpus_per_node") or found.whole("trainer.n_gpus_per_node"))
    servers = (apart or gpus or parallel) // parallel
    if servers > 1:
        found.set("engine.server.replicas", servers)
    found.say(f"{ROLLOUT}data_parallel_size", "taken", "engine.server.replicas: one server per group of GPUs")
    found.set("engine.server.gpu_memory_utilization", found.number(f"{ROLLOUT}gpu_memory_utilization"))
    if not apart and found.flag(f"{ROLLOUT}free_cache_engine") and not found.get("rollout.max_staleness"):
        found.set("engine.server.sleep", True)


def _server_args(found: Imported, name: str) -> list[str]:
    args: list[str] = []
    for key, (when, flag) in _FLAGS[name].items():
        if not found.has(ROLLOUT + key):
            continue
        if when is None:
            args += [flag, str(found.whole(ROLLOUT + key))]
        elif found.flag(ROLLOUT + key) is when:
            args.append(flag)
    if name == "sglang":
        found.say(f"{ROLLOUT}max_num_batched_tokens", "no effect", "verl does not pass it on to SGLang")
    place = f"{ROLLOUT}engine_kwargs."
    for key, value in found.keys.values.items():
        kind, _, option = key.removeprefix(place).partition(".")
        if not key.startswith(place) or not option or value is None or value is False:
            continue
        if kind != name:
            found.say(key, "no effect", f"rollout.name is {name}")
            continue
        flag = f"--{option.replace('_', '-')}"
        args += [flag] if value is True else [flag, str(value)]
    return args


def _sync(found: Imported, name: str) -> None:
    backend, bucket = (
        f"{ROLLOUT}checkpoint_engine.backend",
        f"{ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes",
    )
    if found.text(backend) == "nccl" and name == "sglang":
        found.set("engine.sync", "broadcast")
    elif found.text(backend) not in ("naive", "nccl"):
        found.say(backend, "by hand", "engine.sync is auto, disk, tensor, broadcast or lora")
    elif found.has(backend):
        found.say(backend, "same", "engine.sync chooses automatically")
    if found.has(bucket):
        if name == "sglang":
            found.set("engine.server.bucket_mb", found.whole(bucket))
        else:
            found.say(bucket, "no effect", "vLLM reads the weights from a folder")


# --- critic and reward model --------------------------------------------------------------------------------


def _critic(found: Imported) -> None:
    if "gae" not in (found.get("algorithm.advantage"), found.get("algorithm.advantage.name")):
        found.say_below("critic.", "no effect", "there is a critic with adv_estimator gae only")
        found.say("trainer.critic_warmup", "no effect", "there is a critic with adv_estimator gae only")
        return
    if not found.number("critic.model.lora_rank"):
        found.say_below("critic.model.lora.", "no effect", "lora_rank is 0")
    found.set("critic.lr", found.number("critic.optim.lr"))
    if path := found.keys.values.get("critic.model.path"):
        found.set("critic.path", str(path))
    found.set("critic.value_clip", found.number("critic.cliprange_value"))
    found.set("critic.max_grad_norm", found.number("critic.grad_clip"))
    if warmup := found.whole("trainer.critic_warmup"):
        found.set("critic.warmup_steps", warmup)
    batch, mini = found.whole("data.train_batch_size"), found.whole("critic.ppo_mini_batch_size")
    if mini and max(1, batch // mini) != found.get("algorithm.updates_per_step"):
        found.set("critic.updates_per_step", max(1, batch // mini))
    if (epochs := found.whole("critic.ppo_epochs")) and epochs != (found.get("algorithm.epochs") or 1):
        found.set("critic.epochs", epochs)
    mode = found.text("critic.loss_agg_mode")
    if mode and mode != found.get("algorithm.aggregation"):
        found.set("critic.aggregation", mode)
        if mode == "seq-mean-token-sum-norm":
            factor = found.number("critic.loss_scale_factor") or found.number("data.max_response_length")
            found.set("critic.aggregation_scale", factor)
    for ours in ("lr_warmup_steps", "lr_warmup_steps_ratio", "weight_decay", "betas"):
        key = f"critic.optim.{ours}"
        if found.has(key) and found.keys.values[key] != found.value(f"{ACTOR}optim.{ours}"):
            found.say(key, "by hand", f"the critic has the policy's own ({found.value(f'{ACTOR}optim.{ours}')!r})")


def _reward_model(found: Imported) -> None:
    place = next((p for p in ("reward.reward_model.", "reward_model.") if found.flag(f"{p}enable")), None)
    if place is None:
        for below in ("reward_model.", "reward.reward_model."):
            found.say_below(
                below, "no effect", "reward_model.enable is off", but=("reward_kwargs", "overlong_buffer")
            )
        return
    path = found.text(f"{place}model_path") or (
        found.text("reward_model.model.path") if place == "reward_model." else ""
    )
    if not path:
        found.hint(f"{place}enable", "name the model in reward_model.path")
        return
    if found.get("env.options.reward"):
        found.hint(
            f"{place}model_path",
            "verl's reward function reaches this model through reward_router_address: start it as a server, and "
            "call it from the function (agentrl.env.judge) or with reward_model.kind judge",
        )
        return
    found.set("reward_model.kind", "classifier")
    found.set("reward_model.path", path)
    if place == "reward_model.":
        if found.has("reward_model.max_length"):
            found.set("reward_model.max_tokens", found.whole("reward_model.max_length"))
        if found.has("reward_model.micro_batch_size_per_gpu"):
            found.set("reward_model.batch_size", found.whole("reward_model.micro_batch_size_per_gpu"))
    if found.flag(f"{place}enable_resource_pool"):
        nodes, each = found.whole(f"{place}nnodes") or 1, found.whole(f"{place}n_gpus_per_node") or 1
        found.set("reward_model.workers", nodes * each)
