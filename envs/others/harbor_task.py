"""Harbor's task folders: `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias, cast

from agentrl.errors import ConfigError
from agentrl.sandbox.inside import packing
from agentrl.sandbox.inside.keeper import base_env
from agentrl.sandbox.trees import Entry

Table: TypeAlias = "Mapping[str, object]"
IGNORED = ("FROM", "CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "USER", "HEALTHCHECK", "STOPSIGNAL", "SHELL")
"""Instructions of a Dockerfile that need no image to be followed."""
_UNSUPPORTED = {
    ("steps",): "several steps",
    ("environment", "mcp_servers"): "MCP servers",
    ("environment", "gpus"): "GPUs",
    ("environment", "tpu"): "TPUs",
    ("environment", "healthcheck"): "a health check",
    ("verifier", "environment"): "an environment for the verifier",
    ("verifier", "collect"): "collect hooks",
}


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task.

    Attributes:
        folder: the task's folder.
        instruction: the user message.
        image: the image to run; None: the one that `environment/Dockerfile` builds.
        workdir: working directory; None: that of the image or the Dockerfile.
        artifacts: paths carried into the verifier's sandbox; empty: everything in the writable folders.
        network: whether it may have a network.
    """

    folder: Path
    instruction: str
    image: str | None
    workdir: str | None
    artifacts: tuple[str, ...]
    env: Mapping[str, str]
    test_env: Mapping[str, str]
    agent_timeout_s: float | None
    test_timeout_s: float
    memory_mb: int | None
    storage_mb: int | None
    cpus: float | None
    network: bool

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name

    @property
    def dockerfile(self) -> Path:
        """The Dockerfile of the environment."""
        return self.folder / "environment" / "Dockerfile"


def task_folders(root: Path) -> list[Path]:
    """The task folders: `root` itself, or those directly in it by name. Raises ConfigError if there are none."""
    if not root.is_dir():
        raise ConfigError(f"env harbor:{root}: no such folder")
    if (root / "task.toml").is_file():
        return [root]
    found = sorted(folder for folder in root.iterdir() if (folder / "task.toml").is_file())
    if not found:
        raise ConfigError(f"env harbor:{root}: no task.toml in it or in the folders in it")
    return found


def read_task(folder: Path) -> HarborTask:
    """Read and check a task. Raises ConfigError."""
    where = f"{folder}/task.toml"
    try:
        data = cast(Table, tomllib.loads((folder / "task.toml").read_text(encoding="utf-8")))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as e:
        raise ConfigError(f"{folder}: {e}") from e
    for keys, what in _UNSUPPORTED.items():
        if _at(data, *keys):
            raise ConfigError(f"{where}: {'.'.join(keys)}: tasks with {what} are not supported")
    if _at(data, "environment", "os") not in (None, "linux"):
        raise ConfigError(f"{where}: environment.os: only linux is supported")
    if _at(data, "verifier", "environment_mode") == "separate" and (folder / "tests" / "Dockerfile").is_file():
        raise ConfigError(f"{where}: a verifier with an image of its own (tests/Dockerfile) is not supported")
    if any((folder / "environment").glob("docker-compose.y*ml")):
        raise ConfigError(f"{folder}/environment: tasks of several containers (docker-compose) are not supported")
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigError(f"{folder}: has no tests/test.sh")
    return HarborTask(
        folder,
        instruction,
        _text(data, where, "environment", "docker_image"),
        _text(data, where, "environment", "workdir"),
        tuple(_artifact(item, where) for item in cast(list[object], _at(data, "artifacts") or [])),
        _variables(data, where, "environment"),
        _variables(data, where, "verifier"),
        _number(data, where, "agent", "timeout_sec"),
        _number(data, where, "verifier", "timeout_sec") or 600.0,
        _megabytes(data, where, "memory"),
        _megabytes(data, where, "storage"),
        _number(data, where, "environment", "cpus"),
        _at(data, "environment", "allow_internet") is not False,
    )


