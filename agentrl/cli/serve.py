"""`agentrl serve`: serve a policy through an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import PlayOverrides, client_secret, given_options
from agentrl.errors import ConfigError, TemplateError
from agentrl.extras import require
from agentrl.sigterm import set_at_end

if TYPE_CHECKING:
    from agentrl.chat.template import Renderer
    from agentrl.config.engine import EngineConfig
    from agentrl.engine.base import Engine
    from agentrl.serve.endpoint import Settings

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")
_NOT_RECORDED = frozenset({"--model-name", "--accept-any-model", "--max-requests", "--memory-tokens"})
"""Options without effect on a recording: episodes accept any model name and have no such limits."""


def serve(
    context: typer.Context,
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT|MODEL",
            help="A run folder, a checkpoint, a model directory, or a Hugging Face id in the local cache.",
            show_default=False,
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; any other than loopback requires --api-key-env.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8000,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Environment variable with the key that clients must send.", show_default=False
        ),
    ] = None,
    model_name: Annotated[
        list[str],
        typer.Option(
            "--model-name",
            help="Model name for clients; repeat for aliases. [default: the run's name]",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    accept_any_model: Annotated[bool, typer.Option("--accept-any-model", help="Accept any model name.")] = False,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Maximum concurrent completions; further requests get 429.")
    ] = 256,
    memory_tokens: Annotated[
        int,
        typer.Option(min=1, help="Tokens of past turns to keep, so that conversations continue token for token."),
    ] = 4_000_000,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Record episodes into this folder; POST /episodes opens one with its own URL and key.",
            show_default=False,
        ),
    ] = None,
    cors: Annotated[
        list[str],
        typer.Option(
            metavar="ORIGIN",
            help="Origin of a web page that may use the endpoint; repeat for more.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    overrides: PlayOverrides = [],  # noqa: B006
) -> None:
    """Serve a policy through an OpenAI-compatible API, with the exact tokens of its training, until Ctrl-C."""
    for extra in ("serve", "train"):
        require(extra, "agentrl serve")
    from agentrl.reporting.display import quiet_transformers
    from agentrl.serve.endpoint import Settings

    _check_options(given_options(context) if record else (), model_name, cors)
    key, policy = client_secret(host, api_key_env, "--api-key-env", "key", "endpoint"), _find(target, overrides)
    names, fingerprint = tuple(model_name) or (policy.name,), f"fp_{policy.digest}"
    settings = Settings(names, accept_any_model, key, fingerprint, cors=tuple(cors))
    quiet_transformers()
    if told := _about_tools(policy.renderer):
        print(told, file=sys.stderr, flush=True)
    if record is not None:
        asyncio.run(_record(policy, settings, host, port, record))
        return
    asyncio.run(_serve(policy, settings, host, port, max_requests, memory_tokens))


def _check_options(of_recording: Sequence[str], model_names: Sequence[str], origins: Sequence[str]) -> None:
    """Refuse options that would do nothing.

    Args:
        of_recording: the options that are given, if episodes are recorded.
        model_names: the names for clients.
        origins: of web pages.

    Raises:
        ConfigError: one of them has no effect.
    """
    for option in of_recording:
        if option in _NOT_RECORDED:
            raise ConfigError(f"{option} has no effect with --record")
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors {origin}: no page has this origin; write one as browsers send it, such as "
                "https://app.example.com (lower case, no path), or `*` for all"
            )
    if "" in model_names:
        raise ConfigError("--model-name: is empty; give a name, or leave it out")


@dataclass(frozen=True, slots=True)
class _Policy:
    """What is served: `digest` is of weights and renderer."""

    name: str
    directory: Path
    renderer: Renderer
    engine: EngineConfig
    digest: str
    ray: str | None = None


def _find(target: Path, overrides: list[str]) -> _Policy:
    """The newest good checkpoint of a run with the run's renderer and engine, or a bare model with its default
    ones.

    Raises:
        CheckpointError: no valid weights were found, or they were trained with another renderer.
        ConfigError: the folder is neither, or an override is wrong.
    """
    from agentrl.chat.template import Renderer
    from agentrl.config.load import load_engine, load_sampling_config
    from agentrl.config.overrides import check_effect
    from agentrl.rollout.policy_folder import policy_folder, trained_by
    from agentrl.rollout.renderer import check_renderer, load_renderer
    from agentrl.run_folder.store import find_checkpoint

    check_effect(overrides, "serve", "on serving")
    named, target = target, policy_folder(target)
    if (run := trained_by(target)) is not None:
        # It is always on here, so the run's own setting must not keep an override from choosing another kind.
        changes = ["engine.server.grammars=null", *overrides]
        config = load_sampling_config(run / "config.yaml", changes, check_paths=False)
        found = find_checkpoint(target, hold=True)
        renderer = load_renderer(config, found.path)
        check_renderer(renderer, found.path)
        engine = _with_grammars(config.engine)
        return _Policy(config.name, found.path, renderer, engine, _digest(found.path, renderer), config.ray)
    if not (target / "config.json").is_file():
        raise ConfigError(
            f"{target}: has no config.yaml and no config.json; give a run folder, a checkpoint in one, or a model "
            "directory"
        )
    engine = _with_grammars(load_engine(overrides, str(target)))
    renderer = Renderer.from_directory(target)
    check_renderer(renderer, target)
    name = target.absolute().name if named == target else str(named)
    return _Policy(name, target, renderer, engine, _digest(target, renderer))


def _with_grammars(engine: EngineConfig) -> EngineConfig:
    """Servers that are started get the tokenizer that their grammars need."""
    return engine.model_copy(update={"server": engine.server.model_copy(update={"grammars": True})})


def _about_tools(renderer: Renderer) -> str:
    """A warning about the chat template for clients that send tools; empty if their calls are parsed."""
    from agentrl.chat.proof import prove

    try:
        prove(renderer).require(tools=True)
    except TemplateError as e:
        return f"note: tools of clients will not work: {e}"
    return ""


def _digest(directory: Path, renderer: Renderer) -> str:
    """Identifies weights and renderer; other weights or another template change it."""
    import hashlib

    manifest = directory / "manifest.json"  # of a checkpoint: holds the digest of every file
    if manifest.is_file():
        weights = manifest.read_bytes()
    else:
        files = sorted(path for path in directory.iterdir() if path.suffix in (".safetensors", ".bin", ".json"))
        weights = repr([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]).encode()
    return hashlib.sha256(renderer.hash.encode() + weights).hexdigest()[:16]


Using = Callable[["Engine", asyncio.Event], Awaitable[None]]
"""Uses an engine until the event is set."""


async def _with_engine(policy: _Policy, use: Using) -> None:
    """Load the engine, use it until a signal comes, close it; a signal while it starts ends it as well."""
    from agentrl.engine.open import open_engine

    ended = asyncio.Event()
    set_at_end(ended)
    opening = asyncio.ensure_future(open_engine(policy.engine, policy.directory, ray=policy.ray))
    leaving = asyncio.ensure_future(ended.wait())
    await asyncio.wait((opening, leaving), return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if not opening.done():
        opening.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        engine = await opening
        try:
            await use(engine, ended)
        finally:
            await engine.close()


async def _serve(
    policy: _Policy, settings: Settings, host: str, port: int, max_requests: int, memory_tokens: int
) -> None:
    """Answer until a signal comes."""
    from agentrl.serve.endpoint import create_app
    from agentrl.serve.listen import SHUTDOWN_S, running
    from agentrl.serve.prometheus import Metrics
    from agentrl.serve.service import ChatService, Gate

    async def use(engine: Engine, ended: asyncio.Event) -> None:
        service = ChatService(engine, policy.renderer, gate=Gate(max_requests), metrics=Metrics())
        app = create_app(service, settings, session=service.open_session(memory_tokens))
        async with running(app, host=host, port=port) as url:
            key = "" if settings.api_key is None else " (with the key)"
            print(f"{settings.names[0]} at {url}/v1{key}; {policy.directory}; Ctrl-C ends", flush=True)
            await ended.wait()
            if service.gate.running:
                print(f"finishing answers, for {SHUTDOWN_S} s at most; Ctrl-C again ends now", file=sys.stderr)

    await _with_engine(policy, use)


async def _record(policy: _Policy, settings: Settings, host: str, port: int, folder: Path) -> None:
    """Record episodes until a signal comes, and write them."""
    from agentrl.agents.external import RecordFolder
    from agentrl.agents.recorder import Recorder
    from agentrl.rollout.limits import EpisodeLimits
    from agentrl.serve.listen import running

    async def use(engine: Engine, ended: asyncio.Event) -> None:
        room = engine.max_context
        recorder = Recorder(
            engine, policy.renderer, EpisodeLimits(max_turns=1 << 30, max_tokens=room, token_budget=room)
        )
        episodes = RecordFolder(recorder, folder, api_key=settings.api_key, temperature=1.0, cors=settings.cors)
        try:
            async with running(episodes.app(), host=host, port=port) as url:
                print(f"POST {url}/episodes opens an episode; {policy.directory}; Ctrl-C ends", flush=True)
                await ended.wait()
        finally:
            await episodes.close()

    await _with_engine(policy, use)
