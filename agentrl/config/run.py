"""The one typed configuration of a run. The YAML of a run holds only what differs from these defaults."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from agentrl.config.algorithm import ALONE, AlgorithmConfig, CriticConfig
from agentrl.config.choice import OwnFunction, choice_of
from agentrl.config.engine import EngineConfig
from agentrl.config.facts import (
    DataFiles,
    MayChangeOnResume,
    NamesCode,
    NeverWhen,
    NeverWith,
    OnlyWhen,
    OnlyWith,
    PathTo,
    UnusedBy,
)
from agentrl.config.reward_model import RewardModelConfig
from agentrl.config.section import Count, Device, Fraction, Positive, Section


class TinyModel(Section):
    """A small Qwen3-architecture model that the run makes itself, with a tokenizer trained on the env's text."""

    hidden: Positive = 128
    """Width of the residual stream."""
    layers: Positive = 2
    """Number of transformer blocks."""
    heads: Positive = 4
    """Number of query heads; key/value heads are half as many (at least one)."""
    intermediate: Positive = 384
    """Width of the feed-forward layer."""
    vocab: Annotated[int, Field(ge=300)] = 640
    """Size of the byte-level BPE vocabulary, control tokens included."""
    max_context: Positive = 1024
    """Longest sequence in tokens."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.heads > 1 and self.heads % (self.heads // 2):
            raise ValueError(
                f"heads = {self.heads} cannot share {self.heads // 2} key/value heads evenly: "
                "use 1, 3 or an even number"
            )
        if self.hidden % (2 * self.heads):  # rotary positions turn pairs of numbers within a head
            near = 2 * self.heads * max(1, round(self.hidden / (2 * self.heads)))
            raise ValueError(
                f"hidden = {self.hidden} cannot be split into {self.heads} heads of an even size: "
                f"set hidden to {near}, or change heads"
            )
        return self


class ModelConfig(Section):
    """Which policy is trained: a Hugging Face directory, or a tiny model created for the run."""

    path: Annotated[str | None, PathTo("folder", hub=True)] = None
    """Directory with config.json, weights, tokenizer.json and a chat template, relative to the YAML file; or a
    Hugging Face id (`Qwen/Qwen3-0.6B`, `...@revision`) in the local cache: nothing is downloaded."""
    tiny: TinyModel | None = None
    """Make a tiny model instead of loading one."""
    chat_template: Annotated[str | None, PathTo("file", names=("chatml",))] = None
    """File with a chat template that replaces the tokenizer's own."""
    history: Literal["keep", "fork"] = "keep"
    """Where the template rewrites earlier turns: keep them as sampled, or give each context its own sample."""
    parser: Annotated[str, NamesCode("class", or_word=True)] = "auto"
    """Tool-call format: a name of docs/tokens.md, `module:Name` or `path/to/file.py:Name` of your own, or `auto`:
    the first that reads back the calls that the chat template writes."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking: false`; one that it never reads is an error."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("give exactly one of `path` (a model directory) and `tiny` (make a tiny model)")
        return self


class EnvConfig(Section):
    """Which environment the run uses."""

    use: Annotated[str, NamesCode("class")]
    """`module:Class` or `path/to/file.py:Class`; a path is relative to the YAML file."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the class."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Limits on calls and results, and what follows mistakes: the fields of `agentrl.env.ToolSettings`."""
    solved_at: float | dict[str, float] | None = None
    """When an episode counts as solved: at this total reward, or where each named reward, before its weight,
    reaches its number. What the env declares (`@reward(solved=True)`) where it is not given."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weights by reward name, in place of those in the code."""


class AgentConfig(Section):
    """A program of your own that plays the episodes: it talks to the policy as to any OpenAI endpoint."""

    use: Annotated[str | None, NamesCode("function")] = None
    """`module:function` or `path/to/file.py:function`, relative to the YAML file: `async def f(task, access)`."""
    command: list[str] = Field(default_factory=list)
    """Or a command and its arguments, started for each episode with OPENAI_BASE_URL and OPENAI_API_KEY set."""
    cwd: Annotated[str | None, PathTo("folder"), OnlyWith("command")] = None
    """Folder in which the command runs; the current one by default."""
    max_running: Positive = 64
    """Maximum concurrent episodes."""
    crash: Literal["infra", "score"] = "score"
    """A program that raises or exits with a code other than 0 after the policy has answered: the episode is scored
    as it stands, or lost and played again. What the policy wrote can crash a program, so `infra` lets it have
    its bad episodes drawn again. A crash before the first answer is always lost."""

    @model_validator(mode="after")
    def _one_program(self) -> Self:
        if (self.use is None) == (not self.command):
            raise ValueError("give exactly one of `use` (a Python function) and `command` (a program)")
        return self


