"""The one typed configuration of a run. The YAML of a run holds only what differs from these defaults."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.parameters import Named
from agentrl.config.address import hide_credentials
from agentrl.config.agreement import check_sections, check_sequence_ranks
from agentrl.config.algorithm import AlgorithmConfig, CriticConfig
from agentrl.config.choice import OneOf, OwnFunction, choice_of, known_or_own
from agentrl.config.compact import CompactConfig
from agentrl.config.engine import EngineConfig
from agentrl.config.eval_config import EvalConfig
from agentrl.config.facts import (
    Advanced,
    DataFiles,
    NamesCode,
    NeverWhen,
    NeverWith,
    OnlyWhen,
    OnlyWhenOrOwn,
    OnlyWith,
    OnResume,
    PathTo,
    UnusedBy,
)
from agentrl.config.loggers import LoggerConfig
from agentrl.config.place import Places
from agentrl.config.reward_model import RewardModelConfig
from agentrl.config.section import COLDEST, HOTTEST, Count, Device, Fraction, Positive, Section
from agentrl.config.teacher import TeacherConfig, TeacherOfEnv


class TinyModel(Section):
    """A small model with the Qwen3 architecture, created by the run, with a tokenizer trained on the env's
    text."""

    hidden: Positive = 128
    """Width of the residual stream."""
    layers: Positive = 2
    """Number of transformer blocks."""
    heads: Positive = 4
    """Number of query heads; there are half as many key/value heads (at least one)."""
    intermediate: Positive = 384
    """Width of the feed-forward layer."""
    vocab: Annotated[int, Field(ge=300)] = 640
    """Size of the byte-level BPE vocabulary, control tokens included."""
    max_context: Positive = 1024
    """Maximum sequence length in tokens."""

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
    """The policy to train: a Hugging Face directory, or a tiny model created for the run."""

    path: Annotated[str | None, PathTo("folder", hub=True), UnusedBy("eval FOLDER", "serve")] = None
    """Directory with config.json, weights, tokenizer.json and a chat template, relative to the YAML file; or a
    Hugging Face id (`Qwen/Qwen3-0.6B`, `...@revision`) in the local cache (nothing is downloaded)."""
    tiny: Annotated[TinyModel | None, UnusedBy("eval FOLDER", "serve")] = None
    """Make a tiny model instead of loading one."""
    chat_template: Annotated[str | None, PathTo("file", names=("chatml",))] = None
    """Chat template file that replaces the tokenizer's template."""
    history: Literal["keep", "fork"] = "keep"
    """If the template rewrites earlier turns: keep them as sampled, or make each context a separate sample."""
    parser: Annotated[str, NamesCode("class", or_word=True)] = "auto"
    """Tool-call format: a name from docs/tokens.md, your own parser as `module:Name` or `path/to/file.py:Name`, or
    `auto`: the first format that parses the calls rendered by the chat template."""
    template_options: dict[str, object] = Field(default_factory=dict)
    """Chat template variables, such as `enable_thinking: false`; variables the template never reads are errors."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("give exactly one of `path` (a model directory) and `tiny` (make a tiny model)")
        return self


class EnvConfig(Section):
    """The environment."""

    use: Annotated[str, NamesCode("class", or_scheme=True)]
    """`module:Class` or `path/to/file.py:Class`; a path is relative to the YAML file. Or `SCHEME:REST`, an env of
    another ecosystem, such as `textarena:2048-v0` (`agentrl envs` lists the schemes)."""
    options: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments for the class, or the options of the scheme."""
    settings: dict[str, object] = Field(default_factory=dict)
    """Limits on calls and results, and the handling of mistakes: the fields of `agentrl.env.ToolSettings`."""
    solved_at: float | dict[str, float] | None = None
    """When an episode counts as solved: at this total reward, or when each named reward, before its weight,
    reaches its threshold. By default the env decides (`@reward(solved=True)`)."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Reward weights by name; they override those in the code."""

    @property
    def shown(self) -> str:
        """`use` without the credentials of an address, for messages and files."""
        return hide_credentials(self.use)


