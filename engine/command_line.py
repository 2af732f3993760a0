"""Commands: the signature and the docstring of a function are its command line.

The functions of a room's `commands.py` import what they call in their bodies, so that `--help` and a mistyped option
need no torch.
"""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Parameter, Token

from clip_moe.engine.help_text import in_lines
from clip_moe.engine.messages import one_line
from clip_moe.engine.program import end

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions, RenderableType

# Of the name of a command, before what it does
NAME_WIDTH = 14


class Help:
    """Plain help in lines that are broken once. The formatters of cyclopts break them at the terminal's width, then put
    names before them and break them again."""

    def render_usage(self, console: "Console", options: "ConsoleOptions", usage: "RenderableType") -> None:
        self._print(console, in_lines(f"Usage: {self._text(console, usage)}") + "\n")

    def render_description(self, console: "Console", options: "ConsoleOptions", text: "RenderableType") -> None:
        self._print(console, in_lines(self._text(console, text)))

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
        if not panel.entries:
            return
        self._print(console, f"\n{panel.title}:")
        for entry in panel.entries:
            text = self._text(console, entry.description)
            if panel.format == "command":
                names = ", ".join((*entry.positive_names, *entry.positive_shorts))
                self._print(console, in_lines(text, NAME_WIDTH, f"  {names}".ljust(NAME_WIDTH)))
                continue
            facts = [" or ".join(entry.choices or ()), "required" if entry.required else ""]
            facts += [f"default {entry.default}" if entry.default not in (None, "False") else ""]
            names = ", ".join(filter(None, [" ".join(entry.display_labels_with_metavar), *facts]))
            self._print(console, in_lines(names, 10, "  ") + "\n" + in_lines(text, 6))

    @staticmethod
    def _text(console: "Console", text: "RenderableType") -> str:
        unbroken = console.options.update(width=100_000)
        return "".join(segment.text for segment in console.render(text, unbroken)).rstrip()

    @staticmethod
    def _print(console: "Console", text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)


def command_line(name: str, **options: object) -> App:
    """An empty command line, with plain help, in which an option may take several values one after another."""
    return App(
        name=name,
        help_format="plaintext",
        help_formatter=Help(),
        version_flags=(),
        default_parameter=Parameter(
            name_transform=str,  # as settings are called: --batch_size
            negative_bool="no_",
            consume_multiple=True,
            negative_iterable=(),
            allow_repeating=True,
        ),
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
        function, bound, _ = line.parse_args(list(map(_spelled, given)), print_error=False, exit_on_error=False)
    except CycloptsError as error:
        sys.exit(f"error: {one_line(error)}")
    end(lambda: function(*bound.args, **bound.kwargs), is_all=arguments is None)


def _spelled(argument: str) -> str:
    """An option with `_` for `-`, which read alike. A key of several parts is a setting's, whose class spells it."""
    name, equals, value = argument.partition("=")
    if not re.fullmatch(r"--[a-z][\w-]*", name):
        return argument
    return f"--{name[2:].replace('-', '_')}{equals}{value}"


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
