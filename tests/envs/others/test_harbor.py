"""`harbor:DIR`: task folders in real sandboxes, against the test script run by hand."""

from __future__ import annotations

import asyncio
import io
import json
import random
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.env.load import load_env
from agentrl.env.play import Policy, ScriptedPolicy, call, play
from agentrl.envs.others import harbor_image
from agentrl.envs.others.harbor import HarborOptions, local_stage, solution_command
from agentrl.envs.others.harbor_task import host_tree, read_dockerfile, read_rewards, read_task
from agentrl.errors import ConfigError, RewardError
from agentrl.sandbox import Sandbox, pool_for
from agentrl.testing import check_env
from agentrl.types import Task
from tests.envs.others.harbor_folders import make_tasks, write
from tests.sandbox.sandbox_specs import docker_answers

PLACES = ("/app", "/logs", "/solution", "/tests")


def harbor(root: Path, **options: Any) -> Any:
    """The class for `harbor:DIR`, loaded as a run does."""
    return load_env(f"harbor:{root}", {"backend": "namespace", "held_out": "all", **options})


def answers(i: int, folder: Path) -> str:
    """What an oracle, near and far guesses, and vandals type."""
    total = i + i * 3 + 1 + 7
    return [
        solution_command(folder),
        f"echo {total + i % 7} > answer.txt",
        "echo not a number > answer.txt",
        "true",
        f"rm -rf data && mkdir -p sub && echo {total} > sub/a && ln -s sub/a answer.txt",
    ][i % 5]


async def by_hand(folder: Path, command: str) -> dict[str, float]:
    """The same in one sandbox: copy the files, type the command, copy the tests, run them, read the file."""
    spec = Sandbox(writable=PLACES, memory_mb=512, wall_s=300.0)
    box = await pool_for(spec).acquire(folder.name)
    try:
        await box.put_entries(host_tree(folder / "environment" / "data"), "/app/data")
        await box.run(command, cwd="/app")
        await box.put_entries(host_tree(folder / "tests"), "/tests")
        await box.make_dir("/logs/verifier")
        await box.run("bash /tests/test.sh", cwd="/app")
        try:
            found: dict[str, float] = json.loads(await box.read_file("/logs/verifier/reward.json"))
        except FileNotFoundError:
            found = {"reward": float(await box.read_file("/logs/verifier/reward.txt"))}
        return found
    finally:
        await pool_for(spec).release(box)


