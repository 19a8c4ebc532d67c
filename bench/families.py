"""Model families with tiny random weights: computed exactly, or refused with a reason.

Each family is built from its own config class with every window, chunk, scale and rope boundary brought down to
24 tokens. The learner's log-probabilities of rows that lie end to end (up to 130 tokens, with shared beginnings)
and the local engine's tokens are compared with plain transformers on each row alone.

    python bench/families.py            # all
    python bench/families.py --quick    # one or two of each kind of boundary
    python bench/families.py --write    # all, and the results that docs/models.md is generated from
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from agentrl.engine.local.local_engine import LocalEngine
from agentrl.engine.local.own_cache import TurnScheduler
from agentrl.errors import ConfigError
from agentrl.learner.apart import rows_apart
from agentrl.learner.logprobs import token_stats
from agentrl.learner.pack import pack
from agentrl.learner.policy_model import load_policy
from agentrl.models.model_config import auto_class
from agentrl.types import Sample, Sampling

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.verdict import finish

RESULTS = Path(__file__).parent / "results" / "families.json"
VOCABULARY, NEAR = 97, 24
TOLERANCE = 1e-4
"""Of log-probabilities in float32."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SMALL_HEADS: dict[str, Any] = {"head_dim": 8}
"""For families that leave it to hidden_size / num_attention_heads."""
ALTERNATING = ["sliding_attention", "full_attention"] * 2
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": NEAR, "layer_types": ALTERNATING}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """Rotations of a kind."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **more}}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=NEAR)
LONGROPE = rope(
    "longrope",
    short_factor=[1.0] * 4,
    long_factor=[4.0] * 4,
    original_max_position_embeddings=NEAR,
    factor=4.0,
)
LLAMA3 = rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=NEAR
)


@dataclass(frozen=True)
class Family:
    """One architecture with the settings that matter."""

    model_type: str
    settings: dict[str, Any]
    about: str = ""
    quick: bool = False


def _f(model_type: str, *parts: dict[str, Any], about: str = "", quick: bool = False, **more: Any) -> Family:
    settings = {key: value for part in (*parts, more) for key, value in part.items()}
    return Family(model_type, settings, about, quick)


TOWER: dict[str, Any] = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
PATCHES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
ROTATIONS: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
}
TEXT: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": ROTATIONS,
    "qwen3_vl": ROTATIONS,
    "glm4v": ROTATIONS,
    "qwen3_5": {**ROTATIONS, **LINEAR, "layer_types": ["linear_attention", "full_attention"] * 2},
    "gemma3": {"sliding_window": NEAR, "layer_types": ALTERNATING},
    "llama4": {**MOE, "attention_chunk_size": NEAR, "floor_scale": NEAR, "intermediate_size_mlp": 64},
    "lfm2_vl": {"layer_types": ["conv", "full_attention"] * 2},
}


def _seeing(model_type: str, *parts: dict[str, Any], quick: bool = False, **vision: Any) -> Family:
    """A model of images and text: its vision tower and its text decoder have separate settings."""
    base = AutoConfig.for_model(model_type)
    own = copy.deepcopy(TEXT.get(model_type, {}))  # transformers writes into its rotations
    text = {"model_type": base.text_config.model_type, **SHAPE, **SMALL_HEADS, **own}
    tower = {key: value for part in (*parts, vision) for key, value in part.items()}
    tower["model_type"] = base.vision_config.model_type
    return Family(model_type, {"text_config": text, "vision_config": tower}, "images and text", quick)


