"""Evaluations of a model behind an endpoint: a real HTTP server, the env code of training."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.cli.app import main
from agentrl.config import RunConfig
from agentrl.config.engine import EngineConfig
from agentrl.config.run import EnvConfig
from agentrl.engine.chat_client import Endpoint
from agentrl.env import tool
from agentrl.envs.calculator import Calculator
from agentrl.errors import ConfigError, EngineError, InfraError
from agentrl.eval.compare import compare
from agentrl.eval.evaluate import EvalOptions, Subject, check_minimum, evaluate
from agentrl.eval.result import EvalResult, Prices
from agentrl.eval.stats import Estimate, estimate
from agentrl.eval.tables import comparison_text, result_text
from agentrl.reporting.report import Silent
from agentrl.run_folder.records import read_episodes, read_metrics, recorded_steps
from agentrl.types import Filters, Message, StopReason, Task
from agentrl.view.episode_text import num_sampled
from tests.eval.eval_server import Server, guess, refusal, serving, solve


def config(**rollout: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "calc",
            "env": "agentrl.envs.calculator:Calculator",
            "model": {"path": "/m"},
            "rollout": {"max_turns": 4, "infra_retries": 1} | rollout,
        }
    )


def play(
    server: Server, folder: Path, *, run: RunConfig | None = None, fresh: bool = False, **options
) -> EvalResult:
    endpoint = Endpoint(server.url, "m", retries=2, timeout_s=10)
    settings = EvalOptions(**{"tasks": 6} | options)
    return evaluate(
        Subject(endpoint=endpoint), run or config(), settings, folder=folder, fresh=fresh, reporter=Silent()
    )


class Asks(Calculator):
    """Work it out, with a hint."""

    async def reset(self, task: Task) -> Any:
        assert self.model is not None
        await self.model.chat([Message("user", "A hint?")])
        return await super().reset(task)


class Stuck(Calculator):
    """Work it out."""

    @tool(timeout_s=600)
    async def hint(self) -> str:
        """A hint."""
        assert self.model is not None
        with contextlib.suppress(ValueError):
            await self.model.chat([Message("user", "A hint?")])
        await asyncio.sleep(600)
        return ""


def test_time_that_a_tool_takes_after_a_refused_question_is_the_episodes(tmp_path: Path):
    def model(messages: Any) -> Any:
        return {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "hint", "arguments": "{}"}}]}

    stuck = config(timeout_s=3, infra_retries=0).model_copy(update={"env": EnvConfig(use=f"{__name__}:Stuck")})
    full = refusal(400, message="too long", code="context_length_exceeded")
    with serving(Server(model, lambda number: full if number == 2 else None)) as server:
        result = play(server, tmp_path / "e", run=stuck, tasks=1)
    assert (result.stop_reasons, result.lost) == ({"timeout": 1}, 0)


class Both(Calculator):
    """Work it out, with two hints."""

    @tool(timeout_s=600)
    async def hint(self) -> str:
        """Two hints."""
        assert self.model is not None
        first, second = await asyncio.gather(*(self.model.chat([Message("user", f"{n}?")]) for n in range(2)))
        return f"{first.content} {second.content}"


def test_a_question_that_is_answered_leaves_the_time_of_another_to_the_endpoint(tmp_path: Path):
    gate = threading.Event()

    def model(messages: Any) -> Any:
        if messages[-1]["content"] == "1?":
            gate.wait(20)
        if len(messages) == 1:
            return {"content": "Think."}
        return {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "hint", "arguments": "{}"}}]}

    both = config(timeout_s=3, infra_retries=0).model_copy(update={"env": EnvConfig(use=f"{__name__}:Both")})
    with serving(Server(model)) as server:
        with pytest.raises(InfraError, match=r"v1 \(m\) took longer than 3 s"):
            play(server, tmp_path / "e", run=both, tasks=1)
        gate.set()


def test_what_the_env_asks_the_model_is_paid_for_as_well(tmp_path: Path):
    def hints(messages: Any) -> Any:
        return {"content": "Think."} if messages[-1]["content"] == "A hint?" else solve(messages)

    asks = config().model_copy(update={"env": EnvConfig(use=f"{__name__}:Asks")})
    with serving(Server(hints)) as server:
        result = play(server, tmp_path / "e", run=asks, prices=Prices(1.0, 10.0, 0.5))
    assert (result.episodes, result.turns) == (6, 2.0)
    assert (result.prompt_tokens, result.cached_tokens, result.sampled_tokens) == (1800, 720, 180)


def test_a_model_behind_an_endpoint_plays_the_env_of_training(tmp_path: Path):
    with serving(Server(solve)) as server:
        result = play(server, tmp_path / "e", prices=Prices(1.0, 10.0, 0.5))
    assert result.estimates["solved"].mean == 1.0
    assert result.estimates["reward/solved"].mean == 1.0
    assert result.stop_reasons == {"answered": 6}
    assert (result.episodes, result.turns, result.infra_failures, result.lost) == (6, 2.0, 0, 0)
    assert (result.prompt_tokens, result.cached_tokens, result.sampled_tokens) == (1200, 480, 120)
    assert result.cost == pytest.approx((720 * 1.0 + 480 * 0.5 + 120 * 10.0) / 1e6)
    first, second = server.requests[0], next(r for r in server.requests if len(r["messages"]) == 4)
    assert first["tools"][0]["function"]["name"] == "calculator"
    assert (first["temperature"], first["max_tokens"]) == (0.0, 256)
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["messages"][3]["tool_call_id"] == second["messages"][2]["tool_calls"][0]["id"]


def test_the_folder_is_a_run_folder(tmp_path: Path):
    with serving(Server(solve)) as server:
        result = play(server, tmp_path / "e")
    assert recorded_steps(tmp_path / "e") == [0]
    episodes = read_episodes(tmp_path / "e", 0)
    assert [e.reward for e in episodes] == [1.0] * 6
    assert episodes[0].turns[0].calls[0].outcome == "ok"
    assert num_sampled(episodes[0]) == 20, "as the endpoint counts them"
    assert read_metrics(tmp_path / "e")[0]["solved"] == 1.0
    assert EvalResult.read(tmp_path / "e") == result
    assert "100.0 % of 6 held-out tasks" in result_text(result).plain


def test_several_attempts_give_pass_at_k(tmp_path: Path):
    with serving(Server(solve)) as server:
        server.model = lambda messages: (solve if len(server.requests) % 3 else guess)(messages)
        result = play(server, tmp_path / "e", attempts=4, tasks=5, concurrency=1)
    names = ["pass@2", "pass^2", "pass@4", "pass^4"]
    assert [name for name in result.estimates if name.startswith("pass")] == names
    found = {name: value.mean for name, value in result.estimates.items()}
    assert result.estimates["reward"] == result.estimates["solved"], "a reward of 0 or 1 has the same interval"
    assert found["pass^4"] <= found["pass^2"] <= found["solved"] <= found["pass@2"] <= found["pass@4"]
    assert 0 < found["solved"] < 1
    assert server.requests[0]["temperature"] == 1.0, "that of training"
    with pytest.raises(ConfigError, match="greedy attempts at each task are all the same"):
        play(server, tmp_path / "f", attempts=4, temperature=0.0)


def test_no_more_episodes_at_once_than_allowed(tmp_path: Path):
    with serving(Server(solve)) as server:
        play(server, tmp_path / "e", tasks=12, attempts=2, concurrency=3)
    assert 1 <= server.most_at_once <= 3


class TestTrouble:
    def test_what_passes_is_asked_again_as_the_endpoint_says(self, tmp_path: Path):
        def busy(number: int):
            status = {1: 429, 2: 500, 5: 503}.get(number)
            if status is None:
                return None
            return status, {"error": {"message": "busy"}}, {"Retry-After": "0.01"}

        with serving(Server(solve, busy)) as server:
            result = play(server, tmp_path / "e")
        assert result.estimates["solved"].mean == 1.0
        assert result.infra_failures == 0
        assert len(server.requests) == 12 + 3

    def test_an_endpoint_that_fails_loses_the_task_and_scores_nothing(self, tmp_path: Path):
        def trouble(number: int):
            said = server.requests[number - 1]["messages"][1]["content"]
            return refusal(400, message="cannot") if said == _question(0) else None

        with serving(Server(solve, trouble)) as server:
            result = play(server, tmp_path / "e")
            assert (result.lost, result.episodes) == (1, 5)
            assert result.estimates["solved"].mean == 1.0, "a lost task is no failed one"
            text = result_text(result).plain.splitlines()
            assert text[2].split() == ["that", "is:", "solved", "(@reward(solved=...))"]
            assert text[3].split(maxsplit=1) == [
                "lost",
                "1 task that could not be played; excluded from all metrics",
            ]
            asked = len(server.requests)
            server.trouble = lambda number: None
            again = play(server, tmp_path / "e")
        assert (again.lost, again.episodes) == (0, 6)
        assert len(server.requests) - asked == 2, "only the lost task is played"

    def test_a_dead_endpoint_ends_the_evaluation(self, tmp_path: Path):
        with serving(Server(solve, lambda number: refusal(400))) as server:
            with pytest.raises(EngineError, match="the first 5 tasks all failed to run"):
                play(server, tmp_path / "e", concurrency=1)
            assert len(server.requests) == 10
        assert not (tmp_path / "e" / "results.json").exists()

    @pytest.mark.parametrize(
        ("answer", "text"),
        [
            (refusal(401, message="bad key"), "bad key; name the variable that holds the API key: --api-key-env"),
            (refusal(402, message="no money"), "no money; the account needs credit"),
            (refusal(404, message="no model m; here is tiny."), "here is tiny; give the base URL with its /v1"),
            (refusal(400, message="only 1", param="temperature"), "refuses temperature 0: only 1"),
        ],
    )
    def test_what_the_user_must_mend_stops_at_once(self, tmp_path: Path, answer, text):
        with serving(Server(solve, lambda number: answer)) as server, pytest.raises(ConfigError) as found:
            play(server, tmp_path / "e", concurrency=1)
        assert text in str(found.value)
        assert len(server.requests) == 1

    def test_time_that_the_endpoint_takes_is_not_the_policys(self, tmp_path: Path):
        gate = threading.Event()

        def slow(messages):
            gate.wait(5)
            return solve(messages)

        with serving(Server(slow)) as server:
            with pytest.raises(EngineError, match=r"failed to run; the last error: .* took longer than 0.2 s"):
                play(server, tmp_path / "e", run=config(timeout_s=0.2, infra_retries=0), tasks=5)
            gate.set()

    def test_a_full_context_ends_the_episode_and_scores(self, tmp_path: Path):
        full = refusal(400, message="too long", code="context_length_exceeded")
        with serving(Server(solve, lambda number: None if number <= 6 else full)) as server:
            result = play(server, tmp_path / "e", concurrency=6)
        assert result.stop_reasons.get("context_full", 0) >= 1
        assert result.lost == 0


class TestWhatModelsSay:
    def test_arguments_that_cannot_be_read_are_answered_under_their_call(self, tmp_path: Path):
        def model(messages):
            if len(messages) == 2:
                bad = {"id": "b", "type": "function", "function": {"name": "calculator", "arguments": "{oops"}}
                return {"tool_calls": [bad]}
            return solve(messages[:2]) if len(messages) == 4 else {"content": messages[-1]["content"]}

        with serving(Server(model)) as server:
            result = play(server, tmp_path / "e", tasks=2)
        assert (result.malformed, result.estimates["solved"].mean) == (2, 1.0)
        third = next(r for r in server.requests if len(r["messages"]) == 4)["messages"]
        assert third[2]["tool_calls"][0]["function"]["arguments"] == "{oops", "the turn goes back as it came"
        assert (third[3]["role"], third[3]["tool_call_id"]) == ("tool", "b")
        assert "not JSON" in third[3]["content"]

    def test_a_cut_answer_ends_the_episode(self, tmp_path: Path):
        with serving(Server(lambda messages: {"content": "and so", "finish": "length"})) as server:
            play(server, tmp_path / "e", tasks=2)
        assert {e.stop_reason for e in read_episodes(tmp_path / "e", 0)} == {StopReason.MAX_TOKENS}

    def test_an_answer_that_is_no_message_is_the_endpoints_fault(self, tmp_path: Path):
        told = "an answer that is not a chat message: content: must be text"
        with serving(Server(lambda _: {"content": 5})) as server, pytest.raises(EngineError, match=told):
            play(server, tmp_path / "e", tasks=5, run=config(infra_retries=0))

    @pytest.mark.parametrize("usage", [None, {"prompt_tokens": -5, "completion_tokens": 1.5}])
    def test_tokens_that_are_not_reported_have_no_cost(self, tmp_path: Path, usage: object):
        with serving(Server(lambda messages: {"content": "1", "usage": usage})) as server:
            for _ in range(2):
                result = play(server, tmp_path / "e", tasks=2, prices=Prices(1.0, 1.0, 2.0))
                assert (result.prompt_tokens, result.sampled_tokens, result.cost) == (0, 0, None)
                assert "not reported by the endpoint" in result_text(result).plain

    def test_a_part_of_the_tokens_has_no_cost(self, tmp_path: Path):
        answers = itertools.count()

        def now_and_then(messages: list[dict[str, Any]]) -> dict[str, Any]:
            return solve(messages) | ({} if next(answers) % 2 else {"usage": None})

        with serving(Server(now_and_then)) as server:
            result = play(server, tmp_path / "e", tasks=4, prices=Prices(1.0, 1.0, 2.0))
        unreported = (len(server.requests) + 1) // 2
        reported = len(server.requests) - unreported
        assert (result.prompt_tokens, result.unreported, result.cost) == (100 * reported, unreported, None)
        said = " ".join(result_text(result).plain.split())
        assert f"{100 * reported:,} read (" in said
        assert f"; not reported for {unreported} requests" in said

    def test_a_model_that_wants_the_newer_limit_gets_it(self, tmp_path: Path):
        text = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
        with serving(Server(solve)) as server:
            server.trouble = lambda n: (
                refusal(400, message=text) if "max_tokens" in server.requests[n - 1] else None
            )
            result = play(server, tmp_path / "e", tasks=2)
        assert result.estimates["solved"].mean == 1.0


class TestResume:
    def test_a_stopped_evaluation_goes_on_and_a_finished_one_is_read(self, tmp_path: Path):
        with serving(Server(solve)) as server:
            server.trouble = lambda number: refusal(401) if number == 7 else None
            with pytest.raises(ConfigError):
                play(server, tmp_path / "e", concurrency=1)
            partial = tmp_path / "e/episodes/partial.jsonl"
            assert len(partial.read_bytes().splitlines()) == 3
            with partial.open("ab") as file:
                file.write(b'{"step": 0, "gro')  # torn by a crash
            server.trouble = lambda number: None
            asked = len(server.requests)
            result = play(server, tmp_path / "e", concurrency=1)
            assert len(server.requests) - asked == 6
            assert (result.episodes, result.estimates["solved"].mean) == (6, 1.0)
            assert not partial.exists()
            assert play(server, tmp_path / "e").episodes == 6
            assert len(server.requests) - asked == 6
            play(server, tmp_path / "e", fresh=True)
            assert len(server.requests) - asked == 18

    def test_another_evaluation_is_refused(self, tmp_path: Path):
        with serving(Server(solve)) as server:
            play(server, tmp_path / "e", tasks=1)
            with pytest.raises(ConfigError, match=r"another evaluation \(tasks: 1 -> 2\); give another --out"):
                play(server, tmp_path / "e", tasks=2)


def test_two_evaluations_are_compared_task_by_task(tmp_path: Path):
    with serving(Server(guess)) as server:
        play(server, tmp_path / "a", tasks=8)
        server.model = solve
        play(server, tmp_path / "b", tasks=6)
        play(server, tmp_path / "c", tasks=6, split="train")
    found = compare(tmp_path / "a", tmp_path / "b")
    assert (found.tasks, found.only_a, found.only_b) == (6, 2, 0)
    solved = found.values["solved"]
    assert (solved.a, solved.b, solved.better, solved.worse) == (0.0, 1.0, 6, 0)
    assert solved.p == pytest.approx(2 / 2**6)
    text = comparison_text(found).plain
    assert "0.0 % -> 100.0 %" in text
    assert "2 only in A left out" in text
    assert comparison_text(compare(tmp_path / "b", tmp_path / "a")).plain.count("B loses") == 1
    one = comparison_text(replace(found, values={"solved": replace(solved, better=1, equal=5)})).plain
    assert "better on 1 task, equal on 5, worse on 0" in one
    with pytest.raises(ConfigError, match="have no task in common"):
        compare(tmp_path / "a", tmp_path / "c")


def test_bounds(tmp_path: Path):
    with serving(Server(solve)) as server:
        result = play(server, tmp_path / "e", tasks=2)
    assert check_minimum(result, {"solved": 0.9, "reward/solved": 1.0}) == []
    assert check_minimum(result, {"reward": 1.5}) == ["reward is 1, below 1.5"]
    with pytest.raises(ConfigError, match="--min reward/cost: not measured here; there is: solved, reward"):
        check_minimum(result, {"reward/cost": 0.0})


def test_a_bound_that_is_reached_but_for_rounding_is_reached(tmp_path: Path):
    with serving(Server(solve)) as server:
        result = play(server, tmp_path / "e", tasks=1)
    found = replace(result, estimates={"solved": estimate([1 / 3, 1.0, 1 / 3, 2 / 3, 2 / 3])})
    assert found.estimates["solved"].mean < 0.6
    assert check_minimum(found, {"solved": 0.6}) == []
    single = {"reward": estimate([float(np.float32(0.7))])}
    assert single["reward"].mean < 0.7
    assert check_minimum(replace(found, estimates=single), {"reward": 0.7}) == []
    assert check_minimum(found, {"solved": 0.6001}) == ["solved is 0.6, below 0.6001"]
    single = {"reward": estimate([0.59997])}
    assert check_minimum(replace(found, estimates=single), {"reward": 0.6}) == ["reward is 0.59997, below 0.6"]
    single = {"reward": estimate([1.499998])}
    assert check_minimum(replace(found, estimates=single), {"reward": 1.5}) == ["reward is 1.499998, below 1.5"]


@pytest.mark.parametrize(
    ("value", "shown"), [(0.5, "0.500"), (0.0, "0.000"), (-4e-5, "-4e-05"), (1e100, "1e+100"), (-12.25, "-12.250")]
)
def test_rewards_of_any_size_can_be_read(tmp_path: Path, value: float, shown: str):
    with serving(Server(solve)) as server:
        result = play(server, tmp_path / "e", tasks=1)
    text = result_text(replace(result, estimates={"reward": Estimate(value, value, value)})).plain
    assert f"{shown}  ({shown} to {shown})" in text


def test_what_is_small_or_almost_all_is_not_shown_as_nothing_or_all(tmp_path: Path):
    with serving(Server(solve)) as server:
        result = play(server, tmp_path / "e", tasks=1, prices=Prices(0.01, 0.01, 0.01))
    text = result_text(replace(result, estimates={"solved": Estimate(0.9996, 0.0002, 1.0)})).plain
    assert "> 99.9 % of 1 held-out task\n" in text
    assert "between < 0.1 % and 100.0 %" in text
    assert "$0.0000022\n" in text


def test_more_cached_tokens_than_were_read_do_not_make_an_evaluation_earn_money(tmp_path: Path):
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 900}}
    with serving(Server(lambda messages: {**solve(messages), "usage": usage})) as server:
        result = play(server, tmp_path / "e", tasks=1, prices=Prices(1.0, 1.0, 0.1))
    assert result.cached_tokens == result.prompt_tokens > 0
    text = result_text(result).plain
    assert f"{result.prompt_tokens} read ({result.prompt_tokens} of them cached)" in text
    assert result.cost == pytest.approx((0.1 * result.prompt_tokens + result.sampled_tokens) / 1e6)
    assert "$-0.0042\n" in result_text(replace(result, cost=-0.0042)).plain  # of records from before


def test_the_name_of_a_reward_never_runs_into_its_value(tmp_path: Path):
    with serving(Server(solve)) as server:
        result = play(server, tmp_path / "e", tasks=1)
    names = ["solved_in_round_1", "x" * 300]
    estimates = {f"reward/{name}": Estimate(0.5, 0.25, 0.75) for name in names}
    lines = result_text(replace(result, estimates=estimates)).plain.splitlines()
    shown = [line.split() for line in lines if "0.250 to" in line]
    assert shown == [[name, "0.500", "(0.250", "to", "0.750)"] for name in (names[0], "x" * 38 + "…")]


def test_episodes_of_an_endpoint_are_not_exported_as_a_file_without_tokens(tmp_path: Path, capfd):
    with serving(Server(solve)) as server:
        play(server, tmp_path / "e", tasks=2)
    words = ["export", str(tmp_path / "e"), "--out", str(tmp_path / "rows.parquet"), "--format"]
    with pytest.raises(SystemExit):
        main([*words, "tokens"])
    assert "episode eval/g0/e0 has no tokens" in capfd.readouterr().err
    assert not (tmp_path / "rows.parquet").exists()
    with pytest.raises(SystemExit):
        main([*words, "hf"])
    assert (tmp_path / "rows.parquet").is_file()


class TestChangedTasks:
    """An env of the user's, whose file and rows change between evaluations."""

    ENV = """
from agentrl import Stop, TextEnv, reward

class Echo(TextEnv):
    '''Say the word.'''

    def setup(self, word: str) -> str:
        self.word = word
        return f"Say {word}"

    def reply(self, text: str) -> Stop:
        self.said = text
        return Stop()

    @reward
    def solved(self) -> bool:
        return self.said == self.word
"""

    def run(self, folder: Path, words: str, env: str = ENV) -> RunConfig:
        (folder / "echo.py").write_text(env)
        rows = "".join(json.dumps({"word": word}) + "\n" for word in words)
        for name in ("train.jsonl", "rows.jsonl"):
            (folder / name).write_text(rows)
        data = {"train": str(folder / "train.jsonl"), "held_out": str(folder / "rows.jsonl")}
        found = {"name": "echo", "env": f"{folder / 'echo.py'}:Echo", "model": {"path": "/m"}, "data": data}
        return RunConfig.model_validate(found)

    @staticmethod
    def says(word: str):
        return lambda messages: {"content": word if messages[-1]["content"] == f"Say {word}" else "?"}

    def test_neither_a_finished_nor_a_stopped_evaluation_is_mixed_with_other_tasks_or_rewards(
        self, tmp_path: Path
    ):
        with serving(Server(self.says("a"))) as server:
            server.trouble = lambda number: refusal(401) if number == 3 else None
            with pytest.raises(ConfigError):
                play(server, tmp_path / "e", run=self.run(tmp_path, "abc"), concurrency=1)
            server.trouble = lambda number: None
            told = r"changed since this evaluation began:\s+held_out tasks: 3 differ"
            with pytest.raises(ConfigError, match=told):
                play(server, tmp_path / "e", run=self.run(tmp_path, "xabc"))
            assert play(server, tmp_path / "e", run=self.run(tmp_path, "abc")).episodes == 3
            other = self.ENV.replace("self.said == self.word", "True")
            with pytest.raises(ConfigError, match=r"reward Echo.solved changed\s+undo the change, give another"):
                play(server, tmp_path / "e", run=self.run(tmp_path, "abc", other))
            fresh = play(server, tmp_path / "e", run=self.run(tmp_path, "abc", other), fresh=True)
            assert fresh.estimates["solved"].mean == 1.0

    def test_an_evaluation_of_a_version_without_a_record_gets_none_later(self, tmp_path: Path):
        other = self.ENV.replace("self.said == self.word", "True")
        with serving(Server(self.says("a"))) as server:
            played = play(server, tmp_path / "e", run=self.run(tmp_path, "abc"))
            (tmp_path / "e" / "code.json").unlink()
            again = play(server, tmp_path / "e", run=self.run(tmp_path, "abc", other))
        assert again.estimates == played.estimates
        assert not (tmp_path / "e" / "code.json").exists()

    def test_a_finished_evaluation_can_be_read_without_its_env(self, tmp_path: Path):
        with serving(Server(self.says("a"))) as server:
            run = self.run(tmp_path, "abc")
            played = play(server, tmp_path / "e", run=run)
            (tmp_path / "rows.jsonl").unlink()
            assert play(server, tmp_path / "e", run=run).estimates == played.estimates
            with pytest.raises(ConfigError, match=r"rows\.jsonl"):
                play(server, tmp_path / "other", run=run)

    def test_tasks_are_paired_by_their_rows_and_not_by_line_numbers(self, tmp_path: Path):
        with serving(Server(self.says("a"))) as server:
            play(server, tmp_path / "a", run=self.run(tmp_path, "abc"))
            play(server, tmp_path / "b", run=self.run(tmp_path, "xab"))
        found = compare(tmp_path / "a", tmp_path / "b")
        assert (found.tasks, found.only_a, found.only_b, found.changed) == (2, 1, 1, 1)
        assert (found.values["solved"].better, found.values["solved"].worse, found.worst) == (0, 0, [])
        assert "1 with an id that both have, and another row" in comparison_text(found).plain

    def test_a_lost_task_does_not_shift_the_pairs_of_equal_rows(self, tmp_path: Path):
        with serving(Server(self.says("a"))) as server:
            play(server, tmp_path / "b", run=self.run(tmp_path, "aab"))
            server.trouble = lambda number: refusal(400) if 4 <= number <= 6 else None
            lost = play(server, tmp_path / "a", run=self.run(tmp_path, "aab"), concurrency=1)
        assert lost.lost == 1
        found = compare(tmp_path / "a", tmp_path / "b")
        assert (found.tasks, found.only_a, found.only_b, found.changed) == (2, 0, 1, 0)

    def test_a_comparison_names_filters_and_limits_that_differ(self, tmp_path: Path):
        run = self.run(tmp_path, "ab")
        with serving(Server(self.says("a"))) as server:
            play(server, tmp_path / "a", run=run, temperature=1.0)
            rollout = run.rollout.model_copy(update={"max_tokens": 7})
            other = run.model_copy(update={"rollout": rollout})
            play(server, tmp_path / "b", run=other, temperature=1.0, filters=Filters(top_p=0.5))
        assert compare(tmp_path / "a", tmp_path / "b").notes == [
            "top_p: 1.0 and 0.5",
            "rollout.max_tokens: 256 and 7",
        ]


