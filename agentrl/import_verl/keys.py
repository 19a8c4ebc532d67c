"""Every key of verl's configuration, one row each: what it becomes here, or why it does not.

The rows are verl's `ppo_trainer.yaml` with all that it includes, the keys of `docs/examples/config.rst`, and older
names that launch scripts still use. `docs/verl-keys.md` is written from them by `scripts/verl-keys`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

How = Literal["taken", "same", "no effect", "by hand", "refused"]


@dataclass(frozen=True, slots=True)
class Row:
    """One key of verl; one that ends with `.*` stands for all below it that have no separate row.

    `text` is the key of ours where the key is taken ("taken"), why nothing needs to be written ("same"), why verl
    itself does not read it ("no effect"), what to decide ("by hand"), or why it is not supported ("refused").
    """

    key: str
    how: How
    text: str
    default: Any = None
    """verl's own value, or a tuple of those that mean the same here. A key that is by hand or refused needs
    nothing at this value; one that is "same" is so only at this value, where there is one."""

    def idle(self, value: Any) -> bool:
        """Whether a value changes nothing: verl's default, or an empty one."""
        defaults = self.default if isinstance(self.default, tuple) else (self.default,)
        return value in defaults or value in (None, False, "", -1, [], {})

    def kind(self, value: Any) -> How:
        """What becomes of the key with that value."""
        if self.how in ("by hand", "refused") and self.idle(value):
            return "same"
        if self.how == "same" and self.default is not None and not self.idle(value):
            return "by hand"
        return self.how


Texts = Mapping[str, str | tuple[str, Any]]
"""By key, the text of its row, or that and verl's default."""


_HOW: Mapping[str, How] = {
    "taken": "taken", "same": "same", "no_effect": "no effect", "by_hand": "by hand", "refused": "refused"
}  # fmt: skip


def _rows(prefix: str, **kinds: Texts) -> list[Row]:
    return [
        Row(prefix + key, _HOW[kind], *(text if isinstance(text, tuple) else (text, None)))
        for kind, rows in kinds.items()
        for key, text in rows.items()
    ]


_PACKED = "rows are packed by token budget (learner.tokens_per_micro_batch)"
_MEGATRON = "agentrl shards with FSDP2 only: no Megatron back end"
_PROFILE = "agentrl has no profiler integration; profile the process from outside"
_SERVER = "belongs to the server: add its flag to engine.server.args"
_OVERLONG = (
    "rollout.overlong: penalise subtracts rollout.overlong_penalty from episodes that a limit cut; verl's penalty "
    "grows as the limit comes near"
)
_FSDP = ("fsdp", "fsdp2", "${actor_rollout_ref.actor.strategy}")
_TEXT = "prompts of a dataset are text; an env of your own may show images"

ACTOR, ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "ref", "model"))

_DATA = [
    *_rows(
        "data.",
        taken={
            "train_files": "data.train",
            "val_files": "data.held_out",
            "val_max_samples": ("eval.tasks", -1),
            "prompt_key": ("data.columns.prompt", "prompt"),
            "train_batch_size": ("rollout.groups_per_step", 1024),
            "max_prompt_length": ("rollout.token_budget (prompt + response)", 512),
            "max_response_length": ("rollout.token_budget (prompt + response) and rollout.max_tokens", 512),
            "shuffle": ("data.sampler.order", True),
            "seed": "seed",
            "filter_overlong_prompts": ("data.overlong_prompts", False),
            "apply_chat_template_kwargs": ("model.template_options", {}),
            "apply_chat_template_kwargs.*": "model.template_options",
        },
        same={
            "gen_batch_size": "groups start as soon as others finish",
            "val_batch_size": "held-out episodes start as soon as others finish",
            "return_full_prompt": "every episode is recorded with its tokens",
            "return_raw_input_ids": "every episode is recorded with its tokens",
            "return_raw_chat": "messages are always kept",
            "filter_overlong_prompts_workers": "rows are rendered in one process, at the start",
            "dataloader_num_workers": "rows are held in memory",
            "validation_shuffle": "held-out tasks are played in the order of the file",
            "tool_config_path": "the tools of env.options.tools are counted in every prompt",
            "function_tool_path": "the tools of env.options.tools are counted in every prompt",
            "reward_fn_key": "compute_score is given the row's data_source",
            "use_shm": "model directories are memory-mapped in place",
            "return_multi_modal_inputs": _TEXT,
            "cache_dir": "datasets are read in place",
        },
        by_hand={
            "truncation": (
                "prompts are never cut: overlong ones are refused or dropped (data.overlong_prompts)",
                "error",
            ),
            "train_max_samples": ("shorten the file to that many rows", -1),
            "tokenizer": "the tokenizer comes from model.path",
        },
        refused={
            "custom_cls.path": "rows come from files or from an env: write the dataset class as the `tasks` "
            "classmethod of an Env, or save its rows to a file",
            "custom_cls.name": "see data.custom_cls.path",
            "sampler.class_path": "data.sampler.order is sequential, shuffled, weighted, or a class of your own "
            "with a method `choose`: rewrite the sampler as such a class (docs/environments.md#order)",
            "sampler.class_name": "see data.sampler.class_path",
            "datagen.*": "rows made during training: write the env's `tasks` as a sequence that makes them",
            "collate_fn": "episodes are packed by the learner; no tensors are collated from rows",
            "trust_remote_code": "code from a model directory is never run",
            "image_key": (_TEXT, "images"),
            "video_key": (_TEXT, "videos"),
            "audio_key": (_TEXT, "audios"),
            "image_patch_size": (_TEXT, 14),
            "mm_processor_kwargs": (_TEXT, {}),
        },
    ),
]