FAMILIES: tuple[Family, ...] = (
    _f("qwen2", quick=True),
    _f("qwen2", WINDOW, about="sliding window", quick=True),
    _f("qwen3"),
    _f("qwen3", WINDOW, about="sliding window"),
    _f("qwen3", YARN, about="yarn", quick=True),
    _f("qwen3", rope("dynamic", factor=4.0), about="dynamic rope", quick=True),
    _f("qwen2_moe", MOE),
    _f("qwen2_moe", MOE, WINDOW, about="sliding window", quick=True),
    _f("qwen3_moe", MOE, quick=True),
    _f("qwen3_next", MOE, LINEAR, quick=True),
    _f("qwen3_5_text", LINEAR),
    _f("qwen3_5_moe_text", MOE, LINEAR),
    _f("llama"),
    _f("llama", LLAMA3, about="llama3 rope", quick=True),
    _f("llama", rope("linear", factor=2.0), about="linear rope"),
    _f("llama4_text", MOE, attention_chunk_size=NEAR, floor_scale=NEAR, intermediate_size_mlp=64, quick=True),
    _f(
        "llama4_text",
        MOE,
        attention_chunk_size=512,
        floor_scale=NEAR,
        intermediate_size_mlp=64,
        about="temperature tuning alone",
    ),
    _f("llama4_text", MOE, intermediate_size_mlp=64, about="boundaries at 8,192", quick=True),
    _f("mistral", sliding_window=NEAR, about="sliding window", quick=True),
    _f("mistral", sliding_window=None),
    _f("ministral", sliding_window=NEAR, layer_types=ALTERNATING, about="sliding window"),
    _f(
        "ministral3",
        rope("yarn", factor=4.0, original_max_position_embeddings=NEAR, llama_4_scaling_beta=0.1),
        about="yarn, scaled queries",
        quick=True,
    ),
    _f("mixtral", MOE),
    _f("mixtral", MOE, sliding_window=NEAR, about="sliding window"),
    _f("gemma"),
    _f("gemma2", sliding_window=NEAR, layer_types=ALTERNATING, quick=True),
    _f("gemma3_text", sliding_window=NEAR, layer_types=ALTERNATING, about="sliding window", quick=True),
    _f(
        "gemma3_text",
        sliding_window=NEAR,
        layer_types=ALTERNATING,
        rope_parameters={
            "full_attention": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        about="dynamic rope in full layers",
        quick=True,
    ),
    _f("vaultgemma", sliding_window=NEAR, layer_types=ALTERNATING),
    _f("phi"),
    _f("phi3", SMALL_HEADS),
    _f("phi3", SMALL_HEADS, sliding_window=NEAR, about="sliding window"),
    _f("phi3", SMALL_HEADS, LONGROPE, original_max_position_embeddings=NEAR, about="longrope", quick=True),
    _f("phimoe", MOE, sliding_window=None),
    _f("phimoe", MOE, sliding_window=NEAR, about="sliding window", quick=True),
    _f("olmo"),
    _f("olmo2"),
    _f("olmo3", sliding_window=NEAR, layer_types=ALTERNATING, about="sliding window"),
    _f("olmo_hybrid", LINEAR),
    _f("olmoe", SMALL_HEADS, MOE),
    _f("flex_olmo", MOE),
    _f("granite"),
    _f("granitemoe", MOE),
    _f("granitemoeshared", MOE),
    _f("granitemoehybrid", MOE, MAMBA, layer_types=["attention"] * 4, about="attention alone"),
    _f("granitemoehybrid", MOE, MAMBA, layer_types=["mamba", "attention"] * 2, quick=True),
    _f("cohere"),
    _f("cohere2", sliding_window=NEAR, layer_types=ALTERNATING, quick=True),
    _f("cohere2_moe", MOE, sliding_window=NEAR, layer_types=ALTERNATING),
    _f("glm"),
    _f("glm4"),
    _f("glm4_moe", MOE),
    _f("glm4_moe_lite", MOE, MLA),
    _f("glm_moe_dsa", MOE, MLA, index_topk=NEAR, index_head_dim=16, index_n_heads=2),
    _f("deepseek_v2", MOE, MLA),
    _f("deepseek_v3", MOE, MLA, quick=True),
    _f("deepseek_v32", MOE, MLA, index_topk=NEAR, index_head_dim=16, index_n_heads=2, quick=True),
    _f("youtu", MLA),
    _f("minicpm3", MLA),
    _f("gpt_oss", MOE, sliding_window=NEAR, layer_types=ALTERNATING, quick=True),
    _f("exaone4", sliding_window=NEAR, layer_types=ALTERNATING, about="sliding window"),
    _f("exaone_moe", MOE, sliding_window=NEAR, layer_types=ALTERNATING),
    _f("ernie4_5"),
    _f("ernie4_5_moe", MOE),
    _f("seed_oss"),
    _f("smollm3", layer_types=["full_attention"] * 4, about="layers without rope", no_rope_layers=[1, 1, 1, 0]),
    _f("hunyuan_v1_dense"),
    _f("hunyuan_v1_moe", MOE),
    _f("arcee"),
    _f("apertus"),
    _f("helium", SMALL_HEADS),
    _f("nanochat"),
    _f("bitnet", SMALL_HEADS),
    _f("stablelm", SMALL_HEADS),
    _f("starcoder2", sliding_window=NEAR, about="sliding window"),
    _f("diffllama"),
    _f("doge", keep_window_size=NEAR),
    _f("jetmoe", MOE),
    _f("jais2"),
    _f("mellum", MOE, sliding_window=NEAR, layer_types=ALTERNATING),
    _f("laguna", MOE, sliding_window=NEAR, layer_types=ALTERNATING),
    _f("hy_v3", MOE),
    _f("longcat_flash", MOE, MLA, expert_ffn_hidden_size=32, ffn_hidden_size=64, zero_expert_num=2),
    _f("axk1", MOE, MLA),
    _f(
        "gemma4_text",
        sliding_window=NEAR,
        layer_types=ALTERNATING,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        global_head_dim=16,
    ),
    _f("afmoe", MOE, sliding_window=NEAR, layer_types=ALTERNATING),
    _f("minimax", MOE, layer_types=["linear_attention", "full_attention"] * 2),
    _f("minimax_m2", MOE),
    _f("mimo_v2_flash", MOE, sliding_window=NEAR),
    _f("solar_open", MOE),
    _f("hyperclovax"),
    _f("nemotron", quick=True),
    _f("nemotron_h", MAMBA),
    _f("lfm2", layer_types=["conv", "full_attention"] * 2, quick=True),
    _f("jamba", MOE, attn_layer_period=2, attn_layer_offset=1),
    _f("bamba", MAMBA, attn_layer_indices=[1, 3]),
    _f("falcon_h1", MAMBA, mamba_d_ssm=64),
    _f("kimi_linear", MOE, MLA),
    _f("zamba2", MAMBA, num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2),
    _f("lfm2_moe", MOE, layer_types=["conv", "full_attention"] * 2),
    _f("recurrent_gemma", attention_window_size=NEAR),
    _f("mamba", quick=True),
    _f("falcon_mamba"),
    _f("rwkv"),
    _f("gpt2", about="learned positions", quick=True),
    _f("gpt_neo", attention_types=[[["global", "local"], 2]], window_size=NEAR),
    _f("gpt_neox"),
    _f("gptj", rotary_dim=8),
    _f("gpt_bigcode"),
    _f("codegen", rotary_dim=8),
    _f("opt", word_embed_proj_dim=32, ffn_dim=64),
    _f("bloom", about="alibi", quick=True),
    _f("mpt", d_model=32, n_heads=4, n_layers=4, max_seq_len=512, about="alibi"),
    _f("falcon", alibi=True, about="alibi", quick=True),
    _f("falcon", about="rope"),
    _f("persimmon", SMALL_HEADS),
    _f("biogpt"),
    _f("xglm", attention_heads=4, ffn_dim=64, num_layers=4, d_model=32),
    _seeing("qwen2_5_vl", TOWER, out_hidden_size=32, fullatt_block_indexes=[0], quick=True),
    _seeing("qwen3_vl", TOWER, out_hidden_size=32, deepstack_visual_indexes=[0], num_position_embeddings=16),
    _seeing("qwen3_5", TOWER, out_hidden_size=32, num_position_embeddings=16, quick=True),
    _seeing("glm4v", TOWER, out_hidden_size=32),
    _seeing("mistral3", PATCHES),
    _seeing("gemma3", PATCHES),
    _seeing("llama4", PATCHES, vision_output_dim=32, projector_input_dim=32, projector_output_dim=32),
    _seeing("internvl", PATCHES),
    _seeing("llava", PATCHES),
    _seeing("smolvlm", PATCHES),
    _seeing("lfm2_vl", PATCHES),
    _f("qwen2_audio", about="sound and text"),
    _f("t5", d_model=32, d_ff=64, num_layers=2, num_heads=4, about="encoder-decoder", quick=True),
)


@dataclass(frozen=True)
class Finding:
    """What became of one family."""

    model_type: str
    about: str
    model: str
    learner: str
    engine: str
    difference: float | None
    reason: str = ""
    engine_reason: str = ""
    apart: bool = False
    """Whether the learner computes rows apart."""
    turns: bool = False
    """Whether sequences take turns in the engine."""


def config_of(family: Family) -> PretrainedConfig:
    """The family's own config class with tiny sizes; settings that a class cannot take are left out."""
    kind = type(AutoConfig.for_model(family.model_type))
    if "text_config" in family.settings:
        return kind(**family.settings)
    settings = {**SHAPE, **family.settings}
    for name in [name for name in settings if isinstance(getattr(kind, name, None), property)]:
        del settings[name]
    return kind(**settings)


def sharpen(model: PreTrainedModel) -> PreTrainedModel:
    """Make every parameter matter: norms that are not 1 and biases that are not 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and parameter.is_floating_point():
                centre = parameter.mean() if "norm" in name or "ln" in name else 0.0
                parameter.copy_(centre + 0.1 * torch.randn_like(parameter))
    return model


def samples() -> list[Sample]:
    """Rows well beyond every boundary, in groups that share their beginnings."""
    rng = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return [int(i) for i in torch.randint(3, VOCABULARY, (count,), generator=rng)]

    found = []
    for group, (start, ends) in enumerate([(60, (70, 5, 31)), (10, (12, 90)), (0, (3,)), (0, (120,))]):
        shared = tokens(start)
        for number, end in enumerate(ends):
            ids = (*shared, *tokens(end))
            mask = tuple(place > 0 and place >= start for place in range(len(ids)))
            zeros = (0.0,) * len(ids)
            versions = (0,) * len(ids)
            found.append(Sample(ids, mask, zeros, zeros, versions, episode_id=f"{group}/{number}", group=group))
    first = found[0]  # an episode that goes on from its middle, twice: three levels
    for number, place in enumerate((80, 100), 3):
        ids = (*first.ids[:place], *tokens(20))
        mask = tuple(at >= place for at in range(len(ids)))
        zeros = (0.0,) * len(ids)
        found.append(Sample(ids, mask, zeros, zeros, (0,) * len(ids), episode_id=f"0/{number}", group=0))
    return sorted(found, key=lambda sample: sample.group)


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64, where rounding does not count; as it is if a layer cannot compute that."""
    double = copy.deepcopy(model).double()
    try:
        with torch.no_grad():
            double(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    except RuntimeError:
        return model
    return double


def plain_logprobs(model: PreTrainedModel, rows: list[Sample]) -> Tensor:
    """[N] of the trained tokens, each row by itself."""
    found = []
    for row in rows:
        table_LV = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0].float().log_softmax(-1)
        found += [table_LV[t - 1, row.ids[t]] for t, on in enumerate(row.loss_mask) if on]
    return torch.stack(found)


def learner_gap(directory: Path, plain: PreTrainedModel, seen: set[str] | None = None) -> float:
    """The largest difference of a log-probability; adds "apart" to `seen` if rows are computed apart."""
    model = load_policy(directory, torch.device("cpu"))
    if seen is not None and rows_apart(model):
        seen.add("apart")
    rows = samples()
    with torch.no_grad():
        found, wanted = token_stats(model, pack(rows)).logprobs_N, plain_logprobs(plain, rows)
    return float((found - wanted).abs().max())


def engine_gap(directory: Path, plain: PreTrainedModel, seen: set[str] | None = None) -> float:
    """The largest difference of a sampled token's log-probability; adds "turns" to `seen` if rows take turns."""

    async def play() -> list[tuple[tuple[int, ...], Any]]:
        engine = LocalEngine.from_directory(directory, max_slots=4, cache_mb=64, prefill_chunk=16)
        if seen is not None and isinstance(engine._scheduler, TurnScheduler):
            seen.add("turns")
        prompts = [row.ids[:-2] for row in samples()]
        try:
            sampling = Sampling(max_tokens=40, temperature=1.0, seed=0)
            done = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
        finally:
            await engine.close()
        return list(zip(prompts, done, strict=True))

    worst = 0.0
    for prompt, completion in asyncio.run(play()):
        ids = torch.tensor([[*prompt, *completion.ids]])
        with torch.no_grad():
            table_LV = plain(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        for at, (token, logprob) in enumerate(zip(completion.ids, completion.logprobs, strict=True), len(prompt)):
            worst = max(worst, abs(float(table_LV[at - 1, token]) - logprob))
    return worst


def verdict(measure: Callable[[], float]) -> tuple[str, float | None, str]:
    """right, wrong, refused or traceback; the difference; the reason."""
    try:
        gap = measure()
    except ConfigError as e:
        return ("refused" if "\n" not in str(e) else "traceback"), None, str(e)
    except Exception as e:
        return "traceback", None, f"{type(e).__name__}: {e}"
    return ("right" if gap < TOLERANCE else "wrong"), gap, ""


def measure(family: Family, directory: Path) -> Finding:
    """Build it, load it both ways and compare."""
    config = config_of(family)
    try:
        torch.manual_seed(0)
        plain = sharpen(auto_class(config).from_config(config, attn_implementation="eager").eval())
        plain.save_pretrained(directory)
    except ValueError:  # no causal language model: its config is all there is
        config.save_pretrained(directory)
        (plain,) = (AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SHAPE)),)
    plain, seen = in_double(plain), set[str]()
    learner, gap, reason = verdict(lambda: learner_gap(directory, plain, seen))
    engine, engine_gap_, engine_reason = verdict(lambda: engine_gap(directory, plain, seen))
    gaps = [value for value in (gap, engine_gap_) if value is not None]
    said = str(directory)
    return Finding(
        family.model_type,
        family.about,
        (config.architectures or [type(plain).__name__ if reason == "" else type(config).__name__])[0],
        learner,
        engine,
        max(gaps) if gaps else None,
        reason.replace(f"model directory {said}: ", ""),
        engine_reason.replace(f"model directory '{said}': ", ""),
        "apart" in seen,
        "turns" in seen,
    )