def read_rewards(text: str | None, parts: str | None) -> dict[str, float]:
    """The rewards of `reward.json`, or of `reward.txt` if that is missing.

    If `reward` stands next to other parts, it is the total: it is returned alone unless they add up to it.

    Raises:
        ValueError: there is neither, or a value is not a finite number.
    """
    if parts is not None:
        found: object = json.loads(parts)
        values: Mapping[str, object] = found if isinstance(found, dict) else {"reward": found}
    elif text is not None:
        values = {"reward": float(text)}
    else:
        raise ValueError("the tests wrote neither reward.json nor reward.txt into /logs/verifier")
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"reward {name!r} is {value!r}: must be a finite number")
        numbers[name] = float(value)
    if not numbers:
        raise ValueError("reward.json is empty")
    rest = {name: value for name, value in numbers.items() if name != "reward"}
    if "reward" not in numbers:
        return rest
    total = numbers["reward"]
    return rest if rest and math.isclose(sum(rest.values()), total, abs_tol=1e-9) else {"reward": total}


def host_tree(root: Path, below: str = "") -> list[Entry]:
    """The files, folders and links below `root`, with their modes, named below `below`."""
    found: list[Entry] = []
    for path in sorted(root.rglob("*")):
        name = str(PurePosixPath(below) / path.relative_to(root).as_posix())
        if path.is_symlink():
            found.append(Entry(packing.LINK, name, target=os.fsencode(os.readlink(path))))
        elif path.is_dir():
            found.append(Entry(packing.FOLDER, name, mode=0o755))
        elif path.is_file():
            found.append(Entry(packing.FILE, name, path.read_bytes(), path.stat().st_mode & 0o755 | 0o600))
    return found


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a Dockerfile without `RUN` says: files by absolute path, variables, and the working directory."""

    files: tuple[Entry, ...]
    env: Mapping[str, str]
    workdir: str


def read_dockerfile(path: Path) -> Recipe:
    """Follow a Dockerfile without building an image.

    Raises:
        ConfigError: it has an instruction that needs an image.
    """
    files: dict[str, Entry] = {}
    env: dict[str, str] = {}
    workdir = PurePosixPath("/app")
    for line in _instructions(path):
        name, _, rest = line.partition(" ")
        name = name.upper()
        try:
            if name == "WORKDIR":
                workdir = workdir / " ".join(_words(rest, env))
            elif name == "ENV":
                env |= _assigned(_words(rest, env))
            elif name in ("COPY", "ADD") and not rest.strip().startswith("--"):
                for entry in _copied(path, *_places(rest, env), workdir):
                    files[entry.name] = entry
            elif name not in IGNORED:
                raise ConfigError(f"{path}: {line[:60]!r} needs an image: use `options: {{backend: docker}}`")
        except ValueError as e:
            raise ConfigError(
                f"{path}: {line[:60]!r}: {e}; write it in another way, or use `options: {{backend: docker}}`"
            ) from None
    return Recipe(tuple(files.values()), env, str(workdir))


def _instructions(path: Path) -> Sequence[str]:
    """The instructions, each on one line. Comments may stand between the lines of one."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}; a task needs it, or environment.docker_image") from e
    lines = (line.strip() for line in text.splitlines())
    kept = "\n".join(line for line in lines if line and not line.startswith("#"))
    return [line.strip() for line in kept.replace("\\\n", " ").splitlines()]


