"""A recipe is checked whole before its first stage runs: all faults at once that the run would meet later."""

import copy
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from huggingface_hub.errors import StrictDataclassError

from data.annotations import holds_list
from data.once import once
from data.sources import DataArguments, is_here
from data.worlds import WORLDS
from evaluation.tasks import missing_data
from records.files import read_record
from records.local_names import is_hub_name
from records.messages import Faults, most_similar, what_is_meant
from records.provenance import MANIFEST
from training.estimates import Expected, Unknown, as_stream, count_pairs, is_cached, model_configs
from training.settings import Reads, dump
from training.stages import STAGES
from training.stages.base import Reference, Stage, each_value, expected_output, inherited, kinds, map_inputs, references

# What a wrong setting makes configurations and libraries raise
SETTING_ERRORS = (ValueError, OSError, StrictDataclassError, TypeError, ArithmeticError, LookupError, RuntimeError)
# By which a folder is known to hold a model, or a sentence encoder
MODEL_FILES = ("config.json", "modules.json")


def described(error: Exception) -> str:
    """What an error says; of one that is not ours, such as a KeyError, with its kind."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


class RecipeError(Faults):
    """The faults of a recipe, with their settings: a first line that counts them, then a line for each.

    One alone stands in the first line.

    Args:
        faults: `stage.setting: what is wrong`. What is wrong in several stages alike, as by defaults, is one fault.
    """

    def __init__(self, recipe: str | Path, faults: Iterable[str]):
        settings: dict[str, list[str]] = {}
        for fault in dict.fromkeys(faults):
            setting, _, what = " ".join(fault.split()).partition(": ")
            settings.setdefault(what, []).append(setting)
        lines = [f"{', '.join(alike)}: {what}" for what, alike in settings.items()]
        several = "\n  ".join([f"{recipe} has {len(lines)} faults:", *lines])
        super().__init__(several if len(lines) > 1 else f"{recipe} has a fault: {lines[0]}")


class Outlook:
    """What is known of the stages of a recipe before they run.

    Args:
        num_processes: of the run.
        broken: names of further stages, whose settings cannot be read.
        thorough: whether to ask the Hub for configurations, and to read a whole .json to count its pairs.
    """

    def __init__(
        self,
        stages: list[Stage],
        output_dir: str | Path,
        num_processes: int = 1,
        broken: Collection[str] = (),
        thorough: bool = False,
    ):
        self.stages = {stage.name: stage for stage in stages}
        self.output_dir, self.broken, self.thorough = Path(output_dir), broken, thorough
        self.inputs: dict[str, SimpleNamespace] = {}
        self.outputs: dict[str, Expected] = {}
        # Stage -> what its settings cannot make; other source -> why it cannot be read
        self.wrong: dict[str, str] = {}
        for stage in stages:
            self.inputs[stage.name] = map_inputs(stage, self._look_up)
            self.inputs[stage.name].num_processes = num_processes
            self.outputs[stage.name] = self._output(stage)

    def finished(self, name: str) -> bool:
        return (self.output_dir / name / MANIFEST).is_file()

    def _output(self, stage: Stage) -> Expected:
        """The expected output of a stage; a finished stage has its model already."""
        inputs, folder = self.inputs[stage.name], self.output_dir / stage.name
        is_model = stage.makes_model and self.finished(stage.name)
        try:
            output = expected_output(stage, inputs)
            output = replace(output, configs=model_configs(str(folder))) if is_model else output
        except Unknown as why:
            output = replace(inherited(stage, inputs), configs=str(why))
        except SETTING_ERRORS as error:
            self.wrong[stage.name] = str(error)
            output = replace(inherited(stage, inputs), configs=f"{stage.name} has a fault")
        if not self.finished(stage.name):
            return replace(output, folder=None)
        return replace(output, folder=folder, processor=folder if stage.makes_model else output.processor)

    def _look_up(self, value: str | DataArguments, reads: Reads) -> Expected:
        """Each stage gets configurations of its own, as it may change them."""
        if isinstance(value, DataArguments):
            expected = self.data(value)
        elif value in reads.literals:
            expected = Expected()
        elif "model" not in reads.kinds:
            expected = self._stage(value) or Expected(folder=_folder(value))
        else:
            expected = self._stage(value) or self._tried(value, lambda: self._model(value))
        return replace(expected, configs=copy.deepcopy(expected.configs))

    def data(self, arguments: DataArguments) -> Expected:
        """What is known of data, which a stage may make."""
        made = self._stage(arguments.source)
        if made is None:
            key = json.dumps(dump(arguments))
            counted = self._tried(key, lambda: Expected(pairs=count_pairs(arguments, self.thorough)))
            readable = arguments if arguments.source in WORLDS or is_here(arguments.source) else None
            return replace(counted, readable=readable)
        readable = made.folder and replace(arguments, source=str(made.folder))
        pairs = type(made.pairs)(arguments.taken(made.pairs)) if isinstance(made.pairs, int) else made.pairs
        return replace(made, pairs=pairs, readable=readable)

    def _model(self, source: str) -> Expected:
        configs, folder = model_configs(source, self.thorough), _folder(source)
        return Expected(configs, folder=folder, processor=folder, weights=((source, frozenset()),))

    def _stage(self, name: str) -> Expected | None:
        if name in self.broken or name in self.stages:
            return self.outputs.get(name, Expected.unknown(f"{name} cannot be read"))
        return None

    def _tried(self, key: str, look: Callable[[], Expected]) -> Expected:
        """What is known of something that is no stage, such as a model on the Hub."""

        def tried() -> Expected:
            try:
                return look()
            except Unknown as why:
                return Expected.unknown(str(why))
            except SETTING_ERRORS as error:
                self.wrong[key] = described(error)
                return Expected.unknown(self.wrong[key])

        return once(f"expected of {key}", tried)


def _folder(name: str | float) -> Path | None:
    return Path(name) if isinstance(name, str) and Path(name).is_dir() else None


def reference_faults(stages: list[Stage], broken: Collection[str] = ()) -> Iterator[str]:
    """What is wrong with the names by which stages of a recipe refer to each other.

    Args:
        broken: names of further stages, whose settings cannot be read.
    """
    position = {stage.name: number for number, stage in enumerate(stages)}
    for number, stage in enumerate(stages):
        for reference in references(stage):
            value, reads = reference.value, reference.reads
            key, at = f"{stage.name}.{reference.setting}", position.get(value)
            fitting = [other.name for other in stages if set(kinds(type(other))) & set(reads.kinds)]
            if at is not None and value not in fitting:
                yield f"{key}: {value} is a stage of type {stages[at].stage}, not {reads}"
            elif at is not None and at >= number:
                yield f"{key}: {value} is {'this stage itself' if at == number else 'a later stage: move it up'}"
            elif at is None and value not in broken:
                others = [name for name in fitting if name != stage.name]  # a stage may be called as what it reads
                if _is_misspelt(value, others):
                    yield f"{key}: there is no stage or folder {value!r}: {what_is_meant(value, others)}"


def _is_misspelt(value: str, names: list[str]) -> bool:
    """Whether a plain word, which a hub name may be, is rather the name of a stage with a slip."""
    plain = not set(value) & set("/\\.*~") and value not in WORLDS and not Path(value).exists()
    return plain and not is_cached(value) and most_similar(value, names, cutoff=0.75) is not None


def find_faults(outlook: Outlook, wanted: Collection[str]) -> Iterator[str]:
    """What is wrong with the stages that have not finished.

    Args:
        wanted: names of the stages to run. Of the others, it is looked whether their settings make something.
    """
    for stage in outlook.stages.values():
        if outlook.finished(stage.name):
            continue
        if stage.name in wanted:
            yield from _faults_of_inputs(stage, outlook, wanted)
        if stage.name in outlook.wrong:
            yield _line(stage, "", outlook.wrong[stage.name])
        try:
            problems = stage.problems(outlook.inputs[stage.name]) if stage.name in wanted else ()
            yield from (_line(stage, setting, problem) for setting, problem in problems if problem)
        except Unknown:
            pass
        except SETTING_ERRORS as error:
            if str(error) != outlook.wrong.get(stage.name):
                yield _line(stage, "", str(error))


def _line(stage: Stage, setting: str, problem: str) -> str:
    if problem.startswith(f"{stage.name}."):
        return problem
    key = f"{stage.name}.{setting}" if setting else stage.name
    return f"{key}: {problem.removeprefix(f'{stage.name}: ')}"


def _faults_of_inputs(stage: Stage, outlook: Outlook, wanted: Collection[str]) -> Iterator[str]:
    for reference in references(stage):
        value, key = reference.value, f"{stage.name}.{reference.setting}"
        if value in outlook.stages:
            if value not in wanted and not outlook.finished(value):
                folder = outlook.output_dir / value
                yield f"{key}: the stage {value!r} has not finished: {folder} is not there. Run it first"
        elif value not in outlook.broken and reference.reads.outside:
            problem = _problem_of_outside(reference) or outlook.wrong.get(value)
            yield from [f"{key}: {problem}"] if problem else []
    for name, value in vars(stage).items():
        for setting, arguments in each_value(name, value):
            if isinstance(arguments, DataArguments):
                uncounted = outlook.wrong.get(json.dumps(dump(arguments)))
                problems = [*_problems_of_data(stage, arguments, outlook)] or [f": {uncounted}"] * bool(uncounted)
                yield from (f"{stage.name}.{setting}{problem}" for problem in problems)


def _problem_of_outside(reference: Reference) -> str:
    """Why a reference names neither a model nor the folder of a stage that fits, or nothing."""
    value, wanted = reference.value, reference.reads.kinds
    folder = Path(value)
    if "model" in wanted and (any((folder / name).is_file() for name in MODEL_FILES)):
        return ""
    if not folder.is_dir():
        is_name = "model" in wanted and is_hub_name(value)
        return "" if is_name else f"there is no stage {value!r}, and no such folder"
    if not (folder / MANIFEST).is_file():
        return f"{value} is the folder of neither a model nor a stage: it has no config.json and no {MANIFEST}"
    stage = read_record(folder / MANIFEST, dict).get("stage")
    kind = stage.get("stage") if isinstance(stage, dict) else None
    fits = kind not in STAGES or set(kinds(STAGES[kind])) & set(wanted)
    return "" if fits else f"{value} is the folder of a stage of type {kind}, not {reference.reads}"


def _problems_of_data(stage: Stage, arguments: DataArguments, outlook: Outlook) -> Iterator[str]:
    """What is wrong with a source, after the name of the setting that holds it. No row is read."""
    source, root = arguments.source, arguments.image_root
    if source in outlook.stages or source in outlook.broken:
        for column, made in (("image_column", "image"), ("caption_column", "caption")):
            if source not in outlook.broken and getattr(arguments, column) != made:
                yield f".{column}: {source} makes the column {made}, not {getattr(arguments, column)}"
        return
    if source in WORLDS:
        return
    if root is not None and not Path(root).is_dir():
        yield f".image_root: there is no folder {root}"
    if not is_here(source):
        if missing := missing_data(source):
            yield f".source: {missing}"
        return
    try:
        if source.endswith(".json") and holds_list(source):
            if arguments.split != "train":
                yield f".split: {source} has no split {arguments.split!r}, only train"
        else:
            stage.open_data(as_stream(arguments))
    except SETTING_ERRORS as error:
        yield f": {error}"
        return
    if outlook.data(arguments).pairs == 0:
        yield f".skip: {arguments.skip} leaves no pair of {source}" if arguments.skip else f": {source} has no pairs"
