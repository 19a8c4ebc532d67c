"""Changes of weights that meet a server with other weights than the trainer believes, or odd tensors."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from contextlib import asynccontextmanager

import pytest
import torch
from torch import Tensor

from agentrl.engine.servers.delta_sync import DeltaSync
from agentrl.engine.servers.http import ServerLost
from agentrl.engine.servers.inside.agentrl_weight_delta import changed as apply
from agentrl.engine.servers.inside.agentrl_weight_delta import decode, encode, fingerprint, load, statement
from agentrl.errors import EngineError
from tests.engine.test_weight_delta import Fused, changed, weights_of

NAN = float("nan")


class Server:
    """A server that holds a fused and sharded model; a failing loader is answered with HTTP 500, as by vLLM."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.model = Fused(weights)
        self.log: list[str] = []
        self.url = "http://server"
        self.down = False
        self.refuse_after: int | None = None
        self.hang = asyncio.Event()
        self.hang.set()

    @asynccontextmanager
    async def updating(self, *, by_tensor):
        yield

    async def check(self, *, timeout_s):
        if self.down:
            raise ServerLost("gone")

    async def load_tensors(self, tensors, version):
        self._note("all")
        self.model.load_weights(tensors.items())

    async def load_changes(self, changes, version):
        if any(json.loads(header)["base"] is not None for header in changes):
            self._note("changes")
        await self.hang.wait()
        try:
            load(self.model, changes.items())
        except (RuntimeError, TypeError) as e:
            raise ServerLost(f"HTTP 500: {e}", 500) from e

    def _note(self, what):
        if self.down:
            raise ServerLost("gone")
        if self.refuse_after is not None:
            if not self.refuse_after:
                self.refuse_after = None
                raise ServerLost("HTTP 500: no room", 500)
            self.refuse_after -= 1
        if self.log[-1:] != [what]:
            self.log.append(what)


def a_sync(**options) -> tuple[DeltaSync, list[str]]:
    said: list[str] = []
    return DeltaSync(**{"bucket_bytes": 4000, "full_every": 99} | options, tell=said.append), said


# What is behind the trainer's back on the server when the next changes arrive, whose share is `share`.
BEHIND = {
    "started again": lambda server, first: server.__init__(first),
    "another trainer's weights": lambda server, first: server.model.load_weights(changed(first, 0.5, 9).items()),
    "one bit of a whole tensor": lambda server, first: server.model.norm.data.view(torch.int16)[3].bitwise_xor_(1),
    "one bit of a fused tensor": lambda server, first: server.model.qk.data.view(torch.int16)[9, 3].bitwise_xor_(
        1
    ),
    "one bit of a shard": lambda server, first: server.model.shard.data.view(torch.int16)[1, 3].bitwise_xor_(1),
}


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.03, 1.0])
@pytest.mark.parametrize("what", BEHIND)
async def test_a_server_that_holds_something_else_gets_everything(what, share):
    first = weights_of()
    server, (sync, said) = Server(first), a_sync()
    held = changed(first, 0.02)
    assert await sync.push([server], held, 1) == {}
    BEHIND[what](server, first)
    new = changed(held, share, 3)
    assert await sync.push([server], new, 2) == {}
    assert server.model.holds(new)
    assert share == 1.0 or ["refused changes" in text for text in said] == [True]
    after = changed(new, 0.02, 4)
    server.log.clear()
    assert await sync.push([server], after, 3) == {}
    assert server.log == ["changes"]
    assert server.model.holds(after)


async def test_two_trainers_on_one_server_never_leave_a_mixture():
    first = weights_of()
    server = Server(first)
    trainers = [(changed(first, 0.02, seed), a_sync()[0]) for seed in (1, 2)]
    for version, (seed, one) in enumerate(itertools.product(range(4), (0, 1))):
        weights, sync = trainers[one]
        weights = changed(weights, 0.02, 10 + seed)
        trainers[one] = weights, sync
        assert await sync.push([server], weights, version) == {}
        assert server.model.holds(weights)


async def test_the_same_changes_twice_are_the_same_weights():
    old = weights_of()
    server, (sync, said) = Server(old), a_sync()
    assert await sync.push([server], old, 0) == {}
    new = changed(old, 0.03)
    message = [encode(name, old[name], new[name]) for name in old]
    for _ in range(2):
        load(server.model, message)
    assert server.model.holds(new)
    assert await sync.push([server], new, 1) == {}
    assert server.model.holds(new)
    assert said == []


