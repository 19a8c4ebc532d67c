"""A teacher in the place of the reference: gradients against plain computations, and a teacher on a server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algo.kl import kl_per_token, whole_kl
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.config.teacher import TeacherConfig
from agentrl.errors import ConfigError, EngineError
from agentrl.learner import teacher_server
from agentrl.learner.pack import in_pack_order
from agentrl.learner.teacher_server import TeacherServer, TeacherServers
from agentrl.types import Sample
from tests.learner.direct import DirectLearner
from tests.learner.train_models import VOCABULARY, gradients, make_batch, padded_logprobs, plain_model, write_model

COEF = 0.7


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider and deeper model than the policy."""
    return write_model(tmp_path_factory.mktemp("teacher"), seed=5, hidden=48, layers=3)


def make_learner(
    policy: Path,
    teacher: dict[str, Any],
    *,
    tokens: int = 120,
    temperature: float = 1.0,
    lora: bool = False,
    **kl: Any,
) -> DirectLearner:
    told = TeacherConfig(**teacher)
    return DirectLearner(
        policy,
        algorithm=AlgorithmConfig(kl={"coef": COEF, **kl}),
        optim=OptimConfig(lr=1e-3, warmup_steps=0, max_grad_norm=1e9),
        config=LearnerConfig(
            device="cpu", tokens_per_micro_batch=tokens, logits_at_once=16, lora={"rank": 2} if lora else None
        ),
        temperature=temperature,
        total_steps=10,
        reference_dir=policy,
        **({"servers": {"": told}} if told.url else {"teacher": told}),
    )


def without_advantage(samples: Sequence[Sample]) -> list[Sample]:
    return [replace(s, advantages=(0.0,) * len(s.ids)) for s in samples]


def step(learner: DirectLearner, samples: Sequence[Sample]) -> tuple[Tensor, dict[str, float]]:
    """The gradient of a step, and its metrics."""
    seen: list[Tensor] = []
    learner.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(learner.policy)))
    found = learner.step(samples)
    return seen[0], dict(found.metrics)


def tables(model: torch.nn.Module, samples: Sequence[Sample], temperature: float) -> Tensor:
    """[N, V] log-probabilities in the place of each trained token, row by row."""
    found = []
    for s in samples:
        logits = model(torch.tensor([s.ids]), use_cache=False).logits[0] / temperature
        found += [torch.log_softmax(logits[t - 1], -1) for t, on in enumerate(s.loss_mask) if on]
    return torch.stack(found)