class AgentConfig(Section):
    """Your own program that plays the episodes; it uses the policy through an OpenAI-compatible endpoint."""

    use: Annotated[str | None, NamesCode("function")] = None
    """`module:function` or `path/to/file.py:function`, relative to the YAML file: `async def f(task, access)`."""
    command: list[str] = Field(default_factory=list)
    """Or a command and its arguments, started for each episode with OPENAI_BASE_URL, OPENAI_API_KEY and their
    ANTHROPIC_ counterparts set."""
    cwd: Annotated[str | None, PathTo("folder"), OnlyWith("command")] = None
    """Working directory of the command; by default the current one. Not with `sandbox`."""
    workers: Annotated[Positive | None, OnlyWith("command"), Advanced()] = None
    """Start the command this many times and keep it up: each process plays one episode after another, which saves
    the time of its imports. The program reads and writes lines of JSON (docs/agents.md#workers). Not with
    `sandbox`."""
    sandbox: Annotated[dict[str, object] | None, OnlyWith("command"), Advanced()] = None
    """Run the command in a sandbox that reaches only the policy: fields of `Sandbox` (`{}` for the defaults),
    back-end `namespace` or `docker`. It works on a copy of the env's files, which is read back for the reward."""
    max_running: Positive = 64
    """Maximum concurrent episodes."""
    offer_tools: Annotated[bool, Advanced()] = False
    """Offer the env's tools in requests that send none, for clients that leave tools to the server."""
    crash: Annotated[Literal["infra", "score"], Advanced()] = "score"
    """If the program raises or exits with a nonzero code after the policy has answered: score the episode so far,
    or treat it as lost and replay it. The policy's text can crash a program, so with `infra` a policy can get its
    bad episodes replayed. After a crash before the first answer the episode is always replayed."""

    @model_validator(mode="after")
    def _one_program(self) -> Self:
        if (self.use is None) == (not self.command):
            raise ValueError("give exactly one of `use` (a Python function) and `command` (a program)")
        if self.sandbox is not None and self.cwd is not None:
            raise ValueError(
                "`cwd` has no effect with `sandbox`: the command starts in the sandbox's home directory"
            )
        if self.workers is not None and self.sandbox is not None:
            raise ValueError("`workers` has no effect with `sandbox`: each episode gets a new sandbox; remove one")
        if self.workers is not None and "max_running" in self.model_fields_set and self.max_running < self.workers:
            raise ValueError(
                f"`workers` {self.workers} with `max_running` {self.max_running}: the others would never play: "
                "each worker plays one episode at a time"
            )
        episode = ("{prompt}", "{id}", "{base_url}")
        given = next((word for word in self.command if any(each in word for each in episode)), None)
        if self.workers is not None and given is not None:
            raise ValueError(
                f"`workers`: the command has {given!r}, but a worker reads each task and its address from "
                "standard input"
            )
        return self


ORDERS = ("sequential", "shuffled", "weighted")


class SamplerConfig(Section):
    """The order of tasks. The sampler's state is saved in every checkpoint."""

    order: Annotated[str, NamesCode("class", or_word=True)] = "sequential"
    """`sequential`: in order; `shuffled`: in a new random order each epoch; `weighted`: at random, with weights
    from recent solve rates; `module:Class` or `path/to/file.py:Class`: in an order of your own. See
    docs/environments.md#order."""
    options: Annotated[dict[str, Any], NeverWhen("order", *ORDERS), Advanced()] = Field(default_factory=dict)
    """Keyword arguments of your own order."""
    window: Annotated[Positive, OnlyWhen("order", "weighted"), Advanced()] = 8
    """Number of recent groups of a task that its solve rate is averaged over."""
    floor: Annotated[float, Field(gt=0, le=1), OnlyWhen("order", "weighted"), Advanced()] = 0.1
    """Weight of a task that is always or never solved; a task solved half the time has weight 1."""

    @field_validator("order")
    @classmethod
    def _known_order(cls, order: str) -> str:
        return known_or_own(order, ORDERS, "Class")


