"""agentrl trains language models to use tools by reinforcement learning.

The names below are imported when they are first used, so that `import agentrl` is quick and needs no torch.
"""

from __future__ import annotations

import importlib
import os
import sys

TYPE_CHECKING = False  # that of `typing`, whose import takes a while in which Ctrl-C shows a traceback

if sys.platform == "win32":
    raise ImportError("agentrl needs Linux or macOS; on Windows, install and run it inside WSL 2")

if not os.path.isdir(os.path.dirname(__file__)):
    raise ImportError(
        f"agentrl cannot be imported from an archive ({__file__}), because it reads files next to its modules: "
        "install the wheel with pip, or unpack it"
    )

if TYPE_CHECKING:
    from agentrl.config.load import load_config as load_config
    from agentrl.config.run import RunConfig as RunConfig
    from agentrl.env import Env as Env
    from agentrl.env import StepInfo as StepInfo
    from agentrl.env import Stop as Stop
    from agentrl.env import TextEnv as TextEnv
    from agentrl.env import ToolEnv as ToolEnv
    from agentrl.env import ToolResult as ToolResult
    from agentrl.env import reward as reward
    from agentrl.env import tool as tool
    from agentrl.errors import AgentRLError as AgentRLError
    from agentrl.errors import ConfigError as ConfigError
    from agentrl.errors import InfraError as InfraError
    from agentrl.eval.compare import Comparison as Comparison
    from agentrl.python.configure import configure as configure
    from agentrl.python.evaluating import EvaluationResult as EvaluationResult
    from agentrl.python.evaluating import compare as compare
    from agentrl.python.evaluating import evaluate as evaluate
    from agentrl.python.reading import read_metrics as read_metrics
    from agentrl.python.rollouts import Rollouts as Rollouts
    from agentrl.python.rollouts import rollouts as rollouts
    from agentrl.python.rollouts import training_rows as training_rows
    from agentrl.python.training import train as train
    from agentrl.python.training import train_blocking as train_blocking
    from agentrl.reporting.report import Summary as Summary
    from agentrl.run_folder.records import read_episodes as read_episodes
    from agentrl.run_folder.records import read_groups as read_groups
    from agentrl.trainer.start_run import start_run as start_run
    from agentrl.types import Completion as Completion
    from agentrl.types import Episode as Episode
    from agentrl.types import Group as Group
    from agentrl.types import Image as Image
    from agentrl.types import Message as Message
    from agentrl.types import Sample as Sample
    from agentrl.types import Sampling as Sampling
    from agentrl.types import StopReason as StopReason
    from agentrl.types import Task as Task
    from agentrl.types import ToolCall as ToolCall
    from agentrl.types import Turn as Turn

    __version__: str

_HOMES = {
    "agentrl.config.load": ("load_config",),
    "agentrl.config.run": ("RunConfig",),
    "agentrl.env": ("Env", "StepInfo", "Stop", "TextEnv", "ToolEnv", "ToolResult", "reward", "tool"),
    "agentrl.errors": ("AgentRLError", "ConfigError", "InfraError"),
    "agentrl.eval.compare": ("Comparison",),
    "agentrl.python.configure": ("configure",),
    "agentrl.python.evaluating": ("EvaluationResult", "compare", "evaluate"),
    "agentrl.python.rollouts": ("Rollouts", "rollouts", "training_rows"),
    "agentrl.python.training": ("train", "train_blocking"),
    "agentrl.python.reading": ("read_metrics",),
    "agentrl.reporting.report": ("Summary",),
    "agentrl.run_folder.records": ("read_episodes", "read_groups"),
    "agentrl.trainer.start_run": ("start_run",),
    "agentrl.types": (
        *(
            "Completion",
            "Episode",
            "Group",
            "Image",
            "Message",
            "Sample",
            "Sampling",
            "StopReason",
            "Task",
            "ToolCall",
        ),
        "Turn",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)

if not TYPE_CHECKING:  # type checkers would take every name for Any

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version("agentrl-train")
        if name not in _HOME_OF:
            raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, "__version__"})