class SamplerConfig(Section):
    """Which task comes next. Where the sampler stands is saved in every checkpoint."""

    order: Literal["sequential", "shuffled", "weighted"] = "sequential"
    """One after another; in a new random order each round; or at random, by how often each is solved lately."""
    window: Annotated[Positive, OnlyWhen("order", "weighted")] = 8
    """Groups of a task over which its solve rate is measured."""
    floor: Annotated[float, Field(gt=0, le=1), OnlyWhen("order", "weighted")] = 0.1
    """Weight of a task that is always or never solved; a task solved half of the time has weight 1."""


class DataConfig(Section):
    """Where tasks come from: files of rows, or (by default) the env's own `tasks` generator."""

    train: Annotated[str | list[str] | None, DataFiles("train")] = None
    """Training rows, each with the arguments of `setup`: a .jsonl, .json or .parquet file, a list of files, a
    pattern (`rows/*.parquet`), a folder, or `owner/name` (`owner/name:main/train-*`) of a dataset in the Hugging
    Face cache."""
    held_out: Annotated[str | list[str] | None, DataFiles("held_out")] = None
    """Rows that are only evaluated, given like `train`."""
    columns: Annotated[dict[str, str], OnlyWith("train", "held_out")] = Field(default_factory=dict)
    """Argument of `setup` to the column that holds it, where the names differ: `{prompt: question}`."""
    options: Annotated[dict[str, Any], NeverWith("train")] = Field(default_factory=dict)
    """Keyword arguments for the env's `tasks` generator."""
    sampler: SamplerConfig = SamplerConfig()
    """Which task comes next."""
    overlong_prompts: Literal["refuse", "drop"] | None = None
    """Render all tasks at start and refuse to run, or leave out those whose prompt leaves no room to answer."""


class WarmupConfig(Section):
    """A cold start: supervised epochs on demonstrations before reinforcement learning begins.

    It stops as soon as nearly every task is solved now and then (pass@k), which is what comparing episodes of one
    task needs: something to reinforce everywhere, and much left to learn.
    """

    demonstrations: Annotated[str | None, PathTo("file")] = None
    """JSON-lines file of {"messages": [...]}; without it the env's own `demonstrations` are used, or what its
    `oracle` plays on training tasks."""
    options: Annotated[dict[str, Any], NeverWith("demonstrations")] = Field(default_factory=dict)
    """Keyword arguments for the env's `demonstrations` generator."""
    num: Annotated[Positive, NeverWith("demonstrations")] = 600
    """Number of demonstration episodes."""
    max_epochs: Positive = 16
    """Maximum passes over the demonstrations."""
    until_pass: Fraction = 0.9
    """End the cold start once this fraction of probed tasks is solved in one of `probe_samples` episodes."""
    anneal_epochs: Count = 0
    """Further passes at a falling learning rate; the last of `max_epochs` if `until_pass` is never reached."""
    at_least: Fraction = 0.3
    """Stop the run if the fraction is below this after the cold start: too little to reinforce."""
    probe_every: Positive = 50
    """Supervised steps between probes."""
    probe_tasks: Positive = 32
    """Training tasks per probe."""
    probe_samples: Positive = 8
    """Episodes per probed task, sampled as in training."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate: reached in 20 steps, then held until the anneal."""
    batch_episodes: Positive = 16
    """Demonstrations per optimizer step."""

    @model_validator(mode="after")
    def _anneal_fits(self) -> Self:
        if self.anneal_epochs >= self.max_epochs:
            raise ValueError(
                f"anneal_epochs = {self.anneal_epochs} leaves nothing of max_epochs = {self.max_epochs}: lower it"
            )
        return self


