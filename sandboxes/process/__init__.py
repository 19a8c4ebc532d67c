"""For trusted programs only: limits and reliable cleanup, but no isolation."""

from __future__ import annotations

from agentrl.sandbox.local import LocalBackend


class Backend(LocalBackend):
    """A host directory and resource limits. Must be requested by name, with trusted=True."""

    name = "process"
    always = frozenset({"environment"})
    shields_supervisor = False

    def promises(self) -> tuple[frozenset[str], frozenset[str]]:
        """See contract.Backend: trusted programs run without a control group."""
        return self.always, self.always