class DataConfig(Section):
    """The source of tasks: files of rows, or (by default) the env's `tasks` generator."""

    train: Annotated[str | list[str] | None, DataFiles("train")] = None
    """Training rows with the arguments of `setup`: a .jsonl, .json or .parquet file, a list of files, a
    pattern (`rows/*.parquet`), a folder, or `owner/name` (`owner/name:main/train-*`) of a dataset in the Hugging
    Face cache."""
    held_out: Annotated[str | list[str] | None, DataFiles("held_out")] = None
    """Held-out rows for evaluation, in the same form as `train`."""
    columns: Annotated[dict[str, str], OnlyWith("train", "held_out")] = Field(default_factory=dict)
    """Maps arguments of `setup` to column names if they differ: `{prompt: question}`."""
    options: Annotated[dict[str, object], NeverWith("train")] = Field(default_factory=dict)
    """Keyword arguments for the env's `tasks` generator."""
    sampler: Annotated[SamplerConfig, UnusedBy("eval")] = SamplerConfig()
    """The order of tasks."""
    overlong_prompts: Annotated[Literal["refuse", "drop"] | None, UnusedBy("eval --base-url")] = None
    """Render all prompts at startup and refuse to run if one leaves no room to answer, or drop such tasks."""


class WarmupConfig(Section):
    """A cold start: supervised fine-tuning on demonstrations before reinforcement learning.

    It stops as soon as nearly every task is solved occasionally (pass@k): group comparisons then have something to
    reinforce on every task, and much is left to learn.
    """

    use: Annotated[Literal["demonstrations", "oracle"] | None, NeverWith("demonstrations")] = None
    """Source of the demonstrations: the env's `demonstrations`, or its `oracle`, which plays training tasks. By
    default `demonstrations` if the env has it; `warmup: oracle` is short for `warmup: {use: oracle}`."""
    demonstrations: Annotated[str | None, PathTo("file")] = None
    """JSON-lines file of {"messages": [...]}; by default the env's `demonstrations`, or episodes that its `oracle`
    plays on training tasks."""
    options: Annotated[dict[str, object], NeverWith("demonstrations")] = Field(default_factory=dict)
    """Keyword arguments for the env's `demonstrations` generator."""
    num: Annotated[Positive, NeverWith("demonstrations")] = 600
    """Number of demonstration episodes."""
    max_epochs: Positive = 16
    """Maximum passes over the demonstrations."""
    until_pass: Fraction = 0.9
    """End the cold start once this fraction of probed tasks is solved in one of `probe_samples` episodes."""
    anneal_epochs: Annotated[Count, Advanced()] = 0
    """Additional passes with a decaying learning rate; the last ones of `max_epochs` if `until_pass` is never
    reached."""
    at_least: Annotated[Fraction, Advanced()] = 0.3
    """Stop the run if the fraction is below this after the cold start: too little to reinforce."""
    probe_every: Annotated[Positive, Advanced()] = 50
    """Supervised steps between probes, until one reaches `until_pass`; the last probe is at the end."""
    probe_tasks: Annotated[Positive, Advanced()] = 32
    """Training tasks per probe."""
    probe_samples: Annotated[Positive, Advanced()] = 8
    """Episodes per probed task, sampled as in training."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate: reached after 20 steps, then constant until the anneal."""
    batch_episodes: Annotated[Positive, Advanced()] = 16
    """Demonstrations per optimizer step."""

    @model_validator(mode="after")
    def _ends_fit(self) -> Self:
        if self.anneal_epochs >= self.max_epochs:
            raise ValueError(
                f"anneal_epochs = {self.anneal_epochs} leaves nothing of max_epochs = {self.max_epochs}: lower it"
            )
        if self.at_least > self.until_pass:
            raise ValueError(
                f"until_pass = {self.until_pass} ends the cold start below at_least = {self.at_least}, which then "
                "stops the run: raise the one, or lower the other"
            )
        return self


