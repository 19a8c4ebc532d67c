"""Programs that reach for files of the host, of others, and outside their own folder."""

from __future__ import annotations

from agentrl.sandbox import Box, ExecResult
from agentrl.testing.sandbox_suite.hostile.program import program
from agentrl.testing.sandbox_suite.stage import Stage, expect


async def _link_leads_nowhere(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    for path in ("link", "sub/answer.txt", "root/" + stage.marker.lstrip("/")):
        try:
            data = await box.read_file(path)
        except OSError:
            continue
        expect(stage.secret.encode() not in data, f"read_file({path!r}) left the sandbox")
    tree = await box.get_tree()
    expect(all(stage.secret.encode() not in data for data in tree.values()), "get_tree left the sandbox")


async def _fifo_does_not_hold(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    for operation in (box.read_file("trap"), box.write_file("trap", b"x"), box.read_file("/dev/zero")):
        try:
            await operation
        except OSError:
            continue
        raise AssertionError("a pipe or device was taken for a file")
    expect("trap" not in await box.get_tree(), "get_tree took the pipe for a file")


async def _nothing_written(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    import os

    for folder in (stage.folder, "/", "/etc", "/usr", "/usr/local", "/root", "/home", "/var/tmp"):
        path = os.path.join(folder, token)
        if os.path.lexists(path):
            os.unlink(path)
            raise AssertionError(f"{path} was written outside")


FILES = [
    program("read_shadow", "files", 'attempt(lambda: open("/etc/shadow").read()[:9])'),
    program("read_host_file", "files", 'attempt(lambda: contains_secret(order["marker"]))', escapes_outside=True),
    program("change_host_file", "files", """
        for path in (order["marker"], order["folder"]):
            for flags in (os.O_PATH, os.O_RDONLY):
                try:
                    fd = os.open(path, flags)
                except OSError:
                    continue
                attempt(lambda: os.chmod("/proc/self/fd/%d" % fd, 0o777))
                attempt(lambda: os.fchmod(fd, 0o777))
            attempt(lambda: os.chmod(path, 0o777))
            attempt(lambda: os.chown(path, os.getuid(), -1))
            attempt(lambda: os.utime(path, (0, 0)))
            attempt(lambda: os.setxattr(path, "user.x", b"x"))
            address = ctypes.cast(ctypes.c_char_p(path.encode()), ctypes.c_void_p).value
            result, code = syscall(452, 452, -100, address, 0o777, 0)
            escaped("fchmodat2") if result == 0 else print("stopped:", os.strerror(code))
    """),
    program("read_harness_root", "files", """
        for pid in (order["harness"], order["victim"], os.getppid(), 1):
            for place in ("root", "cwd"):
                attempt(lambda: contains_secret("/proc/%d/%s%s" % (pid, place, order["marker"])))
    """, escapes_outside=True),
    program("write_outside", "files", """
        for folder in (order["folder"], "/", "/etc", "/usr", "/usr/local", "/root", "/home", "/var/tmp"):
            try:
                open(os.path.join(folder, order["token"]), "w").close()
                print("wrote to", folder)
            except OSError as error:
                print("stopped:", error)
    """, _nothing_written, escapes_outside=True),
    program("read_other_episode", "files", """
        import itertools
        places = [order["peer_home"], "/workspace", "/tmp", "/dev/shm"]
        for pid in [p for p in os.listdir("/proc") if p.isdigit()] if os.path.exists("/proc/self") else []:
            places += ["/proc/%s/cwd" % pid, "/proc/%s/root%s" % (pid, order["peer_home"])]
        for place in places:
            attempt(lambda: contains_secret(os.path.join(place, "peer.txt")))
    """, escapes_outside=True),
    program("symlink_escape", None, """
        os.symlink(order["marker"], "link")
        os.symlink(order["folder"], "sub")
        os.symlink("/", "root")
    """, _link_leads_nowhere),
    program("hardlink_escape", "files", """
        attempt(lambda: os.link(order["marker"], "hard") or contains_secret("hard"))
        attempt(lambda: os.link("/etc/passwd", "/etc/passwd2"))
    """),
    program("fifo_trap", None, 'os.mkfifo("trap")', _fifo_does_not_hold),
    program("swap_race", None, """
        def swap():
            while True:
                for make in (lambda: open("race", "w").close(), lambda: os.symlink(order["marker"], "race")):
                    try:
                        os.unlink("race")
                    except OSError:
                        pass
                    try:
                        make()
                    except OSError:
                        pass
        threading.Thread(target=swap, daemon=True).start()
        for _ in range(300):
            try:
                contains_secret("race")
            except (OSError, ValueError):
                pass
    """, _link_leads_nowhere),
]  # fmt: skip
