"""Checks a recipe from its settings and local folders alone. `engine.rehearsal` finds the faults that need data or
models."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from clip_moe.data.arguments import DataArguments
from clip_moe.data.local_data import missing_data
from clip_moe.data.worlds import is_world
from clip_moe.engine.kinds import KINDS, stage_of_kind
from clip_moe.engine.local_names import is_hub_name
from clip_moe.engine.messages import most_similar, suggestion
from clip_moe.engine.provenance import MANIFEST, Record
from clip_moe.engine.recipe import Recipe, RecipeError
from clip_moe.engine.settings import Reads, dump
from clip_moe.engine.stage import Stage, each_setting, kinds, references
from clip_moe.evaluation.own_task import OwnTask, Wanted
from clip_moe.training.train_settings import MeasuredTasks

# Files that mark a folder as a model or a sentence encoder
MODEL_FILES = ("config.json", "modules.json")


# How often something is logged or saved, how data is read ahead and what is compiled do not change what is computed.
NOT_COMPARED = {"logging_steps", "save_steps", "save_total_limit", "num_workers", "torch_compile"}


def require_same_settings(recipe: Recipe) -> None:
    """Raises a ValueError if a finished stage was made with other settings or another seed. Inputs and data are left to
    the run, which reads them."""
    for stage in recipe.stages:
        folder = Path(recipe.output_dir) / stage.name
        if (folder / MANIFEST).is_file():
            changes = {"stage": comparable(dump(stage)), "seed": recipe.seed}
            Record.read(folder).model_copy(update=changes).require_same(folder)


def comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a stage, or of its data, without those of `NOT_COMPARED`; but workers of a stream settle its order,
    and scores while training may settle which model is kept."""
    left_out = NOT_COMPARED - ({"num_workers"} if settings.get("streaming") else set())
    evaluation = settings.get("evaluation")
    if not (isinstance(evaluation, dict) and evaluation.get("keep_best")):
        left_out |= {"evaluation"}
    compared = {key: value for key, value in settings.items() if key not in left_out}
    if isinstance(compared.get("data"), dict):
        compared["data"] = comparable(compared["data"])
    if isinstance(compared.get("sources"), list):  # a mixture's
        compared["sources"] = [comparable(source) for source in compared["sources"]]
    return compared


def require_sound(recipe: Recipe, stages: Collection[Stage]) -> None:
    """Raises a RecipeError of all that is wrong with the stages to run that have not finished."""
    done = {one.name for one in recipe.stages if (Path(recipe.output_dir) / one.name / MANIFEST).is_file()}
    there = done | {stage.name for stage in stages}
    to_do = [stage for stage in stages if stage.name not in done]
    kinds_of = {one.name: [*kinds(type(one)), one.stage] for one in recipe.stages if one.name in recipe.stage_names}
    read = [(stage.name, *reference) for stage in to_do for reference in references(stage)]
    held = [(stage.name, *setting) for stage in to_do for setting in [("", stage), *each_setting(stage)]]
    faults = [
        (f"{name}.{setting}", _fault_of_reference(name, value, reads, kinds_of, there))
        for name, setting, value, reads in read
    ]
    for name, setting, value in held:
        if isinstance(value, DataArguments) and value.source not in kinds_of:
            faults += [
                (f"{name}.{setting}.{part}", fault) for part, fault in _faults_of_data(value, Path(recipe.output_dir))
            ]
        if isinstance(value, MeasuredTasks):
            tasks = f"{name}.{setting}.tasks".replace("..", ".")
            own = [(number, task) for number, task in enumerate(value.tasks) if isinstance(task, OwnTask)]
            faults += [(f"{tasks}.{number}.dataset", missing_data(task.dataset)) for number, task in own]
            faults.append((tasks, _fault_of_names(value.tasks)))
    told = [f"{setting}: {fault}" for setting, fault in faults if fault]
    if told:
        raise RecipeError.of(recipe.title, told)


def _fault_of_reference(
    name: str, value: str, reads: Reads, kinds_of: Mapping[str, Collection[str]], there: Collection[str]
) -> str | None:
    """What is wrong with a reference; None: it names a suitable model, folder or earlier stage.

    Args:
        name, value: the stage, and what it names.
        kinds_of: name of each stage of the recipe, in their order -> what it is.
        there: the stages that have finished, or are to run.
    """
    names, is_model = [*kinds_of], "model" in reads.kinds
    if value in kinds_of:
        if not set(kinds_of[value]) & set(reads.kinds):
            return f"{value} is a stage of type {kinds_of[value][-1]}, not {reads}"
        if names.index(value) >= names.index(name):
            return f"{value} is {'this stage itself' if value == name else 'a later stage: move it up'}"
        return None if value in there else f"the stage {value!r} has not finished. Run it first"
    fitting = [other for other in names if other != name and set(kinds_of[other]) & set(reads.kinds)]
    folder = Path(value)
    is_word = not set(value) & set("/\\.*~") and not is_world(value) and not folder.exists()
    if is_word and most_similar(value, fitting, cutoff=0.75) is not None:  # which a hub name may be, too
        return f"there is no stage or folder {value!r}: {suggestion(value, fitting)}"
    if not reads.outside or (is_model and any((folder / file).is_file() for file in MODEL_FILES)):
        return None
    if not folder.is_dir():
        return None if is_model and is_hub_name(value) else f"there is no stage {value!r}, and no such folder"
    if not (folder / MANIFEST).is_file():
        return f"{value} is the folder of neither a model nor a stage: it has no config.json and no {MANIFEST}"
    kind = Record.read(folder).stage.get("stage")
    if kind in KINDS and not set(kinds(stage_of_kind(kind))) & set(reads.kinds):
        return f"{value} is the folder of a stage of type {kind}, not {reads}"
    return None


def _fault_of_names(tasks: Collection[Wanted]) -> str | None:
    from clip_moe.evaluation.tasks import require_tasks  # imports `datasets`, for a recipe that measures alone

    try:
        require_tasks(tasks)
    except ValueError as error:
        return str(error)


def _faults_of_data(data: DataArguments, output_dir: Path) -> Iterator[tuple[str, str | None]]:
    """Settings of data, and what is wrong with them."""
    if data.image_root is not None and not Path(data.image_root).is_dir():
        yield "image_root", f"there is no folder {data.image_root}"
    yield "source", missing_data(data.source)
    if Path(data.source).is_dir() and output_dir.resolve().is_relative_to(Path(data.source).resolve()):
        yield (
            "source",
            f"{output_dir} lies inside {data.source}, all of whose files are the data: choose another output",
        )