class RolloutConfig(Section):
    """How episodes are sampled."""

    groups_per_step: Annotated[int, Field(gt=0, le=65_536), UnusedBy("eval")] = 32
    """Tasks per step."""
    group_size: Annotated[int, Field(gt=0, le=65_536), UnusedBy("eval")] = 8
    """Group size: episodes per task, whose rewards are compared with one another."""
    temperature: Annotated[float, Field(ge=COLDEST, le=HOTTEST)] = 1.0
    """Sampling temperature; the learner divides its logits by the same value."""
    max_turns: Positive = 8
    """Maximum completions per episode."""
    max_tokens: Positive = 256
    """Maximum tokens per completion."""
    token_budget: Positive = 4096
    """Maximum tokens of the whole episode: prompt, completions and observations, of all its branches."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Wall-clock limit per episode."""
    compact: Annotated[CompactConfig | None, NeverWith("agent"), UnusedBy("eval --base-url"), Advanced()] = None
    """Shorten the conversation when the context fills up; by default the episode ends."""
    tokenization_check: Annotated[Literal["strict", "ignore_strippable", "disable"], UnusedBy("eval")] = (
        "ignore_strippable"
    )
    """Compare each episode's token ids with a new rendering; episodes that fail are excluded from training."""
    tokenization_stop_above: Annotated[
        Fraction | None, NeverWhen("tokenization_check", "disable"), UnusedBy("eval"), Advanced()
    ] = 0.2
    """Stop the run above this fraction of failed episodes, once it has seen 20; `null` never stops it."""
    overlong: Annotated[Literal["train", "mask", "penalise"], UnusedBy("eval")] = "train"
    """Episodes cut by a limit: trained with their reward, kept out of the loss, or trained with less reward."""
    overlong_penalty: Annotated[float, Field(gt=0), OnlyWhen("overlong", "penalise"), UnusedBy("eval")] = 0.5
    """Subtracted from the reward of such an episode; logged as the reward `overlong`."""
    refill_zero_signal: Annotated[Count, UnusedBy("eval")] = 0
    """Maximum number of zero-variance groups per step that are replaced by new ones."""
    group_filter: Annotated[str | None, NamesCode("function"), UnusedBy("eval"), Advanced()] = None
    """A function of your own that returns False for groups that must not train, `module:function` or
    `path/to/file.py:function`: `refill_zero_signal` replaces them, too. See docs/rollouts.md."""
    env_shares: Annotated[Literal["fixed", "solve_rate"], OnlyWith("envs"), UnusedBy("eval")] = "fixed"
    """Keep the shares of the envs, or weigh them by recent solve rates: an env solved half the time has its full
    weight, one that is always or never solved a tenth of it."""
    infra_retries: Annotated[Count, OnResume("free"), Advanced()] = 2
    """Retries per episode after infrastructure failures before the run stops."""
    redrawn_stop_above: Annotated[Fraction | None, OnResume("free"), Advanced()] = 0.1
    """Stop the run if infrastructure failures exceed this fraction of the last 1,000 episodes, once there are 20
    of them: training would be biased toward the survivors. `null` never stops it."""
    faults_stop_above: Annotated[Fraction | None, OnResume("free"), Advanced()] = 0.5
    """Stop the run if the same reward (or the env itself) raised in more than this fraction of the last 1,000
    episodes, once there are 20 of them; below it, such a reward counts as 0. `null` never stops it."""
    max_staleness: Annotated[Count, UnusedBy("eval")] = 0
    """Maximum staleness of an episode's weights in optimizer steps: 0 is synchronous, 1 samples one step ahead,
    more is asynchronous. A group starts only if the bound can be met; no group is dropped for it."""
    groups_ahead: Annotated[Count | None, NeverWhen("max_staleness", 0), UnusedBy("eval"), Advanced()] = None
    """Maximum groups in flight beyond those of the next step; by default those of `max_staleness` steps. Fewer
    means fresher data; quick groups may train before slow ones (over-sampling), and the rest train later."""
    workers: Annotated[Count, NeverWith("agent"), OnResume("free"), UnusedBy("eval")] = 0
    """Ray actors that run episodes, so that tokenization, tools and rewards use several cores; 0 runs them in the
    training process. An actor that dies is replaced and its episodes are replayed."""
    note_after_s: Annotated[float, Field(gt=0), OnResume("free"), UnusedBy("eval"), Advanced()] = 120.0
    """How long a step waits for episodes before a warning names the oldest one and what it is waiting for."""

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


OptimizerState = Literal["float32", "bfloat16", "int8"]


