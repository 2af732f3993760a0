"""What all settings have in common: unknown keys are errors, and what they read is part of their type."""

from collections.abc import Iterable
from typing import Any

from pydantic import ConfigDict, TypeAdapter

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)


class Reads:
    """Marks a setting that names what a stage reads, as in `Annotated[str, Reads("cluster")]`.

    Args:
        kinds: the kinds of stages that it may name; "model" stands for all that make a model.
        outside: whether it may also name what no stage of the recipe makes: a folder, or a hub name.
        literals: values that name nothing.
    """

    def __init__(self, *kinds: str, outside: bool = True, literals: Iterable[str] = ()):
        self.kinds, self.outside, self.literals = kinds, outside, tuple(literals)

    def __repr__(self) -> str:
        return " or ".join(self.kinds)


def dump(settings: Any) -> dict[str, Any]:
    """The plain dictionary of settings, as YAML and JSON can hold it."""
    return TypeAdapter(type(settings)).dump_python(settings, mode="json", serialize_as_any=True)
