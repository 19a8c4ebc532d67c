"""Checks across the sections of a run: settings that contradict each other, or would have no effect."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from agentrl.config.address import server_of
from agentrl.config.algorithm import ALONE, AlgorithmConfig, CriticConfig, KLConfig
from agentrl.config.choice import OwnFunction

if TYPE_CHECKING:
    from agentrl.algo.parameters import Named
    from agentrl.config.run import EnvOfMixture, LearnerConfig, OptimConfig, RunConfig
    from agentrl.config.teacher import TeacherConfig, TeacherOfEnv


def check_sections(config: RunConfig, *, trains: bool = True) -> None:
    """Check a whole configuration, or only what matters for playing and serving.

    Raises:
        ValueError: names the setting, and what to do.
    """
    _check_envs(config)
    _check_agent(config)
    _check_compact(config)
    for name, view in config.by_env.items():
        _check_room(view, name)
    _check_sampling(config)
    if trains:
        _check_training(config)


def _check_training(config: RunConfig) -> None:
    for name, env in config.envs.items():
        _check_overrides(config, name, env)
    _check_overridden(config)
    _check_models(config)
    _check_teacher(config)
    _check_teachers_of_envs(config)
    _check_hints(config)
    _check_observed(config)
    for name, view in config.by_env.items():
        try:
            view.algorithm.refuse_dead_keys()  # its advantage may be another than the run's
        except ValueError as e:
            raise ValueError(f"envs.{name}: {e}") from None
        _check_distilled(view, name)
        _check_group_size(view, name)
        _check_penalties(view, name)
    _check_unrewarded(config)
    _check_turns(config)
    _check_step(config)
    _check_places(config)
    _check_loggers(config)


def check_sequence_ranks(sequence: int, key: str, ranks: int) -> None:
    """Check that the ranks of a model can be divided into groups that compute rows together.

    Raises:
        ValueError: they cannot.
    """
    if ranks % sequence == 0:
        return
    multiple = -(-ranks // sequence) * sequence
    raise ValueError(
        f"learner.sequence_ranks is {sequence}: that many ranks compute each row together, and {key} is {ranks}, "
        f"not a multiple of it: set {key} to {multiple}, or change learner.sequence_ranks"
    )


def _check_envs(config: RunConfig) -> None:
    """One env, or several; what the envs of a mixture may set."""
    if config.env is None and not config.envs:
        raise ValueError("env is missing: name the environment (or several, under `envs`)")
    if config.env is not None and config.envs:
        raise ValueError("envs cannot be combined with `env`: give one of the two")
    if len(config.envs) == 1:
        raise ValueError("envs has only one environment: write it under `env`, or add another")
    for name, env in config.envs.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise ValueError(f"envs.{name!r}: a name has up to 64 letters, digits, '_' and '-'")
        own = env.algorithm.advantage
        if own is not None and "gae" in (own.name, config.algorithm.advantage.name):
            raise ValueError(
                f"envs.{name}.algorithm.advantage is {own.name}, and algorithm.advantage is "
                f"{config.algorithm.advantage.name}: the critic of gae learns from all episodes of a run, so gae "
                "cannot be chosen or replaced for a single env"
            )
    if config.envs and config.data != type(config.data)():
        raise ValueError("data has no effect with `envs`: write it under the env it belongs to (envs.NAME.data)")
    if config.envs and config.agent is not None:
        raise ValueError("agent plays the episodes of one env: use `env` instead of `envs`, or remove `agent`")
    if config.envs and config.warmup is not None and (config.warmup.demonstrations or config.warmup.options):
        raise ValueError(
            "warmup.demonstrations and warmup.options apply to a single env; with `envs`, each env writes its own "
            "demonstrations: remove them"
        )
    _check_eval_of_envs(config)


def _check_eval_of_envs(config: RunConfig) -> None:
    """Which settings of evaluation belong to the run, and which to an env."""
    if not config.envs:
        return
    own = all(env.eval is not None for env in config.envs.values())
    if own and set(config.eval.written) - {"background"}:
        raise ValueError("eval has no effect: every env under `envs` has its own `eval`; remove it")
    if config.eval.sets:
        raise ValueError("eval.sets holds tasks of one env: write it under that env (envs.NAME.eval.sets)")
    for name, env in config.envs.items():
        if env.eval is not None and "background" in env.eval.written:
            raise ValueError(f"envs.{name}.eval.background is a setting of the whole run: write eval.background")


def _check_overrides(config: RunConfig, name: str, env: EnvOfMixture) -> None:
    """An override that equals the run's setting does nothing."""
    for key, value in env.rollout:
        if value is not None and value == getattr(config.rollout, key):
            raise ValueError(
                f"envs.{name}.rollout.{key} has no effect: it equals rollout.{key} ({value}); remove it"
            )
    if env.algorithm.advantage is not None and env.algorithm.advantage == config.algorithm.advantage:
        raise ValueError(
            f"envs.{name}.algorithm.advantage has no effect: it equals algorithm.advantage; remove it"
        )
    if env.algorithm.kl_coef is not None:
        _check_kl_of_env(config.algorithm.kl, f"envs.{name}.algorithm.kl_coef", env.algorithm.kl_coef)


