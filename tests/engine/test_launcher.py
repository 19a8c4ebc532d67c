"""Servers as child processes: they start, say why they do not, and never outlive their owner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentrl.config.engine import EngineConfig, ServerConfig
from agentrl.config.run import LoRAConfig
from agentrl.engine.open import open_engine
from agentrl.engine.servers.launch.hosts import LaunchedHost, Recipe
from agentrl.engine.servers.launch.launcher import ServerProcess
from agentrl.engine.servers.opening import launch_recipe
from agentrl.engine.servers.replica_pool import ServedLimits
from agentrl.engine.servers.server_engine import ServedEngine, load_folder
from agentrl.engine.servers.sglang import SGLangServer
from agentrl.engine.servers.weight_sync import TensorSync
from agentrl.errors import ConfigError, EngineError
from agentrl.ports import reserved_port
from agentrl.scratch import ScratchFolder
from agentrl.types import Sampling

IP_LOCAL_PORT_RANGE = 51
"""A socket option of Linux 6.3 (ip(7)), which Python 3.11 does not name."""
SERVER = """
import asyncio, sys
from agentrl.testing.sglang_server import LoopbackServer

async def main():
    server = LoopbackServer(token_s=0.02)
    server.port, server.version = int(sys.argv[1]), "0"
    await server.start()
    await asyncio.Event().wait()

asyncio.run(main())
"""
FAMILY = """
import subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(inner.pid, flush=True)
time.sleep(600)
"""


def runs(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def printed_pid(log: Path) -> int:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            return int(log.read_text())
        time.sleep(0.02)
    raise AssertionError("nothing was printed")


def gone(pid: int) -> bool:
    end = time.monotonic() + 30
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not runs(pid)


async def test_stopping_ends_descendants_that_hid_in_another_session(tmp_path: Path) -> None:
    process = await ServerProcess.start([sys.executable, "-c", FAMILY], log=tmp_path / "log")
    inner = await asyncio.to_thread(printed_pid, tmp_path / "log")
    assert runs(inner)
    await process.stop()
    assert await asyncio.to_thread(gone, inner)
    assert not process.alive
    await process.stop()


def test_nothing_outlives_an_owner_that_is_killed(tmp_path: Path) -> None:
    owner = f"""
import asyncio, sys
from pathlib import Path
from agentrl.engine.servers.launch.launcher import ServerProcess

async def main():
    await ServerProcess.start([sys.executable, "-c", {FAMILY!r}], log=Path({str(tmp_path / "log")!r}))
    await asyncio.sleep(600)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", owner]) as process:
        inner = printed_pid(tmp_path / "log")
        process.send_signal(signal.SIGKILL)
    assert gone(inner)


async def test_a_server_does_not_outlive_a_guard_that_is_killed(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    process = await ServerProcess.start([sys.executable, "-c", code], log=tmp_path / "log")
    server = await asyncio.to_thread(printed_pid, tmp_path / "log")
    assert runs(server)
    os.kill(process.pid, signal.SIGKILL)
    assert await asyncio.to_thread(gone, server)
    await process.stop()


async def test_the_exit_code_and_the_last_words_are_known(tmp_path: Path) -> None:
    code = "print('no memory left'); raise SystemExit(3)"
    process = await ServerProcess.start([sys.executable, "-c", code], log=tmp_path / "log")
    assert await process.wait() == 3
    assert process.last_words() == "no memory left"


async def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not a program"):
        await ServerProcess.start([str(tmp_path / "missing")], log=tmp_path / "log")


def launched(tmp_path: Path, code: str, *, start_timeout_s: float = 50.0) -> LaunchedHost:
    return LaunchedHost(
        "test server",
        Recipe(lambda port: [sys.executable, "-c", code, str(port)], {"PYTHONPATH": os.getcwd()}),
        lambda url: SGLangServer(url, timeout_s=20.0),
        log=tmp_path / "server.log",
        start_timeout_s=start_timeout_s,
    )


def model_in(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 97}))
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    return folder


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"exit code 1 while it started[\s\S]*no such model"):
        await launched(tmp_path, "raise SystemExit('no such model')").start()


async def test_the_log_of_a_server_that_is_given_up_outlasts_the_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "kept"))
    (tmp_path / "kept").mkdir()
    (tmp_path / "run").mkdir()
    host = launched(tmp_path / "run", SERVER)
    engine = ServedEngine(
        [host],
        TensorSync(bucket_bytes=1 << 20),
        model=model_in(tmp_path),
        limits=ServedLimits(restarts=0, health_every_s=60.0),
        tell=lambda said: None,
    )
    await engine.start()
    try:
        (tmp_path / "run" / "server.log").write_text("CUDA out of memory")
        engine._pool.lose(engine._pool.replicas[0], "HTTP 500: see the stack trace above")
        with pytest.raises(
            EngineError, match=r"no server is left: .*see the stack trace above \(its log: "
        ) as refused:
            await engine.generate([1], Sampling(max_tokens=3))
    finally:
        await engine.close()
    shutil.rmtree(tmp_path / "run")
    [kept] = (tmp_path / "kept").glob("agentrl-*-server.log")
    assert str(kept) in str(refused.value)
    assert kept.read_text() == "CUDA out of memory"


