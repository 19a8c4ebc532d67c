"""Make the default image without a registry: pack this machine's Python and its everyday tools, and import them.

python -m agentrl.sandboxes.docker.image [--tag agentrl/sandbox:latest] [--python PATH]
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

TOOLS = (
    "sh", "bash", "cat", "ls", "cp", "mv", "rm", "mkdir", "rmdir", "ln", "chmod", "echo", "printf", "true",
    "false", "sleep", "kill", "ps", "grep", "sed", "awk", "find", "head", "tail", "wc", "sort", "uniq",
    "cut", "tr", "diff", "env", "id", "du", "df", "xargs", "tee", "timeout", "nohup", "setsid", "tar",
    "gzip", "git", "patch", "dd", "touch", "stat", "readlink", "basename", "dirname", "mktemp", "date",
    "seq", "test", "sqlite3", "pwd", "yes",
)  # fmt: skip
LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "site-packages",
    "lib2to3",
    "__pycache__",
}
ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:10001:10001:agent:/workspace:/bin/bash\n",
    "etc/group": "root:x:0:\nagent:x:10001:\n",
    "etc/hosts": "127.0.0.1 localhost\n",
    "etc/resolv.conf": "",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
PYTHON_HOME = "opt/python"


def libraries(program: Path) -> Iterator[Path]:
    """Return the shared libraries that a program or library loads, according to `ldd`."""
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        target = line.split("=>")[-1].split("(")[0].strip()
        if target.startswith("/") and os.path.exists(target):
            yield Path(target)


class Root:
    """A root file system under construction; every directory gets an entry, and nothing is written twice."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._seen: set[str] = {"", "."}

    def folder(self, name: str, mode: int = 0o755) -> None:
        """Add a directory and its parents."""
        if name not in self._seen:
            self.folder(os.path.dirname(name))
            self._seen.add(name)
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, mode
            self._tar.addfile(info)

    def text(self, name: str, content: str) -> None:
        """Add a small file."""
        self.folder(os.path.dirname(name))
        info = tarfile.TarInfo(name)
        info.size = len(content.encode())
        self._seen.add(name)
        self._tar.addfile(info, io.BytesIO(content.encode()))

    def link(self, name: str, target: str) -> None:
        """Add a symbolic link."""
        if name not in self._seen:
            self.folder(os.path.dirname(name))
            self._seen.add(name)
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            self._tar.addfile(info)

    def file(self, source: Path, name: str | None = None) -> None:
        """Add a file of this machine with links resolved, below /usr if its own location is a link to there."""
        name = str(source).lstrip("/") if name is None else name
        for short in ("bin/", "sbin/", "lib/", "lib64/"):
            if name.startswith(short):
                name = "usr/" + name
        name = name.replace("usr/sbin/", "usr/bin/")
        if name in self._seen:
            return
        self.folder(os.path.dirname(name))
        self._seen.add(name)
        info = self._tar.gettarinfo(str(source.resolve()), arcname=name)
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        info.type, info.linkname = tarfile.REGTYPE, ""
        info.mode &= 0o755
        real = source.resolve()
        info.size = real.stat().st_size
        with real.open("rb") as f:
            self._tar.addfile(info, f)


def write_root(python: Path, target: Path) -> None:
    """Write the tar archive of the root file system."""
    real = python.resolve()
    prefix = real.parent.parent
    version = subprocess.run(
        [str(real), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    standard = prefix / "lib" / f"python{version}"
    with tarfile.open(target, "w") as tar:
        root = Root(tar)
        for name in ("usr/bin", "usr/lib", "usr/lib64", "proc", "sys", "dev", "workspace"):
            root.folder(name)
        root.folder("tmp", 0o1777)
        for name in ("bin", "lib", "lib64", "sbin"):
            root.link(name, "usr/bin" if name == "sbin" else f"usr/{name}")
        for name, content in ACCOUNTS.items():
            root.text(name, content)
        programs = [Path(found) for name in TOOLS if (found := shutil.which(name, path="/usr/bin:/bin:/usr/sbin"))]
        for program in programs:
            root.file(program)
        binaries = [*programs, real, *standard.glob("lib-dynload/*.so")]
        for library in sorted({library for binary in binaries for library in libraries(binary)}):
            if prefix not in library.parents:
                root.file(library)
        for source in Path("/usr/lib/locale/C.utf8").rglob("*"):
            if source.is_file():
                root.file(source)
        root.file(real, f"{PYTHON_HOME}/bin/python3")
        for source in sorted(standard.rglob("*")):
            inside = source.relative_to(standard)
            if source.is_file() and not LEFT_OUT & set(inside.parts) and source.suffix != ".a":
                root.file(source, f"{PYTHON_HOME}/lib/python{version}/{inside}")
        for source in prefix.glob("lib/libpython*.so*"):
            root.file(source, f"usr/lib/{source.name}")
        for name in ("python3", "python"):
            root.link(f"usr/bin/{name}", f"/{PYTHON_HOME}/bin/python3")


def build(tag: str, python: Path) -> None:
    """Pack the root file system and import it as an image.

    Raises:
        docker.errors.DockerException: no engine responds.
    """
    import docker

    client = docker.APIClient(version="auto", timeout=300, **docker.utils.kwargs_from_env())
    repository, _, name = tag.partition(":")
    changes = ["ENV PATH=/usr/local/bin:/usr/bin:/bin", "USER 10001:10001", "WORKDIR /workspace"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "root.tar"
            write_root(python, target)
            client.import_image_from_file(
                str(target), repository=repository, tag=name or "latest", changes=changes
            )
    finally:
        client.close()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tag", default="agentrl/sandbox:latest")
    parser.add_argument("--python", type=Path, default=Path(getattr(sys, "_base_executable", sys.executable)))
    arguments = parser.parse_args()
    if not sys.platform.startswith("linux"):
        parser.error(
            "this packs programs of a Linux machine; here, build the image from a registry: "
            f"docker build -t {arguments.tag} {Path(__file__).parent}"
        )
    build(arguments.tag, arguments.python)
    sys.stdout.write(f"{arguments.tag} is ready\n")


if __name__ == "__main__":
    main()