def _check_overridden(config: RunConfig) -> None:
    """Settings of the run that every env replaces do nothing."""
    envs = list(config.envs.values())
    if not envs:
        return
    for key in sorted(config.rollout.written & type(envs[0].rollout).model_fields.keys()):
        if all(getattr(env.rollout, key) is not None for env in envs):
            raise ValueError(f"rollout.{key} has no effect: every env under `envs` has its own; remove it")
    if "advantage" in config.algorithm.written and all(env.algorithm.advantage is not None for env in envs):
        raise ValueError("algorithm.advantage has no effect: every env under `envs` has its own; remove it")
    if config.algorithm.kl.coef and all(env.algorithm.kl_coef == 0 for env in envs):
        raise ValueError(
            "algorithm.kl.coef has no effect: kl_coef is 0 in every env under `envs`; remove kl_coef there and "
            "set algorithm.kl.coef to 0, so that no reference is loaded"
        )
    if "coef" in config.algorithm.kl.written and all(env.algorithm.kl_coef is not None for env in envs):
        raise ValueError("algorithm.kl.coef has no effect: every env under `envs` has its own kl_coef; remove it")


def _check_kl_of_env(kl: KLConfig, key: str, coef: float) -> None:
    if kl.coef == 0:
        raise ValueError(
            f"{key} has no effect while algorithm.kl.coef is 0 (the run has no reference): set that above 0, and "
            "kl_coef to 0 for the envs that are not to be penalized"
        )
    if coef == kl.coef:
        raise ValueError(f"{key} has no effect: it equals algorithm.kl.coef ({coef:g}); remove it")
    if kl.control == "adaptive":
        raise ValueError(f"{key} cannot be combined with algorithm.kl.control: adaptive, which changes the weight")


def _check_models(config: RunConfig) -> None:
    """Settings of models that the run does not use."""
    learner = config.learner
    if learner.lora is not None and learner.lora.adapter is not None and config.warmup is not None:
        raise ValueError(
            "learner.lora.adapter was trained on model.path, but warmup changes those weights first: remove one "
            "of the two"
        )
    if config.engine.sync == "lora" and learner.lora is None:
        raise ValueError("engine.sync lora sends the adapter alone, and there is none: set learner.lora")


def _check_teacher(config: RunConfig) -> None:
    """What a teacher needs, and what needs a teacher."""
    teacher, learner, servers = config.teacher, config.learner, config.teachers_on_servers
    tiny = config.model.tiny
    if teacher is not None and teacher.path is not None and tiny is not None and "vocab" in tiny.written:
        raise ValueError(
            "model.tiny.vocab has no effect with teacher.path, whose tokenizer the tiny model takes: remove it"
        )
    initial = not servers and (teacher is None or teacher.policy == "initial")
    named = "reference" if teacher is None else "teacher"
    if learner.reference_ranks and initial and learner.lora is not None:
        raise ValueError(
            f"learner.reference_ranks has no effect with learner.lora: the {named} is the policy without its "
            "adapters; remove it"
        )
    if teacher is not None and teacher.policy in ("current", "average"):
        _check_following(teacher, learner)
    if learner.reference_ranks and servers:
        raise ValueError(
            "learner.reference_ranks has no effect with teacher.url: the teacher is on that server; remove it"
        )
    kl = config.decided_algorithm.kl
    elsewhere = learner.reference_ranks or servers
    if kl.in_loss and kl.kind == "full" and elsewhere:
        raise ValueError(
            "algorithm.kl.kind full compares whole distributions, which only the policy's own ranks can: use "
            "centered, or load the model there (teacher.path, and no learner.reference_ranks)"
        )
    for key in ("top", "jsd_beta"):
        if key in kl.written and not (kl.in_loss and kl.kind == "full"):
            raise ValueError(f"algorithm.kl.{key} has no effect unless algorithm.kl.kind is full: remove it")
    if servers and config.rollout.temperature != 1:
        raise ValueError(
            f"teacher.url scores at temperature 1, and rollout.temperature is {config.rollout.temperature:g}: set "
            "it to 1, or load the teacher with teacher.path"
        )
    sampling = {server_of(url) for url in config.engine.server.urls} if config.engine.sync != "lora" else ()
    for each in servers.values():
        if server_of(each.url or "") in sampling:
            raise ValueError(
                f"{each.place}.url {each.address} is a server of engine.server.urls, which gets the policy's "
                "weights at each update, so the policy would be its own teacher: give the teacher another server"
            )