_MODEL = [
    *_rows(
        MODEL,
        taken={
            "path": "model.path",
            "custom_chat_template": "model.chat_template",
            "enable_gradient_checkpointing": ("learner.checkpoint_activations", True),
            "enable_activation_offload": ("learner.offload_activations", False),
            "lora_rank": ("learner.lora.rank", 0),
            "lora_alpha": ("learner.lora.alpha", 16),
            "target_modules": ("learner.lora.targets", "all-linear"),
            "lora_adapter_path": "learner.lora.adapter",
            "lora.rank": ("learner.lora.rank", 0),
            "lora.alpha": ("learner.lora.alpha", 32),
            "lora.adapter_path": "learner.lora.adapter",
            "override_config.attn_implementation": ("learner.attention", "flash_attention_2"),
        },
        same={
            "use_remove_padding": "rows are always packed without padding",
            "use_rmpad": "rows are always packed without padding",
            "use_fused_kernels": "logits are computed for a few tokens at a time (learner.logits_at_once)",
            "fused_kernel_options.impl_backend": "logits are computed in chunks (learner.logits_at_once)",
            "use_shm": "model directories are memory-mapped in place",
            "use_liger": "logits are computed for a few tokens at a time (learner.logits_at_once)",
            "tiled_mlp.*": "use learner.checkpoint_activations and a smaller learner.tokens_per_micro_batch",
        },
        by_hand={
            "tokenizer_path": "put the tokenizer's files into the folder of model.path",
            "hf_config_path": "put config.json into the folder of model.path",
            "override_config.*": "change config.json in the folder of model.path",
            "override_config": ("change config.json in the folder of model.path", {}),
            "exclude_modules": "name the layers that learn in learner.lora.targets",
            "lora.exclude_modules": "name the layers that learn in learner.lora.targets",
            "lora.target_modules": (
                "name the layers that learn in learner.lora.targets",
                ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
            ),
        },
        refused={
            "trust_remote_code": "code from a model directory is never run",
            "external_lib": "no module is imported for its side effects; an env may import what it needs",
            "external_libs": "no module is imported for its side effects; an env may import what it needs",
            "mtp.*": "multi-token prediction is not trained",
            "lora.*": "only plain LoRA is trained: rank, alpha, targets",
            "override_config.moe_config.*": _MEGATRON,
        },
    ),
]

_OPTIM: Texts = {
    "lr": ("optim.lr", 1e-6),
    "betas": ("optim.betas", [0.9, 0.999]),
    "weight_decay": ("optim.weight_decay", 0.01),
    "lr_warmup_steps": ("optim.warmup_steps", -1),
    "lr_warmup_steps_ratio": ("optim.warmup_ratio", 0.0),
    "lr_scheduler_type": ("optim.schedule", "constant"),
    "warmup_style": "optim.schedule",
    "clip_grad": ("optim.max_grad_norm", 1.0),
}
_OPTIM_REST: dict[str, Texts] = {
    "same": {
        "optimizer": (
            "AdamW is the only optimizer; optim.state can hold its state in fewer bytes",
            ("AdamW", "adamw", "adam"),
        ),
        "optimizer_impl": "AdamW of PyTorch",
        "total_training_steps": "the schedule ends with `steps`",
        "num_cycles": "a cosine falls once",
        "zero_indexed_step": "steps count from 1",
        "use_checkpoint_opt_param_scheduler": "the schedule is a function of the step",
    },
    "by_hand": {
        "min_lr_ratio": ("linear and cosine schedules end at a tenth of the peak", 0.0),
        "min_lr": ("linear and cosine schedules end at a tenth of the peak", 0.0),
        "lr_warmup_init": ("the warm-up begins near 0", 0.0),
        "lr_decay_steps": "the schedule ends with `steps`",
        "lr_decay_style": ("set optim.schedule", "constant"),
        "weight_decay_incr_style": ("weight decay is constant", "constant"),
        "lr_wsd_decay_style": ("schedules are constant, linear and cosine", "exponential"),
        "lr_wsd_decay_steps": "schedules are constant, linear and cosine",
    },
    "refused": {"override_optimizer_config": "AdamW with lr, betas and weight_decay"},
}
_SEQUENCE = "rows are split over learner.sequence_ranks ranks, for every model"
_ENGINE_REST: dict[str, Texts] = {
    "same": {
        "wrap_policy.*": "every block is sharded separately",
        "grad_offload": "gradients move with the parameters (learner.cpu_offload)",
        "reshard_after_forward": "FSDP2 reshards after the forward pass",
        "fsdp_size": "the model is sharded over all ranks of the learner",
        "ulysses_sequence_parallel_size": (_SEQUENCE, 1),
        "forward_prefetch": "FSDP2 prefetches",
        "use_orig_params": "FSDP2 keeps the parameters",
        "use_torch_compile": "nothing is compiled",
        "use_no_sync_for_gradient_accumulation": "gradients are summed over micro-batches",
        "entropy_from_logits_with_chunking": "the entropy is computed in chunks (learner.logits_at_once)",
        "entropy_from_logits_chunk_size": "the entropy is computed in chunks (learner.logits_at_once)",
        "entropy_checkpointing": "the entropy is computed in chunks (learner.logits_at_once)",
        "pad_to_length": "rows are packed without padding",
        "pad_to_length_bucket": "rows are packed without padding",
        "forward_only": "decided by what a model is for",
        "strategy": ("FSDP2", _FSDP),
        "seed": "the run has one `seed`",
        "model_dtype": "parameters are float32",
        "mixed_precision.*": "parameters are float32; set learner.precision for the compute precision",
        "min_num_params": "every block is sharded separately",
    },
    "refused": {
        "full_determinism": "GPU kernels are not made deterministic; a run on CPUs repeats to the bit",
        "qat.*": "no quantization-aware training",
        "turbo_config.*": "agentrl shards with FSDP2 only",
    },
}


