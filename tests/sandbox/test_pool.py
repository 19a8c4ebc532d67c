"""Leases, limits of number, spares, deaths, and what a spec may ask for."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.errors import ConfigError, InfraError, SandboxError
from agentrl.sandbox import (
    PROMISES,
    Capabilities,
    PoolExhausted,
    PromiseNotEnforceable,
    Sandbox,
    SandboxLimits,
    SandboxPool,
    SandboxUnavailable,
    close_pools,
    pool_for,
)
from agentrl.sandbox.local import LocalBackend, LocalProcess
from agentrl.sandbox.survey import examine
from tests.sandbox.sandbox_specs import spec_for


async def test_a_lease_is_a_warm_box_of_ones_own() -> None:
    async with SandboxPool(Sandbox(), min_idle=2) as pool:
        await settle(pool, idle=2)
        async with pool.lease("e1") as one, pool.lease("e2") as two:
            assert one is not two
            await one.write_file("mine", "1")
            assert await two.list_dir() == []
            assert pool.metrics()["leased"] == 2
        await settle(pool, idle=2)
        assert pool.metrics()["leased"] == 0
        assert not await one.alive()
    assert pool.metrics()["total"] == 0


async def settle(pool: SandboxPool, *, idle: int) -> None:
    for _ in range(1000):
        if pool.metrics()["idle"] == idle:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(pool.metrics())


async def test_a_box_that_died_while_it_was_idle_is_replaced() -> None:
    async with SandboxPool(Sandbox(), min_idle=1, max_total=1) as pool:
        while not pool._idle:  # noqa: ASYNC110 - made in the background
            await asyncio.sleep(0.01)
        (idle,) = pool._idle
        assert idle._process is not None
        await idle._process.kill()
        async with pool.lease() as box:
            assert box is not idle
            assert (await box.python("print(1)")).stdout == b"1\n"
        assert (pool.metrics()["died_idle"], pool.metrics()["leased"]) == (1.0, 0.0)
        async with pool.lease() as box:
            assert (await box.python("print(2)")).stdout == b"2\n"


async def test_a_file_of_several_chunks_and_a_tree_of_files_alone_are_read() -> None:
    async with SandboxPool(Sandbox(), min_idle=0) as pool, pool.lease() as box:
        data = os.urandom(5 << 20)
        await box.write_file("d/large", data)
        assert await box.read_file("d/large", max_bytes=8 << 20) == data
        assert await box.read_file("d/large", max_bytes=3 << 20, offset=7) == data[7 : 7 + (3 << 20)]
        assert (await box.run("ln -s d/large link; mkdir empty")).ok
        assert list(await box.get_tree()) == ["d/large"]


async def test_leases_wait_in_order_of_arrival() -> None:
    async with SandboxPool(Sandbox(), min_idle=0, max_total=1) as pool:
        order: list[int] = []

        async def episode(number: int) -> None:
            async with pool.lease() as box:
                order.append(number)
                await box.python("import time; time.sleep(0.02)")

        await asyncio.gather(*(episode(i) for i in range(10)))
        assert order == list(range(10))
        assert pool.metrics()["created"] == 10
        assert pool.metrics()["total"] == 0


async def test_there_are_never_more_than_allowed() -> None:
    async with SandboxPool(Sandbox(), min_idle=1, max_total=3) as pool:
        most = 0.0

        async def episode() -> None:
            nonlocal most
            async with pool.lease():
                most = max(most, pool.metrics()["total"])
                await asyncio.sleep(0.005)

        await asyncio.gather(*(episode() for _ in range(25)))
        assert most == 3


async def test_an_exhausted_pool_says_so() -> None:
    async with SandboxPool(Sandbox(), min_idle=0, max_total=1, acquire_timeout_s=3.0) as pool:
        async with pool.lease():
            with pytest.raises(PoolExhausted, match="1 of at most 1"):
                await pool.acquire("episode 7")
        async with pool.lease() as box:
            assert (await box.run(["true"])).ok


async def test_cancelled_waits_leave_nothing_behind() -> None:
    async with SandboxPool(Sandbox(), min_idle=1, max_total=2) as pool:

        async def episode(delay: float) -> None:
            try:
                async with asyncio.timeout(delay):
                    async with pool.lease() as box:
                        await box.run("sleep 0.02")
            except TimeoutError:
                pass

        await asyncio.gather(*(episode(0.002 * i) for i in range(40)))
        async with pool.lease() as one, pool.lease() as two:
            assert (await one.run(["true"])).ok
            assert (await two.run(["true"])).ok
        await settle(pool, idle=1)
        assert pool.metrics()["total"] == 1


async def test_a_second_release_and_a_foreign_one_do_no_harm() -> None:
    async with SandboxPool(Sandbox(), min_idle=0) as pool:
        box = await pool.acquire()
        await pool.release(box)
        await pool.release(box)
        assert pool.metrics()["total"] == 0


async def test_closing_the_pool_ends_leased_boxes_and_waiting_leases() -> None:
    pool = SandboxPool(Sandbox(), min_idle=0, max_total=1)
    box = await pool.acquire()
    waiting = asyncio.create_task(pool.acquire())
    await asyncio.sleep(0.01)
    await pool.close()
    with pytest.raises(SandboxUnavailable):
        await waiting
    assert not await box.alive()
    with pytest.raises(SandboxUnavailable):
        await pool.acquire()
    await pool.close()


def test_shared_pools_end_with_their_event_loop() -> None:
    async def forget() -> tuple[SandboxPool, int]:
        pool = pool_for(Sandbox(), min_idle=1)
        box = await pool.acquire()
        assert isinstance(box._process, LocalProcess)
        return pool, box._process.pid

    for _ in range(2):
        pool, pid = asyncio.run(forget())
        assert pool.is_closed
        assert not Path(f"/proc/{pid}").exists()


async def test_one_pool_serves_a_spec_and_a_loop() -> None:
    assert pool_for(Sandbox()) is pool_for(Sandbox())
    assert pool_for(Sandbox()) is not pool_for(Sandbox(memory_mb=128))
    async with pool_for(Sandbox()).lease() as box:
        assert (await box.python("print(1)")).text() == "1\n"
    await close_pools()
    async with pool_for(Sandbox()).lease() as box:
        assert await box.alive()
    await close_pools()


async def test_a_box_ends_itself_when_its_time_is_over() -> None:
    async with SandboxPool(Sandbox(ttl_s=0.5), min_idle=0) as pool:
        box = await pool.acquire()
        assert await box.alive()
        await asyncio.sleep(0.8)
        with pytest.raises(SandboxError):
            await box.run(["true"])
        await pool.release(box)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["namespace", "landlock", "process"])
async def test_a_box_whose_time_is_over_ends_its_call(name: str) -> None:
    async with SandboxPool(replace(spec_for(name), ttl_s=3.0, wall_s=150.0), min_idle=0) as pool:
        box = await pool.acquire()
        with pytest.raises(SandboxError):
            await box.run("sleep 140")
        await pool.release(box)


async def test_the_death_of_the_keeper_is_the_death_of_its_boxes() -> None:
    async with SandboxPool(Sandbox(), min_idle=0) as pool:
        box = await pool.acquire()
        backend = pool._backend
        assert isinstance(backend, LocalBackend)
        assert backend._keeper is not None
        call = asyncio.create_task(box.run("sleep 30"))
        await asyncio.sleep(0.1)
        backend._keeper.kill()
        with pytest.raises(InfraError):
            await call
        await pool.release(box)


async def test_another_keeper_takes_the_place_of_a_killed_one() -> None:
    async with SandboxPool(Sandbox(), min_idle=0) as pool:
        backend = pool._backend
        assert isinstance(backend, LocalBackend)
        for _ in range(2):
            first = backend._keeper
            await _kill_keeper(backend)
            boxes = await asyncio.gather(*(pool.acquire() for _ in range(6)))
            assert backend._keeper is not first
            assert first.stderr.closed
            for box in boxes:
                assert (await box.run("echo back")).stdout == b"back\n"
                await pool.release(box)
        assert pool.metrics()["create_failed"] == 0
        await _kill_keeper(backend)
    with pytest.raises(SandboxUnavailable, match="the keeper is not running"):
        await backend.start("late")


async def test_boxes_that_fail_together_do_not_start_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that dies while it forks several boxes must not cost each episode all of its retries."""
    async with SandboxPool(Sandbox(), min_idle=0, create_concurrency=8) as pool:
        start, died = pool._backend.start, asyncio.Event()

        async def dies(name: str) -> object:
            await died.wait()
            raise SandboxUnavailable("the keeper of the sandboxes is gone")

        monkeypatch.setattr(pool._backend, "start", dies)
        calls = [asyncio.create_task(pool.acquire()) for _ in range(8)]
        await asyncio.sleep(0.05)
        died.set()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(error) for error in found] == ["the keeper of the sandboxes is gone"] * 8
        assert pool.metrics()["create_failed"] == 8
        monkeypatch.setattr(pool._backend, "start", start)
        await pool.release(await pool.acquire())


