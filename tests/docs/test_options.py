"""Options that the text of a page names exist, and the commands that serve an env by name find its tasks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from agentrl.cli.app import app
from agentrl.cli.env import run_config
from agentrl.env_server.serve import load_source
from tests.docs.blocks import ROOT, blocks, pages
from tests.docs.test_blocks import commands, leaf

ROOT_COMMAND: Any = typer.main.get_command(app)
OTHERS = {
    "--custom-weight-loader",
    "--enable-deterministic-inference",
    "--enable-lora",
    "--lora-target-modules",
    "--enable-prompt-tokens-details",
    "--enable-return-routed-experts",
    "--generation-config",
    "--no-enable-chunked-prefill",
    "--host-uds",
    "--ignore-requires-python",
    "--incremental-streaming-output",
    "--logprobs-mode",
    "--max-loras-per-batch",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--network",
    "--skip-tokenizer-init",
    "--worker-extension-cls",
}
"""Options of other programs."""
SCRIPTS = {"--quick", "--version", "--install-completion"}
"""Options of benchmarks, and those of `agentrl` itself."""
PAGES = [page for page in pages() if page.name not in ("CHANGELOG.md", "verl-keys.md")]


def all_options(command: Any) -> set[str]:
    """The options of the command and of all commands below it."""
    own = {option for param in command.params for option in param.opts}
    return own.union(*map(all_options, getattr(command, "commands", {}).values()))


def unknown(text: str) -> list[str]:
    """What stands in backquotes and no command accepts: `agentrl eval --nothing`, or `--nothing` alone."""
    found = []
    for code in re.findall(r"`([^`\n]+)`", text):
        command, words = ROOT_COMMAND, code.split()
        if words[0] == "agentrl":
            while words[1:] and words[1] in getattr(command, "commands", {}):
                command = command.commands[words.pop(1)]
        elif not words[0].startswith("--") or words[0].startswith("--env.taskset"):  # vf-eval's
            continue
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        named = hasattr(command, "commands") and len(words) > 1 and words[0] == "agentrl" and not options
        if named or options - all_options(command) - OTHERS - SCRIPTS:
            found.append(code)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_in_the_text_exists(page: Path):
    assert unknown(page.read_text(encoding="utf-8")) == []


def test_an_option_that_does_not_exist_is_noticed():
    text = "`agentrl eval --endpoint`, `agentrl check --endpoint URL`, `agentrl evaluate x`, `--nothing`"
    assert unknown(text) == ["agentrl eval --endpoint", "agentrl evaluate x", "--nothing"]


SERVED = [
    pytest.param(words, id=" ".join(words[3:]))
    for block in blocks("sh")
    for words in commands(block.text)
    if words[:3] == ["agentrl", "env", "serve"] and ":" in words[3]
]


@pytest.mark.parametrize("words", SERVED)
def test_an_env_that_is_served_by_name_has_tasks(words: list[str]):
    if words[3].startswith("reasoning_gym:"):
        pytest.importorskip("reasoning_gym")
    params = leaf(ROOT_COMMAND, words).params
    source = load_source(run_config(words[3], params["env"], list(params["overrides"])), max_turns=1)
    assert all(source.splits.values())