_ACTOR = [
    *_rows(
        ACTOR,
        taken={
            "ppo_mini_batch_size": ("algorithm.updates_per_step (batch / mini-batch)", 256),
            "ppo_epochs": ("algorithm.epochs", 1),
            "ppo_micro_batch_size_per_gpu": "learner.tokens_per_micro_batch (times the longest episode)",
            "ppo_micro_batch_size": "learner.tokens_per_micro_batch (times the longest episode, by GPU)",
            "use_dynamic_bsz": ("learner.tokens_per_micro_batch", False),
            "ppo_max_token_len_per_gpu": ("learner.tokens_per_micro_batch", 16384),
            "clip_ratio": ("the limits of the loss, where low and high are not given", 0.2),
            "clip_ratio_low": ("algorithm.<loss>: clip_low, ratio_min or divergence_low", 0.2),
            "clip_ratio_high": ("algorithm.<loss>: clip_high, ratio_max or divergence_high", 0.2),
            "clip_ratio_c": ("algorithm.loss: dual_clip of ppo_clip, ratio_max of dppo_tv and dppo_kl", 3.0),
            "tau_pos": ("algorithm.loss.tau_positive", 1.0),
            "tau_neg": ("algorithm.loss.tau_negative", 1.05),
            "policy_loss.loss_mode": ("algorithm.loss", "vanilla"),
            "policy_loss.clip_cov_ratio": ("algorithm.loss.fraction", 2e-4),
            "policy_loss.clip_cov_lb": ("algorithm.loss.cov_low", 1.0),
            "policy_loss.clip_cov_ub": ("algorithm.loss.cov_high", 5.0),
            "policy_loss.kl_cov_ratio": ("algorithm.loss.fraction", 2e-4),
            "policy_loss.ppo_kl_coef": ("algorithm.loss.kl_coef", 0.1),
            "policy_loss.dro_beta": "algorithm.loss.beta",
            "use_gpg_loss": ("algorithm.loss", False),
            "loss_agg_mode": ("algorithm.aggregation", "token-mean"),
            "loss_scale_factor": "algorithm.aggregation_scale",
            "entropy_coeff": ("algorithm.entropy_coef", 0),
            "use_kl_loss": ("algorithm.kl", False),
            "kl_loss_coef": ("algorithm.kl.coef", 0.001),
            "kl_loss_type": ("algorithm.kl.kind", "low_var_kl"),
            "grad_clip": ("optim.max_grad_norm", 1.0),
            "fsdp_config.param_offload": ("learner.cpu_offload", False),
            "fsdp_config.optimizer_offload": ("learner.cpu_offload", False),
            "fsdp_config.offload_policy": ("learner.cpu_offload", False),
            "fsdp_config.dtype": ("learner.precision", "bfloat16"),
            "ulysses_sequence_parallel_size": ("learner.sequence_ranks", 1),
            "fsdp_config.mixed_precision.param_dtype": "learner.precision",
            "tis_imp_ratio_cap": "algorithm.correction.importance and high",
        },
    ),
    *_rows(f"{ACTOR}optim.", taken=_OPTIM, **_OPTIM_REST),
    *_rows(f"{ACTOR}fsdp_config.", **_ENGINE_REST),
    *_rows(
        ACTOR,
        same={
            "strategy": ("the learner shards with FSDP2", _FSDP),
            "use_torch_compile": "nothing is compiled",
            "calculate_entropy": "the entropy is always measured",
            "calculate_sum_pi_squared": "computed where the advantage needs it",
            "data_loader_seed": "the run has one `seed`",
            "checkpoint.save_contents": "a checkpoint is a Hugging Face directory with the optimizer state in it",
            "checkpoint.load_contents": "all of a checkpoint is loaded",
            "checkpoint.contents": "a checkpoint is a Hugging Face directory with the optimizer state in it",
            "checkpoint.save_lora_only": "adapters are saved as peft writes them",
            "checkpoint.async_save": "checkpoints are written in the background (checkpoint.background)",
            "checkpoint.strict": "a checkpoint that does not fit is an error",
            "use_fused_kernels": "logits are computed for a few tokens at a time (learner.logits_at_once)",
            "use_remove_padding": "rows are always packed without padding",
            "rollout_n": "see rollout.n",
            "shuffle": "episodes are spread over the updates of a step by the run's seed",
            "entropy_from_logits_with_chunking": "the entropy is computed in chunks (learner.logits_at_once)",
            "entropy_from_logits_chunk_size": "the entropy is computed in chunks (learner.logits_at_once)",
            "entropy_checkpointing": "the entropy is computed in chunks (learner.logits_at_once)",
            "pad_to_length": "rows are packed without padding",
            "use_prefix_grouper": "tokens that rows share are always computed once",
        },
        refused={
            "megatron.*": _MEGATRON,
            "veomni.*": "agentrl shards with FSDP2 only",
            "router_replay.*": ("for R3, set learner.replay_routes (local engine or SGLang)", "disabled"),
            "qat.*": "no quantization-aware training",
            "profiler.*": _PROFILE,
            "freeze_vision_tower": "only text is trained",
        },
    ),
]