async def _kill_keeper(backend: LocalBackend) -> None:
    backend._keeper.kill()
    while backend._control is not None:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_failing_backend_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with SandboxPool(Sandbox(), min_idle=0) as pool:
        backend = pool._backend
        assert isinstance(backend, LocalBackend)

        async def fails() -> None:
            raise SandboxUnavailable("the keeper could not be started")

        monkeypatch.setattr(backend, "open", fails)
        await _kill_keeper(backend)
        for _ in range(4):
            with pytest.raises(SandboxUnavailable):
                await pool.acquire()
        asked: list[str] = []
        monkeypatch.setattr(backend, "start", asked.append)
        with pytest.raises(SandboxUnavailable, match=r"next try in .* s; the last failure: the keeper could"):
            await pool.acquire()
        assert asked == []


async def test_asking_a_failing_backend_again_and_again_does_not_put_its_next_try_off() -> None:
    async with SandboxPool(Sandbox(), min_idle=0) as pool:
        backend = pool._backend
        start, back = backend.start, False

        async def gone(name: str) -> object:
            if back:
                return await start(name)
            raise SandboxUnavailable("the engine is away")

        backend.start = gone  # type: ignore[method-assign,assignment]
        for _ in range(3):
            with pytest.raises(SandboxUnavailable, match="the engine is away"):
                await pool.acquire()
        retry_at, refused = pool._retry_at, 0
        for _ in range(50):
            try:
                await pool.acquire()
            except SandboxUnavailable as error:
                refused += "3 times in a row; next try in" in str(error)
        assert (refused, pool._retry_at, pool.metrics()["create_failed"]) == (50, retry_at, 3)
        back = True
        await asyncio.sleep(max(0.0, retry_at - time.monotonic()))
        box = await pool.acquire()
        assert (await box.run("echo back")).stdout == b"back\n"
        await pool.release(box)


