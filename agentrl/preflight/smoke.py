"""`agentrl train --smoke`: a recipe with tiny random weights of its architecture, two steps, on a CPU.

Everything that a recipe says stays, except what makes it large and what only its machine has. So a smoke run finds
mistakes in the env, its rewards and the settings before a GPU is rented.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config import RunConfig, load_config
from agentrl.config.eval_config import EvalConfig
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

STEPS = 2
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "num_heads": 8,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "top_k_experts": 2,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_headdim": 16,
    "attention_hidden_size": 128,
    "mamba_d_state": 8,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "attn_layer_indices": [1],
    "hybrid_layer_ids": [1],
}
"""Sizes of a tiny model; of an architecture only those that its configuration has larger are set."""
SMALL_TOWER: dict[str, Any] = {
    **dict.fromkeys(("depth", "num_hidden_layers"), 1),
    **dict.fromkeys(("num_heads", "num_attention_heads"), 2),
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size"), SMALL["hidden_size"]),
    **dict.fromkeys(("out_hidden_size", "vision_output_dim", "projector_input_dim"), SMALL["hidden_size"]),
    "projector_output_dim": SMALL["hidden_size"],
    "num_position_embeddings": 16,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
"""The tower of a model of images and text, which the run does not use."""
SMALL_ROLLOUT = {"group_size": 2, "max_turns": 2, "max_tokens": 16, "token_budget": 4096}
_MARK = "smoke"
"""An empty file that tells the folder of a smoke run from others, whose content is not removed."""
_EXPERTS = re.compile(r"-A\d+B")
"""What names of models with experts say: parameters in total, and active ones."""


def empty_folder(folder: Path) -> None:
    """Make the folder of a smoke run, and remove an earlier run from it.

    Raises:
        ConfigError: the folder holds something else, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in folder.iterdir()}
        if names and (_MARK not in names or names - {_MARK, "model", "run"}):
            raise ConfigError(
                f"{folder} is not the folder of a smoke run, so it is not replaced: give another --run-dir"
            )
        for name in names - {_MARK}:
            shutil.rmtree(folder / name)
        (folder / _MARK).touch()
    except OSError as e:
        raise ConfigError(f"{folder} cannot hold a run: {e.strerror}; give another --run-dir") from e


def smoke_config(path: Path, overrides: Sequence[str], folder: Path) -> RunConfig:
    """Return the run of a file, small; a tiny model is written below `folder`.

    Raises:
        ConfigError: the file has mistakes, or its env cannot be loaded.
    """
    given = load_config(path, overrides, check_paths=False)
    changes = _changes(given)
    if given.model.path is not None:
        from agentrl.rollout.content import corpus, load_content

        target = (folder / "model").absolute()
        make_smoke_model(target, Path(given.model.path), corpus(load_content(given)), seed=given.seed)
        changes.append(f"model.path={target}")
    return load_config(path, [*overrides, *changes])


