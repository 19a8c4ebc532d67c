"""`agentrl envs`: what a run can name under `env:`."""

from __future__ import annotations


def envs() -> None:
    """List the shipped environments and the schemes of other ecosystems, with what is installed."""
    from rich.text import Text

    from agentrl.config.schemes import SCHEMES
    from agentrl.env.adapter import missing_module
    from agentrl.importing import load_object
    from agentrl.reporting.safe_console import SafeConsole

    console = SafeConsole()
    console.print(Text("Shipped", style="bold"))
    for where in load_object("agentrl.envs:SHIPPED").values():
        console.print(Text(f"  {where}"), soft_wrap=True)
    console.print(Text("\nOther ecosystems: env: SCHEME:REST, with env.options", style="bold"))
    for name, scheme in SCHEMES.items():
        state = f"needs {scheme.needs}" if scheme.needs else "installed"
        if missing_module(scheme) is not None:
            state = f"not installed: pip install {scheme.install}"
        console.print(Text(f"  {name}:{scheme.rest}", style="bold").append(f"  {state}", "default not bold"))
        console.print(Text(f"      {scheme.about}"), soft_wrap=True)
