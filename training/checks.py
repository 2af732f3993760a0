"""A recipe is checked whole before its first stage runs: all faults at once that the run would meet later."""

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from huggingface_hub.errors import StrictDataclassError

from data.annotations import holds_list, no_split
from data.sources import DataArguments, is_here, once
from data.worlds import WORLDS
from evaluation.tasks import missing_data
from records.files import read_record
from records.local_names import is_hub_name
from records.messages import most_similar, one_line, suggestion
from records.provenance import MANIFEST
from training.estimates import Expected, Unknown, as_stream, count_pairs, is_cached, model_configs
from training.settings import Reads
from training.stages import STAGES
from training.stages.base import Reference, Stage, each_value, expected_output, inherited, kinds, map_inputs, references

# What a wrong setting makes configurations and libraries raise
SETTING_ERRORS = (ValueError, OSError, StrictDataclassError, TypeError, ArithmeticError, LookupError, RuntimeError)
# By which a folder is known to hold a model, or a sentence encoder
MODEL_FILES = ("config.json", "modules.json")


def error_text(error: Exception) -> str:
    """What an error says; of one that is not ours, such as a KeyError, with its kind."""
    text = one_line(error)
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


class Outlook:
    """What is known of the stages of a recipe before they run.

    Args:
        num_processes: of the run.
    """

    def __init__(self, stages: list[Stage], output_dir: str | Path, num_processes: int = 1):
        self.stages, self.output_dir = {stage.name: stage for stage in stages}, Path(output_dir)
        self.inputs: dict[str, SimpleNamespace] = {}
        self.outputs: dict[str, Expected] = {}
        # Stage -> what its settings cannot make; other source -> why it cannot be read
        self.wrong: dict[str, str] = {}
        for stage in stages:
            self.inputs[stage.name], self.outputs[stage.name] = self._expect(stage, num_processes)

    def finished(self, name: str) -> bool:
        return (self.output_dir / name / MANIFEST).is_file()

    def _expect(self, stage: Stage, num_processes: int) -> tuple[SimpleNamespace, Expected]:
        """The expected inputs and output of a stage; a finished stage has its model already."""
        folder, is_finished = self.output_dir / stage.name, self.finished(stage.name)
        is_model = stage.makes_model and is_finished
        inputs = map_inputs(stage, self._look_up)
        inputs.num_processes = num_processes
        try:
            output = expected_output(stage, inputs)
            output = replace(output, configs=model_configs(str(folder))) if is_model else output
        except Unknown as why:
            output = replace(inherited(stage, inputs), configs=str(why))
        except SETTING_ERRORS as error:
            self.wrong[stage.name] = str(error)
            output = replace(inherited(stage, inputs), configs=f"{stage.name} has a fault")
        if not is_finished:
            return inputs, replace(output, folder=None)
        return inputs, replace(output, folder=folder, processor=folder if stage.makes_model else output.processor)

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
            counted = self._tried(str(arguments), lambda: Expected(pairs=count_pairs(arguments)))
            readable = arguments if arguments.source in WORLDS or is_here(arguments.source) else None
            return replace(counted, readable=readable)
        readable = made.folder and replace(arguments, source=str(made.folder))
        pairs = type(made.pairs)(arguments.taken(made.pairs)) if isinstance(made.pairs, int) else made.pairs
        return replace(made, pairs=pairs, readable=readable)

    def _model(self, source: str) -> Expected:
        configs, folder = model_configs(source), _folder(source)
        return Expected(configs, folder=folder, processor=folder, weights=((source, frozenset()),))

    def _stage(self, name: str) -> Expected | None:
        return self.outputs.get(name, Expected.unknown(f"{name} is no earlier stage")) if name in self.stages else None

    def _tried(self, key: str, look: Callable[[], Expected]) -> Expected:
        """What is known of something that is no stage, such as a model on the Hub."""

        def tried() -> Expected:
            try:
                return look()
            except Unknown as why:
                return Expected.unknown(str(why))
            except SETTING_ERRORS as error:
                self.wrong[key] = error_text(error)
                return Expected.unknown(self.wrong[key])

        return once(f"expected of {key}", tried)


def _folder(name: str | float) -> Path | None:
    return Path(name) if isinstance(name, str) and Path(name).is_dir() else None


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
    return f"{key}: {problem}"


def _faults_of_inputs(stage: Stage, outlook: Outlook, wanted: Collection[str]) -> Iterator[str]:
    for reference in references(stage):
        if problem := _problem_of_reference(stage, reference, outlook, wanted):
            yield f"{stage.name}.{reference.setting}: {problem}"
    for name, value in vars(stage).items():
        for setting, arguments in each_value(name, value):
            if isinstance(arguments, DataArguments):
                uncounted = outlook.wrong.get(str(arguments))
                problems = [*_problems_of_data(stage, arguments, outlook)] or [f": {uncounted}"] * bool(uncounted)
                yield from (f"{stage.name}.{setting}{problem}" for problem in problems)


def _problem_of_reference(stage: Stage, reference: Reference, outlook: Outlook, wanted: Collection[str]) -> str:
    """Why a reference names neither a model nor a finished or earlier stage that fits, or nothing."""
    value, reads, names = reference.value, reference.reads, [*outlook.stages]
    fitting = [name for name, other in outlook.stages.items() if set(kinds(type(other))) & set(reads.kinds)]
    if value in outlook.stages:
        if value not in fitting:
            return f"{value} is a stage of type {outlook.stages[value].stage}, not {reads}"
        if names.index(value) >= names.index(stage.name):
            return f"{value} is {'this stage itself' if value == stage.name else 'a later stage: move it up'}"
        if value not in wanted and not outlook.finished(value):
            return f"the stage {value!r} has not finished: {outlook.output_dir / value} is not there. Run it first"
        return ""
    others = [name for name in fitting if name != stage.name]  # a stage may be called as what it reads
    if _is_misspelt(value, others):
        return f"there is no stage or folder {value!r}: {suggestion(value, others)}"
    folder, is_model = Path(value), "model" in reads.kinds
    if not reads.outside or (is_model and any((folder / name).is_file() for name in MODEL_FILES)):
        return outlook.wrong.get(value, "") if reads.outside else ""
    if not folder.is_dir():
        is_name = is_model and is_hub_name(value)
        return outlook.wrong.get(value, "") if is_name else f"there is no stage {value!r}, and no such folder"
    if not (folder / MANIFEST).is_file():
        return f"{value} is the folder of neither a model nor a stage: it has no config.json and no {MANIFEST}"
    made_by = read_record(folder / MANIFEST, dict).get("stage")
    kind = made_by.get("stage") if isinstance(made_by, dict) else None
    if kind in STAGES and not set(kinds(STAGES[kind])) & set(reads.kinds):
        return f"{value} is the folder of a stage of type {kind}, not {reads}"
    return outlook.wrong.get(value, "")


def _problems_of_data(stage: Stage, arguments: DataArguments, outlook: Outlook) -> Iterator[str]:
    """What is wrong with a source, after the name of the setting that holds it. No row is read."""
    source, root = arguments.source, arguments.image_root
    if source in outlook.stages:
        for column, made in (("image_column", "image"), ("caption_column", "caption")):
            if getattr(arguments, column) != made:
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
                yield f".split: {no_split(source, arguments.split, ['train'])}"
        else:
            stage.open_data(as_stream(arguments))
    except SETTING_ERRORS as error:
        yield f": {error}"
        return
    if outlook.data(arguments).pairs == 0:
        yield f".skip: {arguments.skip} leaves no pair of {source}" if arguments.skip else f": {source} has no pairs"