def test_a_log_is_kept_without_a_copy_and_for_its_owner_only(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "run").mkdir()
    host, log = launched(tmp_path / "run", SERVER), tmp_path / "run" / "server.log"
    assert host.keep_log() == log  # there is none yet
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]
    log.write_text("it starts")
    kept = host.keep_log()
    log.write_text("out of memory")
    assert host.keep_log() == kept
    assert kept.samefile(log)
    assert kept.stat().st_mode & 0o077 == 0


async def test_a_server_that_never_answers_is_ended(tmp_path: Path) -> None:
    host = launched(tmp_path, "import time; time.sleep(600)", start_timeout_s=0.5)
    with pytest.raises(EngineError, match="start_timeout_s"):
        await host.start()
    assert host.process is not None
    assert not host.process.alive


async def test_a_killed_server_is_started_again_and_its_requests_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    host = launched(tmp_path, SERVER)
    engine = ServedEngine(
        [host],
        TensorSync(bucket_bytes=1 << 20),
        model=model_in(tmp_path),
        limits=ServedLimits(health_every_s=0.2),
        tell=said.append,
    )
    await engine.start()
    try:
        await engine.update_weights({"a": torch.ones(2)}, version=1)
        tasks = [asyncio.create_task(engine.generate([n], Sampling(max_tokens=30))) for n in range(4)]
        await asyncio.sleep(0.2)
        assert host.process is not None
        os.kill(host.process.pid, signal.SIGTERM)  # the guard takes the server with it
        done = await asyncio.gather(*tasks)
        assert [len(c.ids) for c in done] == [30] * 4
        assert all(c.versions == (1,) * 30 for c in done)
        assert "is lost" in said[0]
    finally:
        await engine.close()
    assert not host.process.alive


def test_nobody_else_gets_a_reserved_port() -> None:
    """A server starts for half a minute, and other programs open sockets meanwhile."""

    def other_program(port: int) -> socket.socket:
        asks = socket.socket()  # for any port of a range in which there is only this one
        try:
            asks.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port | port << 16))
        except OSError:
            pytest.skip("needs Linux 6.3")
        asks.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return asks

    with socket.create_server(("127.0.0.1", 0)) as anybody:
        with reserved_port() as port:
            for host in "127.0.0.1", "":
                with other_program(port) as listens, pytest.raises(OSError, match="in use"):
                    listens.bind((host, 0))
            with other_program(port) as calls, pytest.raises(OSError, match="assign"):
                calls.connect(anybody.getsockname())
            for host in "127.0.0.1", "":
                socket.create_server((host, port)).close()  # the server gets it
        with other_program(port) as calls:
            calls.connect(anybody.getsockname())
            assert calls.getsockname()[1] == port


def test_the_command_line_holds_what_the_configuration_says() -> None:
    config = EngineConfig(
        kind="sglang",
        device="cpu",
        max_slots=32,
        server=ServerConfig(
            python="/venv/bin/python",
            gpu_memory_utilization=0.3,
            args=["--foo", "1"],
            environment={"A": "b", "OMP_NUM_THREADS": "4"},
            sleep=True,
        ),
    )
    recipe = launch_recipe(config, Path("/models/m"), "/venv/bin/python", 0)
    line = " ".join(recipe.command(1234))
    assert line.startswith("/venv/bin/python -m sglang.launch_server --model-path /models/m --host 127.0.0.1")
    for part in (
        "--max-running-requests 32",
        "--mem-fraction-static 0.3",
        "--device cpu",
        "--foo 1",
        "--port 1234",
    ):
        assert part in line
    assert "--enable-memory-saver" in line
    assert recipe.environment["A"] == "b"
    assert recipe.environment["OMP_NUM_THREADS"] == "4"


def test_a_server_for_adapters_is_started_with_their_rank_and_layers(tmp_path: Path) -> None:
    config = EngineConfig(kind="sglang", device="cpu", sync="lora")
    blocks = {f"model.layers.0.{name}.weight": torch.zeros(2, 2) for name in ("mlp.up_proj", "self_attn.q_proj")}
    other = {
        "model.embed_tokens.weight": torch.zeros(2, 2),
        "model.layers.0.input_layernorm.weight": torch.zeros(2),
    }
    routed = {
        f"model.layers.0.mlp.{name}.weight": torch.zeros(2, 2)
        for name in ("experts.0.down_proj", "experts.0.w1", "gate", "gate.wg", "router.classifier")
    }
    save_file(blocks | other | routed, tmp_path / "model.safetensors")
    line = " ".join(launch_recipe(config, tmp_path, "python", 0, LoRAConfig(rank=4)).command(1))
    assert "--enable-lora --max-lora-rank 4 --lora-target-modules q_proj up_proj --max-loras-per-batch 3" in line
    line = " ".join(launch_recipe(config, tmp_path, "python", 0, LoRAConfig(targets=["down_proj"])).command(1))
    assert "--lora-target-modules down_proj --max" in line
    dotted = LoRAConfig(targets=["mlp.down_proj", "layers.1.mlp.down_proj"])
    line = " ".join(launch_recipe(config, tmp_path, "python", 0, dotted).command(1))
    assert "--lora-target-modules down_proj --max" in line
    assert "lora" not in " ".join(launch_recipe(config, tmp_path, "python", 0).command(1))


