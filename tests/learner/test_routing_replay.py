"""Routing replay: the learner's routers take the sampler's experts, weighted by their own current scores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig, OptimConfig, RunConfig
from agentrl.engine.local.local_engine import LocalEngine
from agentrl.errors import ConfigError
from agentrl.learner.logprobs import token_stats
from agentrl.learner.pack import pack
from agentrl.learner.policy_model import checkpoint_activations, load_policy
from agentrl.learner.routing_replay import check_replay, refuse_replay
from agentrl.models.routers import RouteReplay
from agentrl.types import Completion, Sample, Sampling
from bench.families import FAMILIES as ALL
from bench.families import config_of
from tests.engine.test_routes import FAMILIES, family, prompt
from tests.learner.direct import DirectLearner
from tests.learner.train_models import gradients, make_sample, padded_logprobs, relative, routed

CPU = torch.device("cpu")


def softmax_weights(router: Any, logits_TE: Tensor, given_Tk: Tensor) -> Tensor:
    """Of Qwen-MoE, OLMoE and Mixtral."""
    weights_Tk = torch.softmax(logits_TE.float(), -1).gather(1, given_Tk)
    return weights_Tk / weights_Tk.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights_Tk


def sigmoid_weights(router: Any, logits_TE: Tensor, given_Tk: Tensor) -> Tensor:
    """Of DeepSeek-V3."""
    weights_Tk = torch.sigmoid(logits_TE).gather(1, given_Tk)
    weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20) if router.norm_topk_prob else weights_Tk
    return weights_Tk * router.routed_scaling_factor


WEIGHTS = {"deepseek_v3": sigmoid_weights}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for seed, kind in enumerate(FAMILIES):
        torch.manual_seed(10 + seed)
        found[kind] = tmp_path_factory.mktemp(kind)
        AutoModelForCausalLM.from_config(config_of(family(kind))).save_pretrained(found[kind])
    return found


def replayed(folder: Path) -> tuple[PreTrainedModel, RouteReplay]:
    policy = load_policy(folder, CPU)
    return policy, RouteReplay(policy, "it")


def row_of(ids: Sequence[int], completion: Completion, episode: str) -> Sample:
    """A prompt and its completion; no route is known of the last token."""
    whole, routes = (*ids, *completion.ids), completion.routes
    given = (0.0,) * len(ids)
    if routes is not None:
        routes = replace(routes, data=routes.data + b"\xff" * (routes.layers * routes.top_k * routes.width))
    return Sample(
        whole,
        tuple(place >= len(ids) for place in range(len(whole))),
        (*given, *completion.logprobs),
        (1.0,) * len(whole),
        (0,) * len(whole),
        episode_id=episode,
        routes=routes,
    )


def sampled(folder: Path, *, dtype: str = "float32", temperature: float = 1.0) -> list[Sample]:
    """Rows of a group whose prompts begin alike."""

    async def play() -> list[Sample]:
        engine = LocalEngine.from_directory(folder, dtype=dtype, routes=True)
        prompts = [[*prompt(20), *prompt(3 * n, n)] for n in range(4)]
        sampling = Sampling(temperature=temperature, max_tokens=25)
        found = await asyncio.gather(
            *(engine.generate(p, replace(sampling, seed=n)) for n, p in enumerate(prompts))
        )
        await engine.close()
        return [row_of(p, c, f"e{n}") for n, (p, c) in enumerate(zip(prompts, found, strict=True))]

    return asyncio.run(play())


def forced(samples: Sequence[Sample], replay: RouteReplay) -> list[Sample]:
    """Experts that the routers would not choose."""
    return routed(samples, layers=replay.shape.layers, top_k=replay.top_k, experts=replay.experts)


def table_of(sample: Sample) -> Tensor:
    assert sample.routes is not None
    kind = np.dtype(f"i{sample.routes.width}")
    found = np.frombuffer(sample.routes.data, kind).reshape(-1, sample.routes.layers, sample.routes.top_k)
    return torch.from_numpy(found.copy()).long()


def hand_written(
    folder: Path, sample: Sample, weights: Callable[[Any, Tensor, Tensor], Tensor]
) -> PreTrainedModel:
    """A plain model whose routers are replaced for this row."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    for layer, router in enumerate(routers):
        given_Tk = table_of(sample)[:, layer].clone()
        given_Tk[-1] = torch.arange(given_Tk.shape[1])  # of the last token, which nothing follows

        def forward(hidden: Tensor, router: Any = router, given_Tk: Tensor = given_Tk) -> tuple[Tensor, ...]:
            logits_TE = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
            return logits_TE, weights(router, logits_TE, given_Tk), given_Tk

        router.forward = forward
    return model