def _changes(given: RunConfig) -> list[str]:
    rollout = given.rollout
    found: dict[str, Any] = {
        "name": f"{given.name or 'run'}-smoke",
        "steps": STEPS,
        "ray": None,
        "rollout.groups_per_step": min(2, rollout.groups_per_step),
        **{f"rollout.{key}": min(most, getattr(rollout, key)) for key, most in SMALL_ROLLOUT.items()},
        "rollout.workers": None,
        "learner.device": "cpu",
        "learner.precision": None,
        "learner.ranks": None,
        "learner.sequence_ranks": None,
        "learner.reference_ranks": None,
        "learner.attention": None,
        "learner.offload_activations": None,
        "learner.cpu_offload": None,
        "optim.warmup_steps": 0,
        "optim.warmup_ratio": None,
        "checkpoint.every": 1,
    }
    if rollout.groups_ahead is not None:
        found["rollout.groups_ahead"] = min(
            rollout.groups_ahead, rollout.max_staleness * found["rollout.groups_per_step"]
        )
    if given.engine.on_servers:
        found |= {"engine": None, "engine.device": "cpu"}
    elif not given.engine.own:
        found |= {"engine.device": "cpu", "engine.dtype": None, "engine.cuda_graphs": None}
    episodes = found["rollout.groups_per_step"] * found["rollout.group_size"]
    if given.algorithm.updates_per_step > 1:
        found["algorithm.updates_per_step"] = min(episodes, given.algorithm.updates_per_step)
    if (critic := given.critic) is not None:
        found |= {"critic.ranks": None, "critic.path": None}  # it begins as a copy of the tiny policy
        found["critic.warmup_steps"] = min(STEPS - 1, critic.warmup_steps)
        if critic.updates_per_step is not None:
            found["critic.updates_per_step"] = min(episodes, critic.updates_per_step)
    found |= _without_teacher(given)
    if not given.envs or any(env.eval is None for env in given.envs.values()):
        found |= _small_eval(given.eval, "eval")
    for name, env in given.envs.items():
        if env.eval is not None:
            found |= _small_eval(env.eval, f"envs.{name}.eval")
        for key in SMALL_ROLLOUT.keys() & env.rollout.model_fields_set:
            if (own := getattr(env.rollout, key)) is not None:
                small = min(SMALL_ROLLOUT[key], own)
                same = small == found[f"rollout.{key}"]  # a key that changes nothing is an error
                found[f"envs.{name}.rollout.{key}"] = None if same else small
    if given.warmup is not None:
        found |= {"warmup.num": 8, "warmup.max_epochs": 1, "warmup.anneal_epochs": None}
        found |= {"warmup.until_pass": None, "warmup.at_least": 0.0}
    return [f"{key}={'null' if value is None else value}" for key, value in found.items()]


def _without_teacher(given: RunConfig) -> dict[str, Any]:
    """Leave out a teacher that may be large or on a server, and what depends on it."""
    found: dict[str, Any] = {
        f"envs.{name}.teacher": None for name, env in given.envs.items() if env.teacher is not None
    }
    if given.teacher is not None and given.teacher.policy is None:
        found["teacher"] = None
    if not found:
        return {}
    if given.algorithm.kl.kind != "full":
        found |= {"algorithm.kl.top": None, "algorithm.kl.jsd_beta": None}
    advantages = {"algorithm": given.algorithm.advantage}
    advantages |= {
        f"envs.{name}.algorithm": env.algorithm.advantage
        for name, env in given.envs.items()
        if env.algorithm.advantage is not None
    }
    for where, advantage in advantages.items():
        if advantage.name == "none":
            found[f"{where}.advantage"] = "reinforce_plus_plus"  # also for groups of one
    return found


def _small_eval(given: EvalConfig, where: str) -> dict[str, Any]:
    """Evaluate two tasks after every step, and one where a set would not differ otherwise."""
    attempts = min(2, given.attempts)
    found: dict[str, Any] = {f"{where}.every": 1, f"{where}.tasks": 2, f"{where}.attempts": attempts}
    for name, each in given.sets.items():
        own: dict[str, int | None] = dict.fromkeys(each.changes.keys() & {"every", "tasks"})
        if each.attempts is not None:
            small = min(2, each.attempts)
            own["attempts"] = None if small == attempts else small
        gone = {key for key, value in own.items() if value is None}
        if each.data is None and not each.options and not each.changes.keys() - gone:
            own["tasks"] = 1
        found |= {f"{where}.sets.{name}.{key}": value for key, value in own.items()}
    return found


