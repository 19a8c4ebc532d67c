"""One rank of the policy: packs rows, computes the loss, steps the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algo.correction import LogprobDrift, merge_drift
from agentrl.algo.metrics import Metric, Metrics, merge_metrics, to_host
from agentrl.config.run import LearnerConfig, LoRAConfig
from agentrl.errors import AgentRLError, CheckpointError, ConfigError
from agentrl.learner.apart import models_apart
from agentrl.learner.critic import CRITIC_FOLDER, Critic
from agentrl.learner.lanes import Backward, Lanes, num_lanes
from agentrl.learner.layer_clock import LayerClock
from agentrl.learner.learner import Learner
from agentrl.learner.logprobs import TokenStats, Wanted, know_head, token_stats
from agentrl.learner.lora import (
    ADAPTER_FOLDER,
    adapter_state,
    adapters_off,
    add_adapter,
    merged_weights,
    write_adapter,
)
from agentrl.learner.micro_batch import annotated, lr_factor, packed_rows, recorded, saving, working_dtype
from agentrl.learner.optimizer import make_optimizer
from agentrl.learner.pack import Packed, as_taught
from agentrl.learner.policy_loss import Frozen, Loss, make_policy_loss, policy_loss
from agentrl.learner.policy_model import checkpoint_activations, empty_policy, load_policy
from agentrl.learner.rank import InProcess, LearnerSpec, Note
from agentrl.learner.routing_replay import check_replay, route_metrics
from agentrl.learner.sequence_check import check_sequence
from agentrl.learner.shard import World, all_finite, check_offload, whole
from agentrl.learner.split import Columns, MicroBatches, RankResult, Rows, TokenValues
from agentrl.learner.state import (
    AVERAGE_FOLDER,
    TrainingState,
    copied,
    copy_state,
    move_toward,
    restore_optimizer,
    whole_weights,
)
from agentrl.learner.teacher_server import asked_teacher
from agentrl.models.device import pick_device, use_device
from agentrl.models.routers import RouteReplay


class LocalPolicyRank:
    """One rank of the policy in this process, with its optimizer: a `PolicyRank`.

    It also holds the reference and the critic, unless they have ranks to themselves.
    """

    def __init__(self, spec: LearnerSpec, world: World | None = None) -> None:
        self.algorithm, self.config = spec.algorithm, spec.config
        self.optim_config, self.temperature, self.total_steps = spec.optim, spec.temperature, spec.total_steps
        self.policy_loss = make_policy_loss(spec.algorithm)
        self.device = pick_device(spec.config.device)
        use_device(self.device)
        self.world = world or _own_world(spec.config, self.device)
        try:
            self._make(spec)
        except BaseException:
            self.world.leave()
            raise
        self.steps_done = 0
        self.first_step = 0 if spec.critic is None else spec.critic.warmup_steps
        """The step at which the policy begins to learn."""
        self._states: dict[str, TrainingState] = {}
        self._adapter: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}

    def _make(self, spec: LearnerSpec) -> None:
        """Load the models and make their optimizers."""
        optim, config = spec.optim, spec.config
        self.policy = self._load_policy(spec.policy_dir, spec.reference_dir)
        where = f"model directory {spec.policy_dir}"
        check_sequence(self.policy, self.world.sequence, where)
        if config.replay_routes and models_apart([self.policy]):
            raise ConfigError(
                f"learner.replay_routes: {type(self.policy).__name__} computes each row apart, and routes are "
                "replayed on packed rows only; remove it"
            )
        self.replay = RouteReplay(self.policy, where) if config.replay_routes else None
        check_replay(self.policy, self.replay, self.world.sequence)
        if config.checkpoint_activations:
            checkpoint_activations(self.policy)
        self.reference: PreTrainedModel | None = None
        self._adapters_off, self._average_rate = spec.adapters_off, spec.average_rate
        if self._adapters_off or spec.teaches_itself:
            self.reference = self.policy
        elif (frozen := spec.frozen_dir) is not None:
            self.reference = self._load(frozen).requires_grad_(False)
            if spec.teacher is not None:  # another architecture, perhaps
                check_sequence(self.reference, self.world.sequence, f"teacher {frozen}")
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(trained, optim, optim.lr)
        has_critic = spec.critic is not None and spec.critic_dir is not None
        self.critic = Critic(spec, self.world) if has_critic else None
        held = (self.policy, self.reference, None if self.critic is None else self.critic.model)
        self.rows_apart = models_apart([model for model in held if model is not None])
        self._know_heads()
        self._lanes = Lanes(trained, num_lanes(self.policy, self.world, config))
        self._clock = LayerClock(self.policy, self.device) if self.world.size > 1 else None

    def annotate(self, batches: Sequence[Rows], names: frozenset[str]) -> list[Columns]:
        """The named columns of this rank's rows, under the models before the first update."""

        def evaluate(packed: Packed) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            if names & {"learner_logprobs", "entropy", "sum_pi_squared"}:
                with self._replaying(packed):
                    stats = self._stats(self.policy, packed, names & {"entropy", "sum_pi_squared"})
                found = {"learner_logprobs": stats.logprobs_N}
                found |= {} if stats.entropy_N is None else {"entropy": stats.entropy_N}
                found |= {} if stats.sum_pi_squared_N is None else {"sum_pi_squared": stats.sum_pi_squared_N}
            if "ref_logprobs" in names and self.reference is not None:
                with self._as_reference():
                    found["ref_logprobs"] = self._stats(self.reference, packed).logprobs_N
            if "values" in names and self.critic is not None:
                found["values"] = self.critic.values(packed)
            return found

        return annotated(batches, self.device, self._dtype, evaluate, self.world.sequence)

    def update(self, work: Sequence[MicroBatches], critic_work: Sequence[MicroBatches] = ()) -> RankResult:
        """This rank's part of a step; every rank is at work at the same time.

        Args:
            critic_work: for the critic, if it shares the policy's ranks.

        Raises:
            AgentRLError: the gradient is not finite.
        """

        def train(of: MicroBatches, first: bool, rows: Rows, backward: Backward) -> Loss:
            packed = packed_rows(rows, of.columns, self.device, self._dtype, self.world.sequence)
            with self._replaying(packed):  # in the backward pass too, which may compute blocks again
                frozen, at_Nk = self._frozen(rows, packed)
                with saving(self.config):
                    stats, observed_O = self._trained(packed, at_Nk)
                    routes = route_metrics(self.replay, packed) if first else {}
                    loss = policy_loss(
                        self.policy_loss,
                        packed,
                        stats,
                        of.totals,
                        frozen=frozen,
                        observed_O=observed_O,
                        kl_coef=of.kl_coef,
                        first_update=first,
                        record=of.record and bool(rows),
                    )
                backward(loss.value)
            return loss._replace(value=loss.value.detach(), metrics=loss.metrics | routes)

        self._set_lr()
        if self._clock is not None:
            self._clock.reset()
        values = {} if self.critic is None else self.critic.update(critic_work)
        updates: list[Metrics] = []
        drifts: list[LogprobDrift] = []
        seen: list[list[TokenValues]] = []
        for number, micro_batches in enumerate(work if self.steps_done >= self.first_step else ()):
            found = [
                pair
                for rows in micro_batches.rows  # their gradients add up to that of the whole batch
                for pair in self._lanes.run(rows, partial(train, micro_batches, number == 0))
            ]
            losses = [loss for _, loss in found]
            norm = self._optimizer_step(
                f"step {self.steps_done + 1}",
                f"lower optim.lr ({self.optim_config.lr:g}), or rewards and coefficients, if they are large",
            )
            metrics = to_host(merge_metrics([loss.metrics for loss in losses]))
            updates.append(metrics | {"grad_norm": Metric("max", norm)})
            drifts.append(merge_drift([loss.drift for loss in losses]))
            if micro_batches.record:
                seen.append(recorded(micro_batches.rows, [(rows, loss.tokens) for rows, loss in found if rows]))
        self.steps_done += 1
        if self._average_rate and self.reference is not None:
            move_toward(self.reference, self.policy, self._average_rate)
        return RankResult(
            merge_metrics([*updates, values]),
            merge_drift(drifts),
            max((float(metrics["grad_norm"].value) for metrics in updates), default=0.0),
            self.optimizer.param_groups[0]["lr"],
            updates,
            seen,
            0.0 if self._clock is None else self._clock.seconds(),
        )

    def _know_heads(self) -> None:
        """Find out at once, on all ranks, whether the models' logits are the outputs of their output layers."""
        if self.config.logits_at_once:
            for model in (self.policy, self.reference):
                if model is not None:
                    know_head(model, self.device, self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the computation on the models' outputs."""
        return working_dtype(self.policy)

    def _stats(
        self,
        model: PreTrainedModel,
        packed: Packed,
        wanted: Wanted = frozenset(),
        *,
        at_Nk: Tensor | None = None,
        likeliest: int = 0,
    ) -> TokenStats:
        return token_stats(
            model,
            packed,
            temperature=self.temperature,
            chunk=self.config.logits_at_once,
            wanted=wanted,
            entropy_gradient=self.algorithm.entropy_coef > 0,
            at_Nk=at_Nk,
            likeliest=likeliest,
            vocabulary=_vocabulary(self.policy),
        )

    def _trained(self, packed: Packed, at_Nk: Tensor | None) -> tuple[TokenStats, Tensor | None]:
        """Statistics of the trained tokens under the policy and, if they have a loss, the log-probabilities of the
        observed ones, from one forward pass."""
        wanted = frozenset({"entropy"})
        if self.algorithm.observation_coef == 0:
            return self._stats(self.policy, packed, wanted, at_Nk=at_Nk), None
        count, both = len(packed.ids_N), packed.with_observed()
        if at_Nk is not None:  # no others are compared there
            at_Nk = torch.cat([at_Nk, both.ids_N[count:, None].expand(-1, at_Nk.shape[1])])
        stats = self._stats(self.policy, both, wanted, at_Nk=at_Nk)
        return stats.first(count), stats.logprobs_N[count:]

    def _frozen(self, rows: Rows, packed: Packed) -> tuple[Frozen | None, Tensor | None]:
        """Log-probabilities under the reference or teacher if the loss has a KL penalty, and the [N, k] ids to
        compare if it is over whole distributions; None otherwise."""
        kl = self.algorithm.kl
        if not kl.in_loss:
            return None, None
        whole = kl.loss_kind == "full"
        if "ref_logprobs" in packed.columns and not whole:
            return Frozen(packed.columns["ref_logprobs"]), None
        if self.reference is None:
            return None, None
        if any(row.hinted is not None for row in rows):  # the same trained tokens, in the same order
            taught = tuple(map(as_taught, rows))
            packed = packed_rows(taught, (), self.device, self._dtype, self.world.sequence)
        sizes = _vocabulary(self.policy), _vocabulary(self.reference)
        with torch.no_grad(), self._as_reference():
            found = self._stats(self.reference, packed, likeliest=(kl.top or max(sizes)) if whole else 0)
        if found.likeliest is None:
            return Frozen(found.logprobs_N), None
        ids_Nk, likeliest_Nk = found.likeliest
        return Frozen(found.logprobs_N, likeliest_Nk, rest=ids_Nk.shape[1] < max(sizes)), ids_Nk

    def _replaying(self, packed: Packed) -> AbstractContextManager[None]:
        """Where the policy takes the sampler's experts."""
        return nullcontext() if self.replay is None else self.replay.replaying(packed.part().routes_TLk)

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """Where adapters are trained and no teacher is set, the reference is the policy without them. Its routers
        choose themselves."""
        own = nullcontext() if self.replay is None else self.replay.replaying(None)
        with own, adapters_off(self.policy) if self._adapters_off else nullcontext():
            yield

    def imitate(self, batches: Sequence[Rows], total: int, lr: float) -> float:
        """This rank's part of a supervised step on `total` trained tokens; returns its part of the loss.

        Raises:
            AgentRLError: the gradient is not finite.
        """

        def train(rows: Rows, backward: Backward) -> float:
            packed = packed_rows(rows, (), self.device, self._dtype, self.world.sequence)
            stats = token_stats(self.policy, packed, chunk=self.config.logits_at_once)
            loss = -stats.logprobs_N.sum() / total
            backward(loss)
            return float(loss.detach())

        value = sum(loss for rows in batches for _, loss in self._lanes.run(rows, train))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._optimizer_step("warm-up", "lower warmup.lr")
        return value

    def _optimizer_step(self, when: str, advice: str) -> float:
        """One optimizer update with the clipped gradient; returns its norm before clipping.

        Raises:
            AgentRLError: the gradient is not finite, and the policy unchanged; or the update is not finite.
        """
        norm = float(
            whole(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.optim_config.max_grad_norm))
        )
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(norm):
            raise AgentRLError(f"{when}: the gradient is {norm}; {advice}")
        if not all_finite(self.policy.parameters()):
            raise AgentRLError(f"{when}: the update made weights that are not finite; {advice}")
        return norm

    def weights(self) -> dict[str, Tensor]:
        """Parameters by their Hugging Face names, views if there is one rank; {} but on rank 0."""
        if self.world.mesh is None and self.config.lora is None:
            return {name: value.detach() for name, value in self.policy.state_dict().items()}
        return self._whole()

    def adapter(self) -> dict[str, Tensor]:
        """The adapter alone; {} but on rank 0."""
        state = adapter_state(self.policy)
        return state if self.world.rank == 0 else {}

    def _whole(self) -> dict[str, Tensor]:
        """The policy without shards and adapters; {} but on rank 0."""
        return (merged_weights if self.config.lora else whole_weights)(self.policy, self.world)

    def probe(self, batches: Sequence[Rows]) -> list[Columns]:
        """This rank's part of a probe: `logprobs` (temperature 1) of its rows."""

        def evaluate(packed: Packed) -> dict[str, Tensor]:
            return {"logprobs": token_stats(self.policy, packed, chunk=self.config.logits_at_once).logprobs_N}

        return annotated(batches, self.device, self._dtype, evaluate, self.world.sequence)

    def snapshot(self, note: Note) -> None:
        """Copy this rank's part of a checkpoint, for `write`."""
        weights = self._whole()
        note = {**note, "steps_done": self.steps_done}
        self._adapter = adapter_state(self.policy) if self.config.lora else {}
        self._states = {"": copy_state(self.policy, weights, self.optimizer, self.world, note)}
        if self.critic is not None:
            self._states[CRITIC_FOLDER] = self.critic.state(note)
        if self._average_rate and self.reference is not None:
            self._average = copied(whole_weights(self.reference, self.world))

    def _write_adapter(self, directory: Path) -> None:
        if self.config.lora is not None and self.world.rank == 0:
            write_adapter(directory / ADAPTER_FOLDER, self._adapter, self.config.lora, self.policy)

    def write(self, directory: Path) -> None:
        """Write what `snapshot` copied, and forget it."""
        self._write_adapter(directory)
        for name, state in self._states.items():
            (directory / name).mkdir(exist_ok=True)
            state.write(directory / name)
        self._states = {}
        if self._average:  # on rank 0
            self.policy.save_pretrained(directory / AVERAGE_FOLDER, state_dict=self._average)
            self._average = {}

    def load(self, directory: Path) -> Note:
        """Restore this rank's part of a checkpoint; returns its note.

        Raises:
            CheckpointError: the files are missing or belong to another model.
        """
        note = restore_optimizer(self.policy, self.optimizer, directory, self.world)
        try:
            self.steps_done = int(note["steps_done"])
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"checkpoint {directory} cannot be resumed: {e}") from e
        if self.critic is not None:
            self.critic.restore(directory / CRITIC_FOLDER)
        return note

    def export(self, directory: Path) -> None:
        """Write the policy as a Hugging Face model; rank 0 writes."""
        weights = self._whole()
        if self.world.rank == 0:
            self.policy.save_pretrained(directory, state_dict=weights)

    def close(self) -> None:
        """Leave the other ranks; idempotent."""
        self._lanes.close()
        self.world.leave()

    def _load_policy(self, directory: Path, start: Path | None) -> PreTrainedModel:
        """The policy; with adapters it is the one that training began with, and those of a checkpoint."""
        lora = self.config.lora
        if lora is None:
            return self._load(directory)
        saved = directory / ADAPTER_FOLDER
        given = None if lora.adapter is None else Path(lora.adapter)
        return self._load(start or directory, lora, saved if saved.is_dir() else given)

    def _load(
        self, directory: Path, lora: LoRAConfig | None = None, adapter: Path | None = None
    ) -> PreTrainedModel:
        def make(values: bool) -> PreTrainedModel:
            model = load_policy(directory, torch.device("cpu")) if values else empty_policy(directory)
            return model if lora is None else add_adapter(model, lora, adapter, values=values)

        return self.world.place(make, self.config, self.device)

    def _set_lr(self) -> None:
        """Set the learning rate of this step, the same for all of its updates."""
        factor = lr_factor(self.optim_config, self.steps_done, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.optim_config.lr * factor


def _vocabulary(model: PreTrainedModel) -> int:
    """The number of ids that the model's logits are of."""
    return int(model.config.get_text_config().vocab_size)


def local_learner(spec: LearnerSpec) -> Learner:
    """A learner of one rank in this process, which also holds reference (unless it is on a server) and critic."""
    rank = LocalPolicyRank(spec)
    return Learner(
        spec, InProcess(rank, rank), reference=asked_teacher(spec), begin=partial(use_device, rank.device)
    )


def _own_world(config: LearnerConfig, device: torch.device) -> World:
    """One rank; sharded alone if it computes in another precision than it stores, or offloads."""
    check_offload(config, device.type)
    return World.alone(device) if config.precision != "float32" or config.cpu_offload else World()
