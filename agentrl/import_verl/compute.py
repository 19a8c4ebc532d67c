"""Optimizer, learner, engine, critic and reward model of a verl configuration, translated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.import_verl.found import Imported
from agentrl.import_verl.keys import ACTOR, ROLLOUT


def import_compute(found: Imported) -> None:
    """Set the optimizer, the learner, the engine, the critic and the reward model."""
    _optim(found)
    _learner(found)
    _engine(found)
    _critic(found)
    _reward_model(found)


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
        _lowest(found, f"{place}min_lr_ratio", style)
    else:
        found.say(f"{place}lr_scheduler_type", "by hand", "choose optim.schedule: constant, linear or cosine")
    clip = (
        f"{place}clip_grad"
        if found.has(f"{place}clip_grad") and not found.has(f"{ACTOR}grad_clip")
        else f"{ACTOR}grad_clip"
    )
    found.set("optim.max_grad_norm", found.number(clip))


def _lowest(found: Imported, key: str, style: str) -> None:
    """verl's cosine ends at a share of the peak that is 0 by default."""
    if style != "cosine":
        found.say(key, "no effect", f"the schedule is {style}")
    elif (lowest := found.number(key) or 0.0) == 0.1:
        found.say(key, "same", "a cosine ends at a tenth of the peak")
    else:
        found.hint(key, f"verl's cosine ends at {lowest:g} of the peak, agentrl's at a tenth of it")


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
    if not name and any(found.has(ROLLOUT + key) for key in _SERVER_KEYS):
        name = "vllm"
        found.hint(f"{ROLLOUT}name", "none is given, which was vllm in older releases of verl; check engine.kind")
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
    if found.text(backend) == "nccl" and name == "sglang" and not found.get("engine.server.sleep"):
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


_OF_ANY_REWARD = (
    *("reward_kwargs", "reward_manager", "reward_loop", "overlong_buffer", "sandbox_fusion"),
    *("num_workers", "launch_reward_fn_async", "use_reward_loop"),
)
"""Keys of verl's section `reward_model` that it reads without a reward model, too."""


def _reward_model(found: Imported) -> None:
    place = next((p for p in ("reward.reward_model.", "reward_model.") if found.flag(f"{p}enable")), None)
    if place is None:
        for below in ("reward_model.", "reward.reward_model."):
            found.say(f"{below}enable", "same", "verl's default; nothing to write")
            found.say_below(below, "no effect", "reward_model.enable is off", but=_OF_ANY_REWARD)
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
