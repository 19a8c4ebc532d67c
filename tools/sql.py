"""An SQL tool: one SQLite database in the sandbox."""

from __future__ import annotations

from agentrl.env.toolenv.declare import tool
from agentrl.sandbox import Box, BoxSession, QueryResult, Sandbox
from agentrl.tools.observation import ending, observation, shorten

MAX_ROWS = 50


class Sql:
    """The database is the file `data.db` of the sandbox; transactions and temporary tables stay between calls."""

    sandbox = Sandbox()
    box: Box
    database = "data.db"
    _session: BoxSession | None = None

    async def setup(self) -> None:
        """A new episode has no connection yet."""
        self._session = None

    @tool
    async def sql(self, query: str) -> str:
        """Run SQL (SQLite): the rows of a query, or how many rows were changed."""
        if self._session is None:
            self._session = await self.box.session("sqlite")
        return table(await self._session.query(query, database=self.database, max_rows=MAX_ROWS))


def table(answer: QueryResult) -> str:
    """A result as the policy reads it."""
    if not answer.result.ok or answer.result.truncated:
        return observation(answer.result) if not answer.result.ok else "[the answer is too large: select less]"
    if not answer.columns:
        return f"[ok, {answer.changed} rows changed]"
    rows = [" | ".join(_cell(value) for value in row) for row in answer.rows]
    end = (
        f"[more than {len(rows)} rows: the first {len(rows)} are shown]" if answer.more else f"[{len(rows)} rows]"
    )
    note = ending(answer.result)
    return shorten("\n".join([" | ".join(answer.columns), *rows])) + "\n" + end + (f"\n[{note}]" if note else "")


def _cell(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, dict):
        return f"x'{value['hex']}'"
    return str(value)