_CORRECTION: Texts = {
    "rollout_is": "algorithm.correction.importance",
    "rollout_is_threshold": ("algorithm.correction.high, and low for a band", 2.0),
    "rollout_is_batch_normalize": ("algorithm.correction.normalize", False),
    "rollout_rs": "algorithm.correction.reject",
    "rollout_rs_threshold": "algorithm.correction.reject",
    "rollout_rs_threshold_lower": "algorithm.correction.reject",
    "rollout_token_veto_threshold": "algorithm.correction.veto",
    "bypass_mode": ("algorithm.old_logprobs", False),
    "loss_type": ("algorithm.loss", "ppo_clip"),
}
_ROLLOUT = [
    *_rows(
        ROLLOUT,
        taken={
            "name": "engine.kind",
            "n": ("rollout.group_size", 1),
            "temperature": ("rollout.temperature", 1.0),
            "val_kwargs.do_sample": ("eval.temperature", False),
            "val_kwargs.temperature": ("eval.temperature", 0),
            "val_kwargs.top_p": ("eval.top_p", 1.0),
            "val_kwargs.top_k": ("eval.top_k", -1),
            "val_kwargs.min_p": ("eval.min_p", 0),
            "val_kwargs.n": ("eval.attempts", 1),
            "prompt_length": ("rollout.token_budget (prompt + response)", 512),
            "response_length": ("rollout.token_budget (prompt + response) and rollout.max_tokens", 512),
            "dtype": ("engine.dtype", "bfloat16"),
            "gpu_memory_utilization": ("engine.server.gpu_memory_utilization", 0.5),
            "enforce_eager": ("engine.server.args", False),
            "free_cache_engine": ("engine.server.sleep", True),
            "tensor_model_parallel_size": ("engine.server.tensor_parallel", 2),
            "data_parallel_size": ("engine.server.replicas", 1),
            "max_num_seqs": ("engine.max_slots", 256),
            "max_model_len": "engine.server.args",
            "max_num_batched_tokens": ("engine.server.args (vLLM)", 8192),
            "enable_chunked_prefill": ("engine.server.args", True),
            "enable_prefix_caching": ("engine.server.args", True),
            "engine_kwargs.vllm.*": "engine.server.args",
            "engine_kwargs.sglang.*": "engine.server.args",
            "nnodes": "engine.server.replicas (servers on dedicated GPUs)",
            "n_gpus_per_node": "engine.server.replicas (servers on dedicated GPUs)",
            "checkpoint_engine.backend": ("engine.sync", "naive"),
            "checkpoint_engine.update_weights_bucket_megabytes": ("engine.server.bucket_mb", 2048),
            "multi_turn.enable": "rollout.max_turns",
            "multi_turn.max_assistant_turns": "rollout.max_turns",
            "multi_turn.max_user_turns": "rollout.max_turns (one completion more)",
            "multi_turn.tool_config_path": "env.options.tools",
            "multi_turn.function_tool_path": "env.options.tools",
            "multi_turn.max_parallel_calls": ("env.settings.max_calls_per_turn", 1),
            "multi_turn.max_tool_response_length": (
                "env.settings.observation_tokens (a token for 4 letters)",
                256,
            ),
            "agent.default_agent_loop": ("rollout.max_turns", "single_turn_agent"),
        },
        same={
            "mode": "rollouts are always asynchronous",
            "do_sample": ("training samples", True),
            "load_format": "weights come from the learner",
            "layered_summon": "weights are sent in buckets",
            "calculate_log_probs": "the sampler's log-probabilities are always kept",
            "log_prob_micro_batch_size": _PACKED,
            "log_prob_micro_batch_size_per_gpu": _PACKED,
            "log_prob_use_dynamic_bsz": _PACKED,
            "log_prob_max_token_len_per_gpu": _PACKED,
            "logprobs_mode": "sampler and learner compute log-probabilities at the same temperature",
            "skip_tokenizer_init": "servers receive and return token ids",
            "agent.num_workers": "episodes are played concurrently; rollout.workers adds processes",
            "multi_turn.format": "the parser is recognized by the chat template (model.parser)",
            "multi_turn.tool_response_truncate_side": ("the middle of a long result is left out", "middle"),
            "disable_log_stats": "server logs are written to files, not to the screen",
            "seed": "the run has one `seed`",
            "trace.*": "every episode is recorded with its tokens; see `agentrl show` and `agentrl view`",
            "prometheus.*": "metrics are in metrics.jsonl of the run folder",
            "update_weights_bucket_megabytes": "weights are sent in buckets (engine.server.bucket_mb)",
        },
        no_effect={
            "multi_turn.use_inference_chat_template": "verl does not read it",
            "multi_turn.tokenization_sanity_check_mode": "verl does not read it; see rollout.tokenization_check",
            "multi_turn.num_repeat_rollouts": "verl does not read it",
            "multi_turn.interaction_config_path": "verl removed it; write the user as `respond` of an env",
            "multi_turn.completion_callback": "verl removed it",
            "over_sample_rate": "verl does not read it; rollout.groups_ahead samples ahead",
            "multi_stage_wake_up": "verl does not read it",
            "limit_images": "verl does not pass it on to SGLang",
        },
        by_hand={
            "top_p": ("training samples from the whole distribution", 1),
            "top_k": ("training samples from the whole distribution", -1),
            "min_p": ("training samples from the whole distribution", 0),
            "repetition_penalty": ("training samples from the unmodified distribution", 1.0),
            "agent.agent_loop_config_path": "write the loop as an Env, or as a program under `agent`",
            "agent.agent_loop_manager_class": "write the loop as an Env, or as a program under `agent`",
            "agent.custom_async_server.*": "list running servers in engine.server.urls",
            "cudagraph_capture_sizes": _SERVER,
            "scheduling_policy": (_SERVER, "fcfs"),
            "expert_parallel_size": (_SERVER, 1),
            "pipeline_model_parallel_size": (_SERVER, 1),
            "quantization": _SERVER,
            "quantization_config_file": _SERVER,
            "engine_kwargs.trtllm.*": "engine.kind is local, sglang or vllm",
        },
        refused={
            "ignore_eos": "a completion ends at the policy's stop token",
            "full_determinism": "GPU kernels are not made deterministic",
            "disaggregation.*": "prefill and decode stay in one server",
            "mtp.*": "no speculative decoding in the rollout",
            "qat.*": "no quantization-aware training",
            "enable_rollout_routing_replay": "set learner.replay_routes, with the local engine or SGLang",
            "moe_load_balance_metrics_interval": ("expert load is not measured", 0),
            "profiler.*": _PROFILE,
            "router.*": "requests go to the least loaded server, and an episode stays on one server",
        },
    ),
]