def _check_teachers_of_envs(config: RunConfig) -> None:
    """Where an env has its own teacher, all teachers are on servers, and no env needs the reference."""
    own = [name for name, env in config.envs.items() if env.teacher is not None]
    if not own:
        return
    weights = {name: view.algorithm.kl.coef for name, view in config.by_env.items()}
    for name in own:
        if weights[name] == 0:
            key = f"envs.{name}.algorithm.kl_coef" if config.algorithm.kl.coef else "algorithm.kl.coef"
            raise ValueError(
                f"envs.{name}.teacher has no effect while {key} is 0: raise it, or remove the teacher"
            )
        if config.teacher is not None and _same(config.envs[name].teacher, config.teacher):
            raise ValueError(f"envs.{name}.teacher has no effect: it equals `teacher`; remove it")
    others = [name for name, weight in weights.items() if weight > 0 and name not in own]
    if config.teacher is None and others:
        raise ValueError(
            f"envs.{others[0]} has no teacher, and envs.{own[0]} has one: the teachers replace the reference, so "
            f"give it a teacher, or set envs.{others[0]}.algorithm.kl_coef to 0"
        )
    if config.teacher is not None and not others:
        raise ValueError("teacher has no effect: every env that learns from one has its own; remove it")
    if config.teacher is not None and config.teacher.url is None:
        raise ValueError(
            f"envs.{own[0]}.teacher is on a server, and `teacher` is not: a run has its teachers on servers, or "
            "one with the learner; serve that one, too (teacher.url)"
        )
    if config.teacher is not None and config.teacher.hint != "none":
        raise ValueError(f"teacher.hint cannot be combined with envs.{own[0]}.teacher, which reads no hints")


def _same(own: TeacherOfEnv | None, teacher: TeacherConfig) -> bool:
    return own is not None and own.at("teacher").model_dump() == teacher.model_dump()


def _check_following(teacher: TeacherConfig, learner: LearnerConfig) -> None:
    """A teacher that changes with the policy is on the policy's ranks."""
    if learner.reference_ranks:
        raise ValueError(
            f"learner.reference_ranks has no effect with teacher.policy {teacher.policy}, which the policy's own "
            "ranks evaluate: remove it"
        )
    if teacher.policy == "average" and learner.lora is not None:
        raise ValueError(
            "teacher.policy average needs a policy that is trained whole, and learner.lora trains adapters: use "
            "initial or current"
        )


def _check_hints(config: RunConfig) -> None:
    """What a hint needs."""
    teacher = config.teacher
    if teacher is None or teacher.hint == "none":
        return
    if config.algorithm.kl.in_reward:
        raise ValueError(
            f"algorithm.kl.where {config.algorithm.kl.where} lowers the rewards of all episodes, and only those "
            "with a hint have a teacher (teacher.hint): use algorithm.kl.where loss"
        )
    sizes = {view.rollout.group_size for view in config.by_env.values() if view.algorithm.kl.coef > 0}
    if teacher.shows_solved and sizes == {1}:
        raise ValueError(
            f"teacher.hint {teacher.hint} shows another attempt at the same task, and rollout.group_size is 1: "
            "raise it"
        )