@pytest.mark.slow
async def test_40_episodes_earn_what_the_test_script_writes_by_hand(tmp_path: Path):
    env_class = harbor(make_tasks(tmp_path, 8))
    tasks = env_class.tasks("train")
    turns = asyncio.Semaphore(16)

    async def one(number: int) -> tuple[dict[str, float], dict[str, float]]:
        task, folder = tasks[number % 8], Path(tasks[number % 8].row["folder"])
        typed = answers(number // 8 + number % 8, folder)
        async with turns:
            episode = await play(env_class(), task, ScriptedPolicy([call("shell", command=typed)]))
            return {k.removeprefix("tests/"): v for k, v in episode.rewards.items()}, await by_hand(folder, typed)

    found = await asyncio.gather(*[one(number) for number in range(40)])
    assert [ours for ours, _ in found] == [hand for _, hand in found]
    totals = {sum(ours.values()) for ours, _ in found}
    assert {0.0, 1.0} < totals, "graded ones in between"


async def run(folder: Path, policy: Policy | Sequence[str], **options: Any) -> Any:
    env_class = harbor(folder, **options)
    task = env_class.tasks("train")[0]
    typed = policy if callable(policy) else ScriptedPolicy([call("shell", command=text) for text in policy])
    return await play(env_class(), task, typed)


@pytest.mark.slow
async def test_the_checker_accepts_tasks_and_their_oracle(tmp_path: Path):
    env_class = harbor(make_tasks(tmp_path, 2))
    await check_env(env_class, env_class.tasks("train"), oracle=env_class.oracle, reward_range=(0.0, 1.0))


async def test_tests_run_in_a_fresh_sandbox(tmp_path: Path):
    root = make_tasks(tmp_path, 1)
    fake = "echo 1 > /logs/verifier/reward.txt"
    seen = await run(
        root / "sum-00",
        [
            f"{fake}; echo '{fake}' > /tests/test.sh; chmod -w /tests/test.sh; mkdir -p /tmp/bin",
            f"(while true; do {fake}; sleep 0.01; done) > /dev/null 2>&1 &",
            "alias python3=true; echo 'exit 0' > ~/.bashrc; pwd; touch /usr/x; ls /solution /tests",
        ],
    )
    assert seen.reward == 0.0
    last = str(seen.turns[2].observation[0].content)
    assert last.startswith("/app")
    assert "Read-only file system" in last


async def test_only_artifacts_are_carried_if_the_task_names_some(tmp_path: Path):
    root = make_tasks(tmp_path, 1)
    toml = root / "sum-00" / "task.toml"
    toml.write_text('artifacts = ["/app/answer.txt"]\n' + toml.read_text())
    test = root / "sum-00" / "tests" / "test.sh"
    test.write_text(
        test.read_text()
        + "test -e /app/data/numbers.txt -a ! -e /app/other || echo 7 > /logs/verifier/reward.txt\n"
    )
    assert (await run(root, ["echo 8 > answer.txt; echo 1 > other; rm -r data"])).reward == 1.0
    assert (await run(root, ["echo 8 > other"])).reward == 0.0


async def scored(folder: Path, dockerfile: str, test: str, *typed: str, **options: Any) -> Any:
    """Play a task whose test is a condition."""
    test = f"if {test}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    given = {"task.toml": "", "instruction.md": "Do it.", "tests/test.sh": test, "environment/x.txt": "x\n"}
    write(folder, {**given, "environment/Dockerfile": f"FROM x\n{dockerfile}\n"})
    return await run(folder, typed, **options)


@pytest.mark.parametrize(
    ("dockerfile", "test", "typed"),
    [
        ("", "grep -q ok /tmp/out", "echo ok > /tmp/out"),
        ("", "grep -q ok /workspace/out", "echo ok > ~/out; ln -s out ~/again; ln -s ../tmp ~/up"),
        ("COPY x.txt /workspace/x.txt", "grep -q x /workspace/x.txt", "true"),
        ("COPY x.txt /tmp/", "grep -q x /tmp/x.txt", "grep x /tmp/x.txt"),
        ("WORKDIR /tmp/deep", "grep -q /tmp/deep out", "pwd > out"),
        ("WORKDIR /workspaces/app", "grep -q /workspaces/app out", "pwd > out"),
        ('WORKDIR "/app/my dir"', "grep -q '/app/my dir' '/app/my dir/out'", "pwd > out"),
        ("ENV A=/data\nWORKDIR $A/x", "grep -q /data/x /data/x/out", "pwd > out"),
        ("ENV PATH=/app/bin:$PATH", "[[ $PATH == /app/bin:*/usr/bin* ]]", "true"),
    ],
)
async def test_work_in_every_writable_folder_reaches_the_tests(
    tmp_path: Path, dockerfile: str, test: str, typed: str
):
    assert (await scored(tmp_path / "task", dockerfile, test, typed)).reward == 1.0


async def test_the_tests_own_programs_do_not_load_packages_of_the_policys_home(tmp_path: Path):
    plant = (
        'd=$(python3 -m site --user-site); mkdir -p $d; echo \'open("/app/planted", "w")\' > $d/usercustomize.py'
    )
    test = "python3 -c pass && test ! -e /app/planted"
    assert (await scored(tmp_path / "task", "", test, plant)).reward == 1.0


@pytest.mark.parametrize(
    ("test", "typed"),
    [
        ("source ~/.local/bin/env", "mkdir -p ~/.local/bin; echo 'echo 1 > $LOG; exit 0' > ~/.local/bin/env"),
        ("echo 1 > /tmp/result", "ln -s $LOG /tmp/result"),
        ("echo 1 > /tmp/result", "ln -s ../logs/verifier/reward.json /tmp/result"),
        ("echo 1 > /tmp/result", "ln -s / /tmp/root; ln -s root$LOG /tmp/result"),
        ("echo 1 > /tmp/result", "ln -s /proc/self/root$LOG /tmp/result"),
        ("echo 1 > /tmp/result", "ln -s /app /tmp/in; ln -s in/..$LOG /tmp/result"),
        ("echo 1 > out/reward.json", "ln -s /logs/verifier out"),
    ],
)
async def test_no_file_of_the_policy_leads_the_tests_to_the_reward(tmp_path: Path, test: str, typed: str):
    log = "/logs/verifier/reward.json"
    folder = make_tasks(tmp_path, 1) / "sum-00"
    script = f"({test.replace('$LOG', log)}) 2>/dev/null || true; echo 0 > /logs/verifier/reward.txt\n"
    (folder / "tests" / "test.sh").write_text(script)
    assert (await run(folder, [typed.replace("$LOG", log)])).reward == 0.0


async def test_artifacts_do_not_bring_a_reward(tmp_path: Path):
    folder = make_tasks(tmp_path, 1) / "sum-00"
    toml = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text('artifacts = ["/logs", "/app", "/app/out"]\n' + toml)
    (folder / "tests" / "test.sh").write_text("echo 0 > /logs/verifier/reward.txt\n")
    plant = (
        "ln -s /logs/verifier out; mkdir -p /logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json"
    )
    assert (await run(folder, [plant])).reward == 0.0


async def test_all_files_of_the_policy_together_have_one_limit(tmp_path: Path):
    folder = make_tasks(tmp_path, 1) / "sum-00"
    write = "truncate -s 3M /tmp/a b; echo 8 > answer.txt"  # sparse: they take no room on the sandbox's disk
    assert (await run(folder, [write], workspace_mb=8)).reward == 1.0
    with pytest.raises(RewardError, match="more than"):
        await run(folder, [write], workspace_mb=4)


async def test_a_large_solution_with_variables_is_run(tmp_path: Path):
    folder = make_tasks(tmp_path, 1) / "sum-00"
    (folder / "solution" / "data.bin").write_bytes(random.Random(0).randbytes(300_000))
    (folder / "solution" / "solve.sh").write_text('test "$ANSWER" = "it\'s 8" && echo 8 > answer.txt\n')
    with (folder / "task.toml").open("a") as toml:
        toml.write('[solution]\nenv = {ANSWER = "it\'s 8"}\n')
    env_class = harbor(folder)
    task = env_class.tasks("train")[0]
    assert (await play(env_class(), task, env_class.oracle(task))).reward == 1.0


def test_sizes_and_networks_of_tasks(tmp_path: Path):
    folder = make_tasks(tmp_path, 1) / "sum-00"
    (folder / "task.toml").write_text("[environment]\nmemory = '2G'\nstorage = '512M'\nallow_internet = false\n")
    task = read_task(folder)
    spec = local_stage(task, HarborOptions(backend="namespace", network=True)).spec
    assert (spec.memory_mb, spec.workspace_mb, spec.network) == (2048, 512, False)


def test_a_sandbox_outlasts_the_programs_and_tests_of_its_task(tmp_path: Path):
    folder = make_tasks(tmp_path, 1) / "sum-00"
    (folder / "task.toml").write_text("[agent]\ntimeout_sec = 7200\n[verifier]\ntimeout_sec = 7200\n")
    task = read_task(folder)
    spec = local_stage(task, HarborOptions(backend="namespace")).spec
    assert spec.wall_s + task.test_timeout_s < spec.ttl_s


def test_hard_links_of_an_image_are_files():
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(file := tarfile.TarInfo("app/a"), io.BytesIO(b""))
        file.name, file.size = "app/b", 5
        tar.addfile(file, io.BytesIO(b"hello"))
        link = tarfile.TarInfo("app/c")
        link.type, link.linkname = tarfile.LNKTYPE, "app/b"
        tar.addfile(link)
    found = harbor_image._entries([packed.getvalue()], "image", "/app")
    assert {entry.name: entry.content for entry in found} == {"a": b"", "b": b"hello", "c": b"hello"}


async def test_tests_without_a_reward_are_a_fault_that_says_why(tmp_path: Path):
    root = make_tasks(tmp_path, 1)
    (root / "sum-00" / "tests" / "test.sh").write_text("echo no such tool >&2; exit 3\n")
    with pytest.raises(RewardError, match=r"neither reward.json nor reward.txt(.|\n)*no such tool"):
        await run(root, [])


def test_rewards_of_both_files():
    assert read_rewards("0.5\n", None) == {"reward": 0.5}
    assert read_rewards("0.5\n", "1") == {"reward": 1.0}
    assert read_rewards(None, '{"a": 0.25, "b": 1}') == {"a": 0.25, "b": 1.0}
    assert read_rewards(None, '{"reward": 1.25, "a": 0.25, "b": 1}') == {"a": 0.25, "b": 1.0}
    assert read_rewards(None, '{"reward": 0.5, "a": 0.25, "b": 1}') == {"reward": 0.5}
    for text, parts in ((None, None), ("", None), ("nan", None), (None, '{"a": true}'), (None, "{}"), (None, "[")):
        with pytest.raises(ValueError):
            read_rewards(text, parts)


def test_a_dockerfile_is_followed(tmp_path: Path):
    files = {
        "Dockerfile": "FROM x\n# note\nENV A=1 B='two words'\nworkdir /srv\nCOPY a.sh \\\n  tree ./in/\n"
        "COPY . /all/\nADD a.sh b.sh",
        "a.sh": "echo",
        "tree/b": "b",
    }
    recipe = read_dockerfile(write(tmp_path, files) / "Dockerfile")
    assert (recipe.workdir, recipe.env) == ("/srv", {"A": "1", "B": "two words"})
    names = {entry.name for entry in recipe.files}
    assert {"/srv/in/a.sh", "/srv/in/b", "/all/a.sh", "/all/tree/b", "/srv/b.sh"} <= names
    assert "/all/Dockerfile" not in names


def test_variables_lists_and_patterns_of_a_dockerfile(tmp_path: Path):
    lines = [
        "FROM x",
        "ENV A=1 \\",
        "# a note",
        "    B='$A' C=\\$A D=\"it's $NONE-${A:-7}\"",
        "ENV E=${A:-7}${N:-x}${A:+y} F two  words",
        "ENV G two words of $A",
        "WORKDIR /srv/$A",
        'COPY ["my file.txt", "./"]',
        "COPY *.sh /in",
    ]
    files = {"Dockerfile": "\n".join(lines), "my file.txt": "", "a.sh": "", "b.sh": ""}
    with pytest.raises(ConfigError, match="ENV needs NAME=VALUE"):
        read_dockerfile(write(tmp_path, files) / "Dockerfile")
    files["Dockerfile"] = files["Dockerfile"].replace(" F two  words", "")
    recipe = read_dockerfile(write(tmp_path, files) / "Dockerfile")
    # A is not yet set in its own instruction.
    assert recipe.env == {
        "A": "1", "B": "$A", "C": "$A", "D": "it's -7", "E": "1xy", "G": "two words of 1"
    }  # fmt: skip
    assert recipe.workdir == "/srv/1"
    assert {entry.name for entry in recipe.files} == {"/srv/1/my file.txt", "/in/a.sh", "/in/b.sh"}


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("task.toml", "steps = [{name = 'a'}]", "several steps"),
        ("task.toml", "[environment]\nos = 'windows'", "only linux"),
        ("task.toml", "[environment]\ndocker_image = 'x'", "backend: docker"),
        (
            "task.toml",
            "[environment]\nmemory_mb = 'big'",
            "environment.memory_mb: must be a positive number, got 'big'",
        ),
        ("task.toml", "[verifier.env]\nKEY = '${KEY}'", "without variables of the host"),
        ("task.toml", "artifacts = ['answer.txt']", "must be an absolute path"),
        ("task.toml", "x = ", "Invalid value"),
        ("environment/Dockerfile", "FROM x\nENV", "'ENV': ENV needs NAME=VALUE"),
        ("environment/Dockerfile", "FROM x\nENV A=${B%c}", "cannot read 'A=${B%c}'"),
        ("environment/Dockerfile", "FROM x\nENV A='b", "No closing quotation"),
        ("environment/Dockerfile", 'FROM x\nCOPY ["a"', "backend: docker"),
        ("environment/Dockerfile", "FROM x\nCOPY *.none /app", "no such file"),
        ("environment/Dockerfile", "FROM x\nCOPY --chown=a data /app", "needs an image"),
        ("task.toml", "[environment]\nmemory = 'big'", "environment.memory: 'big' must be a size"),
        ("environment/Dockerfile", "FROM x\nRUN make", "'RUN make' needs an image"),
        ("environment/Dockerfile", "FROM x\nCOPY ../tests /app", "no such file"),
        ("environment/Dockerfile", "FROM x\nCOPY data /etc/data", "is not in a writable folder"),
        (
            "environment/Dockerfile",
            "FROM x\nWORKDIR /usr/src",
            "sum-00: sandbox writable='/usr/src': /usr is reserved",
        ),
        ("environment/Dockerfile", "FROM x\nWORKDIR /", "sum-00: the working directory is /"),
        ("environment/docker-compose.yaml", "services: {}", "several containers"),
    ],
)
def test_a_task_that_cannot_be_played_is_one_clear_line(tmp_path: Path, file: str, text: str, said: str):
    root = make_tasks(tmp_path, 1)
    (root / "sum-00" / file).write_text(text)
    with pytest.raises(ConfigError) as caught:
        harbor(root)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_options_and_folders(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such folder"):
        harbor(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"no task\.toml"):
        harbor(tmp_path)
    with pytest.raises(ConfigError, match="use docker or namespace"):
        harbor(make_tasks(tmp_path, 1), backend="landlock")


def test_every_fifth_task_is_held_out(tmp_path: Path):
    env_class = harbor(make_tasks(tmp_path, 10), held_out="fifth")
    assert [task.id for task in env_class.tasks("held_out")] == ["harbor-sum-04", "harbor-sum-09"]
    assert len(env_class.tasks("train")) == 8


@pytest.mark.docker
@pytest.mark.slow
async def test_images_are_built_and_their_files_are_there(tmp_path: Path):
    if not docker_answers():
        pytest.skip("no Docker engine answers")
    root = make_tasks(tmp_path, 2, base="agentrl/sandbox:latest")
    for folder in root.iterdir():
        file = folder / "environment" / "Dockerfile"
        file.write_text(
            file.read_text() + "ENV GREETING=hello\nUSER 0\nRUN mkdir /opt/made && echo built > /opt/made/x\n"
        )
    env_class = harbor(root, backend="docker")
    for task in env_class.tasks("train"):
        assert (await play(env_class(), task, env_class.oracle(task))).reward == 1.0
    look = (
        "cat /opt/made/x data/numbers.txt; echo $GREETING; pwd; echo 0 > data/numbers.txt && cat data/numbers.txt"
    )
    seen = await play(env_class(), task, ScriptedPolicy([call("shell", command=look)]))
    assert str(seen.turns[0].observation[0].content).split() == ["built", "1", "4", "7", "hello", "/app", "0"]
    assert seen.reward == 0.0


async def test_writable_folders_share_the_disk():
    spec = Sandbox(writable=("/app", "/srv/deep/er"), workspace_mb=8, memory_mb=64)
    async with pool_for(spec, min_idle=0).lease() as box:
        await box.write_file("/srv/deep/er/a", b"x")
        assert (await box.run("cp /srv/deep/er/a /app/b && cat /app/b")).text() == "x"
        full = await box.run("head -c 6000000 /dev/zero > /app/big; head -c 6000000 /dev/zero > /workspace/big")
        assert "No space left" in full.error_text()
        assert "Read-only" in (await box.run("touch /srv/other")).error_text()
        await box.reset()
        assert (await box.list_dir("/app")) == []


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("app", "must be an absolute path"),
        ("/", "must be an absolute path"),
        ("/app/../etc", "must be an absolute path"),
        ("/usr/local", "is reserved"),
    ],
)
def test_a_wrong_writable_folder_is_refused(folder: str, said: str):
    with pytest.raises(ConfigError, match=said):
        Sandbox(writable=(folder,))


def test_writable_folders_need_a_back_end_that_has_them():
    with pytest.raises(ConfigError, match="use namespace or docker"):
        Sandbox(backend="landlock", writable=("/app",))
    with pytest.raises(ConfigError, match="already part of '/app'"):
        Sandbox(writable=("/app", "/app/in"))


def test_a_task_row_names_its_folder(tmp_path: Path):
    (task,) = harbor(make_tasks(tmp_path, 1)).tasks("held_out")
    assert task == Task("harbor-sum-00", {"folder": str(tmp_path / "sum-00")})
