"""A stage: its settings, its inputs, and its run."""

import dataclasses
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

from huggingface_hub.errors import StrictDataclassError
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass
from transformers import PreTrainedConfig

from data.pairs import select_columns
from data.sources import DataArguments, Rows, open_rows
from training.context import Context
from training.estimates import Expected, bytes_in_memory, bytes_of_rows, size_of_weights
from training.settings import STRICT, Reads


class Trained(typing.NamedTuple):
    """The pairs that a stage trained on.

    Args:
        pairs: their number.
        duplicates: the shares of them that had another pair with an equal text or image in their batch in the first
            epoch: `left`, and `shuffled`, had it been shuffled.
    """

    pairs: int
    duplicates: dict[str, float]


@dataclass(config=STRICT, kw_only=True)
class Stage:
    """One stage of a recipe: it reads folders and writes one folder of its own.

    A kind of stage is a subclass. Its fields are its settings; one that names what the stage reads says so in its type:
    `Annotated[str, Reads("cluster")]`. Settings that contradict each other raise a ValueError in a
    `pydantic.model_validator`.
    """

    # What a recipe calls it: `stage: KIND`
    kind: ClassVar[str] = ""
    # Whether its folder is a model, which other stages may read as one
    makes_model: ClassVar[bool] = False
    # Whether `run` is for the main process alone, while the others wait
    main_process_only: ClassVar[bool] = False

    # The name of the stage, and of its folder.
    name: str = Field(pattern=r"^\w[\w -]*$", max_length=200)
    # The kind of stage, or a class of your own as `package.module:Class`.
    stage: str

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> Trained | None:
        """Do it.

        Args:
            inputs: what the settings with `Reads` name, under the same names: a stage is its folder, which has
                finished; of `data`, the source is. Others are as they stand in the recipe.
            context: what the stages of a run share.
            directory: where all of it is written. It is renamed when `run` has returned on all processes. What an
                attempt that was killed left there is still there.

        Returns:
            What it trained on, for its record and a card. None: nothing, or it is not known.
        """
        raise NotImplementedError(f"{type(self).__name__} has no run")

    def fingerprints(self, inputs: SimpleNamespace) -> dict[str, str]:
        """What it reads that no setting with `Reads` names, with hashes: when they change, the stage is made anew."""
        return {}

    def open_data(self, arguments: DataArguments) -> Rows:
        """The columns that it needs of its data. No row is read."""
        return select_columns(open_rows(arguments), arguments)

    # Four questions are asked before any stage runs: for the checks of a recipe, and for --plan. `inputs` are as those
    # of `run`, each an `Expected` in place of a folder or source, and `num_processes` is that of the run. Where what is
    # needed is not known, an answer raises `Unknown`.

    def problems(self, inputs: SimpleNamespace) -> Iterator[tuple[str, str]]:
        """What is wrong: settings and messages, which are empty where nothing is. It is asked of the stages to run;
        data, references and what `output_config` raises are looked at in any case."""
        return iter(())

    def output_config(self, inputs: SimpleNamespace) -> PreTrainedConfig | tuple[PreTrainedConfig, ...] | Expected:
        """What will come out: the configuration of a model, those of a mixture's experts, or all that is known. A
        stage that makes no model has the configuration of the model or encoder whose output it holds.

        Raises:
            Unknown
            ValueError: the settings make nothing of these inputs.
        """
        return inherited(self, inputs)

    def notes(self, inputs: SimpleNamespace) -> Iterator[str]:
        """What --plan tells besides."""
        return iter(())

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        """What it takes: functions for columns of --plan, which may raise `Unknown`.

        `memory`: the most bytes that a process holds beside those that it begins with: here the weights of all models
        that it reads and makes, in float32, and drawn pictures. `disk`: bytes of its folder when it is done, small
        files not counted; `disk at most`: the most that it has while it runs, if that is more.
        """
        models = models_of(self, inputs)

        def memory() -> int:
            made = expected_output(self, inputs)
            held = bytes_in_memory(made.known_configs) if self.makes_model else bytes_of_rows(made)
            return held + sum(bytes_in_memory(model.known_configs) for model in models)

        def disk() -> int:
            return size_of_weights(expected_output(self, inputs).known_configs) if self.makes_model else 0

        cost = {"memory": memory, "disk": disk}
        return cost | ({"samples": lambda: inputs.data.known_pairs} if getattr(inputs, "data", None) else {})


# An earlier stage, a folder or a hub name
Model = Annotated[str, Reads("model")]
# The source may be a stage that makes a dataset
Data = Annotated[DataArguments, Reads("captions", "mixture", outside=False)]


def require_numbered(data: DataArguments) -> DataArguments:
    if data.streaming:
        raise ValueError("streaming: a stream has no numbered samples and no length, which are needed: leave it out")
    return data


# Data with a length: labels and features belong to the numbers of their samples
NumberedData = Annotated[Data, AfterValidator(require_numbered)]


@dataclasses.dataclass(frozen=True)
class Reference:
    """A setting of a stage that names what it reads.

    Args:
        setting: its name; where it holds several, with the position or key.
        value: what it names: a stage, a folder or a hub name.
    """

    setting: str
    value: str
    reads: Reads


