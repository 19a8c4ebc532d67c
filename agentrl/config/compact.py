"""How a context that fills up is made shorter: `rollout.compact`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agentrl.config.facts import Advanced, NamesCode, NeverWith, OnlyWhen
from agentrl.config.section import Count, Positive, Section

PROMPT = (
    "Your context is almost full. Write a summary of your progress: what you have found out, what you have done, "
    "and what remains to be done. You will continue with the task and this summary, without the conversation so "
    "far. Do not call a tool now."
)


class CompactConfig(Section):
    """Shorten the conversation when the context fills up, and continue in a new branch of the episode."""

    at: Annotated[float, Field(gt=0, lt=1), Advanced()] = 0.8
    """Fraction of the context at which to compact, before the next turn; earlier if a summary would not fit."""
    context: Annotated[Positive | None, Advanced()] = None
    """Tokens of context per branch; by default the engine's maximum."""
    keep_turns: Annotated[Count, NeverWith("use"), Advanced()] = 4
    """Number of recent turns that stay; fewer if the episode has no more."""
    how: Annotated[Literal["summary", "drop_tool_results"], NeverWith("use"), Advanced()] = "summary"
    """The policy writes a summary that replaces the earlier turns, or their tool results are removed without
    asking the policy."""
    prompt: Annotated[str, Field(min_length=1), OnlyWhen("how", "summary"), NeverWith("use"), Advanced()] = PROMPT
    """The request for a summary."""
    max_tokens: Annotated[Positive | None, OnlyWhen("how", "summary"), NeverWith("use"), Advanced()] = None
    """Maximum tokens of a summary; by default `rollout.max_tokens`."""
    train: Annotated[bool, OnlyWhen("how", "summary"), NeverWith("use"), Advanced()] = True
    """Train the tokens of summaries, with the advantage of the episode."""
    use: Annotated[str | None, NamesCode("function"), Advanced()] = None
    """Your own function instead, `module:function` or `path/to/file.py:function`: it takes the messages of the
    branch and returns those of the new one."""

    @model_validator(mode="after")
    def _keeps_less(self) -> Self:
        if self.max_tokens is not None and self.context is not None and self.max_tokens >= self.context:
            raise ValueError(
                f"max_tokens = {self.max_tokens} does not fit into context = {self.context}: lower it"
            )
        return self
