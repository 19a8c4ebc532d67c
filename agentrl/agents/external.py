"""Record episodes of external programs: opened and ended over HTTP, stored in a folder.

    POST /episodes                {"task": {"id": "t1", "row": {...}}}
                                  -> {"id", "base_url", "api_key", "keyed_url"}
    ANY  /episodes/ID/v1/...      the chat, responses and messages dialects, with the episode's key
    GET  /episodes/ID             the recording so far
    POST /episodes/ID/end         {"reward": 1.0, "rewards": {...}} or {"error": "..."}
                                  -> {"id", "turns", "sampled_tokens"}, and an "error" if it has no reward

An episode that was not ended, or ended with an error, is stored without a reward and never trained.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from agentrl.agents.recorder import EpisodeRecording, Recorder, no_episode
from agentrl.chat.messages import write_message
from agentrl.env.solved import BY_NAME
from agentrl.env.toolenv.observe import error_text
from agentrl.errors import ConfigError
from agentrl.run_folder.files import write_atomic
from agentrl.run_folder.lock import lock_folder
from agentrl.run_folder.records import (
    PARTIAL_FILE,
    EpisodeRecord,
    compress,
    decode,
    encode,
    episodes_file,
    whole_lines,
)
from agentrl.serve.api_errors import ApiError, from_validation
from agentrl.serve.browsers import BrowserGuard
from agentrl.serve.endpoint import ApiKeyGuard, Settings, error_response, keys_in, with_errors
from agentrl.types import Episode, StopReason, Task

MAX_BODY_BYTES = 4 << 20


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class WireTask(_Body):
    """The task of the episode: `id` groups the episodes of one task."""

    id: str = ""
    row: dict[str, Any] = {}


class OpenRequest(_Body):
    """POST /episodes."""

    task: WireTask = WireTask()


class EndRequest(_Body):
    """POST /episodes/ID/end: a reward, or an error that explains why there is none."""

    reward: float | None = None
    rewards: dict[str, float] = {}
    solved: bool | None = None
    """Whether the task is solved; by default, a reward part named `solved` decides."""
    error: str | None = None


@dataclass
class _Open:
    recording: EpisodeRecording
    task: Task
    began: float = field(default_factory=time.monotonic)


class RecordFolder:
    """Opens, ends and stores episodes; a context manager that writes the folder's episodes file on exit.

    Args:
        recorder: records the episodes.
        folder: created if missing; episodes of earlier servers are kept.
        api_key: required to open an episode; None allows anyone who can reach the server.
        temperature: sampling temperature of all completions.
    """

    def __init__(
        self,
        recorder: Recorder,
        folder: Path,
        *,
        api_key: str | None,
        temperature: float,
        cors: Sequence[str] = (),
    ) -> None:
        self.recorder, self.folder = recorder, folder
        self._api_key, self._temperature, self._cors = api_key, temperature, cors
        self._open: dict[str, _Open] = {}
        self._groups: dict[str, int] = {}
        self._count = 0
        try:
            (folder / "episodes").mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"--record {folder}: cannot make the folder: {e.strerror}") from None
        if (folder / "config.yaml").exists():
            raise ConfigError(f"--record {folder}: is the folder of a run; give another folder")
        self._lock = lock_folder(folder, "give another folder")  # others would number their groups alike
        self._partial = folder / PARTIAL_FILE
        self._end_torn_line()
        for record in self._records():
            self._group_of(record.episode.task.id)
            self._count += 1

    def app(self) -> ASGIApp:
        """The application."""
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self.recorder.metrics, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/{path:path}", self._answering(self._without_episode), methods=["GET", "POST"]),
            Route("/episodes", self._answering(self._begin), methods=["POST"]),
            Route("/episodes/{episode}", self._answering(self._show), methods=["GET"]),
            Route("/episodes/{episode}/end", self._answering(self._end), methods=["POST"]),
        ]
        app = ApiKeyGuard(with_errors([*routes, *self.recorder.routes()]), Settings(names=("policy",)))
        return BrowserGuard(app, self._cors, keyless=self._api_key is None)

    async def close(self) -> None:
        """End open episodes without a reward, and write the episodes file."""
        with self._lock:
            for one in list(self._open.values()):
                await self._keep(one, EndRequest(error="the session was not ended"))
            write_atomic(episodes_file(self.folder, 0), compress(self._records()))

    def _answering(self, handle: Any) -> Any:
        async def answer(request: Request) -> Response:
            try:
                found: Response = await handle(request)
            except ApiError as e:
                return error_response(e, request.url.path)
            except ValidationError as e:
                return error_response(from_validation(e), request.url.path)
            return found

        return answer

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "open": len(self._open), "kept": self._count})

    async def _models(self, request: Request) -> Response:
        """The name under which each episode serves the policy; other names are accepted there as well."""
        return JSONResponse(
            {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "agentrl"}]}
        )

    async def _without_episode(self, request: Request) -> Response:
        text = "This server records: open an episode with POST /episodes, and use the `base_url` in its answer."
        raise ApiError(404, text, code="not_found")

    async def _begin(self, request: Request) -> Response:
        known = self._api_key
        given = keys_in(request.headers)
        if known is not None and not any(hmac.compare_digest(one.encode(), known.encode()) for one in given):
            raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")
        body = OpenRequest.model_validate_json(await _read(request))
        recording = self.recorder.open(temperature=self._temperature, seed=int.from_bytes(os.urandom(7)))
        task = Task(body.task.id or recording.id, body.task.row)
        self._open[recording.id] = _Open(recording, task)
        root = str(request.base_url).rstrip("/")
        opened = {"id": recording.id, "base_url": root + recording.path, "api_key": recording.key}
        return JSONResponse(opened | {"keyed_url": root + recording.keyed_path}, 201)

    async def _show(self, request: Request) -> Response:
        recording = self.recorder.find(request)
        return JSONResponse(
            {
                "id": recording.id,
                "turns": recording.num_turns,
                "messages": [write_message(message) for message in recording.ledger.messages],
                "tokens": sum(len(s.ids) for s in recording.ledger.segments),
                "metrics": recording.metrics(),
            }
        )

    async def _end(self, request: Request) -> Response:
        recording = self.recorder.find(request)
        end = EndRequest.model_validate_json(await _read(request))
        if (end.reward is None) == (end.error is None):
            raise ApiError(400, "reward: give exactly one of `reward` and `error`", param="reward")
        one = self._open.get(recording.id)
        if one is None:  # another request ended it while this one was read
            raise no_episode()
        try:
            episode = await self._keep(one, end)
        except OSError as e:
            text = f"The episode could not be written ({e.strerror}); it is still here: end it again."
            raise ApiError(503, text, code="not_written", headers={"Retry-After": "5"}) from None
        sampled = sum(len(s.ids) for s in episode.segments if s.origin == "sampled")
        ended = {"id": episode.id, "turns": len(episode.turns), "sampled_tokens": sampled}
        return JSONResponse(ended | ({"error": episode.error} if episode.error else {}))

    async def _keep(self, one: _Open, end: EndRequest) -> Episode:
        """Seal an episode, write it, and forget it.

        Raises:
            OSError: it could not be written, and is not forgotten.
        """
        recording = one.recording
        recording.seal()
        turns = recording.turns(one.began)
        error = end.error or _failure(recording) or (None if turns else "it has no completions")
        episode = Episode(
            id=recording.id,
            task=one.task,
            messages=recording.ledger.messages,
            turns=tuple(turns),
            segments=recording.ledger.segments,
            stop_reason=StopReason.INFRA if error else recording.ending,
            reward=None if error else end.reward,
            rewards={} if error else _parts(end),
            metrics=recording.metrics(),
            error=error,
            seconds=(seconds := time.monotonic() - one.began),
            start_s=time.time() - seconds,
            tools=tuple(recording.tools),
            solved=None if error else _solved(end),
        )
        self._write(episode)
        del self._open[recording.id]
        await self.recorder.close(recording)
        self._count += 1
        return episode

    def _write(self, episode: Episode) -> None:
        """Append an episode to the file, or leave the file as it was."""
        line = encode(EpisodeRecord(0, self._group_of(episode.task.id), episode)) + b"\n"
        with self._partial.open("ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(before)
                raise

    def _group_of(self, task: str) -> int:
        return self._groups.setdefault(task, len(self._groups))

    def _records(self) -> Iterator[EpisodeRecord]:
        """All stored episodes; an incomplete line left by a killed server is skipped."""
        return map(decode, whole_lines(self._partial))

    def _end_torn_line(self) -> None:
        """Start a new line, so that an incomplete line before it does not corrupt the next record."""
        if self._partial.is_file() and not self._partial.read_bytes().endswith(b"\n"):
            with self._partial.open("ab") as file:
                file.write(b"\n")


def _failure(recording: EpisodeRecording) -> str | None:
    """What kept a request from being answered that is not the agent's fault."""
    if recording.bug is not None:
        return f"a bug in agentrl: {error_text(recording.bug)}"
    return recording.trouble


def _parts(end: EndRequest) -> Mapping[str, float]:
    return end.rewards or {"reward": end.reward or 0.0}


def _solved(end: EndRequest) -> bool | None:
    return BY_NAME.verdict(end.rewards, end.reward or 0.0) if end.solved is None else end.solved


async def _read(request: Request) -> bytes:
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise ApiError(
                413, f"The request body is larger than {MAX_BODY_BYTES} bytes.", code="request_too_large"
            )
    return data or b"{}"
