"""What can be wrong with a recipe that its settings and the folders here tell at once. What data and models make of it
`training.rehearsal` shows."""

from collections.abc import Collection, Iterator
from pathlib import Path

from data.arguments import DataArguments
from data.local_data import missing_data
from data.worlds import WORLDS
from evaluation.own_task import OwnTask
from records.files import read_record
from records.local_names import is_hub_name
from records.messages import most_similar, suggestion
from records.provenance import MANIFEST
from training.recipe import Recipe, RecipeError
from training.stages import KINDS, stage_of_kind
from training.stages.base import Reference, Stage, each_value, kinds, references
from training.train_settings import MeasuredTasks

# By which a folder is known to hold a model, or a sentence encoder
MODEL_FILES = ("config.json", "modules.json")


def require_sound(recipe: Recipe, stages: Collection[Stage]) -> None:
    """Raises a RecipeError of all that is wrong with the stages to run: see `find_faults`."""
    faults = [*find_faults(recipe, {stage.name for stage in stages})]
    if faults:
        raise RecipeError.of(recipe.title, faults)


def find_faults(recipe: Recipe, wanted: Collection[str]) -> Iterator[str]:
    """`stage.setting: what is wrong`, of the stages to run that have not finished.

    Args:
        wanted: names of the stages to run.
    """
    output_dir = Path(recipe.output_dir)
    for stage in recipe.stages:
        if stage.name not in wanted or (output_dir / stage.name / MANIFEST).is_file():
            continue
        for reference in references(stage):
            if problem := _problem_of_reference(stage, reference, recipe, wanted):
                yield f"{stage.name}.{reference.setting}: {problem}"
        if isinstance(stage, MeasuredTasks):
            yield from _problems_of_tasks(f"{stage.name}.", stage)
        for name, value in vars(stage).items():
            for setting, arguments in each_value(name, value):
                if isinstance(arguments, MeasuredTasks):
                    yield from _problems_of_tasks(f"{stage.name}.{setting}.", arguments)
                if isinstance(arguments, DataArguments):
                    problems = _problems_of_data(arguments, {one.name for one in recipe.stages}, output_dir)
                    yield from (f"{stage.name}.{setting}{problem}" for problem in problems)


def _problem_of_reference(stage: Stage, reference: Reference, recipe: Recipe, wanted: Collection[str]) -> str:
    """Why a reference names neither a model nor a finished or earlier stage that fits, or nothing."""
    value, reads, stages = reference.value, reference.reads, {one.name: one for one in recipe.stages}
    fitting = [name for name, one in stages.items() if set(kinds(type(one))) & set(reads.kinds)]
    names, is_model = [*stages], "model" in reads.kinds
    if value in stages:
        if value not in fitting:
            return f"{value} is a stage of type {stages[value].stage}, not {reads}"
        if names.index(value) >= names.index(stage.name):
            return f"{value} is {'this stage itself' if value == stage.name else 'a later stage: move it up'}"
        folder = Path(recipe.output_dir) / value
        if value not in wanted and not (folder / MANIFEST).is_file():
            return f"the stage {value!r} has not finished: {folder} is not there. Run it first"
        return ""
    others = [name for name in fitting if name != stage.name]  # a stage may be called as what it reads
    is_word = not set(value) & set("/\\.*~") and value not in WORLDS and not Path(value).exists()
    if is_word and most_similar(value, others, cutoff=0.75) is not None:  # which a hub name may be, too
        return f"there is no stage or folder {value!r}: {suggestion(value, others)}"
    folder = Path(value)
    if not reads.outside or (is_model and any((folder / name).is_file() for name in MODEL_FILES)):
        return ""
    if not folder.is_dir():
        is_name = is_model and is_hub_name(value)
        return "" if is_name else f"there is no stage {value!r}, and no such folder"
    if not (folder / MANIFEST).is_file():
        return f"{value} is the folder of neither a model nor a stage: it has no config.json and no {MANIFEST}"
    made_by = read_record(folder / MANIFEST, dict).get("stage")
    kind = made_by.get("stage") if isinstance(made_by, dict) else None
    if kind in KINDS and not set(kinds(stage_of_kind(kind))) & set(reads.kinds):
        return f"{value} is the folder of a stage of type {kind}, not {reads}"
    return ""


def _problems_of_data(arguments: DataArguments, stages: Collection[str], output_dir: Path) -> Iterator[str]:
    """What is wrong with a source, after the name of the setting that holds it."""
    source, root = arguments.source, arguments.image_root
    if source in stages:
        for column, made in (("image_column", "image"), ("caption_column", "caption")):
            if getattr(arguments, column) != made:
                yield f".{column}: {source} makes the column {made}, not {getattr(arguments, column)}"
        return
    if root is not None and not Path(root).is_dir():
        yield f".image_root: there is no folder {root}"
    if missing := missing_data(source):
        yield f".source: {missing}"
    elif Path(source).is_dir() and output_dir.resolve().is_relative_to(Path(source).resolve()):
        yield f".source: {output_dir} lies inside {source}, all of whose files are the data: choose another output"


def _problems_of_tasks(where: str, measured: MeasuredTasks) -> Iterator[str]:
    """Own data of tasks that are not there."""
    for number, task in enumerate(measured.tasks):
        if isinstance(task, OwnTask) and (missing := missing_data(task.dataset)):
            yield f"{where}tasks.{number}.dataset: {missing}"
