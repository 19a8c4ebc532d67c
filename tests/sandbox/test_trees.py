"""What a sandbox may answer to a file operation, and what the host makes of it: the truth or an OSError."""

from __future__ import annotations

import errno
import json
import os
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentrl.sandbox import BoxSnapshot, Sandbox, SandboxDied, SandboxPool, trees
from agentrl.sandbox.contract import ExecResult
from agentrl.sandbox.inside import frames, leftovers, packing
from agentrl.sandbox.link import StreamLink

ORDER = {"op": "write", "path": "place"}


def result(stderr: bytes) -> ExecResult:
    return ExecResult("exit", 0, None, b"", stderr, 0, len(stderr), 0.0, 0.0)


def told(data: bytes = b"") -> list[Any]:
    return trees._told(data)


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"[" * 200_000, b"[]", b"null", b"7", b"\xff", b'{"errno": ' + b"9" * 5000 + b"}",
        b'{"errno": 1e999}',
        b'{"errno": "2"}', b'{"errno": [2]}', b'{"errno": 100000000000000000000, "error": {}, "path": {}}',
        b'{"errno": null}', b'{"errno": true}', b"{}", b'{"taken": 1, "sent": 2}', b'{"taken": {}, "sent": [[]]}',
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_an_error_of_the_operation(answer: bytes) -> None:
    with pytest.raises(OSError):
        trees.answer_of(result(answer), ORDER, b"", b"")


def test_data_that_were_taken_or_added_on_their_way_are_noticed() -> None:
    fine = json.dumps({"taken": told(b"abc"), "sent": told(b"xy")}).encode()
    assert trees.answer_of(result(fine), ORDER, b"abc", b"xy")
    for sent, came in ((b"abd", b"xy"), (b"ab", b"xy"), (b"abc", b"xz"), (b"abc", b"")):
        with pytest.raises(OSError, match="did not arrive as they were sent") as caught:
            trees.answer_of(result(fine), ORDER, sent, came)
        assert caught.value.errno == errno.EIO


@pytest.mark.parametrize(
    "entries",
    [
        None, {}, [1], [["a"]], [["a", {}]], [["a", None]], [[1, {}]], [["a/b", {"kind": "file"}]],
        [["a", {"kind": "file", "size": -1, "mode": 0, "mtime": 0}]],
        [["a", {"kind": "pipe", "size": 1, "mode": 0, "mtime": 0}]],
        [["a", {"kind": "file", "size": 1, "mode": 0, "mtime": float("nan")}]],
        [["a", {"kind": "file", "size": 1, "mode": "x", "mtime": 0}]],
        [["a", {"kind": "file", "size": 1, "mode": 0, "mtime": 0}]] * 2,
        [[str(i), {"kind": "file", "size": 1, "mode": 0, "mtime": 0}] for i in range(4)],
    ],
)  # fmt: skip
def test_a_listing_that_is_none_is_an_error_of_the_operation(entries: Any) -> None:
    with pytest.raises(OSError):
        trees.listing({"entries": entries}, "place", 3)


def tree(*parts: bytes, count: int | None = None) -> bytes:
    return b"".join(parts) + packing.end(len(parts) if count is None else count)


def file(name: bytes, content: bytes = b"x", mode: int = 0o644) -> bytes:
    return packing.head(packing.FILE, mode, -1, name) + packing.piece(content) + packing.piece(b"")


FOLDER = packing.head(packing.FOLDER, 0o755, -1, b"d")
LINK = packing.head(packing.LINK, 0o777, -1, b"l", b"/etc")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"x" * 100, b"\xff" * 1000, tree(file(b"a"))[:-1], tree(file(b"a")) + b"x", tree(file(b"a"), count=2),
        tree(file(b"/etc/passwd")), tree(file(b"../x")), tree(FOLDER, file(b"d/../../x")), tree(file(b"a//b")),
        tree(file(b"./a")), tree(file(b"a\0b")), tree(file(b"")), tree(file(b"n" * 256)),
        tree(file(b"a/" * 200 + b"b")), tree(packing.head(packing.FOLDER, 0o755, -1, b"d", b"t")),
        tree(file(b"a"), file(b"a")), tree(file(b"d/x")), tree(LINK, file(b"l/passwd")),
        tree(file(b"a"), file(b"a/b")), tree(packing.head(packing.LINK, 0o777, -1, b"l")),
        tree(packing.head(9, 0o755, -1, b"device")), tree(file(b"a", mode=0o170644)),
        tree(packing.head(packing.MORE, 0o644, -1, b"a") + packing.piece(b"")),
        tree(packing.head(packing.FILE, 0o644, -1, b"a") + packing.PIECE.pack(1 << 31)),
        tree(*(file(b"f%d" % i) for i in range(11))), tree(file(b"a", b"x" * 60), file(b"b", b"x" * 60)),
    ],
)  # fmt: skip
def test_a_tree_that_is_none_is_an_error_of_the_operation(data: bytes) -> None:
    assert trees.read(tree(FOLDER, file(b"d/x", b"y" * 100), LINK), max_bytes=100, max_files=10)
    with pytest.raises(OSError):
        trees.read(data, max_bytes=100, max_files=10)