class OptimConfig(Section):
    """AdamW."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: Annotated[tuple[_Decay, _Decay], Advanced()] = (0.9, 0.99)
    """Decay rates of the first and second moments."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    warmup_steps: Annotated[Count, NeverWith("warmup_ratio")] = 5
    """Steps of linear learning-rate warmup."""
    warmup_ratio: Fraction | None = None
    """Warmup as a fraction of all steps, rounded down; an alternative to `warmup_steps`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warmup (linear and cosine decay to a tenth at the last step)."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Maximum gradient norm; larger gradients are scaled down."""
    state: Annotated[OptimizerState, Advanced()] = "float32"
    """How AdamW keeps its two moments, of the critic as well: 8, 4 or 2 bytes per trained parameter in all. With
    fewer bytes, updates differ a little (docs/distributed.md, "Optimizer state")."""

    def warmup_of(self, steps: int) -> int:
        """Warmup steps of a run with this many steps."""
        return self.warmup_steps if self.warmup_ratio is None else int(self.warmup_ratio * steps)


class LoRAConfig(Section):
    """Train low-rank adapters (LoRA) on frozen weights; the reference is the policy without them."""

    rank: Positive = 16
    """Rank of the adapter matrices."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter's output is scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Target layers by name suffix (`q_proj`), or all linear layers of the blocks except routers."""
    adapter: Annotated[str | None, PathTo("folder", hub=True)] = None
    """Folder of a LoRA adapter in peft format to continue from; its base, `model.path`, is the reference. Its
    rank, alpha and scale must match these settings. Other kinds of adapters (DoRA, biases, whole modules, ...)
    are rejected."""

    @model_validator(mode="after")
    def _has_targets(self) -> Self:
        if not self.targets:
            raise ValueError("learner.lora.targets is empty: name linear layers (`q_proj`), or write `all-linear`")
        return self

    @property
    def plain_alpha(self) -> float:
        """The alpha that gives the same scale as alpha / rank."""
        return self.alpha * math.sqrt(self.rank) if self.rslora else self.alpha


class LearnerConfig(Section):
    """How the update is computed."""

    device: Annotated[Device, OnResume("free")] = "auto"
    """`cpu`, `cuda`, `cuda:N`, or `auto`: CUDA if there is one; for ranks on Ray not `cuda:N`."""
    tokens_per_micro_batch: Annotated[Positive, OnResume("free")] = 16384
    """Token budget of one forward and backward pass per rank; gradients accumulate over as many passes as
    needed."""
    logits_at_once: Annotated[Count, OnResume("free"), Advanced()] = 1024
    """Tokens per chunk of logits, so that memory does not grow with vocabulary times batch; 0: all at once."""
    ranks: Annotated[Positive, OnResume("free")] = 1
    """1 trains in this process; more start Ray workers, one per GPU (or CPU), each with a shard of the model."""
    sequence_ranks: Annotated[Positive, OnResume("free"), Advanced()] = 1
    """Sequence parallelism: this many ranks compute each row together, for rows longer than one rank can take. A
    micro-batch then has this many times `tokens_per_micro_batch` tokens. It must divide `ranks`, and
    `reference_ranks` and `critic.ranks` where they are set."""
    reference_ranks: Annotated[Count, OnResume("free"), NeverWhen("algorithm.kl.coef", 0), Advanced()] = 0
    """Number of dedicated Ray workers for the reference or the teacher, each with one shard; 0 runs it on the
    policy's ranks. With dedicated ranks, the policy also runs on Ray, even with a single rank. Adapters need none:
    without a teacher, the reference is the policy without them."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Compute precision; parameters and accumulated gradients are always float32."""
    attention: Annotated[Literal["auto", "sdpa", "flex", "flash"], OnResume("free")] = "auto"
    """Attention implementation: PyTorch's `sdpa`, its `flex` attention (GPUs), or `flash` from the flash-attn
    package (GPUs, bfloat16). `auto` is `sdpa` on a CPU; on a GPU the first of `flash`, `flex` and `sdpa` that
    works."""
    checkpoint_activations: Annotated[bool, OnResume("free")] = False
    """Activation checkpointing: keep only the input of each block and recompute the rest in the backward pass.
    Less memory, more time."""
    offload_activations: Annotated[bool, OnResume("free"), NeverWhen("device", "cpu"), Advanced()] = False
    """Offload activations to host memory until the backward pass; for GPUs."""
    cpu_offload: Annotated[bool, OnResume("free"), NeverWhen("device", "cpu")] = False
    """Keep parameters, gradients and optimizer state in host memory and update them there; for GPUs."""
    replay_routes: Annotated[bool, Advanced()] = False
    """Routing replay, for models with experts, with the local engine or SGLang: when the update computes a token,
    its routers take the experts that the sampler's routers chose, weighted by their current scores."""
    lora: Annotated[LoRAConfig | None, OnResume("fixed")] = None
    """Train adapters instead of the whole model."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.attention in ("flex", "flash") and self.device == "cpu":
            raise ValueError(f"learner.attention {self.attention} needs a GPU: use auto, or change learner.device")
        if self.attention == "flash" and self.precision == "float32":
            raise ValueError(
                "learner.attention flash computes in bfloat16 only: set learner.precision to bfloat16"
            )
        for key in ("ranks", "reference_ranks"):
            check_sequence_ranks(self.sequence_ranks, f"learner.{key}", getattr(self, key))
        return self

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch, over all ranks that compute it together."""
        return self.tokens_per_micro_batch * self.sequence_ranks