def test_errors_survive_pickling() -> None:
    for error in (PoolExhausted("a"), SandboxUnavailable("b"), PromiseNotEnforceable("c")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
    assert issubclass(PoolExhausted, InfraError)
    assert issubclass(PromiseNotEnforceable, ConfigError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"wall_s": 0}, "wall_s must be positive, got 0"),
        ({"memory_mb": -5}, "memory_mb must be positive"),
        ({"wall_s": float("inf")}, "wall_s must be positive"),
        ({"workspace_mb": 512}, "workspace_mb=512 exceeds memory_mb=256"),
        ({"require": ("netwrok",)}, "not a promise; known: files"),
        ({"backend": "process"}, "say trusted=True"),
        ({"runtime": "runsc"}, "has an effect with backend='docker' only"),
        ({"image": "mine:1"}, "image='mine:1' has an effect with backend='docker' only"),
        ({"trusted": True}, "trusted=True has an effect with backend='process' only"),
        ({"url": "http://127.0.0.1:1"}, "no other back-end takes one"),
        ({"token_file": "token"}, "no other back-end takes one"),
        ({"readonly": ("data",)}, "must be an absolute path"),
    ],
)
def test_a_wrong_spec_is_one_clear_error(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Sandbox(**arguments)  # type: ignore[arg-type]


async def test_a_backend_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"'nosuch' is unknown: use namespace"):
        SandboxPool(Sandbox(backend="nosuch"))
    with pytest.raises(ConfigError, match="has no Nothing"):
        SandboxPool(Sandbox(backend="agentrl.sandboxes.namespace:Nothing"))


async def test_a_promise_that_cannot_be_kept_raises_when_the_pool_opens() -> None:
    pool = SandboxPool(Sandbox(backend="process", trusted=True, require=("network",)))
    with pytest.raises(PromiseNotEnforceable, match="cannot promise 'network'"):
        await pool.acquire()
    spec_for("landlock")
    pool = SandboxPool(Sandbox(backend="landlock", require=("disk",)))
    with pytest.raises(PromiseNotEnforceable, match="cannot promise 'disk'"):
        await pool.open()


@pytest.mark.parametrize("backend", ["namespace", "landlock"])
async def test_a_path_that_is_not_there_cannot_be_shown(backend: str, tmp_path: Path) -> None:
    path = str(tmp_path / "packages")
    pool = SandboxPool(Sandbox(backend=backend, readonly=(path,)))
    with pytest.raises(SandboxUnavailable, match=f"^sandbox readonly: {path}: No such file or directory$"):
        await pool.open()


async def test_an_ordinary_user_cannot_choose_another(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() == 0:
        monkeypatch.setattr("agentrl.sandbox.local.os.getuid", lambda: 23456)
    pool = SandboxPool(Sandbox(run_as=23457))
    with pytest.raises(SandboxUnavailable, match=r"^sandbox run_as=23457: only root can choose another user id"):
        await pool.open()


def test_equal_specs_are_equal_and_limits_come_from_one_place() -> None:
    assert Sandbox(cpu_s=10, memory_mb=512) == Sandbox(memory_mb=512, cpu_s=10)
    assert hash(Sandbox()) == hash(Sandbox())
    assert Sandbox(memory_mb=512).limits == SandboxLimits(memory_mb=512)
    assert SandboxLimits(cpu_s=1.2).rlimits()["CPU"] == 2


async def test_the_table_in_the_docs_is_what_this_machine_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")
    ]
    begin = next(i for i, row in enumerate(rows) if row[0] == "promise")
    head, body = rows[begin], rows[begin + 1 : begin + 1 + len(PROMISES)]
    assert [row[0] for row in body] == list(PROMISES)
    assert [row[-1] for row in body] == list(PROMISES.values())
    if os.getuid() != 0 or not os.path.exists("/sys/fs/cgroup/memory/cgroup.procs"):
        pytest.skip("the table was made as root with control groups version 1")
    for backend in ("namespace", "landlock", "process"):
        found = await examine(backend)
        assert isinstance(found, Capabilities), found
        column = head.index(backend)
        assert {row[0] for row in body if row[column] == "kept"} == found.kept, backend