_REF = [
    *_rows(
        REF,
        same={
            "strategy": ("the reference is sharded as the policy is", _FSDP),
            "ulysses_sequence_parallel_size": (_SEQUENCE, 1),
            "rollout_n": "see rollout.n",
            "use_torch_compile": "nothing is compiled",
            "log_prob_micro_batch_size": _PACKED,
            "log_prob_micro_batch_size_per_gpu": _PACKED,
            "log_prob_use_dynamic_bsz": _PACKED,
            "log_prob_max_token_len_per_gpu": _PACKED,
            "fsdp_config.param_offload": "learner.cpu_offload holds for policy and reference; "
            "learner.reference_ranks gives the reference dedicated ranks",
            "fsdp_config.optimizer_offload": "the reference has no optimizer",
            "fsdp_config.offload_policy": "see fsdp_config.param_offload",
            "fsdp_config.dtype": "as the policy (learner.precision)",
            "entropy_from_logits_with_chunking": "logits are computed for a few tokens at a time",
            "entropy_from_logits_chunk_size": "logits are computed for a few tokens at a time",
            "entropy_checkpointing": "logits are computed for a few tokens at a time",
            "pad_to_length": "rows are packed without padding",
        },
    ),
    *_rows(f"{REF}fsdp_config.", **_ENGINE_REST),
    *_rows(
        REF,
        refused={
            "model.path": "the reference is the policy that training began with",
            "megatron.*": _MEGATRON,
            "veomni.*": "agentrl shards with FSDP2 only",
            "router_replay.*": ("for R3, set learner.replay_routes (local engine or SGLang)", "disabled"),
            "profiler.*": _PROFILE,
        },
    ),
    Row("actor_rollout_ref.hybrid_engine", "same", "policy and servers share GPUs with engine.server.sleep", True),
    Row("actor_rollout_ref.nccl_timeout", "no effect", "verl does not read it", 600),
]