@pytest.mark.parametrize(
    ("top", "temperature", "beta"),
    [
        (0, 1.0, 1.0),
        (0, 0.7, 1.0),
        (20, 1.0, 1.0),
        (VOCABULARY - 1, 1.0, 1.0),
        (0, 0.7, 0.0),
        (20, 1.0, 0.0),
        (0, 1.0, 0.5),
        (20, 1.0, 0.1),
    ],
)
def test_full_is_the_divergence_of_the_whole_distributions(
    policy_dir: Path, teacher_dir: Path, top: int, temperature: float, beta: float
):
    samples = without_advantage(make_batch(3))
    kl = {"kind": "full", "top": top, "jsd_beta": beta}
    learner = make_learner(policy_dir, {"path": str(teacher_dir)}, temperature=temperature, **kl)
    gradient, metrics = step(learner, samples)
    policy, teacher = plain_model(policy_dir), plain_model(teacher_dir)
    own_NV = tables(policy, samples, temperature)
    with torch.no_grad():
        other_NV = tables(teacher, samples, temperature)
    if top:
        best_Nk = other_NV.topk(top, -1).indices
        own_NV, other_NV = own_NV.gather(1, best_Nk), other_NV.gather(1, best_Nk)
        rest_N, other_rest_N = (1 - t.exp().sum(-1) for t in (own_NV, other_NV))
        own_NV = torch.cat([own_NV, rest_N.log()[:, None]], 1)
        other_NV = torch.cat([other_NV, other_rest_N.log()[:, None]], 1)
    own, other = own_NV.exp(), other_NV.exp()
    mixture = beta * other + (1 - beta) * own
    if beta == 1:
        found = (own * (own / other).log()).sum(-1)
    elif beta == 0:
        found = (other * (other / own).log()).sum(-1)
    else:
        toward = (other * (other / mixture).log()).sum(-1), (own * (own / mixture).log()).sum(-1)
        found = beta * toward[0] + (1 - beta) * toward[1]
    assert metrics["kl"] == pytest.approx(float(found.mean().detach()), rel=1e-4)
    policy.zero_grad()
    (COEF * found.mean()).backward()
    wanted = gradients(policy)
    assert float((gradient - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize("tokens", [60, 5000])
def test_centered_is_the_policy_gradient_with_the_mean_as_its_baseline(
    policy_dir: Path, teacher_dir: Path, tokens: int
):
    samples = without_advantage(make_batch(4))
    learner = make_learner(policy_dir, {"path": str(teacher_dir)}, tokens=tokens, kind="centered")
    gradient, _ = step(learner, samples)
    policy, teacher = plain_model(policy_dir), plain_model(teacher_dir)
    own_N = torch.cat(padded_logprobs(policy, samples))
    with torch.no_grad():
        other_N = torch.cat(padded_logprobs(teacher, samples))
    sampler_N = torch.tensor([p for s in samples for p, on in zip(s.logprobs, s.loss_mask, strict=True) if on])
    weights_N = own_N.detach() - other_N - (sampler_N - other_N).mean()
    policy.zero_grad()
    (COEF * (weights_N * own_N).mean()).backward()
    wanted = gradients(policy)
    assert float((gradient - wanted).norm() / wanted.norm()) < 1e-4


def test_estimates_agree_with_the_whole_distributions_in_expectation():
    """Over all tokens that could be drawn, each weighted by its probability: value and gradient."""
    random = torch.Generator().manual_seed(1)
    logits_V, other_V = (torch.randn(9, generator=random, dtype=torch.float64) for _ in range(2))
    other_V = torch.log_softmax(2 * other_V, -1)
    everything = torch.ones(9, dtype=torch.bool)

    def of(estimate: Any) -> tuple[float, Tensor]:
        leaf_V = logits_V.clone().requires_grad_()
        value = estimate(torch.log_softmax(leaf_V, -1))
        value.backward()
        assert leaf_V.grad is not None
        return float(value.detach()), leaf_V.grad

    value, gradient = of(lambda own_V: whole_kl(own_V[None], other_V[None], rest=False)[0])
    for kind, mean in (("unbiased", None), ("centered", torch.full((9,), 0.83, dtype=torch.float64))):
        found = of(
            lambda own_V, k=kind, m=mean: (
                own_V.detach().exp() * kl_per_token(k, own_V, other_V, everything, m)
            ).sum()
        )
        assert found[0] == pytest.approx(value, abs=1e-12)
        assert torch.allclose(found[1], gradient, atol=1e-12)
    for beta in (1.0, 0.0, 0.3):
        whole = whole_kl(torch.log_softmax(logits_V, -1)[None], other_V[None], rest=False, beta=beta)
        part = whole_kl(torch.log_softmax(logits_V, -1)[None, :4], other_V[None, :4], rest=True, beta=beta)
        assert 0 < float(part) < float(whole), "tokens that count as one hide some of the difference"


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_impossible_tokens_leave_a_divergence_finite_where_it_is(beta: float):
    logits = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log().requires_grad_()
    other = torch.tensor([[0.2, 0.8, 0.0]], dtype=torch.float64).log()
    found = whole_kl(torch.log_softmax(logits, -1), other, rest=False, beta=beta)
    found.sum().backward()
    assert logits.grad is not None
    assert found.isfinite().all()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 0] > 0, "the policy is pulled to the other token"


def test_only_the_forward_kl_moves_a_policy_that_is_certain_of_the_wrong_token():
    logits = torch.tensor([[30.0, 0.0, 0.0]], dtype=torch.float64)
    other = torch.tensor([[0.01, 0.98, 0.01]], dtype=torch.float64).log()
    pull = {}
    for beta in (0.0, 1.0):
        leaf = logits.clone().requires_grad_()
        whole_kl(torch.log_softmax(leaf, -1), other, rest=False, beta=beta).sum().backward()
        assert leaf.grad is not None
        pull[beta] = float(leaf.grad.abs().max())
    assert pull[1.0] < 1e-10
    assert pull[0.0] > 0.9


def test_adapters_learn_from_the_teacher_not_from_their_base(policy_dir: Path, teacher_dir: Path):
    samples = without_advantage(make_batch(5))
    learner = make_learner(policy_dir, {"path": str(teacher_dir)}, lora=True, kind="unbiased")
    first = learner.step(samples).metrics["kl"]
    own_N, other_N = (
        torch.cat(padded_logprobs(plain_model(d), samples)).detach() for d in (policy_dir, teacher_dir)
    )
    wanted = kl_per_token("k3", own_N, other_N, torch.ones_like(own_N, dtype=torch.bool)).mean()
    assert first == pytest.approx(float(wanted), rel=1e-4)


class Scoring(BaseHTTPRequestHandler):
    """Scores given tokens as OpenAI's completions do, with a model; first says what `fails` holds."""

    model: Any = None
    fails: list[tuple[int, bytes]]
    asked: list[dict[str, Any]]
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.lock:
            self.asked.append({**body, "key": self.headers["authorization"]})
            status, data = self.fails.pop(0) if self.fails else (200, self._scored(body["prompt"]))
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _scored(self, ids: list[int]) -> bytes:
        with torch.no_grad():
            table = torch.log_softmax(self.model(torch.tensor([ids]), use_cache=False).logits[0], -1)
        values = [None, *(float(table[t - 1, ids[t]]) for t in range(1, len(ids)))]
        logprobs = {
            **{"tokens": [*(f"t{i}" for i in ids), "more"], "token_logprobs": [*values, -1.0]},
            **{"top_logprobs": None, "text_offset": []},
        }
        choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": logprobs}
        return json.dumps(
            {"id": "x", "object": "text_completion", "created": 0, "model": "t", "choices": [choice]}
        ).encode()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def scoring(directory: Path, *fails: tuple[int, bytes]) -> Iterator[tuple[str, type[Scoring]]]:
    handler = type("Handler", (Scoring,), {"model": plain_model(directory), "fails": list(fails), "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_teacher_on_a_server_gives_the_gradient_of_one_here(policy_dir: Path, teacher_dir: Path, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "abc")
    samples = without_advantage(make_batch(6))
    here = make_learner(policy_dir, {"path": str(teacher_dir)}, kind="centered")
    wanted, metrics = step(here, samples)
    with scoring(teacher_dir, (503, b"busy"), (200, b"no json")) as (url, server):
        there = make_learner(policy_dir, {"url": url, "model": "t", "key_env": "TEACHER_KEY"}, kind="centered")
        assert there.learner.reference_apart
        gradient, found = step(there, samples)
        there.close()
    assert len(server.asked) == len(samples) + 2, "what failed was asked again"
    assert {(one["echo"], one["temperature"], one["key"]) for one in server.asked} == {(True, 1.0, "Bearer abc")}
    assert found["kl"] == pytest.approx(metrics["kl"], rel=1e-5)
    assert float((gradient - wanted).norm() / wanted.norm()) < 1e-5


def test_each_env_is_scored_by_its_teacher(policy_dir: Path, teacher_dir: Path):
    samples = [replace(row, env=("a", "b", "c", "a2")[n % 4]) for n, row in enumerate(make_batch(8))]
    with scoring(policy_dir) as (url_a, server_a), scoring(teacher_dir) as (url_b, server_b):
        a = {"url": url_a, "model": "t"}
        servers = TeacherServers(
            {"a": TeacherConfig(**a), "a2": TeacherConfig(**a), "b": TeacherConfig(url=url_b, model="t")}
        )
        batches = [tuple(samples[1::2]), tuple(samples[::2])]
        found = servers.annotate(batches, frozenset({"ref_logprobs"}))
        servers.close()
    rows = [row for batch in batches for row in in_pack_order(batch)]
    plain = {"a": plain_model(policy_dir), "b": plain_model(teacher_dir)}
    for row, columns in zip(rows, found, strict=True):
        if row.env == "c":
            wanted = [value for value, on in zip(row.logprobs, row.loss_mask, strict=True) if on]
        else:
            wanted = padded_logprobs(plain[row.env[0]], [row])[0].tolist()
        assert columns["ref_logprobs"] == pytest.approx(wanted, abs=1e-4)
    assert len({row.env for row in rows}) == 4
    asked = [sum(row.env.startswith(name) for row in rows) for name in "ab"]
    assert [len(server_a.asked), len(server_b.asked)] == asked


def test_what_one_of_two_teachers_refuses_is_the_error(teacher_dir: Path):
    rows = tuple(replace(row, env="ab"[n % 2]) for n, row in enumerate(make_batch(4)))
    with scoring(teacher_dir) as (url, _), scoring(teacher_dir, *[(401, b"{}")] * 9) as (refusing, _):
        servers = TeacherServers(
            {name: TeacherConfig(url=where, model="t") for name, where in (("a", url), ("b", refusing))}
        )
        with pytest.raises(ConfigError, match=rf"{refusing} \(t\): HTTP 401"):
            servers.annotate([rows], frozenset({"ref_logprobs"}))
        servers.close()


def answered(*values: object) -> tuple[int, bytes]:
    """An answer with these log-probabilities."""
    logprobs = {"tokens": ["t"] * len(values), "token_logprobs": values}
    return 200, json.dumps({"choices": [{"index": 0, "text": "", "logprobs": logprobs}]}).encode()


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (
            (400, b'{"error": {"message": "echo is not supported"}}'),
            ConfigError,
            "HTTP 400.*echo is not supported",
        ),
        ((401, b"{}"), ConfigError, "HTTP 401"),
        (
            (200, b'{"choices": [{"index": 0, "text": "", "logprobs": null}]}'),
            ConfigError,
            "scores 0 of 4 given tokens",
        ),
        ((200, b'{"choices": []}'), ConfigError, "scores 0 of 4 given tokens"),
        ((200, b"[1, 2]"), ConfigError, "scores 0 of 4 given tokens"),
        ((200, b"null"), ConfigError, "scores 0 of 4 given tokens"),
        (answered(-1, -1, -1, -1, -1, -1), ConfigError, "scores 6 of 4 given tokens"),
        (answered(None, -1, None, -1), ConfigError, "1 of 3 scores are no log-probabilities: None"),
        (answered(None, -1, float("nan"), -1), ConfigError, "1 of 3 scores .*: nan"),
        (answered(None, -1, float("-inf"), -1), ConfigError, "1 of 3 scores .*: -inf"),
        (answered(None, 2.5, 0.3, -1), ConfigError, "2 of 3 scores .*: 2.5"),
        (answered(None, "-1.0", -1, -1), ConfigError, "1 of 3 scores .*: '-1.0'"),
        ((500, b"broken"), EngineError, "no answer for 0 s .*HTTP 500.*resumed"),
    ],
)
def test_a_server_that_cannot_score_is_one_error(teacher_dir: Path, answer, error, text: str):
    with scoring(teacher_dir, answer) as (url, _):
        server = TeacherServer(TeacherConfig(url=url, model="t", retry_s=0))
        try:
            with pytest.raises(error, match=text):
                server.scored([1, 2, 3, 4])
        finally:
            server.close()


class Clock(threading.Event):
    """A clock that moves only while someone waits."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return False


def test_a_server_that_fails_is_asked_until_its_time_is_over(teacher_dir: Path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(teacher_server, "time", clock)
    with scoring(teacher_dir, *[(500, b"broken")] * 20) as (url, handler):
        server = TeacherServer(TeacherConfig(url=url, model="t", retry_s=40))
        server._closed = clock
        with (
            pytest.raises(EngineError, match="no answer for 40 s"),
            pytest.warns(UserWarning, match="trying again"),
        ):
            server.scored([1, 2])
        server.close()
    assert clock.now == 40
    assert len(handler.asked) > 6


def test_a_server_that_is_gone_and_a_key_that_is_not_set(monkeypatch):
    monkeypatch.delenv("NO_KEY", raising=False)
    for more, error, text in (
        ({}, EngineError, "APIConnectionError"),
        ({"key_env": "NO_KEY"}, ConfigError, "teacher.key_env: the environment variable NO_KEY is not set"),
    ):
        server = TeacherServer(TeacherConfig(url="http://127.0.0.1:9/v1", model="t", retry_s=0, **more))
        with pytest.raises(error, match=text):
            server.scored([1, 2])
        server.close()


def test_who_waits_for_a_server_can_be_ended():
    """In another thread, as the second Ctrl-C does: neither the retries nor a request in progress hold it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (9, silent.getsockname()[1]):
            url = f"http://127.0.0.1:{port}/v1"
            server = TeacherServer(TeacherConfig(url=url, model="t", timeout_s=60, retry_s=60))
            threading.Timer(0.5, server.close).start()
            began = time.monotonic()
            with pytest.raises(EngineError, match="closed before it had answered"):
                server.scored([1, 2])
            assert time.monotonic() - began < 10


def test_one_row_that_is_refused_ends_the_wait_for_the_others(monkeypatch):
    server = TeacherServer(TeacherConfig(url="http://127.0.0.1:9/v1", model="t"))
    refused, ended = make_batch(7)[-1], threading.Event()

    def of_row(row: Sample) -> tuple[float, ...]:
        if row is refused:
            raise ConfigError("refused")
        ended.wait(60)
        return ()

    monkeypatch.setattr(server, "_of_row", of_row)
    with pytest.raises(ConfigError, match="refused"):
        server.annotate([[*make_batch(8)[:3], refused]], frozenset({"ref_logprobs"}))
    ended.set()


def test_a_server_on_this_machine_is_not_asked_through_a_proxy(teacher_dir: Path, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with scoring(teacher_dir) as (url, _):
        server = TeacherServer(TeacherConfig(url=url, model="t", retry_s=0))
        assert len(server.scored([1, 2, 3])[0]) == 3
        server.close()
