"""A recipe checked whole before its first stage runs: all faults at once, each of which a run would meet later."""

import dataclasses
import difflib
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

from huggingface_hub.errors import StrictDataclassError

from conversion.files import read_record
from conversion.local_names import is_hub_name
from conversion.messages import what_is_meant
from conversion.provenance import MANIFEST
from data.annotations import TABLES, holds_list
from data.sources import BUILDERS, DataArguments, is_here, is_saved
from data.worlds import WORLDS
from training.expected import Expected, Unknown, count_pairs, is_cached, model_configs
from training.settings import Reads, dump
from training.stages import STAGES
from training.stages.base import Reference, Stage, each_value, kinds, map_inputs, references

# What a wrong setting makes configurations and libraries raise
SETTING_ERRORS = (
    ValueError,
    OSError,
    StrictDataclassError,
    TypeError,
    ArithmeticError,
    LookupError,
    RuntimeError,
)
# By which a folder is known to hold a model, or a sentence encoder
MODEL_FILES = ("config.json", "modules.json")


class RecipeError(ValueError):
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
        broken: names of further stages, whose settings cannot be read.
        thorough: whether to ask the Hub for configurations, and to read a whole .json to count its pairs.
    """

    def __init__(
        self, stages: list[Stage], output_dir: str | Path, broken: Collection[str] = (), thorough: bool = False
    ):
        self.stages = {stage.name: stage for stage in stages}
        self.output_dir, self.broken, self.thorough = Path(output_dir), broken, thorough
        self.inputs: dict[str, SimpleNamespace] = {}
        self.outputs: dict[str, Expected] = {}
        # Of a stage: what its settings cannot make. Of what is no stage: why it cannot be read
        self.wrong: dict[str, str] = {}
        self._known: dict[str, Expected] = {}
        for stage in stages:
            self.inputs[stage.name] = map_inputs(stage, self._look_up)
            self.outputs[stage.name] = self._output(stage)

    def finished(self, name: str) -> bool:
        return (self.output_dir / name / MANIFEST).is_file()

    def _output(self, stage: Stage) -> Expected:
        inputs = self.inputs[stage.name]
        try:
            if stage.makes_model and self.finished(stage.name):
                configs = model_configs(str(self.output_dir / stage.name))
            else:
                found = stage.output_config(inputs)
                configs = found if isinstance(found, tuple) else (found,)
        except Unknown as why:
            configs = str(why)
        except SETTING_ERRORS as error:
            self.wrong[stage.name] = str(error)
            configs = f"{stage.name} has a fault"
        return Expected(configs, _pairs(inputs))

    def _look_up(self, value: str | DataArguments, reads: Reads) -> Expected:
        if isinstance(value, DataArguments):
            made = self._stage(value.source)
            if made is None:
                return self._once(json.dumps(dump(value)), lambda: Expected(pairs=count_pairs(value, self.thorough)))
            if isinstance(made.pairs, int):
                return dataclasses.replace(made, pairs=type(made.pairs)(value.taken(made.pairs)))
            return made
        if value in reads.literals:
            return Expected()
        if "model" not in reads.kinds:
            return self._stage(value) or Expected()
        return self._stage(value) or self._once(value, lambda: Expected(model_configs(value, self.thorough)))

    def _stage(self, name: str) -> Expected | None:
        if name in self.broken or name in self.stages:
            return self.outputs.get(name, Expected.unknown(f"{name} cannot be read"))
        return None

    def _once(self, key: str, look: Callable[[], Expected]) -> Expected:
        """What is known of something that is no stage, such as a model on the Hub: it is looked up once."""
        if key not in self._known:
            try:
                self._known[key] = look()
            except Unknown as why:
                self._known[key] = Expected.unknown(str(why))
            except SETTING_ERRORS as error:
                self.wrong[key] = str(error)
                self._known[key] = Expected.unknown("see the faults")
        return self._known[key]


def _pairs(inputs: SimpleNamespace) -> int | str:
    """How many pairs a stage's output is of: those of its data, else of what it reads. A text: why it is unknown."""
    data = getattr(inputs, "data", None)
    sources = [data] if data else [one for one in vars(inputs).values() if isinstance(one, Expected)]
    if hasattr(inputs, "sources"):
        return "only mixing its sources tells"
    numbers = [source.pairs for source in sources]
    return next((number for number in numbers if isinstance(number, int)), next(iter(numbers), "no data"))


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
    return plain and not is_cached(value) and bool(difflib.get_close_matches(value, names, n=1, cutoff=0.75))


def find_faults(outlook: Outlook, wanted: Collection[str], num_processes: int) -> Iterator[str]:
    """What is wrong with the stages that have not finished.

    Args:
        wanted: names of the stages to run. What may be gone, such as data, is looked for of these alone.
        num_processes: of the run.
    """
    for stage in outlook.stages.values():
        if outlook.finished(stage.name):
            continue
        if stage.name in wanted:
            yield from _faults_of_inputs(stage, outlook, wanted)
        if stage.name in outlook.wrong:
            yield _line(stage, "", outlook.wrong[stage.name])
        problems = stage.problems(outlook.inputs[stage.name], num_processes)
        try:
            for setting, problem in problems:
                yield _line(stage, setting, problem)
        except Unknown:
            pass
        except SETTING_ERRORS as error:
            if not stage.makes_model or str(error) != outlook.wrong.get(stage.name):
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
                problems = _problems_of_data(stage, arguments, outlook)
                yield from (f"{stage.name}.{setting}{problem}" for problem in problems)
    yield from (_line(stage, *problem) for problem in stage.data_problems())


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
        if Path(source).suffix in (*BUILDERS, *TABLES, ".json") or not is_hub_name(source):
            yield f".source: there is no file or folder {source}"
        return
    try:
        if source.endswith(".json") and holds_list(source):
            if arguments.split != "train":
                yield f".split: {source} has no split {arguments.split!r}, only train"
        else:
            # Of `train[:10%]` and `train+test`, a stream takes the first name; all have been looked for
            split = arguments.split if is_saved(source) else arguments.split.partition("+")[0].partition("[")[0].strip()
            changes = {
                "streaming": True,
                "indexed": False,
                "in_memory": False,
                "skip": None,
                "num_samples": None,
                "split": split,
            }
            stage.open_data(dataclasses.replace(arguments, **changes))
    except SETTING_ERRORS as error:
        yield f": {error}"