async def test_a_part_that_was_lost_on_the_way_is_found():
    old = weights_of()
    new, newest = changed(old, 0.03), changed(changed(old, 0.03), 0.03, 5)
    model = Fused(old)
    load(model, [encode(name, old[name], new[name]) for name in old if name != "split"])
    with pytest.raises(RuntimeError, match="split: the weight is not the one that the changes are for"):
        load(model, [encode(name, new[name], newest[name]) for name in old])


@pytest.mark.parametrize("name", ["q", "split", "n"])
@pytest.mark.parametrize("share", [0.03, 1.0])
def test_bytes_that_were_damaged_on_the_way_are_found(name, share):
    old = weights_of()
    new, model = changed(old, share), Fused(old)
    load(model, [statement(encode(each, old[each], old[each])[0]) for each in old])
    header, packed = encode(name, old[name], new[name])
    for at in range(0, len(packed), 7):
        damaged = packed.clone()
        damaged[at] ^= 1 << at % 8
        with pytest.raises(RuntimeError, match=f"{name}: the changes were damaged on the way"):
            load(model, [(header, damaged)])
    assert model.holds(old)
    load(model, [(header, packed)])
    assert model.holds(old | {name: new[name]})


async def test_integers_are_refused():
    weights = weights_of() | {"steps": torch.tensor(3)}
    with pytest.raises(EngineError, match=r"steps is torch\.int64; use engine\.sync disk or tensor"):
        await a_sync()[0].push([], weights, 0)


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_a_refused_message_in_the_middle_is_followed_by_everything(after):
    old = weights_of()
    server, (sync, said) = Server(old), a_sync(bucket_bytes=1000)
    assert await sync.push([server], old, 0) == {}
    server.refuse_after = after
    new = changed(old, 0.3)
    assert await sync.push([server], new, 1) == {}
    assert server.model.holds(new)
    assert "no room" in said[0]


async def test_a_full_update_refused_half_way_is_repeated():
    old = weights_of()
    server, (sync, _) = Server(old), a_sync(bucket_bytes=1000)
    server.refuse_after = 2
    new = changed(old, 0.3)
    assert set(await sync.push([server], new, 1)) == {server}
    assert not server.model.holds(new)
    newer = changed(new, 0.01, 2)
    server.log.clear()
    assert await sync.push([server], newer, 2) == {}
    assert server.log == ["all"]
    assert server.model.holds(newer)


async def test_a_server_that_is_gone_is_not_sent_everything():
    old = weights_of()
    server, (sync, said) = Server(old), a_sync()
    assert await sync.push([server], old, 0) == {}
    server.down = True
    assert set(await sync.push([server], changed(old, 0.1), 1)) == {server}
    assert said == []


async def test_of_several_servers_one_misses_an_update():
    history = list(itertools.accumulate(range(5), lambda w, seed: changed(w, 0.02, seed), initial=weights_of()))
    one, two = Server(history[0]), Server(history[0])
    sync, said = a_sync()
    for version, servers in enumerate(([one, two], [one, two], [one], [one, two], [one, two])):
        two.log.clear()
        assert await sync.push(servers, history[version], version) == {}
        assert all(server.model.holds(history[version]) for server in servers)
        assert two.log == [["all"], ["changes"], [], ["all"], ["changes"]][version]
    assert said == []


async def test_other_weights_under_the_same_version_are_the_base_of_the_next_changes():
    old = weights_of()
    one, two = Server(old), Server(old)
    sync, said = a_sync()
    assert await sync.push([one, two], old, 0) == {}
    again = changed(old, 0.5, 7)
    assert await sync.push([one], again, 0) == {}
    new = changed(again, 0.02, 8)
    assert await sync.push([one, two], new, 1) == {}
    assert one.model.holds(new)
    assert two.model.holds(new)
    assert said == []