def _question(number: int) -> str:
    from agentrl.envs.calculator.env import Calculator, Problem

    row = Calculator.tasks("held_out", 0)[number].row
    return Problem(row["start"], tuple((op, n) for op, n in row["operations"])).text


def test_filters_are_sent_and_belong_to_the_evaluation(tmp_path: Path):
    filters = Filters(top_p=0.9, top_k=20, min_p=0.05)
    with serving(Server(solve)) as server:
        result = play(server, tmp_path / "e", attempts=2, temperature=0.7, tasks=2, filters=filters)
        assert {(r["top_p"], r["top_k"], r["min_p"], r["temperature"]) for r in server.requests} == {
            (0.9, 20, 0.05, 0.7)
        }
        assert (result.spec.top_p, result.spec.top_k, result.spec.min_p) == (0.9, 20, 0.05)
        with pytest.raises(ConfigError, match=r"holds another evaluation \(top_p: 0.9 -> 1.0"):
            play(server, tmp_path / "e", attempts=2, temperature=0.7, tasks=2)
        with pytest.raises(ConfigError, match="no effect on greedy episodes"):
            play(server, tmp_path / "f", filters=filters)
        plain = play(server, tmp_path / "g", tasks=1)
        note = json.loads((tmp_path / "g/eval.json").read_text())
        old = {name: value for name, value in note.items() if name not in ("top_p", "top_k", "min_p")}
        (tmp_path / "g/eval.json").write_text(json.dumps(old))
        assert play(server, tmp_path / "g", tasks=1) == plain, "a folder of an earlier version goes on"
    assert "top_p" not in server.requests[-1]
    twice = Endpoint("http://127.0.0.1:1", "m", request={"top_p": 0.5})
    options = EvalOptions(tasks=1, temperature=1.0, filters=Filters(top_p=0.9))
    with pytest.raises(ConfigError, match="--top-p and --request top_p: give one of them"):
        evaluate(Subject(endpoint=twice), config(), options, folder=tmp_path / "h", reporter=Silent())


