"""Commands: the signature and the docstring of a function are its command line.

The functions of a room's `commands.py` import what they call in their bodies, so that `--help` and a mistyped option
need no torch.
"""

import contextlib
import logging
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, Token
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import disable_progress_bars
from safetensors import SafetensorError

from records.messages import Faults, one_line
from records.processes import is_first_process, num_processes

# Seconds that a process that failed waits before it speaks: another one that failed may take some to end, after which
# the launcher ends all
PATIENCE = 15
INTERRUPTED = "interrupted: nothing half-written was left; run the same command again, which goes on where it can"


def command_line(name: str, **options: object) -> App:
    """An empty command line, with plain help, in which an option may take several values one after another."""
    return App(
        name=name,
        help_format="markdown",
        help_formatter="plain",
        version_flags=(),
        default_parameter=Parameter(consume_multiple=True, negative_iterable=(), allow_repeating=True),
        **options,
    )


def command(function: Callable[..., str | None]) -> Callable[..., str | None]:
    """Gives a function a command line, `function.main(arguments)`: parameters before a `/` are arguments, the others
    options. Markdown that it returns is printed."""

    def main(arguments: Sequence[str] | None = None) -> None:
        line = command_line(f"python -m {_module(function)}")
        line.default(function)
        run(line, arguments)

    function.main = main
    return function


def run(line: App, arguments: Sequence[str] | None = None) -> None:
    """Run what a command line says. What a user can cause ends in one line on stderr.

    Args:
        arguments: default: those of this program, which then ends, before its module imports what it needs when others
            import it.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        function, bound, _ = line.parse_args(given, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        sys.exit(f"error: {_parsing_error(error)}")
    with one_line_errors():
        result = function(*bound.args, **bound.kwargs)
        if result and is_first_process():
            _print(result)
    if arguments is None:
        sys.exit()


def _parsing_error(error: CycloptsError) -> str:
    """What cyclopts says, which calls an option that is not there one without a value."""
    text = one_line(error)
    if isinstance(error, MissingArgumentError) and error.keyword is None and not error.argument.tokens:
        return re.sub(r'^(Command ".*?" p|P)arameter (\S+) requires an argument\.', r"\2 is missing.", text)
    return text


def _print(text: str) -> None:
    """As it is, for a file or another program; in a terminal, markdown's tables fit into its width."""
    if sys.stdout.isatty() and re.search(r"^\|", text, re.MULTILINE):
        from rich.console import Console  # takes a while
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        print(text)


def _module(command: Callable) -> str:
    """The name by which `python -m` runs the module that holds the command."""
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else command.__module__


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the program with one line on stderr and a status that is not 0 for an error that the user can cause.

    Ctrl-C and SIGTERM end it as errors do, so that temporary files are removed. Of several processes that fail, one
    alone says why: the first process, or the one that failed first.
    """
    alone = num_processes() == 1
    _quiet_output()
    with sigterm_raises():
        try:
            try:
                yield
            except Exception as error:
                # The others wait to be ended by the launcher, which ends all when one has. So does a process that only
                # lost the connection to another: it fails with a RuntimeError.
                if not alone and (not is_first_process() or isinstance(error, RuntimeError)):
                    time.sleep(PATIENCE)
                raise
        except KeyboardInterrupt:
            if not alone:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher sends it again
            if is_first_process():
                print(INTERRUPTED, file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        except Faults as error:
            sys.exit(f"error: {error}")
        except SafetensorError as error:  # of a file that cannot be written, safetensors raises no OSError
            sys.exit(f"error: weights could not be written or read: {one_line(error)}")
        except (ValueError, OSError, FloatingPointError, StrictDataclassError) as error:
            sys.exit(f"error: {one_line(error)}")


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that `finally` blocks run, as Ctrl-C raises KeyboardInterrupt."""
    if num_processes() > 1:  # one that waits for others does so in a call that keeps Python from running a handler
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _quiet_output() -> None:
    """No library draws a bar where stderr is no terminal. Of several processes, the first alone warns."""
    if not is_first_process():
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    if not sys.stderr.isatty() or not is_first_process():
        disable_progress_bars()  # of huggingface_hub, and of transformers, which asks it
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"


def _folder(kind: type, tokens: Sequence[Token]) -> Path:
    """A path. `Path` would make the current folder of an empty name."""
    if not tokens[0].value.strip():
        raise ValueError("a folder needs a name")
    return Path(tokens[0].value)


# An option that names a folder
Folder = Annotated[Path, Parameter(converter=_folder)]