_CRITIC = [
    *_rows(
        "critic.",
        taken={
            "optim.lr": ("critic.lr", 1e-5),
            "model.path": "critic.path",
            "cliprange_value": ("critic.value_clip", 0.5),
            "grad_clip": ("critic.max_grad_norm", 1.0),
            "ppo_mini_batch_size": "critic.updates_per_step (batch / mini-batch)",
            "ppo_epochs": "critic.epochs",
            "loss_agg_mode": "critic.aggregation",
            "loss_scale_factor": "critic.aggregation_scale",
            "enable": "critic (there is one where algorithm.advantage is gae)",
        },
        same={
            "ulysses_sequence_parallel_size": (_SEQUENCE, 1),
            "ppo_micro_batch_size": _PACKED,
            "ppo_micro_batch_size_per_gpu": _PACKED,
            "forward_micro_batch_size": _PACKED,
            "forward_micro_batch_size_per_gpu": _PACKED,
            "use_dynamic_bsz": _PACKED,
            "ppo_max_token_len_per_gpu": _PACKED,
            "optim.betas": "as the policy (optim.betas)",
            "optim.weight_decay": "as the policy (optim.weight_decay)",
            "optim.lr_warmup_steps": "as the policy (optim.warmup_steps)",
            "optim.lr_warmup_steps_ratio": "as the policy (optim.warmup_steps)",
            "optim.lr_scheduler_type": "as the policy (optim.schedule)",
            "optim.warmup_style": "as the policy (optim.schedule)",
            "optim.clip_grad": "verl reads critic.grad_clip",
            "strategy": ("the critic is sharded as the policy is", _FSDP),
            "rollout_n": "see rollout.n",
            "shuffle": "episodes are spread over the updates of a step by the run's seed",
            "data_loader_seed": "the run has one `seed`",
            "checkpoint.*": "the critic is saved with every checkpoint",
            "fsdp.param_offload": "as the policy (learner.cpu_offload)",
            "fsdp.optimizer_offload": "as the policy (learner.cpu_offload)",
            "fsdp.offload_policy": "as the policy (learner.cpu_offload)",
            "fsdp.dtype": "as the policy (learner.precision)",
            "model.fsdp_config.*": "as the policy (learner)",
            "model.use_remove_padding": "rows are always packed without padding",
            "model.use_rmpad": "rows are always packed without padding",
            "model.enable_gradient_checkpointing": "as the policy (learner.checkpoint_activations)",
            "model.enable_activation_offload": "as the policy (learner.offload_activations)",
            "model.tokenizer_path": "the critic reads the policy's tokens",
            "model.use_shm": "model directories are memory-mapped in place",
            "model.use_fused_kernels": "a critic has no logits",
            "model.fused_kernel_options.impl_backend": "a critic has no logits",
            "model.use_liger": "a critic has no logits",
            "model.tiled_mlp.*": "use learner.checkpoint_activations",
            "model.custom_chat_template": "the critic reads the policy's tokens",
            "model.lora_alpha": "the whole critic learns",
            "model.target_modules": "the whole critic learns",
        },
    ),
    *_rows("critic.optim.", **_OPTIM_REST),
    *_rows("critic.fsdp.", **_ENGINE_REST),
    *_rows(
        "critic.",
        no_effect={"forward_max_token_len_per_gpu": "verl does not read it"},
        by_hand={
            "model.hf_config_path": "put config.json into the folder of critic.path",
            "model.override_config": ("change config.json in the folder of critic.path", {}),
            "model.override_config.*": "change config.json in the folder of critic.path",
        },
        refused={
            "model.trust_remote_code": "code from a model directory is never run",
            "model.external_lib": "no module is imported for its side effects",
            "model.lora_rank": ("the whole critic learns", 0),
            "model.exclude_modules": "the whole critic learns",
            "model.lora_adapter_path": "the whole critic learns",
            "model.lora.*": "the whole critic learns",
            "model.mtp.*": "multi-token prediction is not trained",
            "megatron.*": _MEGATRON,
            "veomni.*": "agentrl shards with FSDP2 only",
            "profiler.*": _PROFILE,
            "router_replay.*": ("for R3, set learner.replay_routes (local engine or SGLang)", "disabled"),
        },
    ),
]