def _check_agent(config: RunConfig) -> None:
    """The program ends before its episode does, so that its files can be read, and its sandbox does not."""
    if config.agent is None or config.agent.sandbox is None:
        return
    sandbox, timeout_s = config.agent.sandbox, config.rollout.timeout_s
    wall_s, ttl_s = sandbox.get("wall_s"), sandbox.get("ttl_s")
    if isinstance(wall_s, int | float) and wall_s >= timeout_s:
        raise ValueError(
            f"agent.sandbox.wall_s is {wall_s:g} and rollout.timeout_s {timeout_s:g}: the program must end first, "
            "so that its files can be read"
        )
    if isinstance(ttl_s, int | float) and ttl_s < timeout_s:
        raise ValueError(
            f"agent.sandbox.ttl_s is {ttl_s:g} and rollout.timeout_s {timeout_s:g}: the sandbox would end during "
            "an episode; remove the key"
        )


def _check_distilled(config: RunConfig, env: str = "") -> None:
    """Without an advantage, only a teacher trains, or the observation loss."""
    algorithm, where = config.algorithm, f"envs.{env}: " if env else ""
    if algorithm.advantage.name != "none":
        return
    observes = algorithm.observation_coef > 0 and config.rollout.max_turns > 1
    if (config.teacher is None or algorithm.kl.coef == 0) and not observes:
        raise ValueError(
            f"{where}algorithm.advantage none leaves the rewards out, so nothing would be learned without a "
            "teacher: set `teacher` and algorithm.kl.coef (or algorithm.observation_coef, with rollout.max_turns "
            "above 1), or choose another advantage"
        )
    if algorithm.drop_zero_signal_groups:
        raise ValueError(
            f"{where}algorithm.drop_zero_signal_groups drops every group with algorithm.advantage: none, so "
            "nothing would be trained: remove it"
        )


def _check_unrewarded(config: RunConfig) -> None:
    """Where no env has an advantage, what acts on advantages alone does nothing."""
    algorithm = config.algorithm
    if any(view.algorithm.advantage.name != "none" for view in config.by_env.values()):
        return
    if config.rollout.overlong == "penalise":
        raise ValueError(
            "rollout.overlong penalise has no effect with algorithm.advantage: none, which ignores rewards: use "
            "mask, or remove it"
        )
    own = isinstance(algorithm.loss, OwnFunction)
    averaged = own or algorithm.kl.in_loss or algorithm.entropy_coef > 0
    idle = {
        "kl.where": algorithm.kl.where != "loss",
        "loss": algorithm.loss != AlgorithmConfig().loss and not own,
        "correction.off_policy": algorithm.correction.off_policy is not None,
        "correction.importance": algorithm.correction.importance != "none" and not own,
        "entropy_top": algorithm.entropy_top < 1 and not own,
        "old_logprobs": algorithm.old_logprobs != "auto" and not own,
        "ratio_veto": "ratio_veto" in algorithm.written and not own,
        "aggregation": "aggregation" in algorithm.written and not averaged,
    }
    for key, given in idle.items():
        if given:
            raise ValueError(
                f"algorithm.{key} has no effect with algorithm.advantage: none, which leaves the policy loss "
                "out: remove it"
            )


def _check_turns(config: RunConfig) -> None:
    """Credit between the turns of an episode needs several of them."""
    for name, view in config.by_env.items():
        advantage = view.algorithm.advantage
        same = [each for each in config.by_env.values() if each.algorithm.advantage == advantage]
        if any(each.rollout.max_turns > 1 for each in same):
            continue
        for key in _between_turns(advantage):
            where = f"envs.{name}.algorithm.advantage" if _has_own(config, name) else "algorithm.advantage"
            raise ValueError(
                f"{where}.{key} has no effect with rollout.max_turns 1, where an episode has a single turn: raise "
                "rollout.max_turns, or remove it"
            )


def _has_own(config: RunConfig, name: str) -> bool:
    return name in config.envs and config.envs[name].algorithm.advantage is not None


def _between_turns(advantage: Named | OwnFunction) -> list[str]:
    """The parameters with which an estimator treats several turns in another way than one."""
    per_turn = advantage.name == "turn_level" or getattr(advantage, "per", "") == "turn"
    one_turn = {"gamma": 1.0, "lam": 1.0, "baseline": "group"}
    return [key for key, value in one_turn.items() if per_turn and getattr(advantage, key, value) != value]


def _check_observed(config: RunConfig) -> None:
    """The env answers between the policy's turns."""
    if config.algorithm.observation_coef and all(view.rollout.max_turns == 1 for view in config.by_env.values()):
        raise ValueError(
            "algorithm.observation_coef has no effect with rollout.max_turns 1: the policy reads no answer of the "
            "env; raise rollout.max_turns, or remove it"
        )