@pytest.mark.parametrize("block", ["model.layers.0", "transformer.h.0", "h.0"])
def test_vllm_prepares_the_layers_that_get_adapters_only(block: str, tmp_path: Path) -> None:
    """With its output layer prepared too, it ends when it scores a prompt while it samples."""
    config = EngineConfig(kind="vllm", device="cpu", sync="lora")
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 64}))
    save_file(
        {
            f"{block}.self_attn.q_proj.weight": torch.zeros(2, 2),
            "lm_head.weight": torch.zeros(2, 2),
        },
        tmp_path / "model.safetensors",
    )
    command = launch_recipe(config, tmp_path, "python", 0, LoRAConfig(rank=4)).command(1)
    assert "--lora-target-modules q_proj" in " ".join(command)
    assert "lm_head" not in command


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_missing_model_and_one_without_layers_have_different_errors(kind: Any, tmp_path: Path) -> None:
    config = EngineConfig(kind=kind, device="cpu", sync="lora")
    with pytest.raises(ConfigError, match=r"model' does not exist; give the path"):
        await open_engine(config, tmp_path / "model", LoRAConfig())
    if kind == "sglang":  # vLLM prepares all layers unless some are named
        with pytest.raises(
            ConfigError, match=r"has no safetensors with linear layers .* name the layers in learner"
        ):
            await open_engine(config, model_in(tmp_path), LoRAConfig())


async def test_a_damaged_file_of_weights_is_named(tmp_path: Path) -> None:
    model = model_in(tmp_path)
    (model / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read: .*header too small"):
        await open_engine(EngineConfig(kind="sglang", device="cpu", sync="lora"), model, LoRAConfig())
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read: .*header too small"):
        load_folder(model, torch.float32)


async def test_an_adapter_that_vllm_would_not_score_is_refused(tmp_path: Path) -> None:
    config = EngineConfig(kind="vllm", device="cpu", sync="lora")
    with pytest.raises(ConfigError, match=r"vLLM ignores an adapter of lm_head .* remove lm_head, or use another"):
        await open_engine(config, model_in(tmp_path), LoRAConfig(targets=["q_proj", "lm_head"]))


@pytest.mark.parametrize(
    ("targets", "lack"),
    [(["q_proj"], "v_proj"), (["up_proj", "down_proj"], "gate_proj"), (["self_attn.k_proj"], "q_proj")],
)
async def test_an_adapter_that_sglang_would_drop_is_refused(tmp_path: Path, targets: list[str], lack: str) -> None:
    config = EngineConfig(kind="sglang", device="cpu", sync="lora")
    with pytest.raises(ConfigError, match=f"lack {lack}"):
        await open_engine(config, model_in(tmp_path), LoRAConfig(targets=targets))


@pytest.mark.parametrize("targets", ["all-linear", ["shared_expert_gate"], ["mlp.shared_expert_gate"]])
async def test_layers_that_sglang_has_no_adapters_for_are_refused(tmp_path: Path, targets: Any) -> None:
    config, model = EngineConfig(kind="sglang", device="cpu", sync="lora"), model_in(tmp_path)
    save_file({"model.layers.0.mlp.shared_expert_gate.weight": torch.zeros(1, 2)}, model / "model.safetensors")
    with pytest.raises(ConfigError, match=r"SGLang serves no adapters of shared_expert_gate: name other layers"):
        await open_engine(config, model, LoRAConfig(targets=targets))


async def test_an_installation_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.server\.python"):
        await open_engine(EngineConfig(kind="sglang", device="cpu"), model_in(tmp_path))


async def test_a_checkpoint_whose_optimizer_servers_would_read_is_refused(tmp_path: Path) -> None:
    model, config = (
        model_in(tmp_path),
        EngineConfig(kind="vllm", device="cpu", server={"python": "/nowhere/python"}),
    )
    (model / "optimizer-00001-of-00002.safetensors").touch()
    with pytest.raises(
        ConfigError, match=r"read optimizer-00001-of-00002.safetensors as weights: copy the folder"
    ):
        await open_engine(config, model)
    (model / "model.safetensors.index.json").touch()
    with pytest.raises(EngineError, match="/nowhere/python"):
        await open_engine(config, model)


def test_folders_of_killed_runs_are_swept_and_those_of_living_ones_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        f"import os, tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        "from agentrl.scratch import ScratchFolder\n"
        "folder = ScratchFolder('engine'); (folder.path / 'weights').write_text('x'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    (dead,) = tmp_path.iterdir()
    living = ScratchFolder("server")
    assert not dead.exists()
    another = ScratchFolder("worker")
    assert living.path.is_dir()
    another.close()
    living.close()
    assert list(tmp_path.iterdir()) == []