def main() -> int:
    """Print a line for each family, and the count as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one or two of each kind of boundary")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} for docs/models.md")
    parser.add_argument("--only", help="families of this model type")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    chosen = [f for f in FAMILIES if (f.quick or not arguments.quick) and arguments.only in (None, f.model_type)]
    if not chosen:
        parser.error(f"--only: unknown model type {arguments.only!r}{' (--quick tries fewer)' * arguments.quick}")
    started, found = time.perf_counter(), list[Finding]()
    for family in chosen:
        with tempfile.TemporaryDirectory() as folder:
            finding = measure(family, Path(folder) / "model")
        found.append(finding)
        label = f"{finding.model_type} {'(' + finding.about + ')' if finding.about else ''}"
        gap = "" if finding.difference is None else f"{finding.difference:.1e}"
        how = f"{'apart' * finding.apart:<6} engine {finding.engine:<9} {'in turns' * finding.turns:<9}"
        print(f"{label:<44} learner {finding.learner:<9} {how} {gap}", flush=True)
        for said in dict.fromkeys((finding.reason, finding.engine_reason)):
            if said:
                print(f"    {said}")
    bad = [f.model_type for f in found if {f.learner, f.engine} & {"wrong", "traceback"}]
    result = {
        "bench": "families",
        "quick": arguments.quick,
        "ours": len(found) - len(bad),
        "baseline": len(found),
        "ratio": round((len(found) - len(bad)) / len(found), 3),
        "unit": "families computed right or refused",
        "families": len(found),
        "learner_apart": sum(f.apart and f.learner == "right" for f in found),
        "learner_right": sum(f.learner == "right" for f in found),
        "learner_refused": sum(f.learner == "refused" for f in found),
        "engine_in_turns": sum(f.turns and f.engine == "right" for f in found),
        "engine_right": sum(f.engine == "right" for f in found),
        "engine_refused": sum(f.engine == "refused" for f in found),
        "wrong": len(bad),
        "goal": "no family is computed wrongly or ends in a traceback",
        "wrong_families": bad,
        "max_difference": max((f.difference for f in found if f.difference is not None), default=0.0),
        "seconds": round(time.perf_counter() - started, 1),
        "met": not bad,
    }
    if arguments.write and not arguments.quick and arguments.only is None:
        RESULTS.write_text(json.dumps([asdict(f) for f in found], indent=1) + "\n")
    finish(result)
    return 0 if not bad else 1


if __name__ == "__main__":
    sys.exit(main())
