"""The recipe of docs/sandbox.md for packages inside: pytest runs there, as the page says."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path

import pytest

from agentrl.env import ToolEnv
from agentrl.sandbox import Sandbox, SandboxPool
from agentrl.testing.policy import ScriptedPolicy, call, play, say
from agentrl.types import Task
from tests.sandbox.sandbox_specs import spec_for

PAGE = Path(__file__).parents[2] / "docs" / "sandbox.md"
FILES = {
    "sums.py": "def add(a, b):\n    return a + b\n",
    "test_sums.py": "from sums import add\n\ndef test_good():\n    assert add(1, 1) == 2\n\n"
    "def test_bad():\n    assert add(1, 1) == 3\n",
}


@pytest.fixture(scope="module")
def packages() -> Iterator[Path]:
    """What `pip install --target` makes, from the packages that these tests run with."""
    root = Path(
        tempfile.mkdtemp()
    )  # below pytest's own folder, which is closed to other users, nothing could be read
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for file in distribution(name).files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (root / "packages" / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(file.locate()), root / "packages" / file)
    (root / "packages" / "only_here.py").touch()
    root.chmod(0o755)
    yield root / "packages"
    shutil.rmtree(root)


def example(packages: Path) -> type[ToolEnv]:
    """The example of the page, with the folder of these tests."""
    (text,) = [b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "class Tested" in b]
    assert text.count('"/opt/packages"') == 1
    scope: dict[str, type[ToolEnv]] = {}
    exec(text.replace("/opt/packages", str(packages)), scope)
    return scope["Tested"]


NAMES = ["namespace", "namespace_user", "landlock_user", pytest.param("docker", marks=pytest.mark.docker)]


@pytest.mark.parametrize("name", NAMES)
async def test_pytest_runs_inside_as_the_page_says(name: str, packages: Path) -> None:
    base = spec_for(name)
    page_env = example(packages)

    class Here(page_env):  # type: ignore[misc, valid-type]
        """Make the tests pass."""

        sandbox = replace(page_env.sandbox, backend=base.backend, run_as=base.run_as, python=base.python)

    episode = await play(Here(), Task("t", {"files": FILES}), ScriptedPolicy([call("run_tests"), say("done")]))
    (found,) = episode.turns[0].observation
    assert "1 failed, 1 passed" in str(found.content), found.content
    assert "assert 2 == 3" in str(found.content)
    code = "import only_here, sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-k', 'good']))"
    async with SandboxPool(Here.sandbox, min_idle=0) as pool, pool.lease() as box:
        await box.put_tree({path: text.encode() for path, text in FILES.items()})
        result = await box.python(code)
        assert (result.exit_code, "1 passed, 1 deselected" in result.text()) == (0, True), result
        where = await box.run("python3 -c 'import pytest; print(pytest.__file__)'")
        assert where.text() == f"{packages}/pytest/__init__.py\n"  # and not another that the interpreter has


async def test_without_readonly_the_folder_does_not_exist_inside(packages: Path) -> None:
    async with SandboxPool(Sandbox(python_path=(str(packages),)), min_idle=0) as pool, pool.lease() as box:
        result = await box.python(f"import os\nprint(os.path.exists({str(packages)!r}))\nimport only_here")
        assert result.text() == "False\n"
        assert "No module named 'only_here'" in result.error_text()


@pytest.mark.skipif(shutil.which("git", path="/usr/bin:/bin") is None, reason="git is not installed")
@pytest.mark.parametrize("name", ["namespace", "landlock"])
async def test_git_commits_inside(name: str) -> None:
    """Also where the system's configuration may not be read."""
    user = "-c user.name=agent -c user.email=agent@example.org"
    async with SandboxPool(spec_for(name), min_idle=0) as pool, pool.lease() as box:
        done = await box.run(
            f"git init -q . && echo 1 > f && git add f && git {user} commit -qm first && git log -1"
        )
        assert done.ok, done
        assert b"first" in done.stdout
