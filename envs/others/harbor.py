"""`harbor:DIR`: Harbor's task folders, played in our sandboxes.

The policy has a shell in the task's working directory. Afterwards the task's artifacts are carried into a fresh
sandbox, where `tests/test.sh` writes the reward. Nothing else that ran before the tests survives.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import posixpath
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from agentrl.env.adapter import Adapter
from agentrl.env.play import ScriptedPolicy, call
from agentrl.env.tasks import Split
from agentrl.env.toolenv.declare import reward, tool
from agentrl.env.toolenv.env import ToolEnv
from agentrl.envs.others.harbor_task import (
    HarborTask,
    host_tree,
    read_dockerfile,
    read_rewards,
    read_task,
    solution_variables,
    task_folders,
)
from agentrl.errors import ConfigError, InfraError
from agentrl.sandbox import Box, BoxSession, Sandbox, pool_for
from agentrl.sandbox.box import MAX_INPUT
from agentrl.sandbox.inside import packing
from agentrl.sandbox.trees import Entry
from agentrl.tools.observation import observation
from agentrl.types import Task

LOGS = "/logs"
TESTS = "/tests"
SOLUTION = "/solution"
TESTS_HOME = f"{TESTS}/.home"
"""The home folder of the tests: that of the policy may hold files that programs load."""
GUARDED = (LOGS, TESTS, SOLUTION, "/proc", "/dev", "/sys")
ALWAYS = ("/workspace", "/tmp")
"""Folders that are writable in every sandbox."""
MAX_FILES = 20_000
TTL_S = 86_400.0
"""When a sandbox that nobody released ends. The limits of episodes, programs and tests are shorter."""
_UNPACK = (
    "import base64,io,sys,tarfile; "
    f'tarfile.open(fileobj=io.BytesIO(base64.b64decode(sys.stdin.read()))).extractall("{SOLUTION}")'
)
_SYSTEM = "You work in a Linux shell. Do the task with the tool; when it is done, say so without a tool call."


@dataclass(frozen=True)
class HarborOptions:
    """Options of `harbor:DIR`."""

    backend: str = "docker"
    """docker runs the task's image; namespace uses this machine's programs, for Dockerfiles without RUN."""
    system: str = _SYSTEM
    """System prompt."""
    held_out: str = "fifth"
    """fifth holds out every fifth task (if there are five); all uses all tasks in both splits."""
    writable: tuple[str, ...] = ()
    """Further writable folders of the image."""
    memory_mb: int = 1024
    """Memory of tasks that do not say."""
    workspace_mb: int = 256
    """Disk of tasks that do not say."""
    network: bool = False
    """Give the sandboxes a network."""


@dataclass(frozen=True, slots=True)
class Stage:
    """How a task starts: the sandbox, its working directory, and the files in the writable folders."""

    spec: Sandbox
    workdir: str
    files: Mapping[str, Sequence[Entry]]


class Harbor(ToolEnv, Adapter):
    """One task folder per episode."""

    Options = HarborOptions
    options: HarborOptions
    solved_at = 1.0
    harbor: HarborTask
    stage: Stage
    _session: BoxSession | None = None

    @classmethod
    def check_name(cls) -> None:
        """Read every task."""
        if cls.options.backend not in ("docker", "namespace"):
            raise ConfigError(f"env.options.backend: {cls.options.backend!r}: use docker or namespace")
        if cls.options.held_out not in ("fifth", "all"):
            raise ConfigError(f"env.options.held_out: {cls.options.held_out!r}: use fifth or all")
        for folder in task_folders(Path(cls.rest)):
            found = read_task(folder)
            if cls.options.backend == "namespace":
                if found.image is not None:
                    raise ConfigError(f"{folder}: environment.docker_image needs `options: {{backend: docker}}`")
                local_stage(found, cls.options)
            elif found.image is None and not found.dockerfile.is_file():
                raise ConfigError(f"{folder}: needs environment/Dockerfile or environment.docker_image")

    @classmethod
    def system(cls) -> str:
        """The system prompt."""
        return cls.options.system

    async def setup(self, folder: str) -> str:
        """Start the task's sandbox with its files; returns the instruction."""
        self.harbor, self._session = read_task(Path(folder)), None
        make = image_stage if self.options.backend == "docker" else local_stage
        self.stage = await asyncio.to_thread(make, self.harbor, self.options)
        pool_for(self.stage.spec, min_idle=0)  # a pool per image: keep none ready
        self.box: Box = await self.lease(self.stage.spec)
        await self._place()
        return self.harbor.instruction

    async def _place(self) -> None:
        """Put the files of the image into the writable folders."""
        for folder, entries in self.stage.files.items():
            await self.box.put_entries(entries, folder)
        for folder in (f"{LOGS}/agent", f"{LOGS}/verifier", f"{LOGS}/artifacts", self.stage.workdir):
            await self.box.make_dir(folder)

    @tool
    async def shell(self, command: str) -> str:
        """Run a bash command line; the working directory and variables stay."""
        if self._session is None:
            self._session = await self.box.session("bash")
            entered = await self._session.run(f"cd -- {shlex.quote(self.stage.workdir)}")
            if not entered.ok:
                raise InfraError(f"{self.harbor.name}: {self.stage.workdir}: {observation(entered)}")
        return observation(await self._session.run(command))

    @reward(timeout_s=7200.0)
    async def tests(self) -> Mapping[str, float]:
        """What `tests/test.sh` writes in a fresh sandbox with the artifacts."""
        carried = await self._work()
        await self.box.reset()
        self._session = None
        await self._place() if self.harbor.artifacts else await self.box.make_dir(self.stage.workdir)
        for folder, entries in carried:
            await self.box.put_entries(entries, folder)
        await self.box.put_entries(host_tree(self.harbor.folder / "tests"), TESTS)
        with contextlib.suppress(FileNotFoundError):
            await self.box.remove(f"{LOGS}/verifier", recursive=True)  # an artifact may contain it
        for folder in (f"{LOGS}/verifier", TESTS_HOME):
            await self.box.make_dir(folder)
        result = await self.box.run(
            ["bash", f"{TESTS}/test.sh"],
            cwd=self.stage.workdir,
            env={"HOME": TESTS_HOME, **self.harbor.env, **self.harbor.test_env},
            wall_s=self.harbor.test_timeout_s,
        )
        try:
            return read_rewards(await self._log("reward.txt"), await self._log("reward.json"))
        except ValueError as e:
            said = (result.text() + result.error_text()).strip()[-300:]
            raise ValueError(f"{self.harbor.name}: {e}; test.sh ended with {result.outcome}: {said}") from None

    async def _work(self) -> Sequence[tuple[str, Sequence[Entry]]]:
        """What the tests get of the policy's files, by folder; all together have the room of one folder.

        Raises:
            OSError: they are more, or cannot be read.
        """
        room, files, found = self.stage.spec.workspace_mb << 20, MAX_FILES, []
        for path in self.harbor.artifacts or self._carried():
            folder, entries = await self._artifacts(path, room, files)
            room -= sum(len(entry.content) for entry in entries)
            files -= len(entries)
            found.append((folder, [entry for entry in entries if not leads_to_results(entry, folder)]))
        return found

    def _carried(self) -> Sequence[str]:
        """The writable folders that hold work, not tests or their results."""
        own = [folder for folder in self.stage.spec.writable if folder not in (LOGS, TESTS, SOLUTION)]
        return [*own, f"{LOGS}/artifacts", *ALWAYS]

    async def _artifacts(self, path: str, most: int, most_files: int) -> tuple[str, Sequence[Entry]]:
        """The files below a path, or the file there, with the folder they belong to."""
        try:
            found = await self.box.stat(path)
            if found.kind == "file":
                content = await self.box.read_file(path, max_bytes=most)
                place = PurePosixPath(path)
                return str(place.parent), [Entry(packing.FILE, place.name, content, found.mode & 0o777)]
            return path, await self.box.get_entries(path, max_bytes=most, max_files=most_files)
        except FileNotFoundError:
            return path, []

    async def _log(self, name: str) -> str | None:
        try:
            raw = await self.box.read_file(f"{LOGS}/verifier/{name}", max_bytes=1 << 16)
            return raw.decode("utf-8", "replace")
        except FileNotFoundError:
            return None

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0) -> Sequence[Task]:
        """The folders by name; every fifth is held out."""
        folders = task_folders(Path(cls.rest))
        if cls.options.held_out == "fifth" and len(folders) >= 5:
            folders = [f for i, f in enumerate(folders) if (i % 5 == 4) == (split == "held_out")]
        return [Task(f"harbor-{folder.name}", {"folder": str(folder)}) for folder in folders]

    @classmethod
    def oracle(cls, task: Task) -> ScriptedPolicy:
        """Run the task's `solution/solve.sh`."""
        return ScriptedPolicy([call("shell", command=solution_command(Path(task.row["folder"]))), "It is done."])