def _check_compact(config: RunConfig) -> None:
    """A context is made shorter between two turns, by what the earlier ones hold."""
    compact, most = config.rollout.compact, max(view.rollout.max_turns for view in config.by_env.values())
    if compact is None or compact.use is not None:
        return
    drops = compact.how == "drop_tool_results"
    least = compact.keep_turns + 2 if drops else 2
    if most >= least:
        return
    kept = f" and rollout.compact.keep_turns {compact.keep_turns}" if drops else ""
    raise ValueError(
        f"rollout.compact has no effect with rollout.max_turns {most}{kept}: there is no earlier turn to shorten; "
        f"{'keep fewer turns, ' if drops else ''}raise rollout.max_turns, or remove compact"
    )


def _check_group_size(config: RunConfig, env: str = "") -> None:
    """An episode without siblings needs an advantage that does not compare."""
    where = f"envs.{env}: " if env else ""
    advantage = config.algorithm.advantage.name
    if config.rollout.group_size == 1 and not (
        advantage in ALONE or isinstance(config.algorithm.advantage, OwnFunction)
    ):
        raise ValueError(
            f"{where}rollout.group_size is 1: a group of one has no advantage; use at least 2, or choose an "
            f"algorithm.advantage that needs no siblings ({', '.join(sorted(ALONE))})"
        )


def _check_penalties(config: RunConfig, env: str = "") -> None:
    """An advantage that divides by the mean reward needs rewards without penalties."""
    where = f"envs.{env}: " if env else ""
    if config.algorithm.advantage.name == "max_rl" and config.rollout.overlong == "penalise":
        raise ValueError(
            f"{where}rollout.overlong: penalise can lead to negative rewards, which algorithm.advantage: max_rl "
            "does not accept; use train or mask, or another advantage"
        )


def _check_room(config: RunConfig, env: str = "") -> None:
    """A completion has to fit into the budget of its episode."""
    rollout, where = config.rollout, f"envs.{env}: " if env else ""
    if "max_tokens" in rollout.written and rollout.max_tokens > rollout.token_budget:
        raise ValueError(
            f"{where}rollout.max_tokens is {rollout.max_tokens}, and rollout.token_budget, for the whole episode "
            f"with its prompt, is {rollout.token_budget}: no completion can get that long; lower one or raise the "
            "other"
        )


def _check_step(config: RunConfig) -> None:
    """Checks of batch sizes."""
    rollout, algorithm, critic = config.rollout, config.algorithm, config.critic
    episodes = rollout.groups_per_step * min(view.rollout.group_size for view in config.by_env.values())
    keys = {"algorithm.updates_per_step": algorithm.updates_per_step}
    if critic is not None and critic.updates_per_step is not None:
        keys["critic.updates_per_step"] = critic.updates_per_step
    for key, updates in keys.items():
        if updates > episodes:
            raise ValueError(
                f"{key} is {updates}, and a step has {episodes} episodes (rollout.groups_per_step x group_size): "
                "each update needs at least one; lower it"
            )
    for name, view in config.by_env.items():
        inherited = name in config.envs and config.envs[name].rollout.refill_zero_signal is None
        _check_refill(view, name, f"set envs.{name}.rollout.refill_zero_signal to 0" if inherited else "remove it")
    if rollout.group_filter and not any(view.rollout.refill_zero_signal for view in config.by_env.values()):
        raise ValueError(
            "rollout.group_filter has no effect while rollout.refill_zero_signal is 0: set it to the number of "
            "groups per step that may be replaced"
        )
    if "warmup_steps" in config.optim.written and config.optim.warmup_steps > config.steps:
        raise ValueError(
            f"optim.warmup_steps is {config.optim.warmup_steps}, and the run has {config.steps} steps: the "
            "learning rate would never reach optim.lr; lower it, or raise steps"
        )
    if "schedule" in config.optim.written and config.optim.schedule != "constant":
        _check_schedule(config.optim, config.steps)
    if critic is not None and critic.warmup_steps >= config.steps:
        raise ValueError(
            f"critic.warmup_steps is {critic.warmup_steps}, and the run has {config.steps} steps: none would "
            "train the policy; lower it, or raise steps"
        )
    if critic is not None:
        check_sequence_ranks(config.learner.sequence_ranks, "critic.ranks", critic.ranks)
        _check_critic(critic, algorithm)


