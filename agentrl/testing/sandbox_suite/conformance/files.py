"""Files: text, bytes, permissions, trees, errors."""

from __future__ import annotations

import secrets

from agentrl.testing.sandbox_suite.stage import Stage, expect

ALL_BYTES = bytes(range(256)) * 5 + b"\r\n\xff\x00\xfe"


async def text_files(stage: Stage) -> None:
    async with stage.box() as box:
        await box.write_file("a.txt", "Grüße, 世界\n")
        expect(await box.read_file("a.txt") == "Grüße, 世界\n".encode(), "text changed")
        await box.write_file("näme mit ❄ blank.txt", "x")
        expect([f.name for f in await box.list_dir()] == ["a.txt", "näme mit ❄ blank.txt"], "names changed")


async def binary_files(stage: Stage) -> None:
    async with stage.box() as box:
        await box.write_file("b", ALL_BYTES)
        expect(await box.read_file("b") == ALL_BYTES, "bytes changed")
        await box.write_file("empty", b"")
        expect(await box.read_file("empty") == b"", "empty file changed")


async def large_files(stage: Stage) -> None:
    async with stage.box() as box:
        data = secrets.token_bytes(1 << 20) * 9 + b"end"
        await box.write_file("large", data)
        expect(await box.read_file("large", max_bytes=1 << 30) == data, "large file changed")
        expect(await box.read_file("large", offset=len(data) - 3) == b"end", "offset is off")
        expect(len(await box.read_file("large")) == 1 << 20, "max_bytes is not held")
        inside = await box.run("wc -c < large")
        expect(int(inside.stdout) == len(data), inside)


async def overwriting(stage: Stage) -> None:
    async with stage.box() as box:
        await box.write_file("f", "a long first version")
        await box.write_file("f", "short", mode=0o640)
        expect(await box.read_file("f") == b"short", "the old end is still there")
        expect((await box.stat("f")).mode == 0o640, "the mode is not set")


async def folders(stage: Stage) -> None:
    async with stage.box() as box:
        await box.write_file("a/b/c.txt", "x")
        await box.make_dir("a/d/e")
        expect(
            [(f.name, f.kind) for f in await box.list_dir("a")] == [("b", "directory"), ("d", "directory")], "list"
        )
        info = await box.stat("a/b/c.txt")
        expect((info.kind, info.size) == ("file", 1), info)
        await box.remove("a/b/c.txt")
        await box.remove("a/b")
        expect([f.name for f in await box.list_dir("a")] == ["d"], "not removed")


async def removing_what_is_locked(stage: Stage) -> None:
    async with stage.box() as box:
        await box.run("mkdir -p locked/inner && touch locked/inner/f && chmod 0 locked/inner locked")
        await box.remove("locked", recursive=True)
        expect(await box.list_dir() == [], "still there")


async def file_errors(stage: Stage) -> None:
    async with stage.box() as box:
        await box.make_dir("folder")
        wrong: list[tuple[type[OSError], object]] = [
            (FileNotFoundError, box.read_file("nothing")),
            (IsADirectoryError, box.read_file("folder")),
            (IsADirectoryError, box.write_file("folder", "x")),
            (FileNotFoundError, box.write_file("no/parent", "x", parents=False)),
            (FileNotFoundError, box.list_dir("nothing")),
            (NotADirectoryError, box.get_tree("/etc/hosts")),
            (FileNotFoundError, box.stat("nothing")),
            (OSError, box.remove("/nothing-of-mine")),
        ]
        for kind, operation in wrong:
            try:
                await operation  # type: ignore[misc]
            except OSError as error:
                expect(isinstance(error, kind), f"expected {kind.__name__}, got {error!r}")
            else:
                raise AssertionError(f"no {kind.__name__}")


async def permissions(stage: Stage) -> None:
    async with stage.box() as box:
        await box.write_file("secret", "x", mode=0o000)
        forbidden = (box.read_file("secret"), box.write_file("/etc/hosts", "x"), box.write_file("/usr/x", "x"))
        for operation in forbidden:
            try:
                await operation
            except OSError:
                continue
            raise AssertionError("was allowed")


async def trees(stage: Stage) -> None:
    files = {"a.py": b"print(1)\n", "deep/er/b.bin": ALL_BYTES, "empty": b""}
    async with stage.box() as box:
        await box.put_tree(files, "project")
        expect(await box.get_tree("project") == files, "the tree changed")
        for name in ("../x", "/x", "a/../../x"):
            try:
                await box.put_tree({name: b""})
            except ValueError:
                continue
            raise AssertionError(f"{name} was accepted")


async def large_trees(stage: Stage) -> None:
    files = {f"d{i}/f": secrets.token_bytes(1 << 20) for i in range(12)} | {"one": secrets.token_bytes(9 << 20)}
    async with stage.box() as box:
        await box.put_tree(files)
        state = await box.snapshot()
        await box.reset(state)
        expect(await box.get_tree(max_bytes=64 << 20) == files, "the tree changed")


async def tree_limits(stage: Stage) -> None:
    async with stage.box() as box:
        await box.run("for i in $(seq 50); do echo x > f$i; done; head -c 100000 /dev/zero > big")
        for operation in (box.get_tree(max_files=20), box.get_tree(max_bytes=50_000)):
            try:
                await operation
            except OSError:
                continue
            raise AssertionError("a limit was not held")
        expect(len(await box.get_tree()) == 51, "not all files came")


async def temporary_files(stage: Stage) -> None:
    async with stage.box() as box:
        code = "import tempfile, os\nwith tempfile.NamedTemporaryFile() as f: print(os.path.dirname(f.name))"
        result = await box.python(code + "\nprint(os.environ['TMPDIR'])")
        lines = result.text().split()
        expect(len(lines) == 2 and lines[0] == lines[1], result)
        result = await box.run("diff <(echo a) <(echo a) && echo same")
        expect(result.stdout == b"same\n" or stage.spec.backend == "landlock", result)


async def snapshots(stage: Stage) -> None:
    async with stage.box() as box:
        await box.put_tree({"a/b.txt": "1"})
        await box.write_file("run.sh", "#!/bin/sh\necho ran", mode=0o755)
        await box.run("ln -s b.txt a/link; mkdir hollow")
        state = await box.snapshot()
        await box.run("rm -rf a; echo junk > $TMPDIR/junk; echo junk > junk")
        session = await box.session("bash")
        await box.reset(state)
        names = (await box.run("find . | sort; readlink a/link; ls $TMPDIR | grep junk; ./run.sh")).text().split()
        expect(names == [".", "./a", "./a/b.txt", "./a/link", "./hollow", "./run.sh", "b.txt", "ran"], names)
        expect((await session.run("echo again")).stdout == b"again\n", "a session of before fails")
        await box.reset()
        expect(await box.list_dir() == [], "an empty reset is not empty")