class RolloutConfig(Section):
    """How episodes are sampled."""

    groups_per_step: Annotated[int, Field(gt=0, le=65_536)] = 32
    """Tasks per step."""
    group_size: Annotated[int, Field(gt=0, le=65_536)] = 8
    """Episodes per task; their rewards are compared with one another."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; the learner scales its logits by the same."""
    max_turns: Positive = 8
    """Maximum completions per episode."""
    max_tokens: Positive = 256
    """Maximum tokens per completion."""
    token_budget: Positive = 4096
    """Maximum tokens of the whole episode: prompt, completions and observations."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Wall-clock limit of one episode."""
    tokenization_check: Literal["strict", "ignore_strippable", "disable"] = "ignore_strippable"
    """Compares each episode's token ids with a fresh rendering; an episode that fails does not train."""
    tokenization_stop_above: Annotated[Fraction | None, NeverWhen("tokenization_check", "disable")] = 0.2
    """Share of failed episodes above which the run stops, once it has seen 20; `null` never stops it."""
    overlong: Literal["train", "mask", "penalise"] = "train"
    """Episodes cut by a limit: trained with their reward, kept out of the loss, or trained with less reward."""
    overlong_penalty: Annotated[float, Field(gt=0), OnlyWhen("overlong", "penalise")] = 0.5
    """Subtracted from the reward of such an episode; logged as the reward `overlong`."""
    refill_zero_signal: Count = 0
    """Maximum number of zero-variance groups per step that are replaced by new ones."""
    infra_retries: Count = 2
    """Retries per episode after infrastructure failures before the run stops."""
    redrawn_stop_above: Fraction | None = 0.1
    """Share of the last 1,000 episodes lost to the infrastructure (and played again) above which the run stops,
    once there are 20 of them: what trains then are the survivors. `null` never stops."""
    faults_stop_above: Fraction | None = 0.5
    """Share of the last 1,000 episodes in which the same reward (or the env itself) raised, above which the run
    stops, once there are 20 of them; below it such a reward counts 0. `null` never stops."""
    max_staleness: Count = 0
    """Steps that an episode's weights may be older than those it trains: 0 samples and trains in turn, 1 samples
    one step ahead, more is asynchronous. Groups begin only where the bound can be kept; none is dropped for it."""
    groups_ahead: Annotated[Count | None, NeverWhen("max_staleness", 0)] = None
    """Groups under way at most beyond those of the next step; by default `max_staleness` steps of them. Fewer are
    fresher, and let quick groups go before slow ones (over-sampling; what is left over is trained later)."""
    workers: Annotated[Count, NeverWith("agent")] = 0
    """Ray actors that play the episodes, so that tokenization, tools and rewards use more than one core; 0 plays
    them in the process that trains. One that dies is replaced, its episodes are played again."""
    note_after_s: Annotated[float, Field(gt=0)] = 120.0
    """How long a step waits for episodes before a note names the oldest one and where it waits."""

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        ahead = self.max_staleness * self.groups_per_step
        if (self.groups_ahead or 0) > ahead:
            raise ValueError(
                f"rollout.groups_ahead is {self.groups_ahead}; max_staleness {self.max_staleness} by "
                f"groups_per_step {self.groups_per_step} allows {ahead}; lower it or raise one"
            )
        return self


_Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.99)
    """Decay rates of the two moments."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    warmup_steps: Annotated[Count, NeverWith("warmup_ratio")] = 5
    """Steps over which the learning rate rises linearly."""
    warmup_ratio: Fraction | None = None
    """The same as a share of all steps, rounded down; in place of `warmup_steps`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up (linear and cosine fall to a tenth at the last step)."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""

    def warmup_of(self, steps: int) -> int:
        """Steps over which the learning rate rises in a run of so many."""
        return self.warmup_steps if self.warmup_ratio is None else int(self.warmup_ratio * steps)


