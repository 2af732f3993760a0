"""A stage: its settings, its inputs, and its run. Importing one imports nothing heavy."""

import dataclasses
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.outcome import Training
from clip_moe.engine.settings import STRICT, Reads, Settings, Source


class Cost(typing.NamedTuple):
    """An estimate for one stage; None: unknown.

    Args:
        seconds: total time.
        step: seconds per step, for a stage that trains.
        steps: number of steps.
        disk: bytes of its folder.
    """

    seconds: float | None = None
    step: float | None = None
    steps: int | None = None
    disk: int | None = None


# Endings of files that grow with the samples, in folders that are no model
ROWS = (".npy", ".arrow", ".safetensors", ".parquet", ".jsonl")


@dataclass(config=STRICT, kw_only=True)
class Stage(Settings):
    """One stage of a recipe: it reads folders and writes one folder of its own.

    A kind of stage is a subclass. Its fields are its settings, and the comment above a field is its help. One that
    names what the stage reads says so in its type: `Annotated[str, Reads("cluster")]`. Settings that contradict each
    other raise a ValueError in a `pydantic.model_validator`; all else is checked by `run`, where it is used.
    """

    # Name of the kind in recipes: `stage: KIND`
    kind: ClassVar[str] = ""
    # Whether `run` is for the main process alone, while the others wait
    main_process_only: ClassVar[bool] = False
    # Whether its folder has a row for each pair of its data, so that what reads it needs the same pairs
    has_rows_of_pairs: ClassVar[bool] = False

    # The name of the stage, and of its folder.
    name: str
    # The kind of stage, or a class of your own as `package.module:Class`.
    stage: str

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> tuple[int, dict[str, float]] | None:
        """Make the stage's folder.

        Args:
            inputs: the settings with `Reads`, by name. A stage is replaced by its finished folder; in `data`, only
                the source is.
            context: what the stages of a run share.
            directory: where to write everything. It is renamed when `run` has returned on all processes. Files of an
                attempt that was killed are still there, unless the stage is for the main process alone.

        Returns:
            For its record and a card, the number of pairs it trained on, and which fraction of them shares a text or
            image with another one of their batch in epoch 1: `left` with its sampler, `shuffled` with plain shuffling.
            None: it trained on none, or they are unknown.
        """

    def fingerprints(self, inputs: SimpleNamespace) -> dict[str, str]:
        """Hashes of inputs that no setting with `Reads` names. If one changes, the finished folder is refused."""
        return {}

    @property
    def expert_number(self) -> int | None:
        """The expert that it trains, of several that can be trained apart, its setting `expert`; None: it has none."""
        return vars(self).get("expert")

    @property
    def least_samples(self) -> int:
        """Fewest samples that a rehearsal needs."""
        return 0

    def rehearsed(self, num_samples: int) -> typing.Self:
        """The same stage with small numbers: by default, with the first samples of all that it reads."""
        few: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Source):
                few[name] = value.first(num_samples)
            elif isinstance(value, list) and value and isinstance(value[0], Source):
                few[name] = [source.first(num_samples) for source in value]
        return dataclasses.replace(self, **few)

    def with_batch(self, batch_size: int, num_processes: int) -> typing.Self:
        """The same stage with `batch_size` samples in the batch of a process, if it has batches."""
        return self

    def cost(self, rehearsed: typing.Self, directory: Path, seconds: float, disk: int, ratio: float | None) -> Cost:
        """Estimate the stage from its rehearsal: by default, all grows with the samples.

        Args:
            rehearsed: the stage that `rehearsed` returned.
            directory: the folder it wrote.
            seconds: time it took.
            disk: bytes of its folder when it ended, checkpoints included.
            ratio: how many times more samples the stage reads; None: not known.
        """
        data = {} if self.source is None else {"data": self.source}
        if ratio is None or dataclasses.replace(rehearsed, **data) != self:
            return Cost()
        files = [path for path in directory.rglob("*") if path.is_file()]
        sizes = (path.stat().st_size * (ratio if path.suffix in ROWS else 1) for path in files)
        return Cost(seconds=seconds * ratio, disk=round(sum(sizes)))

    def complete(self, directory: Path) -> str | None:
        """Check what `run` wrote, on the main process.

        Returns:
            The digest of the model in the folder; None: it is no model.
        """
        return None

    def usage(self, directory: Path) -> str | None:
        """How to use what the folder holds, for the end of a run; None: it needs no word."""
        return None

    def training(self, directory: Path) -> Training | None:
        """The losses that `run` logged; None: it does not train, or they have no chance to compare with."""
        return None

    @property
    def source(self) -> Source | None:
        """The samples that it reads, its setting `data`; None: it has none."""
        return vars(self).get("data")