class LogConfig(Section):
    """What the run folder records besides episodes and metrics."""

    tokens: Annotated[Literal["all", "sample", "none"], UnusedBy("eval", "serve")] = "all"
    """Record the learner's side of sampled tokens (log-probabilities, ratio, entropy, clipping): of all groups, of
    every eighth, or of none."""


class CheckpointConfig(Section):
    """When training state is saved."""

    every: Count = 20
    """Steps between checkpoints; the last step is always saved. 0 saves only the last."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""
    best: bool = True
    """Also keep the checkpoint with the best held-out score; `checkpoints/best` points at it."""
    background: Annotated[bool, Advanced()] = True
    """Write checkpoints in the background from a copy in host memory; otherwise the run waits for the write."""


class RolloutOfEnv(Section):
    """Settings of `rollout` that differ for the episodes of one env; null takes the run's."""

    group_size: Annotated[Annotated[int, Field(gt=0, le=65_536)] | None, UnusedBy("eval")] = None
    """Group size."""
    max_turns: Positive | None = None
    """Maximum completions per episode."""
    max_tokens: Positive | None = None
    """Maximum tokens per completion."""
    token_budget: Positive | None = None
    """Maximum tokens of the whole episode."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Wall-clock limit per episode."""
    refill_zero_signal: Annotated[Count | None, UnusedBy("eval")] = None
    """Maximum number of this env's zero-variance groups per step that are replaced."""


class AlgorithmOfEnv(Section):
    """Settings of `algorithm` that differ for one env; null takes the run's."""

    advantage: (
        Annotated[Named | OwnFunction, OneOf({name: entry.config for name, entry in ESTIMATORS.items()}, "grpo")]
        | None
    ) = None
    """The advantage estimator of its episodes."""
    kl_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the KL penalty (`algorithm.kl.coef`) on its tokens."""


class EnvOfMixture(EnvConfig):
    """One of several environments; the keys of `env`, and these."""

    share: Annotated[float, Field(gt=0, le=1e6), UnusedBy("eval")] = 1.0
    """Its share of the prompts, relative to the shares of the others."""
    data: DataConfig = DataConfig()
    """The env's tasks, in the same form as a run's `data`."""
    rollout: RolloutOfEnv = RolloutOfEnv()
    """Settings of `rollout` that differ for this env."""
    algorithm: Annotated[AlgorithmOfEnv, UnusedBy("eval")] = Field(default_factory=AlgorithmOfEnv)
    """Settings of `algorithm` that differ for this env."""
    teacher: Annotated[TeacherOfEnv | None, OnResume("fixed"), UnusedBy("eval"), Advanced()] = None
    """The env's teacher, on a server; by default the run's `teacher`."""
    eval: Annotated[EvalConfig | None, OnResume("free")] = None
    """Its evaluation: interval, number of tasks, attempts and sampling; by default the run's `eval`."""