def _check_schedule(optim: OptimConfig, steps: int) -> None:
    """The learning rate has to fall in some step; warmup steps by default give way to a run of few steps."""
    whole = {"warmup_ratio": optim.warmup_ratio == 1, "warmup_steps": optim.warmup_steps == steps}
    for key, all_steps in whole.items():
        if all_steps and key in optim.written:
            raise ValueError(
                f"optim.schedule {optim.schedule} has no effect: optim.{key} {getattr(optim, key):g} leaves no "
                "step in which the learning rate falls; lower it, or remove the schedule"
            )


def _check_refill(config: RunConfig, env: str, remedy: str) -> None:
    """Groups are replaced for scoring the same only if that carries no signal."""
    rollout, algorithm, where = config.rollout, config.algorithm, f"envs.{env}: " if env else ""
    if rollout.refill_zero_signal and (rollout.group_size == 1 or algorithm.advantage.name in ALONE):
        why = (
            "rollout.group_size is 1: the episode of each group"
            if rollout.group_size == 1
            else f"algorithm.advantage {algorithm.advantage.name} compares no siblings: a group whose episodes"
        )
        raise ValueError(
            f"{where}rollout.refill_zero_signal puts aside groups whose episodes all scored the same, and {why} "
            f"would be valid signal; {remedy}"
        )


def _check_critic(critic: CriticConfig, algorithm: AlgorithmConfig) -> None:
    """Checks of the critic's aggregation."""
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


def _check_loggers(config: RunConfig) -> None:
    """Two loggers that write to the same place would mix their points."""
    places = [(one.use, one.project, one.entity, one.tracking_uri, str(one.options)) for one in config.loggers]
    if again := next((place[0] for number, place in enumerate(places) if place in places[:number]), None):
        raise ValueError(f"loggers: {again} is listed twice and would write to the same place: remove one of them")


def _check_sampling(config: RunConfig) -> None:
    """Checks of where tokens are sampled, and how."""
    for name, each in config.eval.by_set.items() if config.agent is not None else ():
        if each.top_p < 1 or each.top_k or each.min_p:
            key = f"eval.sets.{name}" if name else "eval"
            raise ValueError(
                f"{key}.top_p, {key}.top_k and {key}.min_p do not reach the completions of an `agent`: remove them"
            )
    given, on_ray = bool(config.engine.server.urls), config.engine.server.launch == "ray"
    if config.engine.on_servers and config.engine.device.startswith("cuda:") and (given or on_ray):
        why = "those in engine.server.urls run already" if given else "Ray chooses their GPUs"
        raise ValueError(
            f"engine.device is {config.engine.device}, which does not reach the servers: {why}; write cuda"
        )
    _check_temperatures(config)


def _check_places(config: RunConfig) -> None:
    """Checks of where the run trains, and what works while it does."""
    rollout, learner = config.rollout, config.learner
    if config.engine.server.sleep and rollout.max_staleness:
        raise ValueError(
            f"engine.server.sleep needs servers without work during an update, and rollout.max_staleness is "
            f"{rollout.max_staleness}: set it to 0, or leave sleep out"
        )
    if config.learner_on_ray and learner.device.startswith("cuda:"):
        raise ValueError(
            f"learner.device is {learner.device}, and Ray chooses the GPU of each rank: write cuda, or auto"
        )
    if config.eval.background and not any(
        each.every for view in config.by_env.values() for each in view.eval.by_set.values()
    ):
        raise ValueError(
            "eval.background has no effect: nothing is evaluated while training continues, as eval.every is 0; "
            "set it, or remove background"
        )
    if config.ray is not None and not config.uses_ray:
        raise ValueError(
            "ray has no effect while nothing runs on Ray: remove it, or set learner.ranks, rollout.workers, "
            "learner.reference_ranks, critic.ranks, reward_model.workers or engine.server.launch"
        )


def _check_temperatures(config: RunConfig) -> None:
    config.engine.refuse_temperature(config.rollout.temperature, "rollout.temperature")
    for name, view in config.by_env.items():
        where = f"envs.{name}." if name and config.envs[name].eval is not None else ""
        for part, each in view.eval.by_set.items():
            key = f"eval.sets.{part}" if part else "eval"
            config.engine.refuse_temperature(each.temperature, f"{where}{key}.temperature")