_LITERAL = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\\$""", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?([-+])([^}]*))?\})")


def _words(text: str, known: Mapping[str, str]) -> list[str]:
    """The words of an instruction as Docker reads them, with quotes and variables. Raises ValueError."""

    def hidden(part: re.Match[str]) -> str:
        return part[0].replace("$" if part[0][0] == "'" else "\\$", "\0")

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        here = known.get(name) or (base_env("", "", {})["PATH"] if name == "PATH" else "")
        instead = found[4] or ""
        return {None: here, "-": here or instead, "+": instead if here else ""}[found[3]]

    words = shlex.split(_LITERAL.sub(hidden, text))
    if other := [word for word in words if "${" in _VARIABLE.sub("", word)]:
        raise ValueError(f"cannot read {other[0]!r}")
    return [_VARIABLE.sub(value, word).replace("\0", "$") for word in words]


def _assigned(words: Sequence[str]) -> dict[str, str]:
    """The variables of `ENV NAME=VALUE ...` or `ENV NAME VALUE`. Raises ValueError."""
    if words and "=" not in words[0]:
        words = [f"{words[0]}={' '.join(words[1:])}"] if len(words) > 1 else []
    if not words or any("=" not in word for word in words):
        raise ValueError("ENV needs NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def _places(rest: str, env: Mapping[str, str]) -> tuple[Sequence[str], str]:
    """The sources and the target of COPY, as words or as a JSON list. Raises ValueError."""
    found: object = json.loads(rest) if rest.strip().startswith("[") else _words(rest, env)
    if not isinstance(found, list) or len(found) < 2 or not all(isinstance(item, str) for item in found):
        raise ValueError("COPY needs sources and a target")
    return found[:-1], found[-1]


def _copied(dockerfile: Path, sources: Sequence[str], target: str, workdir: PurePosixPath) -> list[Entry]:
    root, place = dockerfile.parent.resolve(), workdir / target
    paths: list[Path] = []
    for source in sources:
        name = source.lstrip("/")
        several = any(sign in name for sign in "*?[")
        matching = sorted(root.glob(name)) if several else [(root / name).resolve()]
        if not matching or any(not p.exists() or not p.resolve().is_relative_to(root) for p in matching):
            raise ConfigError(f"{dockerfile}: COPY {source}: no such file in {dockerfile.parent}")
        paths += [path for path in matching if not several or path != root / dockerfile.name]
    found: list[Entry] = []
    for path in paths:
        if path.is_dir():
            found += [e for e in host_tree(path, str(place)) if e.name != str(place / "Dockerfile")]
            continue
        inside = place / path.name if target.endswith(("/", ".")) or len(paths) > 1 else place
        found.append(Entry(packing.FILE, str(inside), path.read_bytes(), path.stat().st_mode & 0o755 | 0o600))
    return found


def solution_variables(folder: Path) -> Mapping[str, str]:
    """The variables of `solution/solve.sh`. Raises ConfigError."""
    where = f"{folder}/task.toml"
    return _variables(tomllib.loads(Path(where).read_text(encoding="utf-8")), where, "solution")


def _at(data: Table, *keys: str) -> object:
    found: object = data
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _text(data: Table, where: str, *keys: str) -> str | None:
    value = _at(data, *keys)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{where}: {'.'.join(keys)}: must be text, got {value!r}")
    return value


def _number(data: Table, where: str, *keys: str) -> float | None:
    value = _at(data, *keys)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise ConfigError(f"{where}: {'.'.join(keys)}: must be a positive number, got {value!r}")
    return float(value)


def _megabytes(data: Table, where: str, name: str) -> int | None:
    """`memory_mb = 2048`, or `memory = "2G"` of older tasks."""
    number = _number(data, where, "environment", f"{name}_mb")
    text = _text(data, where, "environment", name)
    if number is not None or text is None:
        return None if number is None else int(number)
    found = re.fullmatch(r"(\d+)([KMG])i?B?", text.strip(), re.IGNORECASE)
    if found is None or not int(found[1]):
        raise ConfigError(f"{where}: environment.{name}: {text!r} must be a size such as '512M' or '2G'")
    return max(1, int(found[1]) * {"K": 1, "M": 1 << 10, "G": 1 << 20}[found[2].upper()] >> 10)


def _variables(data: Table, where: str, section: str) -> Mapping[str, str]:
    given = _at(data, section, "env") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: {section}.env: must be a table")
    for name, value in given.items():
        if not isinstance(value, str) or "${" in value:
            raise ConfigError(
                f"{where}: {section}.env.{name}: {value!r} must be plain text, without variables of the host"
            )
    return dict(given)


def _artifact(item: object, where: str) -> str:
    path = item.get("source") if isinstance(item, Mapping) else item
    other = [key for key in item if key != "source"] if isinstance(item, Mapping) else []
    if not isinstance(path, str) or not path.startswith("/") or other:
        raise ConfigError(f"{where}: artifacts: {item!r}: must be an absolute path")
    return path