def make_smoke_model(target: Path, source: Path, corpus: Iterable[str], *, seed: int = 0) -> None:
    """Write a model of the architecture of `source`, tiny and random, with its tokenizer.

    Without a `config.json` in `source` it is Qwen3, with experts if its name says so (`Qwen3-30B-A3B`); without a
    tokenizer, one is made of `corpus`.

    Raises:
        ConfigError: transformers has no such architecture, or it cannot be made small.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

    from agentrl.models.model_config import NO_MODEL, auto_class, one_line, read_config, reads_images
    from agentrl.models.tiny import make_tokenizer

    if (source / "tokenizer.json").is_file():
        target.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            if "token" in file.name or file.suffix in (".jinja", ".txt", ".model"):
                shutil.copyfile(file, target / file.name)
    else:
        make_tokenizer(target, corpus, vocab=640, max_context=4096)
    try:
        tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
        if (source / "config.json").is_file():
            shape = read_config(source, f"model.path {source}")
        else:
            shape = AutoConfig.for_model("qwen3_moe" if _EXPERTS.search(source.name) else "qwen3")
        text = shape.get_text_config()
        _shrink(text, len(tokenizer))
        for part in (text, shape):
            part.eos_token_id, part.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        if reads_images(shape):
            for part in (each for each in vars(shape).values() if isinstance(each, PretrainedConfig)):
                if part is not text:
                    _make_small(part, SMALL_TOWER)
        else:
            shape = text
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = auto_class(shape).from_config(shape, dtype=torch.float32, trust_remote_code=False)
        model.save_pretrained(target)
    except NO_MODEL as e:
        raise ConfigError(
            f"model.path {source}: a tiny model of its architecture cannot be made: {one_line(e)}"
        ) from e


def _shrink(shape: PretrainedConfig, vocabulary: int) -> None:
    if getattr(shape, "is_heterogeneous", False):
        shape.per_layer_config = {}  # Gemma 4 has larger heads in some layers
    _make_small(shape, SMALL)
    heads, shared = (getattr(shape, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        shape.num_key_value_heads = heads
    if isinstance(inner := getattr(shape, "mamba_d_ssm", None), int):
        shape.mamba_n_heads = inner // shape.mamba_d_head
    if isinstance(getattr(shape, "kv_lora_rank", None), int):  # latent attention: a key for each query
        shape.num_key_value_heads, shape.head_dim = shape.num_attention_heads, shape.qk_rope_head_dim
    if isinstance(rope := getattr(shape, "rope_parameters", None), dict) and "mrope_section" in rope:
        part = rope.get("partial_rotary_factor", getattr(shape, "partial_rotary_factor", 1.0))
        width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        pairs = int(width * part) // 2
        rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    shape.vocab_size, shape.bos_token_id, shape.dtype = vocabulary, 0, "float32"
    if hasattr(shape, "vocab_size_per_layer_input"):
        shape.vocab_size_per_layer_input = vocabulary


def _make_small(shape: PretrainedConfig, sizes: dict[str, Any]) -> None:
    """Set these sizes where they are larger, and keep some layers of each kind."""
    layers, few = getattr(shape, "num_hidden_layers", None), sizes["num_hidden_layers"]
    for key, value in list(vars(shape).items()):
        if isinstance(value, list) and value and (key == "layer_types" or len(value) == layers):
            size = sizes.get(key)
            setattr(shape, key, [size] * few if isinstance(size, int) else _some_of_each(value, few))
    for key, size in sizes.items():
        found = getattr(shape, key, None)
        if isinstance(getattr(type(shape), key, None), property) or not isinstance(found, type(size)):
            continue
        if not isinstance(size, int) or found > size:
            setattr(shape, key, size)


def _some_of_each(kinds: Sequence[Any], count: int) -> list[Any]:
    """Different kinds of layers first, so that a small model has them all."""
    different = [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]]
    return [*different, *([different[-1]] * count)][:count]


def architecture(config: RunConfig, run: Path) -> str:
    """Return the architecture of a run's model."""
    model = run / "start" if config.model.path is None else Path(config.model.path)
    return str(json.loads((model / "config.json").read_text())["architectures"][0])