def test_a_temperature_that_vllm_would_replace_is_refused(tmp_path: Path):
    served = config().model_copy(update={"engine": EngineConfig(kind="vllm")})
    options = EvalOptions(tasks=1, temperature=0.005)
    with pytest.raises(ConfigError, match=r"--temperature is 0\.005, and vLLM samples with 0\.01 to 2"):
        evaluate(Subject(checkpoint=tmp_path), served, options, folder=tmp_path / "e", reporter=Silent())


@pytest.mark.parametrize("temperature", [1e-9, 1e9, math.inf])
def test_a_temperature_that_no_sampler_takes_is_refused(tmp_path: Path, temperature: float):
    options = EvalOptions(tasks=1, temperature=temperature)
    with pytest.raises(ConfigError, match=r"--temperature .*: must be 0, which is greedy, or from 1e-05 to 10000"):
        evaluate(Subject(checkpoint=tmp_path), config(), options, folder=tmp_path / "e", reporter=Silent())


def test_a_field_that_the_evaluation_decides_is_not_given_as_another(tmp_path: Path):
    for field in ("temperature", "max_tokens", "messages"):
        endpoint = Endpoint("http://127.0.0.1:1", "m", request={"reasoning_effort": "low", field: 1})
        with pytest.raises(ConfigError, match=f"--request {field}: the evaluation sets this field itself"):
            evaluate(Subject(endpoint=endpoint), config(), EvalOptions(), folder=tmp_path, reporter=Silent())


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h/models/a@2", "http://h/models/a@2"),
        ("https://me:p@ss@h:8/v1?q=a@b", "https://(hidden)@h:8/v1?q=a@b"),
    ],
)
def test_an_address_is_shown_without_credentials_only(url: str, shown: str):
    assert Endpoint(url, "m").address == shown


