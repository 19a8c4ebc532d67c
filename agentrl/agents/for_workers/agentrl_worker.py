"""Turn a function into a worker of `agent.workers`: a program that stays up and plays many episodes.

    import my_framework                      # imported once

    def play(task, access):
        return my_framework.run(task["prompt"], base_url=access.base_url, api_key=access.api_key)

    if __name__ == "__main__":
        import agentrl_worker
        agentrl_worker.serve(play)

agentrl puts this folder on the worker's PYTHONPATH. The module needs only Python 3.8 or later, without agentrl.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["EpisodeAccess", "serve"]


class EpisodeAccess:
    """How to reach the policy: `base_url` and `api_key` belong to one episode, `model` can be any name."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.base_url = environment["OPENAI_BASE_URL"]
        self.api_key = environment["OPENAI_API_KEY"]
        self.model = environment["OPENAI_MODEL"]
        self.anthropic_base_url = environment["ANTHROPIC_BASE_URL"]


def serve(play: Callable[[dict[str, Any], EpisodeAccess], Any]) -> None:
    """Play episodes with `play(task, access)`, one after another, until agentrl closes standard input.

    `play` may be async; all its calls share one event loop. What it returns is the outcome, text or JSON data. If
    it raises, the agent crashed in this episode; the worker continues. OPENAI_BASE_URL, OPENAI_API_KEY and their
    ANTHROPIC_ counterparts are set in `os.environ` for each episode. What it prints goes to standard error.
    """
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    _write(answers, {"ready": True})
    for line in requests:
        request = json.loads(line)
        os.environ.update(request["environment"])
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            said = play(request["task"], EpisodeAccess(request["environment"]))
            answer["outcome"] = loop.run_until_complete(said) if inspect.isawaitable(said) else said
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # SystemExit and cancellation as well
            traceback.print_exc()
            answer["error"] = f"{type(e).__name__}: {e}"
        _write(answers, answer)


def _write(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message, default=str).encode() + b"\n")
    answers.flush()
