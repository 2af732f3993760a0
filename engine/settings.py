"""Settings of stages: unknown keys are errors, and what a setting reads is part of its type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter

# Kinds that other kinds of stages belong to
GENERAL_KINDS = ("model", "pairs")
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)


def refuse(*checks: tuple[object, str]) -> None:
    """Raise a ValueError with the first message whose condition holds."""
    for is_wrong, message in checks:
        if is_wrong:
            raise ValueError(message)


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


class Settings:
    """A class of settings: a stage, or a group within one. It answers what a run asks of all settings alike."""

    # Settings that do not change what is computed: how often something is saved, how data are read ahead
    incidental: ClassVar[Collection[str]] = ()

    def take_seed(self, seed: int) -> None:
        """Take the recipe's seed, where it has none of its own."""

    def faults(self, output_dir: Path) -> Iterator[tuple[str, str | None]]:
        """Settings with what is wrong with them, as far as local folders tell; None: nothing.

        Args:
            output_dir: the run's.
        """
        yield from ()

    def changed(self, *names: str) -> list[str]:
        """The names of those of these settings that do not have their default."""
        return [name for name in names if getattr(self, name) != type(self).__pydantic_fields__[name].default]

    def compared(self) -> dict[str, Any]:
        """Settings that change what is computed, as a record holds them."""
        settings = dump(self)
        for name, value in vars(self).items():
            if name in self.incidental:
                del settings[name]
            elif isinstance(value, Settings):
                settings[name] = value.compared()
            elif isinstance(value, list) and value and isinstance(value[0], Settings):
                settings[name] = [part.compared() for part in value]
        return settings


class Source(Settings, ABC):
    """Settings of samples that a stage reads. `source` names a stage, a folder or a Hub dataset."""

    source: str

    @property
    def is_drawn(self) -> bool:
        """Whether the samples are drawn, so that `source` names nothing that is read."""
        return False

    @abstractmethod
    def identity(self) -> dict[str, Any] | None:
        """The samples by name and content, for the record of a stage. None if the settings identify the samples, or
        they cannot be read. A `commit` is the Hub's."""

    @abstractmethod
    def first(self, number: int, skips: bool = True) -> Self:
        """The first samples alone.

        Args:
            skips: whether `skip` applies (False for a source that was already cut).
        """

    @abstractmethod
    def count(self, ratio: float = 1) -> float | None:
        """The number of samples if its source had `ratio` times as many; None: not known."""


def dump(settings: Any) -> dict[str, Any]:
    """The plain dictionary of settings, as YAML and JSON can hold it."""
    return TypeAdapter(type(settings)).dump_python(settings, mode="json", serialize_as_any=True)