@dataclass(config=STRICT, kw_only=True)
class PairsStage(Stage):
    """A stage whose folder holds pairs, which other stages may name as their `data.source`."""

    kind: ClassVar[str] = "pairs"
    main_process_only: ClassVar[bool] = True


# An earlier stage, a folder or a hub name
Model = Annotated[str, Reads("model")]


class Reference(typing.NamedTuple):
    """A setting of a stage that names what it reads.

    Args:
        setting: its name; where it holds several, with the position or key.
        value: a stage, a folder or a hub name, or samples that are built in.
    """

    setting: str
    value: str
    reads: Reads
    is_drawn: bool = False


@contextmanager
def named_errors(stage: Stage, setting: str) -> Iterator[None]:
    """Errors name the setting that causes them."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{stage.name}.{setting}: {error}") from error


def references(stage: Stage) -> list[Reference]:
    """All that a stage names to be read, in the order of its settings."""
    found = []
    for setting, reads in _reading_settings(type(stage)):
        for key, value in _each_value(setting, getattr(stage, setting)):
            if isinstance(value, Source):
                found.append(Reference(f"{key}.source", value.source, reads, value.is_drawn))
            elif isinstance(value, str) and value not in reads.literals:
                found.append(Reference(key, value, reads))
    return found


def each_setting(stage: Stage) -> Iterator[tuple[str, Any]]:
    """The stage itself, without a name, and its settings with their values; of a list or dictionary each value, under
    the name of the setting with position or key."""
    yield "", stage
    for setting, value in vars(stage).items():
        yield from _each_value(setting, value)


def _each_value(setting: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"{setting}.{key}", item) for key, item in items)
    else:
        yield setting, value


def resolve(stage: Stage, context: Context) -> SimpleNamespace:
    """The inputs of `Stage.run`: the values of all settings with `Reads`, with folders in place of stages."""

    def look_up(value: Any, reads: Reads) -> Any:
        if isinstance(value, dict):
            return {key: look_up(item, reads) for key, item in value.items()}
        if isinstance(value, list):
            return [look_up(item, reads) for item in value]
        if isinstance(value, Source):
            return context.resolve(value)
        return context.folder(value) if isinstance(value, str) and value not in reads.literals else value

    settings = _reading_settings(type(stage))
    return SimpleNamespace(**{setting: look_up(getattr(stage, setting), reads) for setting, reads in settings})


def kinds(stage: type[Stage]) -> list[str]:
    """The kinds of a class of stages, the most general first: with those that it is a subclass of, such as "model"."""
    names = [vars(parent).get("kind") for parent in reversed(stage.__mro__)]
    return [kind for kind in names if kind]


def _reading_settings(stage: type[Stage]) -> Iterator[tuple[str, Reads]]:
    hints = typing.get_type_hints(stage, include_extras=True)
    for field in dataclasses.fields(stage):
        reads = _find_reads(hints[field.name])
        if reads is not None:
            yield field.name, reads


def _find_reads(hint: Any) -> Reads | None:
    """The `Reads` in an annotation such as `list[Annotated[str, Reads("model")]] | None`."""
    inside = list(getattr(hint, "__metadata__", ())) + [_find_reads(part) for part in typing.get_args(hint)]
    return next((reads for reads in inside if isinstance(reads, Reads)), None)