def logprobs(policy: PreTrainedModel, replay: RouteReplay, samples: Sequence[Sample]) -> Tensor:
    packed = pack(samples)
    with replay.replaying(packed.routes_TLk):
        return token_stats(policy, packed, chunk=16).logprobs_N


def grown(policy: PreTrainedModel) -> Tensor:
    """The gradients, 0 of parameters that have none."""
    for parameter in policy.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    found = gradients(policy)
    policy.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("kind", FAMILIES)
def test_with_equal_weights_nothing_changes(folders: dict[str, Path], kind: str):
    samples = sampled(folders[kind])
    policy, replay = replayed(folders[kind])
    found_N = logprobs(policy, replay, samples)
    assert torch.allclose(found_N, pack(samples).sampler_logprobs_N, atol=1e-4)
    found_N.sum().backward()
    found = grown(policy)
    plain_N = token_stats(policy, pack(samples)).logprobs_N
    plain_N.sum().backward()
    assert torch.allclose(found_N, plain_N, atol=1e-5)
    assert relative(found, grown(policy)) < 1e-5


@pytest.mark.parametrize("kind", FAMILIES)
def test_other_experts_are_those_of_a_forward_pass_written_by_hand(folders: dict[str, Path], kind: str):
    """Also their gradients, of which the router has its part."""
    policy, replay = replayed(folders[kind])
    (sample,) = forced([make_sample(prompt(40), range(5, 40))], replay)
    model = hand_written(folders[kind], sample, WEIGHTS.get(kind, softmax_weights))
    (wanted_N,) = padded_logprobs(model, [sample])
    wanted_N.sum().backward()
    found_N = logprobs(policy, replay, [sample])
    found_N.sum().backward()
    router = next(module for module in policy.modules() if type(module).__name__.endswith("Router"))
    assert float(router.weight.grad.norm()) > 1e-4
    assert torch.allclose(found_N, wanted_N, atol=1e-4)
    assert relative(grown(policy), grown(model)) < 1e-4
    plain_N = token_stats(policy, pack([sample])).logprobs_N
    assert float((plain_N - wanted_N).detach().abs().max()) > 0.1


@pytest.mark.parametrize("checkpointed", [False, True])
def test_rows_of_a_tree_are_replayed_as_each_alone(folders: dict[str, Path], checkpointed: bool):
    policy, replay = replayed(folders["qwen3_moe"])
    if checkpointed:
        checkpoint_activations(policy)
    shared = prompt(12)
    rows = [
        make_sample([*shared, *prompt(5 + 3 * n, n)], range(12, 17 + 3 * n), episode=f"e{n}") for n in range(4)
    ]
    fork = make_sample([*rows[3].ids[:18], *prompt(6, 50)], range(18, 24), episode="e3")
    samples = forced([*rows, fork], replay)
    packed = pack(samples)
    assert len(packed.ids_T) < sum(len(s.ids) for s in samples) - 40, "they share tokens"
    with replay.replaying(packed.routes_TLk):
        found_N = token_stats(policy, packed).logprobs_N
        found_N.square().sum().backward()
    found = grown(policy)
    wanted = []
    for sample in samples:
        alone = pack([sample])
        with replay.replaying(alone.routes_TLk):
            wanted.append(token_stats(policy, alone).logprobs_N)
            wanted[-1].square().sum().backward()
    assert torch.allclose(found_N, torch.cat(wanted), atol=1e-5)
    assert relative(found, grown(policy)) < 1e-5