class RunConfig(Section):
    """The configuration of a run: one YAML file."""

    _places: Places = PrivateAttr(default_factory=lambda: Places({}))

    name: Annotated[str, OnResume("free"), UnusedBy("eval")] = Field(
        default="", pattern=r"^[A-Za-z0-9._-]*$", max_length=200
    )
    """Name of the run folder under `runs/`; the YAML file's folder name when empty."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), OnResume("fixed"), UnusedBy("serve")] = 0
    """Seed for tasks, the initialization of a tiny model, sampling and data order."""
    steps: Annotated[Positive, OnResume("free"), UnusedBy("eval", "serve")] = 100
    """Steps of training: each samples `rollout.groups_per_step` groups and updates the policy."""
    env: Annotated[EnvConfig | None, UnusedBy("serve")]
    envs: Annotated[dict[str, EnvOfMixture], UnusedBy("serve")] = Field(default_factory=dict)
    """Several environments by name, each with its share of the prompts, instead of `env`."""
    agent: Annotated[AgentConfig | None, UnusedBy("serve")] = None
    model: Annotated[ModelConfig, OnResume("fixed"), UnusedBy("eval --base-url")]
    data: Annotated[DataConfig, UnusedBy("serve")] = DataConfig()
    warmup: Annotated[WarmupConfig | None, OnResume("fixed"), UnusedBy("eval", "serve")] = None
    rollout: Annotated[RolloutConfig, UnusedBy("serve")] = RolloutConfig()
    engine: Annotated[EngineConfig, UnusedBy("eval --base-url")] = EngineConfig()
    algorithm: Annotated[AlgorithmConfig, UnusedBy("eval", "serve")] = AlgorithmConfig()
    critic: Annotated[
        CriticConfig | None, OnlyWhenOrOwn("algorithm.advantage", "gae"), UnusedBy("eval", "serve")
    ] = None
    reward_model: Annotated[RewardModelConfig | None, UnusedBy("eval", "serve")] = None
    teacher: Annotated[
        TeacherConfig | None, NeverWhen("algorithm.kl.coef", 0), UnusedBy("eval", "serve"), OnResume("fixed")
    ] = None
    optim: Annotated[OptimConfig, UnusedBy("eval", "serve")] = OptimConfig()
    learner: Annotated[LearnerConfig, UnusedBy("eval", "serve")] = LearnerConfig()
    eval: Annotated[EvalConfig, OnResume("free"), UnusedBy("serve")] = EvalConfig()
    ray: Annotated[str | None, OnResume("free")] = None
    """Address of the run's Ray cluster (`10.0.0.1:6379`), or `auto` for the cluster this machine is part of; by
    default, a cluster is started on this machine if something needs one. Other keys choose what runs there: the
    learner by `learner.ranks`, `learner.reference_ranks` and `critic.ranks`, episodes by `rollout.workers`, the
    reward model by `reward_model.workers`, servers by `engine.server.launch: ray`."""
    checkpoint: Annotated[CheckpointConfig, OnResume("free"), UnusedBy("eval", "serve")] = CheckpointConfig()
    log: Annotated[LogConfig, OnResume("free")] = LogConfig()
    loggers: Annotated[list[LoggerConfig], OnResume("free"), UnusedBy("eval", "serve"), Advanced()] = Field(
        default_factory=list
    )
    """Where metrics go besides the run folder: `tensorboard`, `wandb`, `mlflow`, `trackio` or `module:Name`, each
    alone or as a section with `use` (docs/loggers.md)."""

    @model_validator(mode="before")
    @classmethod
    def _env_shorthand(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        data = data | {key: {"use": data[key]} for key in ("env", "warmup") if isinstance(data.get(key), str)}
        if isinstance(several := data.get("envs"), dict):
            data = data | {"envs": {k: {"use": v} if isinstance(v, str) else v for k, v in several.items()}}
        return {"env": None} | data if "envs" in data else data

    @model_validator(mode="before")
    @classmethod
    def _critic_of_gae(cls, data: Any) -> object:
        """Give `advantage: gae` a critic with defaults if the user configured none."""
        algorithm = data.get("algorithm") if isinstance(data, dict) else None
        advantage = (
            algorithm.get("advantage") if isinstance(algorithm, dict) else getattr(algorithm, "advantage", None)
        )
        choice = choice_of(AlgorithmConfig.model_fields["advantage"])
        assert choice is not None
        with_critic = choice.kind_of(advantage) == "gae" and data.get("critic") is None
        return data | {"critic": {}} if with_critic else data

    @model_validator(mode="after")
    def _sections_agree(self, info: ValidationInfo) -> Self:
        check_sections(self, trains=(info.context or {}).get("trains", True))
        return self

    @property
    def sole_env(self) -> EnvConfig:
        """The env of a run with one, or of one env's view of a run."""
        assert self.env is not None, "a run of several envs is seen through `by_env`"
        return self.env

    @property
    def places(self) -> Places:
        """Where its keys were written; nowhere if it was not read from a file."""
        return self._places

    def written_at(self, places: Places) -> None:
        """Remember where the keys were written."""
        self._places = places

    @property
    def env_names(self) -> str:
        """The classes of the env or envs, for people."""
        return ", ".join(view.sole_env.shown for view in self.by_env.values())

    @property
    def episodes_per_step(self) -> int:
        """Episodes of a step; with several envs, of an average one."""
        groups = self.rollout.groups_per_step
        if not self.envs:
            return groups * self.rollout.group_size
        size = {name: view.rollout.group_size for name, view in self.by_env.items()}
        total = sum(env.share for env in self.envs.values())
        return round(sum(groups * size[name] * env.share / total for name, env in self.envs.items()))

    @property
    def by_env(self) -> dict[str, RunConfig]:
        """The run as the episodes of each env see it; with one env, the run itself under ''."""
        return {name: _view(self, name, each) for name, each in self.envs.items()} or {"": self}

    @property
    def decided_algorithm(self) -> AlgorithmConfig:
        """`algorithm` with what is `auto` resolved."""
        algorithm, servers = self.algorithm.decided(self.rollout.max_staleness), self.teachers_on_servers
        if not (self.teacher or servers) or algorithm.kl.kind != "auto" or not algorithm.kl.in_loss:
            return algorithm
        here = not servers and not self.learner.reference_ranks
        kl = algorithm.kl.model_copy(update={"kind": "full" if here else "centered"})
        return algorithm.model_copy(update={"kl": kl})

    @property
    def teachers_on_servers(self) -> dict[str, TeacherConfig]:
        """The teacher of each env that one on a server trains; with one env, under ''."""
        weighted = {name: view.teacher for name, view in self.by_env.items() if view.algorithm.kl.coef > 0}
        return {name: teacher for name, teacher in weighted.items() if teacher is not None and teacher.url}

    @property
    def asks_hints(self) -> bool:
        """Whether the env (of one env, see `by_env`) is asked for the hints of training episodes."""
        return self.teacher is not None and self.teacher.asks_env and self.algorithm.kl.coef > 0

    @property
    def learner_on_ray(self) -> bool:
        """Whether the policy is trained on Ray: it has several ranks, or another model has dedicated ranks."""
        apart = self.learner.reference_ranks + (0 if self.critic is None else self.critic.ranks)
        return self.learner.ranks > 1 or apart > 0

    @property
    def uses_ray(self) -> bool:
        """Whether anything runs on Ray."""
        scorers = 0 if self.reward_model is None else self.reward_model.workers
        servers = self.engine.server.launch == "ray"
        return self.learner_on_ray or self.rollout.workers > 0 or scorers > 0 or servers


def _view(config: RunConfig, name: str, env: EnvOfMixture) -> RunConfig:
    """The run as if it had only this env."""
    sole = EnvConfig.model_validate({key: getattr(env, key) for key in EnvConfig.model_fields})
    own = env.algorithm
    algorithm: dict[str, object] = {} if own.advantage is None else {"advantage": own.advantage}
    if own.kl_coef is not None:
        algorithm["kl"] = config.algorithm.kl.model_copy(update={"coef": own.kl_coef})
    rollout = {key: value for key, value in env.rollout if value is not None}
    return config.model_copy(
        update={
            "env": sole,
            "envs": {},
            "data": env.data,
            "rollout": config.rollout.model_copy(update=rollout),
            "algorithm": config.algorithm.model_copy(update=algorithm),
            "teacher": config.teacher if env.teacher is None else env.teacher.at(f"envs.{name}.teacher"),
            "eval": config.eval if env.eval is None else env.eval,
        }
    )
