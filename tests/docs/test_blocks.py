"""Every code block of the docs is checked, or a comment before it says why not: `<!-- not checked: REASON -->`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin

import pytest
import typer
from typer.exceptions import TyperException
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config import load_config
from agentrl.config.load import make_config
from agentrl.config.run import RunConfig
from agentrl.config.schema import field_at, section_of
from agentrl.config.source import read_source
from agentrl.errors import ConfigError
from tests.docs.blocks import ROOT, Block, all_blocks, blocks, pages

LANGUAGES = {"python", "yaml", "sh", "json", "text", "markdown", "dockerfile", "toml"}
BASE: Mapping[str, object] = {"env": "env.py:Env", "model": {"path": "models/m"}}
"""What a snippet of YAML leaves out."""
OUTSIDE = {
    "cd",
    "chmod",
    "vf-eval",
    "curl",
    "docker",
    "eval",
    "export",
    "git",
    "hf",
    "podman",
    "pre-commit",
    "ray",
    "runsc",
    "source",
}
"""Programs of others: nothing of ours can be wrong about them."""
QUICK = {"--version", "config", "plan"}
"""Commands of ours that run here, when the files that they name exist."""
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def at(found: list[Block]) -> list[object]:
    return [pytest.param(block, id=str(block)) for block in found]


def test_every_block_names_its_language():
    found = all_blocks()
    assert len(found) > 50
    assert [f"{block}: {block.language!r}" for block in found if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("block", at(blocks("yaml")))
def test_a_yaml_block_is_a_configuration(block: Block, tmp_path):
    file = tmp_path / "tools.yaml"
    file.write_text(block.text, encoding="utf-8")
    load_config(file, missing(read_source(file).data), check_paths=False)


def missing(data: Mapping[str, object]) -> list[str]:
    """What a snippet does not say, as `--set` would."""
    needed = {"env": "env=env.py:Env", "model": "model.path=models/m"}
    if "envs" in data:
        del needed["env"]
    model = data.get("model")
    if isinstance(model, Mapping) and not {"path", "tiny"} & set(model):
        return [needed["model"], *(text for key, text in needed.items() if key not in data)]
    return [text for key, text in needed.items() if key not in data]


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block as words: lines joined, comments dropped, chains and pipes split."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("&|;"):
                if words:
                    yield words
                words = []
            elif words or not re.fullmatch(r"[A-Z_]+=.*", word):
                words.append(word)


def leaf(command: Any, words: list[str], ctx: Any = None) -> Any:
    """Parse the words as the command line does, down to the context of the last command.

    Raises:
        TyperException: no such command or option, or a value of the wrong kind.
    """
    made = command.make_context(words[0], words[1:], parent=ctx)
    rest = [*getattr(made, "_protected_args", ()), *made.args]
    if not hasattr(command, "resolve_command"):
        return made
    name, found, args = command.resolve_command(made, rest)
    return leaf(found, [name, *args], made)


@pytest.mark.parametrize("block", at(blocks("sh")))
def test_a_shell_block_says_what_there_is(block: Block):
    check_commands(block.text)


def check_commands(text: str) -> None:
    for words in commands(text):
        check_command(words)


def check_command(words: list[str]) -> None:
    program, rest = words[0].rpartition("/")[2], words[1:]
    if program == "agentrl":
        check_agentrl(words)
    elif program == "make":
        assert set(rest) <= TARGETS
    elif program in ("pip", "python", "python3") and "install" in rest:
        for extras in re.findall(r"(?:agentrl-train|\.)\[([\w,]+)\]", " ".join(rest)):
            assert set(extras.split(",")) <= EXTRAS
    elif program in ("python", "python3") and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1]) is not None
    elif program in ("python", "python3", "pytest"):
        assert [path for path in rest if path.endswith(".py") and not (ROOT / path).exists()] == []
    elif words[0].startswith(("scripts/", ".ci/")):
        assert (ROOT / words[0]).exists()
    else:
        assert program in OUTSIDE, f"unknown program {words[0]!r}"


def check_agentrl(words: list[str]) -> None:
    rest = words[1:]
    if rest[0] not in ("--version", "--install-completion"):
        params = leaf(typer.main.get_command(app), words).params
        overrides = params.get("overrides") or []
        engine = "engine.kind" in " ".join(overrides)
        if overrides and not engine:
            make_config(BASE, overrides, "the docs", check_paths=False)
    files = [word for word in rest if word.endswith(".yaml")]
    if rest[0] in QUICK and all((ROOT / file).exists() for file in files):
        done = CliRunner().invoke(app, [str(ROOT / word) if word in files else word for word in rest])
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize("block", at(blocks("python")))
def test_a_python_block_compiles_and_imports_what_there_is(block: Block):
    tree = compile(block.text, str(block), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "agentrl":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.parametrize(
    "text",
    [
        "agentrl trian tools.yaml",
        "agentrl eval runs/x --minimum solved=1",
        "agentrl train tools.yaml --set optim.lrr=1",
        "make everything",
        "pip install 'agentrl-train[trian]'",
        "pytest tests/no_such_test.py",
        "python -m agentrl.nothing",
        "unknown-program x",
    ],
)
def test_the_check_notices_what_there_is_not(text: str):
    with pytest.raises((TyperException, ConfigError, AssertionError, ImportError)):
        check_commands(text)


SECTIONS = {name for name, field in RunConfig.model_fields.items() if section_of(field) is not None}
NO_KEYS = {"env.step", "env.py", "agent.py", "model.safetensors", "agentrl.env", "eval.py"}
"""Words of the pages that look like keys: methods and files."""
OTHER_KEYS = {"verl-keys.md", "differences-to-verl.md", "coming-from.md", "CHANGELOG.md"}
"""Pages with keys of other projects, and of earlier releases."""


def test_every_key_in_the_text_exists():
    keys = {
        (str(page.relative_to(ROOT)), key)
        for page in pages()
        if page.name not in OTHER_KEYS
        for key in re.findall(r"`([a-z]\w*(?:\.[a-z]\w*)+)(?:: [^`]*)?`", page.read_text(encoding="utf-8"))
        if key.partition(".")[0] in SECTIONS and key not in NO_KEYS
    }
    assert len(keys) > 50
    assert sorted(f"{page}: {key}" for page, key in keys if not is_key(key)) == []


def is_key(key: str) -> bool:
    loc = tuple(key.split("."))
    above = (field_at(loc[:end]) for end in range(len(loc), 0, -1))
    nearest = next((field for field in above if field is not None), None)
    return nearest is not None and (field_at(loc) is nearest or get_origin(nearest.annotation) is dict)


def test_make_refuses_an_old_python_before_it_makes_an_environment(tmp_path: Path) -> None:
    """Another PYTHON would not replace the environment."""
    old = tmp_path / "python3.9"
    program = "import sys; sys.version_info = (3, 9, 6); exec(sys.argv[1])"
    old.write_text(f"""#!/bin/sh\n[ "$1" = -c ] || exit 9\nexec {sys.executable} -c '{program}' "$2"\n""")
    old.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    done = subprocess.run(["make", "quickstart", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("Python 3.9 is too old for agentrl: install 3.11 or later")
    assert not (tmp_path / ".venv").exists()