def test_unknown_routes_are_left_to_the_router(folders: dict[str, Path]):
    policy, replay = replayed(folders["olmoe"])
    sample = make_sample(prompt(30), range(3, 30))
    (given,) = forced([sample], replay)
    assert given.routes is not None
    unknown = replace(given, routes=replace(given.routes, data=b"\xff" * len(given.routes.data)))
    wanted_N = token_stats(policy, pack([sample])).logprobs_N
    assert torch.equal(logprobs(policy, replay, [unknown]), wanted_N)
    size = len(given.routes.data) // 30
    half = replace(given, routes=replace(given.routes, data=given.routes.data[: 15 * size] + b"\xff" * 15 * size))
    found_N = logprobs(policy, replay, [half])
    assert not torch.allclose(found_N, wanted_N, atol=1e-2)
    packed = pack([half, make_sample(prompt(8, 3), range(3, 8), episode="f")])
    assert packed.routes_TLk is not None
    assert int((packed.routes_TLk[:, 0, 0] >= 0).sum()) == 15


def direct(folder: Path, reference: Path | None = None, **more: Any) -> DirectLearner:
    kl = {"kl": {"coef": 0.1}} if reference is not None else {"kl": {"coef": 0.0}}
    return DirectLearner(
        folder,
        algorithm=AlgorithmConfig(**kl),
        optim=OptimConfig(lr=1e-3),
        config=LearnerConfig(device="cpu", replay_routes=True, **more),
        temperature=1.0,
        total_steps=10,
        reference_dir=reference,
    )


def test_a_step_measures_what_differs_and_trains_the_routers(folders: dict[str, Path]):
    samples = sampled(folders["qwen3_moe"])
    driver = direct(folders["qwen3_moe"])
    before = {name: value.clone() for name, value in driver.weights().items() if name.endswith("gate.weight")}
    metrics = driver.step(samples).metrics
    assert metrics["drift/max_abs"] < 1e-4
    assert metrics["routes/tokens_differ"] == metrics["routes/experts_differ"] == 0.0
    assert 0.9 < metrics["routes/replayed"] < 1.0
    after = driver.weights()
    assert all(float((after[name] - before[name]).abs().max()) > 1e-5 for name in before)

    driver = direct(folders["qwen3_moe"])
    other = driver.step(forced(samples, driver.replay)).metrics
    assert other["routes/tokens_differ"] == pytest.approx(1.0, abs=0.05)
    assert other["routes/experts_differ"] == pytest.approx(0.5, abs=0.1)  # two of four experts
    assert other["drift/mean_abs"] > 0.05


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
def test_the_reference_goes_its_own_ways(folders: dict[str, Path], lora: dict[str, int] | None):
    more = {} if lora is None else {"lora": lora}
    driver = direct(folders["mixtral"], folders["mixtral"], **more)
    samples = forced(sampled(folders["mixtral"]), driver.replay)
    policy, replay = replayed(folders["mixtral"])
    own_N = token_stats(policy, pack(samples)).logprobs_N.detach()
    gap_N = own_N - logprobs(policy, replay, samples).detach()
    metrics = driver.step(samples).metrics
    assert metrics["kl"] == pytest.approx(float((gap_N.exp() - gap_N - 1).mean()), rel=1e-3)


