"""Images of Harbor tasks on a Docker engine: built once per content, and the files in their writable folders."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from agentrl.envs.others.harbor_task import host_tree
from agentrl.errors import ConfigError
from agentrl.sandbox.errors import SandboxUnavailable
from agentrl.sandbox.inside import packing
from agentrl.sandbox.trees import Entry

MAX_BYTES = 256 << 20
"""Most bytes of an image's writable folders."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """The working directory of an image and its variables."""

    workdir: str
    env: Mapping[str, str]


@contextmanager
def engine(timeout_s: float = 60.0) -> Iterator[Any]:
    """A client of the Docker engine. Raises SandboxUnavailable if none answers."""
    from agentrl.extras import require

    require("docker", "env harbor with images")
    import docker

    try:
        client = docker.APIClient(version="auto", timeout=timeout_s, **docker.utils.kwargs_from_env())
    except docker.errors.DockerException as e:
        raise SandboxUnavailable(f"no Docker engine answers: {e}") from e
    try:
        yield client
    finally:
        client.close()


def built(environment: Path) -> str:
    """The tag of the image of a folder with a Dockerfile; it is built unless the engine has it.

    Raises:
        ConfigError: it cannot be built.
    """
    import docker

    digest = hashlib.sha256()
    for entry in host_tree(environment):
        digest.update(repr((entry.kind, entry.name, entry.mode, entry.content, entry.target)).encode())
    tag = f"agentrl/harbor:{digest.hexdigest()[:16]}"
    with engine(timeout_s=3600.0) as client:
        try:
            client.inspect_image(tag)
            return tag
        except docker.errors.ImageNotFound:
            pass
        said = ""
        for event in client.build(path=str(environment), tag=tag, rm=True, forcerm=True, decode=True):
            said = str(event.get("stream") or said).strip() or said
            if "error" in event:
                raise ConfigError(f"{environment}/Dockerfile cannot be built: {str(event['error']).strip()}")
    return tag


def facts(image: str) -> ImageFacts:
    """What an image says. Raises ConfigError if the engine does not have it."""
    import docker

    with engine() as client:
        try:
            config = client.inspect_image(image).get("Config") or {}
        except docker.errors.ImageNotFound:
            raise ConfigError(f"image {image!r} is not on this Docker engine: pull it") from None
    env = dict(pair.split("=", 1) for pair in config.get("Env") or () if "=" in pair)
    return ImageFacts(str(config.get("WorkingDir") or ""), env)


def image_files(image: str, folders: Sequence[str]) -> dict[str, list[Entry]]:
    """The files of an image below each of these folders.

    Raises:
        ConfigError: they are too large.
    """
    import docker

    found: dict[str, list[Entry]] = {}
    with engine() as client:
        container = client.create_container(image, command=["true"], entrypoint=[])["Id"]
        try:
            for folder in folders:
                try:
                    stream, _ = client.get_archive(container, folder)
                except docker.errors.NotFound:
                    continue
                found[folder] = _entries(stream, image, folder)
        finally:
            client.remove_container(container, force=True, v=True)
    return found


def _entries(stream: Any, image: str, folder: str) -> list[Entry]:
    data = bytearray()
    for chunk in stream:
        data += chunk
        if len(data) > MAX_BYTES:
            raise ConfigError(f"image {image!r}: {folder} has more than {MAX_BYTES >> 20} MiB")
    found: list[Entry] = []
    with tarfile.open(fileobj=io.BytesIO(bytes(data))) as tar:
        for member in tar.getmembers():
            name = str(PurePosixPath(*PurePosixPath(member.name).parts[1:]))
            if name == ".":
                continue
            if member.isdir():
                found.append(Entry(packing.FOLDER, name, mode=member.mode & 0o777 | 0o700))
            elif member.issym():
                found.append(Entry(packing.LINK, name, target=member.linkname.encode()))
            elif (member.isfile() or member.islnk()) and (content := tar.extractfile(member)) is not None:
                found.append(Entry(packing.FILE, name, content.read(), member.mode & 0o777 | 0o600))
    return found
