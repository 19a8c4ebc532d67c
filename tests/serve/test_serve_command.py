"""`agentrl serve` as a user starts it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from agentrl.chat.template import Renderer
from agentrl.cli import main
from agentrl.cli.serve import _about_tools
from agentrl.config.run import TinyModel
from agentrl.models.tiny import make_tiny_model
from tests.serve.serve_kit import CORPUS

SHAPE = TinyModel(hidden=32, layers=1, heads=2, intermediate=64, vocab=400, max_context=512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small untrained model."""
    folder = tmp_path_factory.mktemp("served") / "small"
    make_tiny_model(folder, CORPUS, SHAPE)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_it_says_where_it_is_answers_and_ends_at_a_signal(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVE_KEY", "a-long-secret")
    command = [sys.executable, "-m", "agentrl", "serve", str(model), "--port", "0", "--api-key-env", "SERVE_KEY"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.match(r"small at (http://127\.0\.0\.1:\d+/v1) ", line)
            assert found, line or process.communicate()[1]
            body = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            url = f"{found[1]}/chat/completions"
            assert httpx.post(url, json=body, timeout=30).status_code == 401
            answer = httpx.post(url, json=body, headers={"Authorization": "Bearer a-long-secret"}, timeout=30)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] <= 4
            assert json.loads(answer.text)["system_fingerprint"].startswith("fp_")
        finally:
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--host", "0.0.0.0"], "others could use the endpoint"),
        (["--api-key-env", "NOT_SET_ANYWHERE"], "this environment variable is not set"),
        (["--set", "steps=2"], "--set steps=2: `steps` has no effect on serving"),
        (["--set", "engine.server.sleep=true"], "has no effect on serving, which updates no weights"),
        (["--set", "engine.kind=sglanng"], "did you mean 'sglang'?"),
        (
            ["--set", "engine.server.replicas=2"],
            "engine.server.replicas has no effect unless engine.kind is sglang or vllm",
        ),
        (["--set", "engine.max_slotz=2"], "did you mean 'max_slots'?"),
        (["--set", "engine.server={grammars: false}"], "`engine.server.grammars` has no effect on serving"),
        (["--set", "model.path=other"], "`model.path` has no effect on serving"),
        *(
            (["--cors", origin], f"--cors {origin}: no page has this origin")
            for origin in ("", "app.example.com", "https://App.example.com", "https://x/", "https://a@x")
        ),
        (["--model-name", ""], "--model-name: is empty"),
        (["--record", "r", "--max-requests", "256"], "--max-requests has no effect with --record"),
        (["--record", "r", "--max-requests", "2"], "--max-requests has no effect with --record"),
        (["--record", "r", "--accept-any-model"], "--accept-any-model has no effect with --record"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    model: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
):
    with pytest.raises(SystemExit) as left:
        main(["serve", str(model), *words])
    err = capsys.readouterr().err
    assert left.value.code == 2
    assert told in err
    assert len(err.splitlines()) == 1


def test_calls_that_the_parser_cannot_read_are_said_before_anything_is_served(model: Path, tmp_path: Path):
    assert _about_tools(Renderer.from_directory(model)) == ""
    template = tmp_path / "odd.jinja"
    source = (model / "chat_template.jinja").read_text()
    template.write_text(source.replace("<tool_call>\\n", "!!CALL ").replace("\\n</tool_call>", " LLAC!!"))
    told = _about_tools(Renderer.from_directory(model, template=str(template)))
    assert told.startswith("note: tools of clients will not work: ")
    assert "!!CALL" in told
    template.write_text(source.replace("tools", "nothing"))
    assert "ignores tools" in _about_tools(Renderer.from_directory(model, template=str(template)))


def test_a_folder_that_is_neither_run_nor_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["serve", str(tmp_path)])
    assert f"{tmp_path}: has no config.yaml and no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["use_rslora", "use_dora"])
@pytest.mark.parametrize("command", ["serve", "eval"])
@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_that_peft_wrote_is_refused_by_name(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, command: str, with_config: bool
):
    """Its scale and kind are peft's to merge; nothing is loaded from the base that it names."""
    peft = pytest.importorskip("peft")
    folder = tmp_path / "adapter"
    peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], **{kind: True}).save_pretrained(folder)
    if with_config:
        for file in model.glob("*.json*"):
            (folder / file.name).write_bytes(file.read_bytes())
    with pytest.raises(SystemExit) as left:
        main([command, str(folder)])
    err = capsys.readouterr().err
    assert left.value.code == 2
    assert f"{folder}: holds an adapter (adapter_config.json), not a model: merge the adapter into its base" in err
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(SystemExit):
        main([command, str(folder)])
    assert f"name the checkpoint, {tmp_path}, which has it merged into the model" in capsys.readouterr().err
