"""Every command that a help text shows is one that the argument parser takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest
import typer

from agentrl.cli.app import app

COMMAND = typer.main.get_command(app)


def commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


def texts(command: click.Command) -> str:
    return " ".join([command.help or "", *(getattr(p, "help", None) or "" for p in command.params)])


SHOWN = sorted({line for _, c in commands(COMMAND) for line in re.findall(r"`agentrl ([^`]+)`", texts(c))})


@pytest.mark.parametrize("line", SHOWN)
def test_a_command_in_a_help_text_is_taken(line: str):
    command, words, context = COMMAND, shlex.split(line), None
    while getattr(command, "commands", None):
        assert words[0] in command.commands, f"agentrl {line}: no such command"
        command, words = command.commands[words[0]], words[1:]
    if words:  # `agentrl show` alone names a command
        context = command.make_context(line, words)
        assert context.params


@pytest.mark.parametrize(("path", "command"), list(commands(COMMAND)), ids=lambda value: str(value)[:40])
def test_a_flag_in_a_help_text_is_one_of_its_command(path: tuple[str, ...], command: click.Command):
    known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", texts(command)))
    assert named <= known, f"agentrl {' '.join(path)}"


def test_help_shows_commands():
    assert len(SHOWN) >= 2