def leads_to_results(entry: Entry, folder: str) -> bool:
    """Whether an entry below a folder is a link that may lead to the tests or their results.

    A test that writes to the path of such a link would overwrite these.
    """
    if entry.kind != packing.LINK:
        return False
    target = PurePosixPath(entry.target.decode("utf-8", "surrogateescape"))
    ups = [number for number, part in enumerate(target.parts) if part == ".."]
    if ups != list(range(len(ups))):  # a step up from behind another link leads anywhere
        return True
    place = posixpath.normpath(PurePosixPath(folder, entry.name).parent / target)
    return place == "/" or any(PurePosixPath(place).is_relative_to(one) for one in GUARDED)


def solution_command(folder: Path) -> str:
    """A command line that unpacks the task's solution and runs it. Raises ConfigError if there is none."""
    solution = folder / "solution"
    if not (solution / "solve.sh").is_file():
        raise ConfigError(f"{folder}: has no solution/solve.sh, which an oracle needs")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(solution, ".")
    text = base64.b64encode(packed.getvalue()).decode()
    if len(text) > MAX_INPUT // 2:
        raise ConfigError(f"{solution}: is too large for an oracle: {len(text) >> 20} MiB when packed")
    variables = [shlex.quote(f"{name}={value}") for name, value in solution_variables(folder).items()]
    solve = " ".join([*(["env", *variables] if variables else []), "bash", f"{SOLUTION}/solve.sh"])
    return f"printf %s {text} | python3 -c '{_UNPACK}' && {solve}"