class LoRAConfig(Section):
    """Train small matrices next to the frozen ones; the reference is the policy without them."""

    rank: Positive = 16
    """Inner size of the matrices."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """What they add is scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Layers by the ends of their names (`q_proj`), or all linear ones of the blocks."""
    adapter: Annotated[str | None, PathTo("folder", hub=True)] = None
    """Folder of a LoRA adapter, as peft writes it, to continue from; its base is `model.path`. Its rank, alpha and
    scale must be those given here. Adapters of other kinds (DoRA, biases, whole modules, ...) are refused."""

    @property
    def plain_alpha(self) -> float:
        """The alpha that gives the same scale as alpha / rank."""
        return self.alpha * math.sqrt(self.rank) if self.rslora else self.alpha


class LearnerConfig(Section):
    """How the update is computed."""

    device: Annotated[Device, MayChangeOnResume()] = "auto"
    """`cpu`, `cuda`, `cuda:N`, or `auto`: CUDA where there is one."""
    tokens_per_micro_batch: Annotated[Positive, MayChangeOnResume()] = 16384
    """Token budget of one forward and backward pass of one rank; gradients accumulate over as many as needed."""
    logits_at_once: Annotated[Count, MayChangeOnResume()] = 1024
    """Tokens whose logits exist at once, so that memory does not grow with vocabulary times batch; 0: all."""
    ranks: Annotated[Positive, MayChangeOnResume()] = 1
    """1 computes in this process; more are Ray workers, one per GPU (or CPU), each with a shard of the model."""
    reference_ranks: Annotated[
        Count, MayChangeOnResume(), NeverWith("lora"), NeverWhen("algorithm.kl.coef", 0)
    ] = 0
    """Ray workers of the reference's own, each with a shard of it; 0 keeps it beside the policy, on its ranks.
    With ranks of its own the policy is on Ray as well, whatever its number of ranks."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What is computed in; parameters, gradient sums and optimizer are float32 either way."""
    attention: Annotated[Literal["auto", "sdpa", "flex", "flash"], MayChangeOnResume()] = "auto"
    """PyTorch's `sdpa`; its `flex` attention, on GPUs; or `flash`, the package flash-attn, on GPUs in bfloat16.
    `auto` is `sdpa` on a CPU, and on a GPU `flash` where that works, else `flex`, else `sdpa`."""
    checkpoint_activations: Annotated[bool, MayChangeOnResume()] = False
    """Keep only what enters each block and compute the rest again in the backward pass: less memory, more time."""
    offload_activations: Annotated[bool, MayChangeOnResume(), NeverWhen("device", "cpu")] = False
    """Keep what the backward pass needs in host memory meanwhile; for GPUs."""
    cpu_offload: Annotated[bool, MayChangeOnResume(), NeverWhen("device", "cpu")] = False
    """Keep parameters, gradients and optimizer state in host memory, and update there; for GPUs."""
    lora: LoRAConfig | None = None
    """Train adapters instead of the whole model."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.attention in ("flex", "flash") and self.device == "cpu":
            raise ValueError(f"learner.attention {self.attention} needs a GPU: use auto, or change learner.device")
        if self.attention == "flash" and self.precision == "float32":
            raise ValueError(
                "learner.attention flash computes in bfloat16 only: set learner.precision to bfloat16"
            )
        return self


class EvalConfig(Section):
    """Evaluation on held-out tasks: greedy by default, or sampled as a deployment would."""

    every: Count = 0
    """Steps between evaluations; 0 evaluates before and after training only."""
    tasks: Positive = 200
    """Held-out tasks played."""
    before_training: bool = True
    """Evaluate before the first step as well."""
    attempts: Annotated[int, Field(gt=0, le=65_536)] = 1
    """Episodes of each held-out task. With more than one, `held_out` is the mean over all of them and
    `held_out_pass` the share of tasks solved at least once (pass@n)."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1), NeverWhen("temperature", 0)] = 1.0
    """Sample from the most likely tokens that together have this probability; 1 is off."""
    top_k: Annotated[Count, NeverWhen("temperature", 0)] = 0
    """Sample from this many of the most likely tokens; 0 is off."""
    min_p: Annotated[float, Field(ge=0, lt=1), NeverWhen("temperature", 0)] = 0.0
    """Sample from tokens with at least this share of the largest probability; 0 is off."""

    @model_validator(mode="after")
    def _attempts_differ(self) -> Self:
        if self.temperature == 0 and self.attempts > 1:
            raise ValueError(
                f"eval.attempts is {self.attempts}, and greedy episodes of one task are all the same: set "
                "eval.temperature above 0, or remove eval.attempts"
            )
        return self


