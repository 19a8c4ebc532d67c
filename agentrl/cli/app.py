"""The tree of commands, and the one place where an error becomes text and an exit code."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from agentrl.clean import visible
from agentrl.cli import config, env, sandbox
from agentrl.cli.check import check
from agentrl.cli.doctor import doctor
from agentrl.cli.envs import envs
from agentrl.cli.eval import evaluate
from agentrl.cli.export import export
from agentrl.cli.import_verl import import_verl
from agentrl.cli.new import new
from agentrl.cli.plan import plan
from agentrl.cli.replay import replay
from agentrl.cli.rescore import rescore
from agentrl.cli.runs import compare, runs, tag
from agentrl.cli.serve import serve
from agentrl.cli.show import show
from agentrl.cli.train import train
from agentrl.cli.view import view
from agentrl.errors import AgentRLError, ConfigError, TemplateError
from agentrl.extras import DISTRIBUTION, missing_extra
from agentrl.garbage import collect_rarely

app = typer.Typer(
    help=(
        "Train language models to use tools by reinforcement learning.\n\n"
        "A run is one YAML file: `agentrl check tools.yaml` validates it without a model, "
        "`agentrl train tools.yaml` trains and leaves a folder under runs/, `agentrl show` and `agentrl eval` "
        "read that folder. Run the same `train` command again to resume."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"agentrl {version(DISTRIBUTION)}")
        except PackageNotFoundError:  # a checkout on the path
            print(f"agentrl, from source: the distribution {DISTRIBUTION} is not installed")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hold the options that come before a command."""


app.command("train")(train)
app.command("check")(check)
app.command("plan")(plan)
app.command("show")(show)
app.command("runs")(runs)
app.command("tag")(tag)
app.command("compare")(compare)
app.command("view")(view)
app.command("eval")(evaluate)
app.command("serve")(serve)
app.command("export")(export)
app.command("replay")(replay)
app.command("rescore")(rescore)
app.command("new")(new)
app.command("envs")(envs)
app.command("doctor")(doctor)
app.command("import-verl")(import_verl)
app.add_typer(env.app, name="env")
app.add_typer(config.app, name="config")
app.add_typer(sandbox.app, name="sandbox")

FULL = {errno.EDQUOT, errno.ENOSPC}
PLACES = FULL | {errno.EACCES, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENAMETOOLONG, errno.ENFILE}
PLACES |= {errno.EPERM, errno.EROFS}
"""File-system errors the program cannot fix; reported in one line."""
CONFIG_EXIT = 2
"""Exit code for user errors, including usage errors."""


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(visible("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


_OURS = Path(__file__).parents[1]
_plain_warning = warnings.formatwarning


def _visible_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if category is UserWarning and Path(filename).is_relative_to(_OURS):  # as a run notes them
        return visible(f"note: {message}\n")
    return visible(_plain_warning(message, category, filename, lineno, line))


def _place_error(error: Exception) -> str | None:
    """An error of the machine that the program cannot fix, in one line; None if it is another one."""
    from agentrl.run_folder.files import file_error

    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return (
            f"can't start new thread: {threading.active_count()} are running in this process; raise the limit of "
            "processes (ulimit -u, or the container's) or of memory (ulimit -v), and run the same command again"
        )
    if isinstance(error, ImportError) and "failed to map segment" in str(error):  # as dlopen says it
        return f"{error}: there is no memory left to load it; raise the limit of memory (ulimit -v)"
    error = file_error(error)
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the current folder was deleted; change to another one and run the command again"
    if not isinstance(error, OSError) or error.errno not in PLACES:
        return None
    full = error.errno in FULL
    if error.filename is None and not full:
        return None
    target = error.filename2 if full or error.errno == errno.EFBIG else None  # what a copy was to become
    place = target or error.filename
    where = "" if place is None else f"{str(place)[:200]}: "
    return f"{where}{error.strerror}" + ("; free some space and run the same command again" if full else "")


def _with_home(argument: str) -> str:
    """An argument with the home folder for `~`, which shells leave in `--out=~/results`."""
    option = re.match(r"(--[a-z-]+=)?", argument)[0]  # type: ignore[index]  # it always matches
    return option + os.path.expanduser(argument.removeprefix(option))


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and leave the process.

    Exit codes: 0 done, 1 it failed, 2 the input was wrong, 130 interrupted.
    """
    collect_rarely()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: its encoding may lack what is to be said
    warnings.formatwarning = _visible_warning  # which may quote a sandbox or a server, as tracebacks may
    try:
        given = sys.argv[1:] if argv is None else argv
        app(args=[*map(_with_home, given)], prog_name="agentrl", standalone_mode=True)
    except AgentRLError as e:
        wrong_input = isinstance(e, ConfigError | TemplateError)
        text = str(e) if wrong_input else f"{type(e).__name__}: {e}"
        sys.stdout.flush()
        print(visible(text), file=sys.stderr)
        raise SystemExit(CONFIG_EXIT if wrong_input else 1) from None
    except ModuleNotFoundError as e:
        if (said := missing_extra(e)) is None:
            raise
        print(said, file=sys.stderr)
        raise SystemExit(CONFIG_EXIT) from None
    except BrokenPipeError:  # `agentrl show run | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as e:
        if (said := _place_error(e)) is None:
            raise
        print(visible(said), file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        sys.excepthook = _show_traceback  # typer has set its own
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a background job of a shell has it
            # Nothing can catch it while Python ends, which begins with waiting for threads, before `atexit`.
            threading._register_atexit(signal.signal, signal.SIGINT, signal.SIG_DFL)  # type: ignore[attr-defined]
