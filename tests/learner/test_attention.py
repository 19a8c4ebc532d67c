"""Every attention of the learner gives what transformers' eager attention gives on the rows one by one."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    Lfm2Config,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.errors import ConfigError
from agentrl.learner.apart import rows_apart
from agentrl.learner.attention import flex
from agentrl.learner.attention.flex import BLOCK, block_mask
from agentrl.learner.attention.kind import choose_attention
from agentrl.learner.attention.packed import NAMES, Spans, check_attention
from agentrl.learner.critic import load_critic
from agentrl.learner.logprobs import token_stats
from agentrl.learner.pack import pack
from agentrl.learner.policy_model import checkpoint_activations, load_policy
from agentrl.learner.prefix_tree import prefix_tree
from agentrl.types import Sample
from tests.learner.direct import DirectLearner
from tests.learner.train_models import SHAPE, VOCABULARY, gradients, make_batch, make_sample, one_by_one, relative

CPU = torch.device("cpu")
WINDOW = 7
KINDS = ["full_attention", "sliding_attention"]
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "mistral, every layer": lambda: MistralConfig(**SHAPE, sliding_window=WINDOW),
    "qwen3, every second layer": lambda: Qwen3Config(
        **SHAPE, use_sliding_window=True, sliding_window=WINDOW, layer_types=KINDS
    ),
    "qwen3, no window": lambda: Qwen3Config(**SHAPE),
}


def write(config: PretrainedConfig, directory: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(make(), tmp_path_factory.mktemp("model")) for name, make in FAMILIES.items()}


# --- stand-ins for what runs on GPUs only ------------------------------------------------------------------------


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Tensor:
    """A stand-in for flash-attn, which needs a GPU: what its documentation (2.x) says the function computes.

    Query i of a sequence sees key j where i + keys - queries - left <= j <= i + keys - queries + right; causal
    means a right of 0; -1 is no bound; fewer heads of keys serve groups of queries.
    """
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert (q.shape[0], k.shape[0]) == (cu_seqlens_q[-1], cu_seqlens_k[-1])
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) == max_seqlen_k
    left, right = window_size[0], 0 if causal else window_size[1]
    out = []
    for n in range(len(cu_seqlens_q) - 1):
        queries = q[cu_seqlens_q[n] : cu_seqlens_q[n + 1]]
        keys, values = (x[cu_seqlens_k[n] : cu_seqlens_k[n + 1]] for x in (k, v))
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (keys, values))
        place = torch.arange(len(queries))[:, None] + len(keys) - len(queries)
        ahead = torch.arange(len(keys))[None, :] - place
        seen = (ahead <= right if right >= 0 else ahead < len(keys)) & (
            -ahead <= left if left >= 0 else ahead < 1e9
        )
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * (softmax_scale or q.shape[-1] ** -0.5)
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
    return torch.cat(out)


def flex_by_position(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, scale: float, enable_gqa: bool
) -> Tensor:
    """A stand-in for flex attention, which has no backward pass on CPUs: its mask by position, and SDPA."""
    length = q.shape[2]
    seen = create_mask(block_mask.mask_mod, None, None, length, length, "cpu")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=enable_gqa)


@pytest.fixture(params=["sdpa", "flex", "flash"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    monkeypatch.setattr(flex, "_kernel", lambda device_type: flex_by_position)
    return str(request.param)


def ours(directory: Path, kind: str) -> Any:
    model = load_policy(directory, CPU)
    model.set_attn_implementation(NAMES[kind])
    return model


# --- what they compute -------------------------------------------------------------------------------------------


def long_prompts() -> list[Sample]:
    """Beginnings that are longer than the window, and such as end with it."""
    prompts = {g: [(3 * n + g) % VOCABULARY for n in range(length)] for g, length in enumerate((20, 6, 7, 13), 10)}
    return [
        make_sample(
            [*prompt, *range(e, e + 3 + 9 * e)], {len(prompt), len(prompt) + 2}, episode=f"g{g}/{e}", group=g
        )
        for g, prompt in prompts.items()
        for e in range(3)
    ]


def branches() -> list[Sample]:
    """Rows that leave one another at several places, within the window and beyond it."""
    trunk = [(5 * n) % VOCABULARY for n in range(40)]
    rows = [[*trunk[:place], *[(place + 3 * n) % VOCABULARY for n in range(6)]] for place in (2, 9, 9, 20, 33, 40)]
    return [
        make_sample(row, {len(row) - 5, len(row) - 1}, episode=f"b{n}", group=20) for n, row in enumerate(rows)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_eager_attention(models, family: str, kind: str):
    samples = [*long_prompts(), *branches(), *make_batch(1)]
    samples.sort(key=lambda s: s.group)
    assert max(len(s.ids) for s in samples) > 3 * WINDOW
    model = ours(models[family], kind)
    plain = AutoModelForCausalLM.from_pretrained(models[family], attn_implementation="eager")
    packed = pack(samples)
    found_N, wanted_N = token_stats(model, packed).logprobs_N, one_by_one(plain, samples)
    assert relative(found_N, wanted_N) < 1e-5
    weights_N = torch.linspace(-1, 1, len(wanted_N))
    (found_N * weights_N).sum().backward()
    (wanted_N * weights_N).sum().backward()
    assert relative(gradients(model), gradients(plain)) < 1e-4


def test_all_memory_savers_together_change_nothing(models, kind: str):
    """Chunks of logits, checkpointed blocks, and what the backward pass needs kept elsewhere."""
    directory, packed = models["qwen3, every second layer"], pack(make_batch(2))
    found = []
    for saved in (False, True):
        model = ours(directory, kind)
        if saved:
            checkpoint_activations(model)
        with torch.autograd.graph.save_on_cpu():
            stats = token_stats(model, packed, chunk=16 if saved else 0, wanted=frozenset({"entropy"}))
        (stats.logprobs_N.sum() - stats.entropy_N.sum()).backward()
        found.append((stats.logprobs_N, gradients(model)))
    assert torch.allclose(found[0][0], found[1][0], rtol=0, atol=1e-5)
    assert relative(found[1][1], found[0][1]) < 1e-5


def a_step(directory: Path, **config: Any) -> Any:
    learner = DirectLearner(
        directory,
        algorithm=AlgorithmConfig(kl={"coef": 0.0}),
        optim=OptimConfig(lr=1e-3, warmup_steps=0),
        config=LearnerConfig(tokens_per_micro_batch=400, logits_at_once=16, **config),
        temperature=1.0,
        total_steps=10,
    )
    try:
        return learner.policy.config._attn_implementation, learner.step(make_batch(3)).metrics
    finally:
        learner.close()


def test_a_learner_computes_with_what_is_chosen_and_in_its_precision(models, kind: str, monkeypatch):
    """With a shard, mixed precision, checkpointed blocks and chunks of logits, as on a GPU."""
    directory = models["qwen3, every second layer"]
    low = {"precision": "bfloat16", "checkpoint_activations": True}
    _, wanted = a_step(directory, **low)
    monkeypatch.setattr("agentrl.learner.attention.packed.choose_attention", lambda *_: kind)
    seen: list[torch.dtype] = []
    function = f"agentrl.learner.attention.{kind}.attend"
    attend = pkgutil.resolve_name(function)
    monkeypatch.setattr(function, lambda q, *more: seen.append(q.dtype) or attend(q, *more))
    name, found = a_step(directory, **low)
    assert (name, seen[-1]) == (NAMES[kind], torch.bfloat16)
    assert found["entropy"] == pytest.approx(wanted["entropy"], rel=1e-2)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.1)


def test_a_learner_that_cannot_compute_as_asked_ends_at_once(models):
    with pytest.raises(ConfigError, match=r"learner\.attention flex needs a GPU"):
        a_step(models["qwen3, no window"], attention="flex", device="auto")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_itself(models):
    """PyTorch's own, on a CPU: its forward pass, over rows that fill several blocks."""
    rows = [make_sample([*range(60), *range(n, n + 30)], {60, 75, 89}, episode=str(n)) for n in range(6)]
    samples = [*rows, make_sample([t % VOCABULARY for t in range(2 * BLOCK)], {9, 200}, group=1)]
    packed = pack(samples)
    assert packed.ids_T.numel() > 3 * BLOCK
    with torch.no_grad():
        found_N, wanted_N = (
            token_stats(ours(models["mistral, every layer"], k), packed).logprobs_N for k in ("flex", "sdpa")
        )
    assert relative(found_N, wanted_N) < 1e-5


