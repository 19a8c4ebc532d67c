"""A taskset of verifiers that denies one call of its tool server, and whose other tool returns a long text."""

from __future__ import annotations

import os

import verifiers.v1 as vf

__all__ = ["GuardedTaskset"]


class Desk(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "desk"

    @vf.tool
    def erase(self) -> str:
        """Erase everything."""
        return "erased"

    @vf.tool
    def read(self) -> str:
        """Read everything."""
        return "line\n" * 40_000


class GuardedTask(vf.Task[vf.TaskData]):
    @vf.intercept
    async def deny(self, request: vf.Request) -> vf.Request:
        messages = [
            m.model_copy(update={"content": "denied"})
            if isinstance(m, vf.ToolMessage) and m.name == "desk_erase"
            else m
            for m in request.messages
        ]
        return request.model_copy(update={"messages": messages})

    @vf.reward
    async def finished(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "finished")


class GuardedConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()
    desks: int = 1


class GuardedTaskset(vf.Taskset[GuardedTask, GuardedConfig]):
    @classmethod
    def toolsets(cls, config: GuardedConfig) -> list[vf.Toolset]:
        return [Desk(config.tools) for _ in range(config.desks)]

    def load(self) -> list[GuardedTask]:
        return [GuardedTask(vf.TaskData(prompt="Work."), self.config.task)]


if __name__ == "__main__" and "VF_CONFIG" in os.environ:
    Desk.run()
