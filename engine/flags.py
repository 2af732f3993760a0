"""Flags of a command line, `--NAME VALUE`, as settings of classes, which tell how names are spelled and values read."""

import re
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from clip_moe.engine.settings import refuse
from clip_moe.engine.yaml_files import ODD_NUMBER, read_yaml

# Patterns of files, which YAML takes for an alias and a dictionary
PATTERN = re.compile(r"\*|\{\d+\.\.\d+\}")


def read_settings(
    arguments: Sequence[str], classes: Sequence[type], takes_others: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Flags as settings of these classes and those within, and if `takes_others` the flags of no class, as they are."""
    settings: dict[str, Any] = {}
    others: list[str] = []
    for key, texts in read_flags(arguments, lambda key: ".".join(find_setting(key.split("."), classes)[0])).items():
        *outer, name = path = key.split(".")
        is_known = any(path[0] in cls.__pydantic_fields__ for cls in classes)
        if takes_others and (outer or not is_known):
            others += [f"--{key}", *texts]
            continue
        target = settings
        for part in outer:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ValueError(f"--{key}: {part} has a value already")
        if isinstance(target.get(name), dict):
            raise ValueError(f"--{key}: given both whole and in parts")
        target[name] = read_value(key, texts, find_setting(path, classes)[1])
    return settings, others


def read_flags(arguments: Sequence[str], spell: Callable[[str], str] = str) -> dict[str, list[str]]:
    """`--a.b 1 --c=2 3` as {"a.b": ["1"], "c": ["2", "3"]}. One that is repeated has all its values.

    Args:
        spell: the name of a flag as its settings spell it.
    """
    flags: dict[str, list[str]] = {}
    values = None
    for argument in arguments:
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            values = flags.setdefault(spell(key), [])
            values += [value] * bool(equals)
        elif values is not None:
            values.append(argument)
        else:
            raise ValueError(f"unexpected argument {argument!r}: settings are written --SETTING VALUE")
    return flags


def read_value(key: str, values: list[str], hint: Any = None) -> Any:
    """The value of a flag, each of whose values is read as YAML.

    Args:
        hint: the type of its setting, which makes a list of one value, True of no value, and texts of numbers.
    """
    parsed = [_read(value, f"--{key}", takes_text_alone(hint)) for value in values]
    if not parsed and (hint is bool or bool in get_args(hint)):
        return True
    is_one = hint not in (None, Any) and not is_list(hint)
    refuse(
        (not parsed, f"--{key} needs a value"),
        (len(parsed) > 1 and is_one, f"--{key} takes one value, got {' '.join(values)}"),
    )
    return parsed if len(parsed) > 1 or (is_list(hint) and not isinstance(parsed[0], list)) else parsed[0]


def _read(text: str, flag: str, is_text: bool) -> Any:
    """Parse a value as YAML; text stays text, even with ` #` in it."""
    if not text.strip():  # an unset shell variable
        raise ValueError(f"{flag} is empty: remove it, or set it to null")
    if PATTERN.match(text) or is_text and ODD_NUMBER.fullmatch(text):
        return text
    value = read_yaml(text, flag)
    if is_text and not isinstance(value, str | list | None):
        return text
    return text if " #" in text and isinstance(value, str | None) and text[0] not in "\"'" else value


def settings_within(hint: Any) -> type | None:
    """The class of settings that a setting holds, itself or in a list; None: it holds none."""
    if isinstance(hint, type) and is_dataclass(hint):
        return hint
    return next(filter(None, map(settings_within, get_args(hint))), None)


def find_setting(path: Sequence[str], classes: Iterable[type]) -> tuple[list[str], Any]:
    """The keys of a flag as the settings spell them, where `-` and `_` read alike, and the type of the setting, None if
    it is unknown. Keys of free-form dictionaries, such as names of models, stay as typed."""
    name = path[0].replace("-", "_")
    field = next((c.__pydantic_fields__[name] for c in classes if name in c.__pydantic_fields__), None)
    if field is None:
        return list(path), None
    if len(path) == 1:
        return [name], field.annotation
    if get_origin(field.annotation) is dict and get_origin(get_args(field.annotation)[0]) is Literal:
        return [name, *(key.replace("-", "_") for key in path[1:])], None
    within = settings_within(field.annotation)
    keys, hint = find_setting(path[1:], [within] if within else [])
    return [name, *keys], hint


def is_list(hint: Any) -> bool:
    """Whether a setting takes a list, perhaps among other things."""
    if get_origin(hint) in (Annotated, Union, types.UnionType):
        return any(map(is_list, get_args(hint)))
    return get_origin(hint) in (list, Sequence)


def takes_text_alone(hint: Any) -> bool:
    """Whether a setting takes texts, paths or lists of them, and nothing else but None."""
    if get_origin(hint) is Annotated:
        return takes_text_alone(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return all(isinstance(choice, str) for choice in get_args(hint))
    inner = [part for part in get_args(hint) if part is not types.NoneType]
    return hint in (str, Path) or bool(inner) and get_origin(hint) is not dict and all(map(takes_text_alone, inner))
