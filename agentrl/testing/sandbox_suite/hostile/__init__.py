"""Programs that try to escape, attack others, or take more than their share.

Each says STARTED first (so that a program which never ran is not taken for one that was stopped), then tries, and
says ESCAPED where it succeeds. The box must work afterwards.
"""

from __future__ import annotations

import secrets as random_bytes

from agentrl.sandbox import ExecResult
from agentrl.testing.sandbox_suite.hostile.files import FILES
from agentrl.testing.sandbox_suite.hostile.host import HOST
from agentrl.testing.sandbox_suite.hostile.others import OTHERS
from agentrl.testing.sandbox_suite.hostile.privilege import PRIVILEGE
from agentrl.testing.sandbox_suite.hostile.program import PRELUDE, Hostile
from agentrl.testing.sandbox_suite.hostile.resources import RESOURCES
from agentrl.testing.sandbox_suite.hostile.secrets import NETWORK, SECRETS
from agentrl.testing.sandbox_suite.hostile.time import TIME
from agentrl.testing.sandbox_suite.stage import Check, Stage, expect

GROUPS = {
    "files": FILES, "host": HOST, "secrets": SECRETS, "resources": RESOURCES, "time": TIME, "others": OTHERS,
    "network": NETWORK, "privilege": PRIVILEGE,
}  # fmt: skip
PROGRAMS = [program for group in GROUPS.values() for program in group]


async def play(stage: Stage, program: Hostile) -> ExecResult:
    """Run one program in a fresh box, look at what it did, and see that the box and its neighbor still work."""
    token = "agentrl-" + random_bytes.token_hex(8)
    peer = await stage.neighbor()
    async with stage.box() as box:
        order = stage.order(token=token, peer_home=peer.home)
        result = await box.python(PRELUDE + program.code, stdin=order, wall_s=program.wall_s)
        expect(b"STARTED" in result.stdout, f"did not start: {result}")
        said = result.text()
        expect("ESCAPED" not in said, f"{program.name}: {said[said.find('ESCAPED') :][:800]}")
        if program.after is not None:
            await program.after(stage, box, result, token)
        again = await box.python("print(6 * 7)")
        expect((again.outcome, again.stdout) == ("exit", b"42\n"), f"the box is not usable afterwards: {again}")
    expect(await peer.read_file("peer.txt") == stage.secret.encode(), "the file of its neighbor has changed")
    return result


def checks() -> list[Check]:
    """One check per program."""

    def make(program: Hostile, group: str) -> Check:
        async def run(stage: Stage) -> None:
            await play(stage, program)

        timed = group == "time"
        return Check(
            f"hostile_{program.name}", "hostile", run, program.promise, group, isolating=not timed, alone=timed
        )

    return [make(program, group) for group, programs in GROUPS.items() for program in programs]