def local_stage(task: HarborTask, options: HarborOptions) -> Stage:
    """The start of a task without an image. Raises ConfigError if its Dockerfile needs one."""
    recipe = read_dockerfile(task.dockerfile)
    workdir = task.workdir or recipe.workdir
    spec = _spec(task, options, workdir, {**recipe.env, **task.env}, "agentrl/sandbox:latest")
    files: dict[str, list[Entry]] = {}
    for entry in recipe.files:
        place = PurePosixPath(entry.name)
        homes = [f for f in (*spec.writable, *ALWAYS) if place.is_relative_to(f) and str(place) != f]
        if not homes and str(place) not in (*spec.writable, *ALWAYS):
            raise ConfigError(
                f"{task.dockerfile}: {place} is not in a writable folder; add one to env.options.writable"
            )
        for home in homes:
            inside = Entry(entry.kind, str(place.relative_to(home)), entry.content, entry.mode, -1, entry.target)
            files.setdefault(home, []).append(inside)
    return Stage(spec, workdir, files)


def image_stage(task: HarborTask, options: HarborOptions) -> Stage:
    """The start of a task with an image, which is built if necessary."""
    from agentrl.envs.others import harbor_image

    image = task.image or harbor_image.built(task.folder / "environment")
    found = harbor_image.facts(image)
    workdir = task.workdir or found.workdir or "/app"
    spec = _spec(task, options, workdir, {**found.env, **task.env}, image)
    return Stage(spec, workdir, _image_files(image, (*spec.writable, *ALWAYS)))


@cache
def _image_files(image: str, folders: tuple[str, ...]) -> Mapping[str, Sequence[Entry]]:
    from agentrl.envs.others.harbor_image import image_files

    return image_files(image, folders)


def _spec(task: HarborTask, options: HarborOptions, workdir: str, env: Mapping[str, str], image: str) -> Sandbox:
    """Raises ConfigError, with the task's folder, for a working directory that cannot be made writable."""
    if PurePosixPath(workdir) == PurePosixPath("/"):
        raise ConfigError(
            f"{task.folder}: the working directory is /, which is read-only in a sandbox: set environment.workdir"
        )
    wanted = [workdir, TESTS, LOGS, SOLUTION, *options.writable]
    inside = [f for f in dict.fromkeys(wanted) if not any(PurePosixPath(f).is_relative_to(a) for a in ALWAYS)]
    outer = tuple(f for f in inside if not any(f != g and f.startswith(f"{g}/") for g in inside))
    memory_mb = task.memory_mb or options.memory_mb
    given = {"HOME": "/workspace", **env}
    try:
        return Sandbox(
            backend=options.backend,
            image=image,
            writable=outer,
            env=tuple(sorted(given.items())),
            memory_mb=memory_mb,
            workspace_mb=min(task.storage_mb or options.workspace_mb, memory_mb),
            file_mb=min(task.storage_mb or options.workspace_mb, memory_mb),
            cpus=task.cpus,
            wall_s=task.agent_timeout_s or 600.0,
            ttl_s=TTL_S,
            pids=256,
            open_files=1024,
            network=options.network and task.network,
        )
    except ConfigError as e:
        raise ConfigError(f"{task.folder}: {e}") from None