class CheckpointConfig(Section):
    """When training state is saved."""

    every: Count = 20
    """Steps between checkpoints; the last step is always saved. 0 saves the last only."""
    keep: Positive = 2
    """Newest checkpoints kept."""
    best: bool = True
    """Keep the checkpoint with the best held-out score as well; `checkpoints/best` points at it."""
    background: bool = True
    """Write during the next steps, from a copy in host memory; otherwise the run waits for the write."""


class RunConfig(Section):
    """Everything a run needs; one YAML file."""

    name: Annotated[str, UnusedBy("eval")] = Field(default="", pattern=r"^[A-Za-z0-9._-]*$", max_length=200)
    """Name of the run folder under `runs/`; the YAML file's folder name when empty."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), UnusedBy("serve")] = 0
    """Seeds tasks, model making, sampling and data order."""
    steps: Annotated[Positive, UnusedBy("eval", "serve")] = 100
    """Optimizer steps."""
    env: Annotated[EnvConfig, UnusedBy("serve")]
    agent: Annotated[AgentConfig | None, UnusedBy("serve")] = None
    model: Annotated[ModelConfig, UnusedBy("eval --base-url")]
    data: Annotated[DataConfig, UnusedBy("serve")] = DataConfig()
    warmup: Annotated[WarmupConfig | None, UnusedBy("eval", "serve")] = None
    rollout: Annotated[RolloutConfig, UnusedBy("serve")] = RolloutConfig()
    engine: Annotated[EngineConfig, UnusedBy("eval --base-url")] = EngineConfig()
    algorithm: Annotated[AlgorithmConfig, UnusedBy("eval", "serve")] = AlgorithmConfig()
    critic: Annotated[CriticConfig | None, OnlyWhen("algorithm.advantage", "gae"), UnusedBy("eval", "serve")] = (
        None
    )
    reward_model: Annotated[RewardModelConfig | None, UnusedBy("eval", "serve")] = None
    optim: Annotated[OptimConfig, UnusedBy("eval", "serve")] = OptimConfig()
    learner: Annotated[LearnerConfig, UnusedBy("eval", "serve")] = LearnerConfig()
    eval: Annotated[EvalConfig, UnusedBy("serve")] = EvalConfig()
    ray: Annotated[str | None, MayChangeOnResume()] = None
    """Address of the one Ray cluster of the run (`10.0.0.1:6379`), or `auto` for the one this machine belongs to;
    without it a cluster is started on this machine where something needs one. What runs there is chosen by
    other keys: the learner by `learner.ranks`, `learner.reference_ranks` and `critic.ranks`, episodes by
    `rollout.workers`, the reward model by `reward_model.workers`, servers by `engine.server.launch: ray`."""
    checkpoint: Annotated[CheckpointConfig, MayChangeOnResume(), UnusedBy("eval", "serve")] = CheckpointConfig()

    @model_validator(mode="before")
    @classmethod
    def _env_shorthand(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("env"), str):
            return data | {"env": {"use": data["env"]}}
        return data

    @model_validator(mode="before")
    @classmethod
    def _critic_of_gae(cls, data: Any) -> Any:
        """`advantage: gae` has a critic, with its defaults where the user wrote none."""
        algorithm = data.get("algorithm") if isinstance(data, dict) else None
        advantage = (
            algorithm.get("advantage") if isinstance(algorithm, dict) else getattr(algorithm, "advantage", None)
        )
        choice = choice_of(AlgorithmConfig.model_fields["advantage"])
        assert choice is not None
        with_critic = choice.kind_of(advantage) == "gae" and data.get("critic") is None
        return data | {"critic": {}} if with_critic else data

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        """What no section can see alone; a setting without effect is an error."""
        _check_models(self)
        _check_group_size(self)
        _check_step(self)
        _check_places(self)
        return self

    @property
    def learner_on_ray(self) -> bool:
        """Whether the policy is trained on Ray: it has many ranks, or another model has ranks of its own."""
        apart = self.learner.reference_ranks + (0 if self.critic is None else self.critic.ranks)
        return self.learner.ranks > 1 or apart > 0

    @property
    def uses_ray(self) -> bool:
        """Whether anything runs on Ray."""
        scorers = 0 if self.reward_model is None else self.reward_model.workers
        servers = self.engine.server.launch == "ray"
        return self.learner_on_ray or self.rollout.workers > 0 or scorers > 0 or servers


def _check_models(config: RunConfig) -> None:
    """Settings of models that are not there."""
    learner = config.learner
    if learner.lora is not None and learner.lora.adapter is not None and config.warmup is not None:
        raise ValueError(
            "learner.lora.adapter was trained on model.path, but warmup changes those weights first: remove one "
            "of the two"
        )
    if config.engine.sync == "lora" and learner.lora is None:
        raise ValueError("engine.sync lora sends the adapter alone, and there is none: set learner.lora")


def _check_group_size(config: RunConfig) -> None:
    """An episode without siblings needs an advantage that does without."""
    advantage = config.algorithm.advantage.name
    if config.rollout.group_size == 1 and not (
        advantage in ALONE or isinstance(config.algorithm.advantage, OwnFunction)
    ):
        raise ValueError(
            "rollout.group_size is 1: a group of one has no advantage; use at least 2, or choose an "
            f"algorithm.advantage that needs no siblings ({', '.join(sorted(ALONE))})"
        )


def _check_step(config: RunConfig) -> None:
    """What a step is made of."""
    rollout, algorithm, critic = config.rollout, config.algorithm, config.critic
    episodes = rollout.groups_per_step * rollout.group_size
    keys = {"algorithm.updates_per_step": algorithm.updates_per_step}
    if critic is not None and critic.updates_per_step is not None:
        keys["critic.updates_per_step"] = critic.updates_per_step
    for key, updates in keys.items():
        if updates > episodes:
            raise ValueError(
                f"{key} is {updates}, and a step has {episodes} episodes (rollout.groups_per_step x group_size): "
                "each update needs at least one; lower it"
            )
    if rollout.refill_zero_signal and (rollout.group_size == 1 or algorithm.advantage.name in ALONE):
        why = (
            "rollout.group_size is 1: the episode of each group"
            if rollout.group_size == 1
            else f"algorithm.advantage {algorithm.advantage.name} compares no siblings: a group whose episodes"
        )
        raise ValueError(
            f"rollout.refill_zero_signal puts aside groups whose episodes all scored the same, and {why} would be "
            "valid signal; remove it"
        )
    if "warmup_steps" in config.optim.written and config.optim.warmup_steps > config.steps:
        raise ValueError(
            f"optim.warmup_steps is {config.optim.warmup_steps}, and the run has {config.steps} steps: the "
            "learning rate would never reach optim.lr; lower it, or raise steps"
        )
    if critic is not None:
        _check_critic(critic, algorithm)


def _check_critic(critic: CriticConfig, algorithm: AlgorithmConfig) -> None:
    """How the errors of the critic become one number."""
    norm = (critic.aggregation or algorithm.aggregation) == "seq-mean-token-sum-norm"
    if critic.aggregation_scale is not None and not norm:
        raise ValueError(
            "critic.aggregation_scale has no effect without critic.aggregation: seq-mean-token-sum-norm: remove it"
        )
    if norm and critic.aggregation_scale is None and algorithm.aggregation_scale is None:
        raise ValueError(
            "critic.aggregation_scale is missing: seq-mean-token-sum-norm divides by a constant; give the most "
            "tokens an episode may sample"
        )


def _check_places(config: RunConfig) -> None:
    """Who plays and samples where."""
    rollout = config.rollout
    if config.engine.server.sleep and rollout.max_staleness:
        raise ValueError(
            f"engine.server.sleep needs servers without work during an update, and rollout.max_staleness is "
            f"{rollout.max_staleness}: set it to 0, or leave sleep out"
        )
    evaluation = config.eval
    if config.agent is not None and (evaluation.top_p < 1 or evaluation.top_k or evaluation.min_p):
        raise ValueError(
            "eval.top_p, eval.top_k and eval.min_p do not reach the completions of an `agent`: remove them"
        )
    if config.ray is not None and not config.uses_ray:
        raise ValueError(
            "ray has no effect while nothing runs on Ray: remove it, or set learner.ranks, rollout.workers, "
            "learner.reference_ranks, critic.ranks, reward_model.workers or engine.server.launch"
        )
