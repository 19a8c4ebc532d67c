"""The renderer of a run, and checks that a chat template and a checkpoint match it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from agentrl.chat.parsers import Parsed, Parser
from agentrl.chat.proof import prove
from agentrl.chat.roundtrip import name_problem
from agentrl.chat.template import Renderer
from agentrl.config.choice import is_own
from agentrl.config.run import RunConfig
from agentrl.env.load import said_by
from agentrl.errors import AgentRLError, CheckpointError, ConfigError, TemplateError, traceback_of
from agentrl.importing import load_object

RENDERER_FILE = "renderer.json"
"""File in a checkpoint with the hash of its renderer."""


def load_renderer(config: RunConfig, directory: Path) -> Renderer:
    """The renderer of the run: the same for training, evaluation, serving and check.

    Raises:
        ConfigError: `model.parser` is not a parser, or `model.template_options` has a variable that the chat
            template never reads.
    """
    model, own = config.model, is_own(config.model.parser)
    try:
        renderer = Renderer.from_directory(
            directory,
            template=model.chat_template,
            parser=own_parser(model.parser) if own else model.parser,
            history=model.history,
            variables=model.template_options,
        )
        if model.history == "fork":
            prove(renderer)  # whether transcripts need to check for rewritten turns
        if own:
            _watch(renderer.parser, f"model.parser {model.parser}")
        return renderer
    except AgentRLError:
        raise
    except Exception as e:
        if not own:
            raise
        raise ConfigError(
            f"model.parser {model.parser}: raised while it was tried on what the template writes: {said_by(e)}"
        ) from e


def _watch(parser: Parser, where: str) -> None:
    """Raise ConfigError where the parser raises, or returns something else, on what a policy says."""
    parse = parser.parse

    def watched(text: str, **named: Any) -> Parsed:
        try:
            parsed = parse(text, **named)
        except AgentRLError:
            raise
        except Exception as e:
            raise ConfigError(f"{where}: parse raised {said_by(e)} on {text!r:.200}\n{traceback_of(e)}") from e
        if not isinstance(parsed, Parsed):
            raise ConfigError(f"{where}: parse must return agentrl.chat.parsers.Parsed, got {parsed!r:.200}")
        return parsed

    object.__setattr__(parser, "parse", watched)  # it may be a frozen dataclass


def own_parser(spec: str) -> Parser:
    """A user-supplied parser, from `module:Name`."""
    try:
        found = load_object(spec)
    except ConfigError as e:
        raise ConfigError(f"model.parser {e}") from None
    try:
        parser = found() if isinstance(found, type) else found
    except (Exception, SystemExit) as e:
        raise ConfigError(f"model.parser {spec}: cannot be made: {said_by(e)}") from e
    if not isinstance(parser, Parser):
        got = (
            f"the class {found.__name__}" if isinstance(found, type) else f"a value of type {type(found).__name__}"
        )
        raise ConfigError(
            f"model.parser {spec}: must be a subclass or an instance of agentrl.chat.parsers.Parser, got {got}"
        )
    return copy(parser)  # `_watch` changes it, and an instance may be in use elsewhere


def require_template(renderer: Renderer, tools: Sequence[Mapping[str, Any]]) -> None:
    """Check that the chat template is usable and that its tool calls can be parsed, with the names of these tools.

    Raises:
        TemplateError: gives the reason and a remedy.
    """
    prove(renderer).require(tools=bool(tools))
    for tool in tools:
        if problem := name_problem(renderer, tool):
            raise TemplateError(problem)


def check_renderer(renderer: Renderer, checkpoint: Path) -> None:
    """Check that a checkpoint was trained with this renderer.

    Raises:
        CheckpointError: tokenizer, template, parser or history differ from those of the checkpoint.
    """
    file = checkpoint / RENDERER_FILE
    if not file.is_file():
        return
    trained = json.loads(file.read_text())["hash"]
    if trained != renderer.hash:
        raise CheckpointError(
            f"{checkpoint}: was trained with another tokenizer, chat template, parser or history (renderer hash "
            f"{trained}, here {renderer.hash}): undo the change; to train with it, start the run over with "
            "--fresh, in Python fresh=True"
        )
