"""Weights that are sent as changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import asynccontextmanager

import pytest
import torch
from torch import Tensor, nn

from agentrl.config.engine import EngineConfig, ServerConfig
from agentrl.engine.servers.delta_sync import DeltaSync
from agentrl.engine.servers.http import ServerLost
from agentrl.engine.servers.inside.agentrl_weight_delta import (
    VLLMWeights,
    decode,
    encode,
    fingerprint,
    load,
    statement,
)
from agentrl.engine.servers.vllm import _serialized


class Fused(nn.Module):
    """A server's model: two weights of the trainer in one parameter, half of a third, and one as it is."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        dtype = weights["q"].dtype
        self.qk = nn.Parameter(torch.zeros(12, 300, dtype=dtype))
        self.shard = nn.Parameter(torch.zeros(4, 300, dtype=dtype))
        self.norm = nn.Parameter(torch.zeros(700, dtype=dtype))
        self.load_weights(weights.items())

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            if name in ("q", "k"):
                self.qk.data.narrow(0, 0 if name == "q" else 8, len(tensor)).copy_(tensor)
            elif name == "split":
                self.shard.data.copy_(tensor[4:])
            else:
                self.norm.data.copy_(tensor)

    def holds(self, weights: Mapping[str, Tensor]) -> bool:
        held = (self.qk.data, self.shard.data, self.norm.data)
        wanted = (torch.cat([weights["q"], weights["k"]]), weights["split"][4:], weights["n"])
        return all(map(torch.equal, held, wanted))


def weights_of(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"q": (8, 300), "k": (4, 300), "split": (8, 300), "n": (700,)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def changed(weights: Mapping[str, Tensor], share: float, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in found.values():
        tensor[torch.rand(tensor.shape, generator=generator) < share] *= 1.25
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.03, 0.7, 1.0])
def test_a_model_that_fuses_and_shards_is_changed_exactly(dtype, share):
    old = weights_of(dtype)
    model, new = Fused(old), changed(old, share)
    for tensor in new.values() if share else ():
        tensor.view(-1)[::150] = 0.0
    sent = [encode(name, old[name], new[name]) for name in old]
    load(model, [statement(header) for header, _ in [encode(name, old[name], old[name]) for name in old]])
    load(model, sent)
    assert model.holds(new)
    if share == 0.03:
        assert sum(packed.nbytes for _, packed in sent) < 0.1 * sum(t.nbytes for t in new.values())


def test_a_part_of_a_weight_that_was_sent_whole_needs_nothing_before():
    old = weights_of()
    model, new = Fused(changed(old, 0.5)), changed(old, 1.0)
    header, packed = encode("split", old["split"], new["split"])
    assert json.loads(header)["whole"]
    load(model, [(header, packed)])
    assert torch.equal(model.shard.data, new["split"][4:])


def test_zeros_of_both_signs_and_infinities_are_changes():
    old = torch.tensor([0.0, 1.0, 2.0] * 200, dtype=torch.bfloat16)
    new = old.clone()
    new[0], new[1] = -0.0, float("inf")
    header, packed = encode("n", old, new)
    dense = decode(json.loads(header), packed)
    assert torch.where(dense.isnan(), old, dense).view(torch.int16).equal(new.view(torch.int16))


def test_a_model_that_held_something_else_is_found():
    old = weights_of()
    model, new = Fused(changed(old, 0.01, seed=7)), changed(old, 0.03)
    with pytest.raises(RuntimeError, match="q: after the changes, the weight differs from the trainer's"):
        load(model, [encode("q", old["q"], new["q"])])


def test_fingerprints_tell_single_bits_and_positions():
    tensor = torch.arange(100_001, dtype=torch.float32).to(torch.bfloat16)
    bits = tensor.clone().view(torch.int16)
    bits[77_777] ^= 1
    swapped = tensor.clone()
    swapped[[5, 90_000]] = swapped[[90_000, 5]]
    parts = torch.cat([torch.zeros(3, dtype=torch.bfloat16), tensor])[3:]
    found = {fingerprint(t) for t in (tensor, bits.view(torch.bfloat16), swapped, tensor[:-1])}
    assert len(found) == 4
    assert fingerprint(parts) == fingerprint(tensor)


@pytest.mark.parametrize("step", [4, 8, 99_996])
def test_fingerprints_tell_the_highest_bits_of_several_words(step):
    tensor = torch.arange(1, 100_001, dtype=torch.float32).to(torch.bfloat16)
    other = tensor.clone()
    other[3::step] *= -1  # every fourth number has its sign in the highest bit of 64
    assert (other != tensor).sum() % 2 == 0
    assert fingerprint(other) != fingerprint(tensor)


class Server:
    """A server that holds a model."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.model, self.log, self.lost = Fused(weights), list[str](), False
        self.url = "http://server"

    @asynccontextmanager
    async def updating(self, *, by_tensor):
        yield

    async def load_tensors(self, tensors, version):
        self.log.append(f"all {version}")
        self.model.load_weights(tensors.items())

    async def load_changes(self, changes, version):
        if self.lost:
            raise ServerLost("gone")
        if any(json.loads(header)["base"] is not None for header in changes):
            self.log.append(f"changes {version}")
        load(self.model, changes.items())


class Numbers(nn.Module):
    """A model with a weight of one number, loaded as SGLang and vLLM load by default: such a one is filled."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(300, 4, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            held = getattr(self, name).data
            held.fill_(tensor.item()) if held.numel() == 1 else held.copy_(tensor)


