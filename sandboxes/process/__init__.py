"""For trusted programs only: limits and clean ends, no isolation whatsoever."""

from __future__ import annotations

from agentrl.sandbox.local import LocalBackend


class Backend(LocalBackend):
    """A directory of the host and resource limits. Must be asked for by name, with trusted=True."""

    name = "process"
    always = frozenset({"environment"})
    shields_supervisor = False

    def promises(self) -> tuple[frozenset[str], frozenset[str]]:
        """See contract.Backend: trusted programs are in no control group."""
        return self.always, self.always
