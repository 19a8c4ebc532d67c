"""Packages by which other frameworks play a served env."""

from __future__ import annotations

import json
import keyword
import os
import re
import shlex
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import httpx

from agentrl.config.address import without_credentials
from agentrl.errors import ConfigError
from agentrl.extras import DISTRIBUTION

PACKAGE_SESSIONS = 1024
"""Episodes at once of a server that a package starts; the framework that uses it has its own limit."""
_TASKSET = Path(__file__).parent / "verifiers_package" / "taskset.py"


@dataclass(frozen=True, slots=True)
class Served:
    """How a package gets its server: a command of `agentrl env serve`, or the address of a running one.

    Attributes:
        target: ENV of the command.
        options: further options of the command.
        python: the Python that has agentrl.
        folder: the folder in which the command runs.
    """

    name: str
    target: str = ""
    options: tuple[str, ...] = ()
    python: str = ""
    folder: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True)
class Written:
    """A package that was written."""

    folder: Path
    name: str
    split: str

    @property
    def next_steps(self) -> str:
        """What to do with it."""
        split = "" if self.split == "train" else f" --env.taskset.split {self.split}"
        return (
            f"wrote {self.folder}; next, in the Python that has verifiers:\n"
            f"  pip install -e {shlex.quote(str(self.folder))}\n"
            f"  vf-eval {self.name} -n 5{split} -m MODEL --client.base-url http://127.0.0.1:8000/v1"
        )


def served_url(url: str) -> Served:
    """A running server.

    Raises:
        ConfigError: it does not answer, or is not `agentrl env serve`.
    """
    token, address = os.environ.get("AGENTRL_TOKEN"), without_credentials(url)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/metadata", headers=headers, timeout=30.0)
        answer.raise_for_status()
        about = answer.json()
        # The name is written into files that run: `env_name` leaves no other characters.
        if "served by agentrl" not in about["description"] or not re.fullmatch(r"[\w.-]{1,200}", about["name"]):
            raise ConfigError(f"{address}: this is not `agentrl env serve`")
    except httpx.HTTPStatusError as e:
        hint = "; put its token into AGENTRL_TOKEN" if e.response.status_code == 401 else ""
        raise ConfigError(f"{address}: the server answers with {e.response.status_code}{hint}") from e
    except httpx.HTTPError as e:
        raise ConfigError(f"{address}: no answer ({type(e).__name__}); is `agentrl env serve` running?") from e
    except (KeyError, TypeError, ValueError) as e:
        raise ConfigError(f"{address}: this is not `agentrl env serve`") from e
    return Served(about["name"], url=url.rstrip("/"))


def write_verifiers_package(served: Served, name: str, output: Path | None, split: str = "train") -> Written:
    """Write a taskset of verifiers that plays the env.

    Args:
        name: of the package; characters that a package cannot have become `-`.
        output: the folder; by default the name, in the current folder.

    Raises:
        ConfigError: the name cannot be one of a package, or the folder has other content.
    """
    dashed = "-".join("".join(c if c.isalnum() and c.isascii() else " " for c in name).split()).lower()
    module = dashed.replace("-", "_")
    if not module.isidentifier() or keyword.iskeyword(module):
        raise ConfigError(
            f"--name {name!r}: a package needs a name of letters, digits and dashes, not with a digit first"
        )
    folder = Path(dashed) if output is None else output
    inside = folder / module
    if (
        folder.exists()
        and not (inside / "served.json").is_file()
        and (not folder.is_dir() or any(folder.iterdir()))
    ):
        raise ConfigError(
            f"{folder}: exists and is not a package of {dashed}; choose another folder with --output"
        )
    inside.mkdir(parents=True, exist_ok=True)
    settings = asdict(served) | {"name": dashed}
    (inside / "served.json").write_text(json.dumps(settings, indent=2) + "\n")
    (inside / "__init__.py").write_text(_INIT.format(module=module, name=served.name))
    shutil.copyfile(_TASKSET, inside / "taskset.py")
    (folder / "pyproject.toml").write_text(
        _PYPROJECT.format(name=dashed, module=module, version=version(DISTRIBUTION), served=served.name)
    )
    (folder / "README.md").write_text(_README.format(name=dashed, served=served.name, source=_source_of(served)))
    return Written(folder, dashed, split)


def _source_of(served: Served) -> str:
    if served.url:
        return f"It connects to {served.url}."
    command = shlex.join(["agentrl", "env", "serve", served.target, *served.options])
    return f"It starts `{command}` with {served.python} in {served.folder}; the server ends with its user."


_INIT = '''"""The environment {name} of agentrl, as a taskset of verifiers."""

from {module}.taskset import ServedEnv, ServedHarness, ServedTaskset

__all__ = ["ServedEnv", "ServedHarness", "ServedTaskset"]
'''
_PYPROJECT = """[project]
name = "{name}"
version = "{version}"
description = "The environment {served} of agentrl, as a taskset of verifiers."
requires-python = ">=3.11"
dependencies = ["verifiers>=0.4,<0.5"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["{module}"]
"""
_README = """# {name}

The environment `{served}` of agentrl, as a taskset of verifiers, written by `agentrl env package --as verifiers`.
{source}

```sh
pip install -e .
vf-eval {name} -n 5 -m MODEL --client.base-url http://127.0.0.1:8000/v1
```

| setting | meaning |
|---|---|
| `--env.taskset.split` | `train` (default), or `test` for the held-out tasks |
| `--env.taskset.num-tasks` | the first tasks of the split (1000) |
| `--env.taskset.url` | a running `agentrl env serve`; also `AGENTRL_ENV_URL`, with its token in `AGENTRL_TOKEN` |
| `--env.taskset.python` | the Python that has agentrl; also `AGENTRL_PYTHON` |
"""
