"""Commands: the signature and the docstring of a function are its command line.

The functions of a room's `commands.py` import what they call in their bodies, so that `--help` and a mistyped option
need no torch.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter, Token

from records.messages import one_line
from records.program import end


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
        sys.exit(f"error: {one_line(error)}")
    end(lambda: function(*bound.args, **bound.kwargs), is_all=arguments is None)


def _module(command: Callable) -> str:
    """The name by which `python -m` runs the module that holds the command."""
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else command.__module__


def _folder(kind: type, tokens: Sequence[Token]) -> Path:
    """A path. `Path` would make the current folder of an empty name."""
    if not tokens[0].value.strip():
        raise ValueError("a folder needs a name")
    return Path(tokens[0].value)


# An option that names a folder
Folder = Annotated[Path, Parameter(converter=_folder)]