def test_old_logprobs_are_replayed_too(folders: dict[str, Path]):
    """Several updates a step: the ratio of the first one is 1, whatever the experts."""
    driver = DirectLearner(
        folders["olmoe"],
        algorithm=AlgorithmConfig(kl={"coef": 0.0}, updates_per_step=2),
        optim=OptimConfig(lr=1e-6),
        config=LearnerConfig(device="cpu", replay_routes=True),
        temperature=1.0,
        total_steps=10,
    )
    metrics = driver.step(forced(sampled(folders["olmoe"]), driver.replay)).metrics
    assert metrics["log_ratio_max"] < 1e-2


def test_routers_that_cannot_be_given_experts_are_refused(tmp_path: Path):
    """Groups that are not chosen have weight 0 in DeepSeek-V2."""
    shape = next(family for family in ALL if family.model_type == "deepseek_v2")
    config = config_of(shape)
    config.topk_method, config.n_group, config.topk_group, config.num_experts_per_tok = (
        "group_limited_greedy",
        2,
        1,
        2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy, replay = replayed(tmp_path)
    with pytest.raises(ConfigError, match="give no weight to experts other than those they choose"):
        check_replay(policy, replay, None)
    config.topk_method = "greedy"
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    check_replay(*replayed(tmp_path), None)


def run_config(folder: Path, **more: Any) -> RunConfig:
    return RunConfig(
        env="agentrl.envs.calc:Calc", learner={"replay_routes": True}, model={"path": str(folder)}, **more
    )


def test_what_cannot_be_replayed_is_refused_before_anything_is_loaded(folders: dict[str, Path], policy_dir: Path):
    refuse_replay(run_config(folders["qwen3_moe"]))
    with pytest.raises(ConfigError, match=r"model\.path .* \(qwen3\) has none: remove it"):
        refuse_replay(run_config(policy_dir))
    refuse_replay(run_config(folders["qwen3_moe"], engine={"kind": "sglang"}))
    with pytest.raises(
        ConfigError, match=r"works with the local engine and with SGLang, and engine\.kind is vllm"
    ):
        refuse_replay(run_config(folders["qwen3_moe"], engine={"kind": "vllm"}))
    tiny = RunConfig(env="agentrl.envs.calc:Calc", learner={"replay_routes": True}, model={"tiny": {}})
    with pytest.raises(ConfigError, match=r"model\.tiny has none: remove it"):
        refuse_replay(tiny)


def test_routes_of_another_model_are_refused(folders: dict[str, Path]):
    policy, replay = replayed(folders["olmoe"])
    packed = pack(routed([make_sample(prompt(9), range(3, 9))], layers=3, top_k=2, experts=4))
    said = r"have routes of 3 layers with 2 experts each, and Olmoe\w+ has 4 with 2"
    with pytest.raises(ConfigError, match=said), replay.replaying(packed.routes_TLk):
        token_stats(policy, packed)


def test_servers_report_experts_of_blocks_without_a_router_too(tmp_path: Path):
    """SGLang keeps a row for every block; those of dense ones mean nothing."""
    torch.manual_seed(3)
    config = config_of(family("qwen3_moe"))
    config.mlp_only_layers, config.num_hidden_layers = [0, 2], 4
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy, replay = replayed(tmp_path)
    assert replay.shape.layers == 2
    (row,) = forced([make_sample(prompt(9), range(3, 9))], replay)
    table_TLk = table_of(row)
    all_TLk = torch.full((len(table_TLk), 4, replay.top_k), 5, dtype=torch.int16)
    all_TLk[:, [1, 3]] = table_TLk.to(torch.int16)
    all_TLk[table_TLk[:, 0, 0] < 0] = -1
    assert row.routes is not None
    served = replace(row, routes=replace(row.routes, data=all_TLk.numpy().tobytes(), layers=4, width=2))

    def logprobs(sample: Sample) -> Tensor:
        packed = pack([sample])
        with replay.replaying(packed.routes_TLk):
            return token_stats(policy, packed).logprobs_N

    assert torch.equal(logprobs(served), logprobs(row))
    assert not torch.equal(logprobs(row), logprobs(replace(row, routes=None)))