def test_a_weight_of_one_number_is_changed_exactly():
    model = Numbers()
    old = {"w": torch.randn(300, 4).bfloat16(), "scale": torch.tensor([0.5]).bfloat16()}
    model.load_weights(old.items())
    for scale in (0.5, 0.25, -0.0):  # the first one is no change
        new = changed(old, 0.02, int(scale * 100)) | {"scale": torch.tensor([scale]).bfloat16()}
        load(model, [encode(name, old[name], new[name]) for name in new])
        load(model, [statement(encode(name, new[name], new[name])[0]) for name in new])
        assert all(fingerprint(getattr(model, name).data) == fingerprint(new[name]) for name in new)
        old = new
    head, packed = encode("scale", old["scale"], old["scale"] + 1)
    model.scale.data.fill_(7.0)
    wrong = json.loads(head) | {"hash": fingerprint(old["scale"])}
    with pytest.raises(RuntimeError, match="scale: after the changes, the weight differs"):
        load(model, [(json.dumps(wrong), packed)])


async def test_who_holds_the_last_weights_gets_changes_and_the_others_everything():
    old = weights_of()
    first, second = Server(old), Server(old)
    sync = DeltaSync(bucket_bytes=1 << 20, full_every=10)
    history = [changed(old, 0.02, seed) for seed in range(5)]
    assert await sync.push([first, second], history[0], 0) == {}
    assert await sync.push([first, second], history[1], 1) == {}
    second.lost = True
    assert set(await sync.push([first, second], history[2], 2)) == {second}
    again = Server(old)
    assert await sync.push([again], history[2], 2) == {}
    assert await sync.push([first, again], history[3], 3) == {}
    assert first.log == ["all 0", "changes 1", "changes 2", "changes 3"]
    assert again.log == ["all 2", "changes 3"]
    assert first.model.holds(history[3])
    assert again.model.holds(history[3])


async def test_all_weights_are_sent_at_every_nth_update():
    old = weights_of()
    server, sync = Server(old), DeltaSync(bucket_bytes=1 << 20, full_every=3)
    for version in range(7):
        old = changed(old, 0.02, version)
        assert await sync.push([server], old, version) == {}
    kinds = [line.split()[0] for line in server.log]
    assert kinds == ["all", "changes", "changes", "all", "changes", "changes", "all"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "sglang", "sync": "delta", "dtype": "float32"}, "no effect with dtype: float32"),
        ({"kind": "sglang", "sync": "delta", "server": ServerConfig(sleep=True)}, "needs the full weights again"),
        ({"kind": "sglang", "sync": "delta", "server": ServerConfig(full_every=1)}, "server.full_every: 1, which"),
    ],
)
def test_where_it_has_no_effect_it_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        EngineConfig(**options)


class Worker(VLLMWeights):
    """What vLLM makes of its worker class: a model, and a reload of all weights."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.model = Fused(weights)
        self.get_model = lambda: self.model
        self.reload_weights = lambda weights_iterator: self.model.load_weights(weights_iterator)


def changes_of(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> str:
    return _serialized(dict(encode(name, old[name], new[name]) for name in old))


def test_a_worker_of_vllm_collects_changes_and_reloads():
    old, worker = weights_of(), Worker(changed(weights_of(), 1.0, seed=5))
    assert worker.agentrl_ready()
    for name, tensor in old.items():
        worker.agentrl_take(_serialized({name: tensor}))
    worker.agentrl_load("yes")
    assert worker.model.holds(old)
    for share in (0.03, 0.7):
        new = changed(old, share)
        worker.agentrl_change(changes_of(old, new))
        assert not worker.model.holds(new)
        worker.agentrl_load("yes")
        assert worker.model.holds(new)
        old = new
    with pytest.raises(RuntimeError, match="differs from the trainer's"):
        worker.agentrl_change(changes_of(changed(old, 0.5, seed=3), changed(old, 0.03)))
    worker.agentrl_load("no")
    with pytest.raises(RuntimeError, match="never sent"):
        worker.agentrl_change(changes_of(old, changed(old, 0.03)))


class Experts(nn.Module):
    """What vLLM 0.32 makes of experts on a CPU: it packs their weights while it makes a kernel, never again."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.quant_method = Method()

    def load(self, weight: Tensor) -> None:
        method = self.quant_method
        self.w13_weight.copy_(weight if method.moe_kernel is not None else weight.flip(0))
        method.moe_kernel = method.moe_kernel or "a kernel"


class Method:
    moe_kernel: str | None = "the first kernel"


def worker_with_experts(reload: Callable[[Experts, Tensor], None]) -> tuple[Worker, Experts]:
    worker, experts = Worker(weights_of()), Experts()
    worker.get_model = lambda: nn.Sequential(nn.Linear(1, 1), experts)
    worker.reload_weights = lambda weights_iterator: [reload(experts, weight) for _, weight in weights_iterator]
    return worker, experts


def test_a_worker_of_vllm_packs_experts_again_on_a_cpu():
    worker, experts = worker_with_experts(Experts.load)
    for weight in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])):
        worker.agentrl_take(_serialized({"w13": weight}))
        worker.agentrl_load("no")
        assert torch.equal(experts.w13_weight, weight.flip(0))


def test_experts_that_vllm_does_not_reload_are_an_error():
    worker, experts = worker_with_experts(lambda experts, weight: None)
    worker.agentrl_take(_serialized({"w13": torch.ones(2)}))
    with pytest.raises(RuntimeError, match="vLLM does not load new weights of Experts"):
        worker.agentrl_load("no")
    assert experts.quant_method.moe_kernel is not None, "vLLM dies at the next request"