async def test_an_update_that_was_cut_off_leaves_no_believer():
    old = weights_of()
    server, (sync, said) = Server(old), a_sync(bucket_bytes=1000)
    assert await sync.push([server], old, 0) == {}
    server.hang.clear()
    cut = asyncio.create_task(sync.push([server], changed(old, 0.02, 5), 1))
    while "changes" not in server.log:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    cut.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cut
    server.hang.set()
    server.log.clear()
    new = changed(old, 0.02, 6)
    assert await sync.push([server], new, 1) == {}
    assert server.log == ["all"]
    assert server.model.holds(new)
    assert said == []


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("where", [0, -1])
async def test_nan_is_an_error_and_what_was_sent_stays_the_base(first, where):
    old = weights_of()
    server, (sync, said) = Server(old), a_sync()
    if not first:
        assert await sync.push([server], old, 0) == {}
    bad = {name: tensor.clone() for name, tensor in old.items()}
    bad["n"][where] = NAN
    with pytest.raises(EngineError, match="the weights cannot be sent: n contains NaN"):
        await sync.push([server], bad, 1)
    assert server.model.holds(old)
    new = changed(old, 0.02)
    assert await sync.push([server], new, 1) == {}
    assert server.model.holds(new)
    assert server.log == (["all"] if first else ["all", "changes"])
    assert said == []


async def test_weights_of_other_names_types_or_shapes_are_sent_whole():
    old = weights_of()
    server, (sync, said) = Server(old), a_sync()
    assert await sync.push([server], old, 0) == {}
    for version, kind in enumerate((torch.float16, torch.float32, torch.bfloat16), 1):
        server.model = server.model.to(kind)
        server.log.clear()
        new = weights_of(kind)
        assert await sync.push([server], new, version) == {}
        assert server.log == ["all"]
        assert server.model.holds(new)
    fewer = {name: tensor for name, tensor in new.items() if name != "k"}
    server.log.clear()
    assert await sync.push([server], fewer, 9) == {}
    assert await sync.push([server], new, 10) == {}
    assert server.log == ["all"]
    assert server.model.holds(new)
    assert said == []


async def test_a_server_that_keeps_a_weight_in_a_wider_type_is_changed_exactly():
    old, new = weights_of(), changed(weights_of(), 0.03)
    model = Fused({name: tensor.float() for name, tensor in old.items()})
    for sent in (
        [encode(n, old[n], old[n]) for n in old],
        [encode(n, old[n], new[n]) for n in old if n != "split"],
    ):
        load(model, [part for part in sent if '"split"' not in part[0]])
    assert model.norm.data.equal(new["n"].float())
    assert model.qk.data.equal(torch.cat([new["q"], new["k"]]).float())
    narrow = Fused({name: tensor.half() for name, tensor in old.items()})
    with pytest.raises(TypeError, match=r"holds torch\.float16 where the trainer sends torch\.bfloat16"):
        load(narrow, [encode("n", old["n"], new["n"])])


SPECIAL = {
    torch.bfloat16: [0x0000, -0x8000, 0x0001, -0x7FFF, 0x007F, 0x7F80, -0x80, 0x7F7F, 0x3F80],
    torch.float16: [0x0000, -0x8000, 0x0001, -0x7FFF, 0x03FF, 0x7C00, -0x400, 0x7BFF, 0x3C00],
}
"""Bit patterns: zeros of both signs, denormals, infinities, the largest number, one."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (255,), (256,), (257,), (511, 3), (1, 1, 1), (3, 256, 2)])
def test_any_size_and_any_bits_arrive(shape, dtype):
    generator = torch.Generator().manual_seed(len(shape))
    count = int(torch.Size(shape).numel())
    if dtype in SPECIAL:
        bits = torch.tensor(SPECIAL[dtype], dtype=torch.int16)
        draw = lambda: bits[torch.randint(len(bits), (count,), generator=generator)].view(dtype).view(shape)  # noqa: E731
    else:
        draw = lambda: torch.randn(shape, generator=generator, dtype=dtype) * 1e-40  # noqa: E731
    old, other = draw(), draw()
    for share in (0.0, 0.01, 0.3, 1.0):
        new = torch.where(torch.rand(shape, generator=generator) < share, other, old)
        header, packed = encode("x", old, new)
        assert packed.nbytes <= new.nbytes
        assert fingerprint(apply(json.loads(header), packed, old)) == fingerprint(new)
        dense = decode(json.loads(header), packed)
        assert (dense.shape, dense.dtype) == (new.shape, new.dtype)


async def test_nothing_changed_is_sent_as_hashes_alone():
    old = weights_of()
    server, (sync, _) = Server(old), a_sync()
    assert await sync.push([server], old, 0) == {}
    assert await sync.push([server], {name: tensor.clone() for name, tensor in old.items()}, 1) == {}
    assert server.log == ["all", "changes"]
    assert sync.bytes_sent < 200 * len(old)
