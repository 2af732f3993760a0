"""Settings of a class, and parameters of a function, in words: for `--help` and docs/settings.md."""

import dataclasses
import inspect
import re
import shutil
import textwrap
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from clip_moe.engine.flags import is_list, settings_within
from clip_moe.engine.settings import GENERAL_KINDS, Reads

BASIC = {str: "text", Path: "path", int: "whole number", float: "number", bool: "true or false", Any: "any"}
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting of a class.

    Args:
        default: as YAML writes it; None: it must be given.
        field: pydantic's.
    """

    name: str
    default: str | None
    meaning: str
    field: FieldInfo

    def type(self, link: Callable[[str], str] = str, titles: dict[type, str] | None = None) -> str:
        """Its type in words, with the bounds of a number.

        Args:
            link: makes a link of the title of a kind or a class.
            titles: class of settings -> title.
        """
        return _words(self.field.annotation, self.field.metadata, link, titles or {})


def settings_of(cls: type, meanings: Mapping[str, str] | None = None) -> list[Setting]:
    """The settings of a class, those that must be given first.

    Args:
        meanings: by name; None: the comments above the fields.
    """
    if meanings is None:
        meanings = {}
        for base in reversed(cls.__mro__[:-1]):
            meanings |= {name: text for name, text in _comments_above(base).items() if text}
    fields = sorted(cls.__pydantic_fields__.items(), key=lambda item: not item[1].is_required())
    settings = []
    for name, field in fields:
        default = None if field.is_required() else in_yaml(field.get_default(call_default_factory=True))
        settings.append(Setting(name, default, meanings.get(name, ""), field))
    return settings


def docstring(source: type | Callable) -> str:
    """Paragraphs of a docstring before `Args:`, each on one line; lines of code stay."""
    paragraphs = inspect.getdoc(source).partition("\n\nArgs:")[0].split("\n\n")
    return "\n\n".join(text if text.startswith("    ") else " ".join(text.split()) for text in paragraphs)


def _comments_above(cls: type) -> dict[str, str]:
    """Field of a class -> the comment lines above it, as one text."""
    meanings, comment = {}, []
    for line in inspect.getsource(cls).splitlines():
        field = re.match(r"    (\w+): ", line)
        if line.startswith("    # "):
            comment.append(line[6:])
        elif field:
            meanings[field[1]] = " ".join(comment)
            comment = []
        else:
            comment = []
    return meanings


def _words(kind: Any, metadata: Iterable[Any], link: Callable[[str], str], titles: dict[type, str]) -> str:
    arguments = [argument for argument in get_args(kind) if argument is not types.NoneType]
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        words = " or ".join(_words(argument, (), link, titles) for argument in arguments)
    elif origin is Literal:
        words = ", ".join(f"`{in_yaml(argument)}`" for argument in arguments)
    elif origin is Annotated:
        words = _words(arguments[0], arguments[1:], link, titles)
    elif origin is list:
        words = f"list ({_words(arguments[0], (), link, titles)})"
    elif origin is dict:
        words = "keys and values"
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        words = link(titles[kind]) if kind in titles else "keys and values"
    else:
        reads = next((fact for fact in metadata if isinstance(fact, Reads)), None)
        kinds = " or ".join(name if name in GENERAL_KINDS else link(name) for name in (reads.kinds if reads else ()))
        words = BASIC[kind] if reads is None else "a model" if kinds == "model" else f"{kinds} stage"
    # A Field(...) within Annotated holds several facts
    facts = [part for fact in metadata for part in getattr(fact, "metadata", [fact])]
    bounds = [f"{sign} {getattr(fact, key):,}" for fact in facts for key, sign in BOUNDS.items() if hasattr(fact, key)]
    return " ".join([words, ", ".join(bounds)]).strip()


def function_help(title: str, function: Callable, settings_class: type, arguments: Collection[str]) -> str:
    """Usage of a function's command, its purpose, and its parameters.

    Args:
        settings_class: the parameters as a class of settings.
        arguments: names of those that are given without a flag.
    """
    # Parameters have entries under `Args:` in the docstring
    entries = re.split(r"\n    (?=\w+: )", inspect.getdoc(function).partition("Args:")[2])[1:]
    pairs = (entry.partition(": ") for entry in entries)
    settings = settings_of(settings_class, {name: " ".join(meaning.split()) for name, _, meaning in pairs})
    given = [setting for setting in settings if setting.name in arguments]
    rows = [in_lines(setting.meaning, 6, f"  {setting.name.upper()}  ") for setting in given]
    rows += [line for setting in settings if setting.name not in arguments for line in _help_lines(setting)]
    return _help(title, [setting.name for setting in given], settings, docstring(function), rows)


def stage_help(title: str, stage: type, shared_class: type) -> str:
    """Usage of a stage's command, its purpose, and its settings.

    Args:
        shared_class: the settings that the commands of all stages have.
    """
    shared = settings_of(shared_class)
    left_out = {"name", "stage", *(setting.name for setting in shared)}
    settings = [setting for setting in settings_of(stage) if setting.name not in left_out]
    rows = [in_lines("Settings, whose values are read as YAML; several values make a list:"), ""]
    shown: dict[type, str] = {}
    rows += [line for setting in settings + shared for line in _help_lines(setting, shown=shown)]
    return _help(title, ["output"], settings, docstring(stage), rows)


def _help(title: str, arguments: Sequence[str], settings: Sequence[Setting], about: str, rows: Sequence[str]) -> str:
    required = [f"--{s.name} {s.name.upper()}" for s in settings if s.default is None and s.name not in arguments]
    usage = f"{' '.join([title] + [argument.upper() for argument in arguments] + required)} [--SETTING VALUE ...]"
    return "\n\n".join([in_lines(usage, 7, "Usage: "), in_lines(about), "\n".join(rows)])


def _help_lines(setting: Setting, prefix: str = "", shown: dict[type, str] | None = None) -> list[str]:
    """Lines of a setting and of those within it, unless they are `shown` under another name: it is added."""
    name, hint = f"{prefix}{setting.name}", setting.field.annotation
    within, is_several = settings_within(hint), is_list(hint)
    default = "" if setting.default in (None, "null") else f", default {setting.default}"
    other = (shown or {}).get(within)
    meaning = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", setting.meaning)  # a terminal has no links
    meaning = f"{meaning} Its settings are those of --{other}." if other else meaning
    lines = [in_lines(setting.type() + ("" if within else default), 10, f"  --{name}  "), in_lines(meaning, 6)]
    if other or within is None or is_several or prefix:
        return lines
    if shown is not None:
        shown[within] = name
    return lines + [line for inner in settings_of(within) for line in _help_lines(inner, f"{name}.")]


def in_yaml(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value).replace("'", "")


def in_lines(text: str, indent: int = 0, first: str = "") -> str:
    """Paragraphs in lines of the terminal's width, or of 80 letters where there is no terminal. Lines that are indented
    are commands, which go on behind a backslash.

    Args:
        indent: spaces before each line.
        first: what stands before the text, in its first line.
    """
    width, paragraphs = shutil.get_terminal_size().columns, []
    options = {"break_long_words": False, "break_on_hyphens": False}
    for paragraph in text.strip("\n").split("\n\n"):
        if paragraph.startswith("    "):
            commands = paragraph.replace(" \\\n        ", " ").splitlines()
            lines = (textwrap.wrap(line, width - 2, subsequent_indent=" " * 8, **options) for line in commands)
            paragraphs.append("\n".join(" \\\n".join(line) for line in lines))
        else:
            head = first if first and not paragraphs else " " * indent
            words = " ".join(paragraph.split())
            lines = textwrap.wrap(words, width, initial_indent=head, subsequent_indent=" " * indent, **options)
            paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)
