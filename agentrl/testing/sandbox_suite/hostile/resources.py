"""Programs that take more memory, disk, processes or output than they may."""

from __future__ import annotations

from agentrl.sandbox import Box, ExecResult
from agentrl.testing.sandbox_suite.hostile.program import program
from agentrl.testing.sandbox_suite.stage import Stage, expect


async def _output_is_bounded(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    expect(result.outcome == "exit", f"outcome {result.outcome}")
    expect(result.stdout_total >= 100 << 20, f"only {result.stdout_total} bytes were taken")
    expect(len(result.stdout) <= stage.spec.stdout_bytes + 64, f"{len(result.stdout)} bytes were kept")
    expect(result.truncated, "the cut is not reported")
    expect(result.stdout.startswith(b"STARTED"), "the beginning is lost")
    expect(result.stdout.endswith(b"END\n"), "the end is lost")


RESOURCES = [
    program("fork_bomb", "pids", """
        count = 0
        try:
            while count < order["pids"] + 300:
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
                count += 1
            escaped(count)
        except OSError as error:
            print("stopped after", count, error)
    """, escapes_outside=True),
    program("thread_bomb", "pids", """
        count = 0
        try:
            while count < order["pids"] + 300:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                count += 1
            escaped(count)
        except RuntimeError as error:
            print("stopped after", count, error, flush=True)
        os._exit(0)
    """, escapes_outside=True),
    program("memory_bomb", "memory", """
        held = []
        try:
            while len(held) < order["memory_mb"] * 2:
                held.append(bytearray(b"x" * (1 << 20)))
            escaped(len(held))
        except MemoryError:
            print("stopped at", len(held))
    """, escapes_outside=True, wall_s=20.0),
    program("memory_bomb_many", "memory", """
        def look():
            with contextlib.suppress(BlockingIOError):
                told.update(int(pid) for pid in os.read(reader, 4096).split())
            with contextlib.suppress(ChildProcessError):
                while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                    ended.add(pid)

        each = order["memory_mb"] // 6
        reader, writer = os.pipe()
        for _ in range(20):
            if os.fork() == 0:
                try:
                    held = bytearray(each << 20)
                    held[::4096] = b"x" * (each << 8)
                except MemoryError:
                    os._exit(1)
                os.write(writer, b"%d " % os.getpid())
                time.sleep(60)
                os._exit(0)
        os.set_blocking(reader, False)
        told, ended, until = set(), set(), time.monotonic() + 15
        while len(told | ended) < 20 and time.monotonic() < until:
            time.sleep(0.1)
            look()
        time.sleep(0.5)  # whoever is to be killed for the last ones is killed by now
        look()
        holders = told - ended
        escaped(holders) if len(holders) * each > order["memory_mb"] * 1.2 else print("holding:", len(holders))
    """, escapes_outside=True, wall_s=30.0),
    program("memory_shm", "memory", """
        area = mmap.mmap(-1, order["memory_mb"] * 2 << 20)
        for begin in range(0, len(area), 1 << 20):
            area[begin:begin + (1 << 20)] = b"x" * (1 << 20)
        escaped()
    """, escapes_outside=True),
    program("memfd", "memory", """
        descriptors = []
        def fill():
            total = 0
            while total < order["memory_mb"] * 2:
                fd = os.memfd_create("x")
                descriptors.append(fd)
                for _ in range(32):
                    os.write(fd, b"x" * (1 << 20))
                total += 32
            return total
        attempt(fill)
    """, escapes_outside=True),
    program("memory_full_disk", "disk", """
        try:
            with open("full", "wb") as f:
                while True:
                    f.write(b"x" * (1 << 20))
        except OSError as error:
            print("disk:", error, flush=True)
        held = []
        try:
            while len(held) < order["memory_mb"] * 2:
                held.append(bytearray(b"x" * (1 << 20)))
            escaped()
        except MemoryError:
            pass
    """),
    program("disk_fill", "disk", """
        def fill():
            with open("big", "wb") as f:
                for _ in range(order["workspace_mb"] * 2):
                    f.write(b"x" * (1 << 20))
        attempt(fill)
    """),
    program("disk_fill_many", "disk", """
        def fill():
            for i in range(order["workspace_mb"]):
                with open(["", "/tmp/", "/dev/shm/"][i % 3] + "part%d" % i, "wb") as f:
                    f.write(b"x" * (2 << 20))
        attempt(fill)
    """),
    program("inode_fill", "disk", """
        def fill():
            for i in range(order["inodes"] + 100):
                os.close(os.open("f%d" % i, os.O_CREAT))
        attempt(fill)
    """),
    program("sparse_file", None, """
        with open("sparse", "wb") as f:
            attempt(lambda: f.truncate(order["file_mb"] * 4 << 20))
    """),
    program("zip_bomb", "disk", """
        import zlib
        packer, bomb = zlib.compressobj(9), b""
        for _ in range(order["workspace_mb"] * 2):
            bomb += packer.compress(bytes(1 << 20))
        bomb += packer.flush()
        def unpack():
            unpacker = zlib.decompressobj()
            with open("bomb", "wb") as f:
                data = bomb
                while data:
                    f.write(unpacker.decompress(data, 1 << 20))
                    data = unpacker.unconsumed_tail
        attempt(unpack)
    """),
    program("raise_rlimit", "privileges", """
        for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
            _, hard = resource.getrlimit(which)
            attempt(lambda: resource.setrlimit(which, (hard * 2, hard * 2)))
    """),
    program("output_100MB", None, """
        for _ in range(100):
            sys.stdout.write("x" * (1 << 20))
        print("END")
    """, _output_is_bounded, wall_s=40.0),
]  # fmt: skip