def test_an_address_without_a_scheme_shows_no_password_either():
    with pytest.raises(ConfigError, match=r"--base-url \(hidden\)@host: ") as caught:
        Endpoint("me:hush@host", "m")
    assert "hush" not in str(caught.value)


def test_a_password_in_the_address_is_not_written(tmp_path: Path):
    with serving(Server(solve)) as server:
        endpoint = Endpoint(server.url.replace("://", "://me:hush@"), "m", retries=2)
        subject = Subject(endpoint=endpoint)
        assert subject.name == f"m at {server.url.replace('://', '://(hidden)@')}"
        evaluate(subject, config(), EvalOptions(tasks=1), folder=tmp_path / "e", reporter=Silent())
    written = [file for file in (tmp_path / "e").rglob("*") if file.is_file()]
    assert len(written) > 3
    assert not any(b"hush" in file.read_bytes() for file in written)


def test_the_key_and_further_fields_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", "secret")
    with serving(Server(solve)) as server:
        endpoint = Endpoint(server.url, "m", "MY_KEY", request={"reasoning_effort": "low"})
        options = EvalOptions(tasks=1)
        evaluate(Subject(endpoint=endpoint), config(), options, folder=tmp_path / "e", reporter=Silent())
    assert set(server.keys) == {"Bearer secret"}
    assert server.requests[0]["reasoning_effort"] == "low"
    assert "secret" not in "".join(p.read_text() for p in (tmp_path / "e").glob("*.*") if p.is_file())
    assert json.loads((tmp_path / "e/eval.json").read_text())["policy"] == f"m at {server.url}"