_JUDGE = "a reward model scores with its own tokenizer and window (reward_model.max_tokens)"
_REWARD = [
    *_rows(
        "reward.",
        taken={
            "custom_reward_function.path": "env.options.reward",
            "custom_reward_function.name": ("env.options.reward", "compute_score"),
            "custom_reward_function.reward_kwargs": "env.options.reward (options)",
            "custom_reward_function.reward_kwargs.*": "env.options.reward (options)",
            "reward_model.enable": ("reward_model", False),
            "reward_model.model_path": "reward_model.path",
            "reward_model.enable_resource_pool": ("reward_model.workers", False),
            "reward_model.n_gpus_per_node": ("reward_model.workers", 8),
            "reward_model.nnodes": ("reward_model.workers", 0),
        },
        same={
            "num_workers": "rewards are computed as episodes end; ToolSettings.reward_timeout_s bounds each",
            "reward_manager.name": "a reward function sees one episode, with any manager",
            "reward_manager.source": ("a reward function sees one episode, with any manager", "register"),
            "reward_model.rollout.*": _JUDGE,
            "reward_kwargs.max_resp_len": "see rollout.max_tokens",
            "reward_kwargs.overlong_buffer_cfg.log": "the penalty is the reward `overlong`",
        },
        by_hand={
            "reward_kwargs.overlong_buffer_cfg.enable": _OVERLONG,
            "reward_kwargs.overlong_buffer_cfg.len": "see overlong_buffer_cfg.enable",
            "reward_kwargs.overlong_buffer_cfg.penalty_factor": "see overlong_buffer_cfg.enable",
            "reward_kwargs.*": "arguments of a reward manager; give them to the reward function (`options`)",
            "reward_manager.module.path": "write it as a reward function of the episode",
            "reward_manager.module.name": (
                "write it as a reward function of the episode",
                "custom_reward_manager",
            ),
            "sandbox_fusion.url": "let the reward run programs in a sandbox of agentrl (Sandbox)",
            "sandbox_fusion.max_concurrent": ("see sandbox_fusion.url", 64),
            "sandbox_fusion.memory_limit_mb": ("see sandbox_fusion.url", 1024),
        },
    ),
    *_rows("custom_reward_function.", taken={"path": "env.options.reward", "name": "env.options.reward"}),
    *_rows(
        "custom_reward_function.",
        taken={"reward_kwargs": "env.options.reward (options)", "reward_kwargs.*": "env.options.reward (options)"},
    ),
    *_rows(
        "reward_model.",
        taken={
            "enable": ("reward_model", False),
            "model.path": "reward_model.path",
            "model_path": "reward_model.path",
            "max_length": "reward_model.max_tokens",
            "micro_batch_size_per_gpu": "reward_model.batch_size",
            "enable_resource_pool": ("reward_model.workers", False),
            "n_gpus_per_node": "reward_model.workers",
            "nnodes": "reward_model.workers",
        },
        same={
            "model.input_tokenizer": "conversations are rendered with the reward model's own chat template",
            "model.fsdp_config.*": "a reward model is held whole by each worker",
            "model.use_remove_padding": "rows are scored in batches of like length",
            "model.use_rmpad": "rows are scored in batches of like length",
            "model.use_fused_kernels": "a reward model has no logits",
            "micro_batch_size": "see reward_model.batch_size",
            "use_dynamic_bsz": "see reward_model.batch_size",
            "forward_max_token_len_per_gpu": "see reward_model.batch_size",
            "ulysses_sequence_parallel_size": ("a reward model is held whole by each worker", 1),
            "strategy": "a reward model is held whole by each worker",
            "num_workers": "rewards are computed as episodes end",
            "reward_manager": "a reward function sees one episode, with any manager",
            "launch_reward_fn_async": "rewards are computed as episodes end",
            "use_reward_loop": "rewards are computed as episodes end",
            "rollout.*": _JUDGE,
            "inference.*": _JUDGE,
        },
        by_hand={
            "reward_kwargs.overlong_buffer_cfg.*": _OVERLONG,
            "overlong_buffer.enable": _OVERLONG,
            "overlong_buffer.*": "see overlong_buffer.enable",
            "reward_kwargs.*": "give them to the reward function (`options`)",
            "reward_loop_source": "write it as a reward function of the episode",
            "reward_loop_module_path": "write it as a reward function of the episode",
            "reward_loop_class_name": "write it as a reward function of the episode",
            "sandbox_fusion.*": "let the reward run programs in a sandbox of agentrl (Sandbox)",
        },
        refused={
            "model.trust_remote_code": "code from a model directory is never run",
            "model.external_lib": "no module is imported for its side effects",
            "profiler.*": _PROFILE,
            "megatron.*": _MEGATRON,
        },
    ),
    Row("sandbox_fusion.*", "by hand", "let the reward run programs in a sandbox of agentrl (Sandbox)"),
]

_ALGORITHM = [
    *_rows(
        "algorithm.",
        taken={
            "adv_estimator": ("algorithm.advantage", "gae"),
            "gamma": ("algorithm.advantage.gamma", 1.0),
            "lam": ("algorithm.advantage.lam", 1.0),
            "norm_adv_by_std_in_grpo": ("algorithm.advantage (dr_grpo without)", True),
            "use_kl_in_reward": ("algorithm.kl.where", False),
            "kl_penalty": ("algorithm.kl.kind", "kl"),
            "kl_ctrl.type": ("algorithm.kl.control", "fixed"),
            "kl_ctrl.kl_coef": ("algorithm.kl.coef", 0.001),
            "kl_ctrl.horizon": ("algorithm.kl.horizon", 10000),
            "kl_ctrl.target_kl": ("algorithm.kl.target", 0.1),
            "filter_groups.enable": ("rollout.refill_zero_signal", False),
            "filter_groups.max_num_gen_batches": ("rollout.refill_zero_signal (batches beyond the first)", 0),
            "gdpo_reward_keys": "algorithm.advantage.weights",
            "gdpo_reward_weights": "algorithm.advantage.weights",
        },
    ),
    *_rows("algorithm.rollout_correction.", taken=_CORRECTION),
    *_rows(f"{ACTOR}rollout_correction.", taken=_CORRECTION),
    *_rows(
        "algorithm.",
        taken={
            "rollout_is": "algorithm.correction.importance",
            "rollout_is_threshold": "algorithm.correction.high",
            "rollout_is_threshold_lower": "algorithm.correction.low",
            "rollout_is_level": "algorithm.correction.importance",
            "rollout_is_mode": "algorithm.correction.low",
            "rollout_is_veto_threshold": "algorithm.correction.veto",
        },
        same={
            "filter_groups.metric": "groups whose rewards are all equal are set aside, by their total",
            "filter_groups.max_inflight_gen_batches": ("groups start as soon as others finish", 1),
        },
        refused={
            "use_pf_ppo": "episodes are not resampled by their reward; algorithm.loss may be your own function",
            "pf_ppo.*": "see use_pf_ppo",
        },
    ),
    Row("algorithm.rollout_correction", "same", "no correction"),
    Row(f"{ACTOR}rollout_correction", "same", "no correction"),
]