@contextmanager
def named_errors(stage: Stage, setting: str) -> Iterator[None]:
    """Errors name the setting that causes them."""
    try:
        yield
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{stage.name}.{setting}: {error}") from error


def references(stage: Stage) -> list[Reference]:
    """All that a stage names to be read, in the order of its settings."""
    references = []
    for setting, reads in _reading_settings(type(stage)):
        for key, value in each_value(setting, getattr(stage, setting)):
            if isinstance(value, DataArguments):
                references.append(Reference(f"{key}.source", value.source, reads))
            elif isinstance(value, str):
                references.append(Reference(key, value, reads))
    return [reference for reference in references if reference.value not in reference.reads.literals]


def each_value(setting: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a setting holds; of a list or dictionary, its values, under the name of the setting with position or key."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"{setting}.{key}", item) for key, item in items)
    else:
        yield setting, value


def resolve(stage: Stage, context: Context) -> SimpleNamespace:
    """What `Stage.run` gets: the values of all settings with `Reads`, with folders in place of stages."""

    def look_up(value: str | DataArguments, reads: Reads) -> str | DataArguments:
        if isinstance(value, DataArguments):
            return context.resolve(value)
        return value if value in reads.literals else context.folder(value)

    return map_inputs(stage, look_up)


def map_inputs(stage: Stage, look_up: Callable[[str | DataArguments, Reads], Any]) -> SimpleNamespace:
    """The values of all settings with `Reads`, in which every reference and every source is looked up."""

    def looked_up(value: Any, reads: Reads) -> Any:
        if isinstance(value, dict):
            return {key: looked_up(item, reads) for key, item in value.items()}
        if isinstance(value, list):
            return [looked_up(item, reads) for item in value]
        return None if value is None else look_up(value, reads)

    settings = _reading_settings(type(stage))
    return SimpleNamespace(**{setting: looked_up(getattr(stage, setting), reads) for setting, reads in settings})


def models_of(stage: Stage, inputs: SimpleNamespace) -> list[Any]:
    """The models among what a stage reads."""
    values = [getattr(inputs, setting) for setting, reads in _reading_settings(type(stage)) if "model" in reads.kinds]
    models = [model for value in values for _, model in each_value("", value)]
    return [model for model in models if model is not None and model != Expected()]


def inherited(stage: Stage, inputs: SimpleNamespace) -> Expected:
    """What is known of a stage's output by its inputs alone: what the first of them that has it hands on."""
    values, data = list(vars(inputs).values()), getattr(inputs, "data", None)
    direct = [value for value in values if isinstance(value, Expected)]
    within = [part for value in values for _, part in each_value("", value) if isinstance(part, Expected)]
    pairs = [source.pairs for source in ([data] if data else direct)]
    num_pairs = next((number for number in pairs if isinstance(number, int)), next(iter(pairs), "no data"))
    return Expected(
        configs=next((model.configs for model in direct), ()),
        pairs="only mixing its sources tells" if hasattr(inputs, "sources") else num_pairs,
        processor=next((part.processor for part in within if part.processor), None),
        readable=None if stage.makes_model else next((part.readable for part in within if part.readable), None),
        weights=((stage.name, frozenset()),) if stage.makes_model else (),
    )


def expected_output(stage: Stage, inputs: SimpleNamespace) -> Expected:
    """What a stage will make. Raises as `Stage.output_config`."""
    made = stage.output_config(inputs)
    if isinstance(made, Expected):
        return made
    return dataclasses.replace(inherited(stage, inputs), configs=made if isinstance(made, tuple) else (made,))


def kinds(stage: type[Stage]) -> list[str]:
    """What a class of stages is, the most general first: with those that it is a subclass of, and "model"."""
    names = [vars(parent).get("kind") for parent in reversed(stage.__mro__)]
    return [kind for kind in names if kind] + (["model"] if stage.makes_model else [])


def outline(stage: type[Stage]) -> dict[str, Any]:
    """What is checked of a recipe before its classes are imported: the `kinds` of a class, without "model", and the
    names of its `settings`, each with the same of what it holds."""
    return {"kinds": [kind for kind in kinds(stage) if kind != "model"], "settings": setting_names(stage)}


def setting_names(settings: type) -> dict[str, Any]:
    """The names of a class of settings, each with the names within it; empty: it holds no settings."""

    def within(hint: Any) -> dict[str, Any]:
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return setting_names(hint)
        return next(filter(None, map(within, typing.get_args(hint))), {})

    hints = typing.get_type_hints(settings, include_extras=True)
    return {field.name: within(hints[field.name]) for field in dataclasses.fields(settings)}


def _reading_settings(stage: type[Stage]) -> Iterator[tuple[str, Reads]]:
    hints = typing.get_type_hints(stage, include_extras=True)
    for field in dataclasses.fields(stage):
        reads = _find_reads(hints[field.name])
        if reads is not None:
            yield field.name, reads


def _find_reads(hint: Any) -> Reads | None:
    """The `Reads` in an annotation such as `list[Annotated[str, Reads("model")]] | None`."""
    inside = [*getattr(hint, "__metadata__", ()), *map(_find_reads, typing.get_args(hint))]
    return next((reads for reads in inside if isinstance(reads, Reads)), None)
