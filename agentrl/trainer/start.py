"""The initial policy for RL training: loaded or created, with an optional cold start."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from agentrl.config.run import RunConfig, WarmupConfig
from agentrl.config.teacher import TeacherConfig
from agentrl.env.solved import NOT_DECLARED, undeclared
from agentrl.errors import ConfigError
from agentrl.learner.critic import CRITIC_FOLDER
from agentrl.learner.learner import Learner
from agentrl.learner.policy_rank import local_learner
from agentrl.learner.rank import LearnerSpec
from agentrl.learner.ray_learner import ray_learner
from agentrl.learner.state import AVERAGE_FOLDER
from agentrl.models.tiny import make_tiny_model
from agentrl.reporting.report import Reporter
from agentrl.rollout.build import make_engine, make_player
from agentrl.rollout.collect import collect
from agentrl.rollout.content import Content, corpus, require_solved
from agentrl.rollout.episode_metrics import passed
from agentrl.rollout.prompts import fitting
from agentrl.rollout.renderer import load_renderer, require_template
from agentrl.rollout.task_tools import task_tools
from agentrl.run_folder.files import file_error, share_weights
from agentrl.run_folder.fork import OF_THE_RUN
from agentrl.trainer.in_step import counting, starting_engine
from agentrl.trainer.signals import StoppedEarly, unless_stopped
from agentrl.trainer.teacher_check import model_sizes
from agentrl.trainer.warmup import cold_start, demonstration_samples, not_offered, too_long_to_sample
from agentrl.types import Sample


def start_directory(config: RunConfig, run: Path) -> Path:
    """The folder of the initial policy: in the run folder if the run creates it, else the model's."""
    if config.model.tiny is not None or config.warmup is not None:
        return run / "start"
    return Path(config.model.path or "")


async def make_start(
    config: RunConfig, content: Content, run: Path, *, reporter: Reporter, stopping: Callable[[], bool]
) -> Path | None:
    """Create the initial policy unless it exists; the write is atomic.

    Returns:
        Its directory: a Hugging Face model with its tokenizer; None if the run was asked to stop in the meantime.
    """
    start = start_directory(config, run)
    if start.is_dir():
        return start
    base, aside = run / ".start.base", run / ".start.making"
    for leftover in (base, aside):
        shutil.rmtree(leftover, ignore_errors=True)
    if config.model.tiny is not None:
        try:
            teacher = None if config.teacher is None else config.teacher.path
            given = None if teacher is None else Path(teacher)  # a policy that learns from it needs its tokenizer
            make_tiny_model(base, corpus(content), config.model.tiny, seed=config.seed, tokenizer_of=given)
            share_weights(base)
        except Exception as e:  # tokenizers raises nothing more specific
            if (found := file_error(e, base)) is not e:
                raise found from e
            raise
        source = base
    else:
        source = Path(config.model.path or "")
        if not source.is_dir():
            raise ConfigError(f"model.path {source}: no such directory; give the folder of a Hugging Face model")
    if config.warmup is None:
        source.rename(start)
        return start
    try:
        await _cold_start(config, config.warmup, content, source, aside, reporter, stopping)
    except StoppedEarly:
        return None
    if stopping():
        return None
    aside.rename(start)
    shutil.rmtree(base, ignore_errors=True)
    return start


