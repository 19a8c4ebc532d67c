"""Feed one logger as a run does: `python feeding.py FOLDER LOGGER FIRST LAST [--die]`; settings on stdin."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    """Log steps; with --die, be killed as soon as the logger has taken them."""
    from agentrl.config.loggers import LoggerConfig
    from agentrl.reporting.loggers import log_feed
    from agentrl.reporting.loggers.log_feed import LogFeed
    from agentrl.reporting.loggers.make import make_loggers
    from agentrl.reporting.loggers.protocol import RunInfo
    from agentrl.types import Episode, Message, StopReason, Task

    folder, name, first, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    notes: list[str] = []
    log_feed.FLUSH_S = 90.0  # a busy machine takes more than the seconds that a run waits
    loggers = make_loggers([LoggerConfig.model_validate({"use": name, **json.load(sys.stdin)})])
    feed = LogFeed(loggers, notes.append)
    config = {"steps": 6, "model": {"path": "größe"}, "options": {"key": "(hidden)"}}
    feed.start(RunInfo("läuft", folder / "loggers", config, first, resumed=first > 0))
    for step in range(first, last + 1):
        values = {
            "reward": step / 10,
            "reward/größe 🎯@2": 1.0,
            "loss": math.nan,
            "held_out": 0.5,
            "drift/chi2": 3.0,
        }
        feed.metrics(step, values)
        task = Task(f"t{step}", {})
        messages = (Message("user", "<b>|x|</b>\n你好"), Message("assistant", "done"))
        played = [Episode(f"e{n}", task, messages, (), (), StopReason.ANSWERED, float(n)) for n in range(9)]
        feed.episodes(step, played)
    if "--die" in sys.argv:
        [worker] = feed._workers
        worker.ask_last(lambda: None)
        worker.end(time.monotonic() + 90)  # it has taken every call; nothing was finished
        if worker.thread.is_alive():
            raise SystemExit("the logger is stuck")
        time.sleep(3 if name == "trackio" else 0)  # it writes every half second
        os.kill(os.getpid(), signal.SIGKILL)
    feed.finish({"steps": last, "held_out_after": 0.5})
    sys.stdout.write(json.dumps(notes) + "\n")


if __name__ == "__main__":
    main()
