"""`python -m ci COMMAND`: finds the command's module, runs it, and turns every error into one message and its code.

Only the module of the command asked for is imported, so that `plan` does not wait for the Docker SDK.
"""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import ci.commands
from ci.errors import CiError, ExitCode, Interrupted, UsageError, choices
from ci.interrupts import SIGNALS, Interrupts

NOT_COMMANDS = ("options",)

NOT_OURS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)
"""What is wrong with a disk, or with a path that the user gave; any other OSError is a mistake of this program."""


def commands() -> dict[str, str]:
    """Every command there is, with its module."""
    found = (module.name for module in pkgutil.iter_modules(ci.commands.__path__))
    return {name.replace("_", "-"): f"ci.commands.{name}" for name in found if name not in NOT_COMMANDS}


def run(arguments: Sequence[str]) -> ExitCode:
    """One command line, from words to exit code."""
    import typer  # here, where an interrupt is handled already: it takes a moment
    from typer.exceptions import Abort, Exit, TyperException

    known = commands()
    name = arguments[0] if arguments else "--help"
    app = typer.Typer(
        name="ci", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True
    )
    app.callback(help="Does this pin of DeepSpeed and transformers train correctly on this hardware?")(_nothing)
    if name in ("--help", "-h"):
        arguments, wanted = ["--help"], list(known)
    elif name in known:
        wanted = [name]
    else:
        raise UsageError(f"unknown command {name!r}; {choices(name, known)}")
    for command in wanted:
        function: Callable[..., Any] = importlib.import_module(known[command]).main
        app.command(name=command)(function)
    # Not Typer's own main(): it would turn a closed pipe into exit code 1, which means a verdict that fails.
    group = typer.main.get_command(app)
    try:
        with group.make_context("python -m ci", list(arguments)) as context:
            code = group.invoke(context)
    except Exit as done:
        code = done.exit_code
    except TyperException as error:
        raise UsageError(error.format_message()) from error
    except Abort as error:
        raise Interrupted from error
    return ExitCode(code or 0)


def _nothing() -> None:
    """Makes Typer keep the command's name even where only one is registered."""


def main() -> None:
    """Entry point: never a traceback for an error that was expected, nor for an interrupt at any moment."""
    try:
        with Interrupts():
            code = run(sys.argv[1:])
        sys.stdout.flush()
    except CiError as error:
        print(error.message, file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (`| head`) has seen enough; Python would complain once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.OK
    except OSError as error:
        if error.errno not in NOT_OURS:
            raise
        print(f"cannot write {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
        code = ExitCode.UNAVAILABLE
    sys.exit(int(code))


if __name__ == "__main__":
    try:
        main()
    finally:
        # All is said and done: an interrupt while Python takes itself apart must not change the exit code.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