@pytest.mark.parametrize("name", ["", ".", "..", "/x", "a/../../x", "a/..", "x\0y", "n" * 256])
def test_names_that_leave_the_directory_are_refused_before_anything_is_sent(name: str) -> None:
    with pytest.raises(ValueError, match="would leave the directory, or is not a file name"):
        trees.of_files({name: b""})


def test_a_tree_travels_in_portions() -> None:
    entries = [trees.Entry(packing.FOLDER, "d", mode=0o555), trees.Entry(packing.FILE, "d/big", os.urandom(5000))]
    entries += [trees.Entry(packing.FILE, f"d/{i}", bytes([i]) * i) for i in range(50)]
    sent = list(trees.portions(entries, 1000))
    assert len(sent) > 5
    assert all(len(portion) < 3000 for portion in sent)


async def _linked() -> tuple[StreamLink, socket.socket]:
    ours, theirs = socket.socketpair()
    return await StreamLink.over(ours, "forged"), theirs


FORGERIES: list[Callable[[int], bytes]] = [
    lambda number: frames.pack({"id": number, "part": True}, b"x" * 101),
    lambda number: frames.pack({"id": number + 1, "part": True}, b"x"),
    lambda number: frames.pack({"part": True}, b"x"),
    lambda number: frames.pack({"id": [], "part": True}, b"x"),
    lambda number: frames.pack_raw(b'{"a":' + b"[" * 100_000, b""),
    lambda number: frames.pack({"id": {}}),
]


@pytest.mark.parametrize("forge", FORGERIES)
async def test_parts_are_counted_while_they_arrive(forge: Callable[[int], bytes]) -> None:
    link, far = await _linked()
    with far:
        waiting = link.send({"op": "call", "stream": 100})
        number = link._count
        far.sendall(frames.pack({"id": number, "part": True}, b"y" * 100)[: -100 + 50] + b"y" * 50)
        far.sendall(forge(number))
        with pytest.raises(SandboxDied, match="an invalid frame"):
            await waiting
        link.close()


async def test_a_snapshot_from_elsewhere_is_looked_at_before_the_box_is_reset() -> None:
    async with SandboxPool(Sandbox(), min_idle=0) as pool, pool.lease() as box:
        await box.write_file("kept", "x")
        with pytest.raises(OSError, match="no tree of files"):
            await box.reset(BoxSnapshot(tree(file(b"../x"))))
        assert await box.read_file("kept") == b"x"


def test_leftovers_of_any_depth_and_mode_are_removed() -> None:
    place = tempfile.mkdtemp()
    outside = Path(tempfile.mkdtemp())
    (outside / "kept").write_text("x")
    here = os.open(".", os.O_RDONLY)
    os.chdir(place)
    os.symlink(outside, "link")
    (Path(place) / "moved1").write_text("in the way")
    os.makedirs("moved2/full")
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
    Path("file").write_text("x")
    os.fchdir(here)
    os.close(here)
    os.chmod(f"{place}/d/d/d", 0)
    leftovers.remove_whole(place)
    assert not os.path.exists(place)
    assert (outside / "kept").read_text() == "x"
    leftovers.remove_tree(str(outside))


def test_sweeps_of_one_place_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    for number in range(400):
        workspace = tmp_path / f"agentrl-{os.getuid()}-{2**22 + number}-1" / "box" / "workspace"
        workspace.mkdir(parents=True)
        (workspace / "file").write_text("x")
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(leftovers.sweep_folders, [str(tmp_path)] * 8))
    leftovers.sweep_folders(str(tmp_path))  # what one found full, because another was just emptying it
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before