def test_every_shape_of_flex_attention_has_a_kernel_in_every_thread(monkeypatch: pytest.MonkeyPatch):
    """Two models, two windows, with and without gradients: more kernels than PyTorch compiles by default."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes a second, in each process of the suite

    counted = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex_attention, backend=counted)
    monkeypatch.setattr(flex, "_kernel", lambda device_type: compiled)
    monkeypatch.setattr(
        "torch.nn.attention.flex_attention._validate_device", lambda *_: None
    )  # gradients on a CPU

    def attend(heads: int, size: int, length: int, window: int | None, trained: bool) -> None:
        rows = [tuple(range(length)), (length, *range(length))]
        spans = Spans(prefix_tree(rows).spans, CPU)
        q, k, v = (torch.randn(1, heads, spans.tokens, size, requires_grad=trained) for _ in range(3))
        with torch.set_grad_enabled(trained):
            flex.attend(q, k, v, spans, 1.0, window)

    def all_shapes() -> None:
        for heads, size in ((4, 16), (2, 32)):
            for length in (300, 200):
                for window in (None, 64):
                    for trained in (False, True):
                        attend(heads, size, length, window, trained)

    torch._dynamo.reset()
    try:
        all_shapes()
        known = counted.frame_count
        with ThreadPoolExecutor(1) as other:
            other.submit(attend, 8, 64, 100, None, True).result()
        assert (known > 8, counted.frame_count) == (True, known + 1)
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("window", [None, 40])
def test_blocks_are_those_that_a_look_at_every_pair_finds(window: int | None):
    rows = [make_sample([*range(90), *([n] * 150)], {90, 200}, episode=str(n)) for n in range(3)]
    deeper = [make_sample([*range(90), *[2] * 150, *[4 + n] * 140], {300}, episode=f"d{n}") for n in range(2)]
    alone = [make_sample([1] * (3 * BLOCK), {9, 300}, group=1), make_sample([1, 2], {1}, group=2)]
    packed = pack([*rows, *deeper, *alone])
    ours, length = block_mask(packed.spans, window), packed.ids_T.numel()
    assert length == 90 + 450 + 2 * 140 + 3 * BLOCK + 1
    theirs = create_block_mask(ours.mask_mod, None, None, length, length, "cpu", BLOCK)
    assert ours.full_kv_num_blocks.equal(theirs.full_kv_num_blocks)
    more = ours.to_dense() - theirs.to_dense()
    assert int(more.min()) == 0
    assert int(more.sum()) <= (0 if window is None else 8), "blocks of several spans, whose distances are bounds"


# --- what is refused ---------------------------------------------------------------------------------------------


NOT_PACKED: dict[str, tuple[PretrainedConfig, str]] = {
    "bounded scores": (Gemma2Config(**SHAPE), "does not support softcap, which Gemma2Attention uses"),
    "sinks": (
        GptOssConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1),
        "does not support s_aux, which GptOssAttention uses",
    ),
    "a state along the row": (
        Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
        "Lfm2ForCausalLM computes different results on packed rows",
    ),
}


@pytest.mark.parametrize("name", NOT_PACKED)
def test_what_is_not_computed_on_packed_rows_is_computed_apart(tmp_path: Path, name: str):
    config, text = NOT_PACKED[name]
    model = load_policy(write(config, tmp_path), CPU)
    assert rows_apart(model)
    model.set_attn_implementation(NAMES["sdpa"])
    with pytest.raises(ConfigError, match=text) as caught:
        check_attention(model, "here")
    assert "use a decoder whose layers have full or sliding-window attention" in str(caught.value)


def test_a_critic_is_checked_as_well(tmp_path: Path):
    assert rows_apart(load_critic(write(Gemma2Config(**SHAPE), tmp_path)))
    critic = load_critic(write(MistralConfig(**SHAPE, sliding_window=WINDOW), tmp_path / "m"))
    assert critic.config.num_labels == 1
    assert not rows_apart(critic)


def chosen(attention: str = "auto", device: str = "cuda", head: int = 128, **config: Any) -> str:
    config = LearnerConfig(attention=attention, **config)
    return choose_attention(config, device, {head})


def test_auto_takes_the_best_that_is_there(monkeypatch: pytest.MonkeyPatch):
    there: set[str] = set()
    monkeypatch.setattr("agentrl.learner.attention.kind.find_spec", lambda name: name in there or None)
    low = {"precision": "bfloat16"}
    assert chosen(**low) == "sdpa"
    there.add("triton")
    assert (chosen(), chosen(**low), chosen(device="cpu"), chosen(head=8)) == ("flex", "flex", "sdpa", "sdpa")
    there.add("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    assert (chosen(**low), chosen(), chosen(device="cpu", **low)) == ("flash", "flex", "sdpa")
    assert (chosen(head=320, **low), chosen(head=100, **low)) == ("flex", "flex"), "heads that flash-attn lacks"
    assert [chosen(kind, **low) for kind in ("sdpa", "flex", "flash")] == ["sdpa", "flex", "flash"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"flash_attn/cute/__init__.py": ""}, "has no attribute 'flash_attn_varlen_func'"),
        (
            {"flash_attn/__init__.py": "raise ImportError('undefined symbol: _ZN3c10')"},
            "undefined symbol: _ZN3c10",
        ),
    ],
    ids=["version 4", "built for another torch"],
)
def test_a_flash_attn_that_cannot_be_used_is_passed_over(
    files: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    try:
        assert chosen(precision="bfloat16") in ("flex", "sdpa")
        with pytest.raises(ConfigError, match="flash needs flash-attn, and what is installed cannot") as caught:
            chosen("flash", precision="bfloat16")
    finally:
        sys.modules.pop("flash_attn", None)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"attention": "flex", "device": "cpu"},
            "flex needs a GPU, and the learner computes on the CPU: PyTorch has",
        ),
        ({"attention": "flash", "device": "cpu", "precision": "bfloat16"}, "flash needs a GPU"),
        ({"attention": "flash", "precision": "bfloat16"}, "needs flash-attn: pip install flash-attn"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentrl.learner.attention.kind.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=text):
        chosen(**given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"attention": "flash"}, "computes in bfloat16 only"),
        ({"attention": "flash", "precision": "bfloat16", "device": "cpu"}, "needs a GPU"),
        ({"attention": "flex", "device": "cpu"}, "needs a GPU"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        LearnerConfig(**given)