async def _cold_start(
    config: RunConfig,
    warmup: WarmupConfig,
    content: Content,
    source: Path,
    target: Path,
    reporter: Reporter,
    stopping: Callable[[], bool],
) -> None:
    """Train the policy in `source` on the demonstrations and write it to `target`."""
    require_solved(content, "warmup.until_pass")
    renderer, (_, context) = load_renderer(config, source), model_sizes(source)
    samples: list[Sample] = []
    for name, part in content.by_env.items():
        tools = await task_tools(part.make_env, part.train_tasks)
        require_template(renderer, tools)
        lengths: list[int] = []
        samples += demonstration_samples(
            renderer,
            part.demonstrations,
            tools,
            env=name,
            longest=lengths.append,
            room=config.learner.micro_batch_tokens,
            context=context,
        )
        rollout = config.by_env[name].rollout
        for said in (too_long_to_sample(lengths, rollout), not_offered(part.demonstrations, tools)):
            if said:
                reporter.note(f"envs.{name}: {said}" if name else said)
    learner = await make_learner(config, source, None)
    await make_room(config, learner)
    reporter.within(starting_engine(config))
    engine = await unless_stopped(stopping, make_engine(config, source, trains=True))

    async def probe() -> float:
        """The share of probed tasks that is solved; with several envs, that of the env with the lowest."""
        await engine.update_weights(await sent_weights(config, learner), version=0)
        shares = [await probe_env(name, view) for name, view in config.by_env.items()]
        return min(shares)

    async def probe_env(name: str, view: RunConfig) -> float:
        part, samples = fitted.by_env[name], warmup.probe_samples
        tasks = part.train_tasks[: warmup.probe_tasks]
        player = make_player(view, engine, renderer, part.make_env, temperature=view.rollout.temperature)
        groups = await collect(
            player,
            tasks,
            group_size=samples,
            label=f"probe/{name}" if name else "probe",
            seed=config.seed,
            infra_retries=config.rollout.infra_retries,
            on_episode=counting(reporter, "probe", len(tasks) * samples),
        )
        if undeclared(groups):
            raise ConfigError(f"warmup.until_pass has to know when an episode is solved: {NOT_DECLARED}")
        return passed(groups)

    try:
        # Before the first step, so that a prompt that is refused costs no time. The run says what is left out.
        fitted = await fitting(content, config, renderer, engine.max_context, None)
        await cold_start(learner, samples, warmup, probe, seed=config.seed, reporter=reporter, stopping=stopping)
        try:
            target.mkdir()
            await learner.export(target)
            share_weights(target)
        except (SafetensorError, OSError) as e:
            raise file_error(e, target) from e
    finally:
        await engine.close()
        await learner.close()
    copy_tokenizer(source, target)


async def make_learner(config: RunConfig, policy: Path, reference: Path | None) -> Learner:
    """The learner of the run, here or on Ray; without a reference directory it has no reference and no critic."""
    on_ray = config.learner.ranks > 1 or (reference is not None and config.learner_on_ray)
    critic = None if reference is None else config.critic  # the cold start needs none
    saved, average = policy / CRITIC_FOLDER, policy / AVERAGE_FOLDER
    critic_dir = saved if saved.is_dir() else Path((critic and critic.path) or policy)
    spec = LearnerSpec(
        policy,
        algorithm=config.decided_algorithm,
        optim=config.optim,
        config=config.learner,
        temperature=config.rollout.temperature,
        total_steps=config.steps,
        reference_dir=reference,
        teacher=None if reference is None else _absolute(config.teacher),
        servers={} if reference is None else config.teachers_on_servers,
        average_dir=average if policy != reference and average.is_dir() else None,  # of this run
        critic=critic,
        critic_dir=None if critic is None else critic_dir,
        seed=config.seed,
        ray=config.ray,
    )
    return await asyncio.to_thread(ray_learner if on_ray else local_learner, spec)


def _absolute(teacher: TeacherConfig | None) -> TeacherConfig | None:
    """The same with a path that holds in every process; None if it is on a server."""
    if teacher is None or teacher.path is None:
        return None if teacher is None or teacher.url is not None else teacher
    return teacher.model_copy(update={"path": str(Path(teacher.path).absolute())})


async def sent_weights(config: RunConfig, learner: Learner) -> dict[str, Tensor]:
    """What engines receive: the policy, or only its adapter with `engine.sync: lora`. Servers that sleep have room
    to wake up afterwards."""
    found = await (learner.adapter() if config.engine.sync == "lora" else learner.weights())
    await make_room(config, learner)
    return found


async def make_room(config: RunConfig, learner: Learner) -> None:
    """Where servers take turns with the learner on its GPUs: leave them the memory that it does not need now."""
    if config.engine.server.sleep:
        await learner.release()


_WEIGHTS = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".h5", ".msgpack", ".ot", ".gguf", ".onnx")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy missing files other than weights (tokenizer, template, generation config), without those of a run."""
    for file in source.iterdir():
        left_out = file.name.endswith(_WEIGHTS) or file.name in OF_THE_RUN
        if file.is_file() and not left_out and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name, dirs_exist_ok=True)