_TRAINER = [
    *_rows(
        "trainer.",
        taken={
            "total_training_steps": "steps",
            "total_epochs": ("steps (epochs times the batches of data.train_files)", 30),
            "experiment_name": ("name", "gsm8k"),
            "logger": "loggers: wandb, tensorboard, mlflow and trackio; for others write your own",
            "project_name": "project of the loggers",
            "nnodes": ("learner.ranks", 1),
            "n_gpus_per_node": ("learner.ranks", 8),
            "save_freq": ("checkpoint.every", -1),
            "test_freq": ("eval.every", -1),
            "val_before_train": ("eval.before_training", True),
            "critic_warmup": ("critic.warmup_steps", 0),
            "max_actor_ckpt_to_keep": "checkpoint.keep",
            "device": ("learner.device", "cuda"),
            "v1.trainer_mode": ("rollout.max_staleness", "sync"),
            "v1.sampler.max_off_policy_threshold": ("rollout.max_staleness", 8),
        },
        same={
            "balance_batch": "rows are packed by token budget",
            "log_val_generations": "every episode is recorded; see `agentrl show`",
            "rollout_data_dir": "every episode is recorded in the run folder",
            "validation_data_dir": "every episode is recorded in the run folder",
            "max_critic_ckpt_to_keep": "the critic is a part of the checkpoint",
            "remove_previous_ckpt_in_save": "checkpoint.keep is the number of checkpoints kept",
            "del_local_ckpt_after_load": "checkpoint.keep is the number of checkpoints kept",
            "use_v1": "there is one trainer",
            "use_legacy_worker_impl": "there is one trainer",
            "v1.sync": "there is one trainer",
            "v1.colocate_async.*": "see rollout.max_staleness",
            "v1.separate_async.*": "weights are sent after every step; see rollout.max_staleness",
            "v1.sampler.*": "groups begin only where rollout.max_staleness can be kept; none is dropped",
            "resume_mode": ("a run of the same folder is continued", "auto"),
            "default_local_dir": "a run is a folder under runs/ (see name)",
        },
        no_effect={
            "esi_redundant_time": "verl does not read it",
            "ray_wait_register_center_timeout": "verl does not read it",
        },
        by_hand={
            "val_only": "run `agentrl eval` instead of `agentrl train`",
            "default_hdfs_dir": "copy the run folder",
        },
        refused={
            "resume_from_path": "a checkpoint of verl has another format: merge it to Hugging Face format "
            "(verl.model_merger), set model.path and start a new run; agentrl's own runs resume automatically",
            "checkpoint_callback_class": "watch the run folder: a checkpoint is complete once its folder exists",
            "v1.sampler.custom_sampler.*": "groups train in the order of their deadlines (rollout.max_staleness)",
        },
    ),
]

_REST = [
    Row(
        "async_training.*",
        "by hand",
        "rollout.max_staleness: 1 or more samples during updates, and bounds how many steps old an episode may be",
    ),
    Row("rollout.total_rollout_steps", "by hand", "set steps"),
    Row("rollout.test_freq", "by hand", "set eval.every"),
    *_rows(
        "rollout.",
        by_hand=dict.fromkeys(("nnodes", "n_gpus_per_node"), "engine.server.replicas, on dedicated GPUs"),
    ),
    Row("distillation.*", "by hand", "name the teacher under `teacher`; algorithm.kl.coef is its weight"),
    Row("transfer_queue.*", "same", "episodes stay in the run's process or its Ray workers"),
    Row("global_profiler.*", "refused", _PROFILE),
    Row("skip.*", "refused", "rollouts are not replayed from a dump"),
    Row("ray_kwargs.*", "by hand", "start the cluster as you need it and name it in `ray`"),
]

ROWS = (*_DATA, *_MODEL, *_ACTOR, *_ROLLOUT, *_REF, *_CRITIC, *_REWARD, *_ALGORITHM, *_TRAINER, *_REST)
BY_KEY: Mapping[str, Row] = {row.key: row for row in reversed(ROWS)}


def row_of(key: str) -> Row | None:
    """The row of a key: its own, or that of the nearest `.*` above it; `_target_` is Hydra's."""
    if key.endswith("._target_"):
        return Row(key, "same", "a class of verl's own")
    if key in BY_KEY:
        return BY_KEY[key]
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (row := BY_KEY.get(".".join([*parts[:end], "*"]))) is not None:
            return row
    return BY_KEY.get(f"{key}.*")
