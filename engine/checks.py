"""Checks a recipe from its settings and local folders alone. `engine.rehearsal` finds the faults that need data or
models."""

from collections.abc import Collection, Mapping
from pathlib import Path

from clip_moe.engine.kinds import KINDS, stage_of_kind
from clip_moe.engine.local_names import is_hub_name
from clip_moe.engine.messages import most_similar, suggestion
from clip_moe.engine.provenance import MANIFEST, Record
from clip_moe.engine.recipe import Recipe, RecipeError
from clip_moe.engine.settings import Settings, Source
from clip_moe.engine.stage import Reference, Stage, each_setting, kinds, references

# Files that mark a folder as a model or a sentence encoder
MODEL_FILES = ("config.json", "modules.json")


def require_same_settings(recipe: Recipe) -> None:
    """Raises a ValueError if a finished stage was made with other settings or another seed. Inputs and data are left to
    the run, which reads them."""
    for stage in recipe.stages:
        folder = Path(recipe.output_dir) / stage.name
        if (folder / MANIFEST).is_file():
            changes = {"stage": stage.compared(), "seed": recipe.seed}
            Record.read(folder).model_copy(update=changes).require_same(folder)


def require_sound(recipe: Recipe, stages: Collection[Stage]) -> None:
    """Raises a RecipeError of all that is wrong with the stages to run that have not finished."""
    done = {one.name for one in recipe.stages if (Path(recipe.output_dir) / one.name / MANIFEST).is_file()}
    there = done | {stage.name for stage in stages}
    to_do = [stage for stage in stages if stage.name not in done]
    kinds_of = {one.name: [*kinds(type(one)), one.stage] for one in recipe.stages if one.name in recipe.stage_names}
    faults = [
        (f"{stage.name}.{reference.setting}", _fault_of_reference(stage.name, reference, kinds_of, there))
        for stage in to_do
        for reference in references(stage)
        if not reference.is_drawn
    ]
    for stage in to_do:
        for setting, value in [("", stage), *each_setting(stage)]:
            if isinstance(value, Source) and value.is_drawn and value.source in kinds_of:
                faults.append(
                    (f"{stage.name}.{setting}.source", f"{value.source} is built in: name the stage otherwise")
                )
            elif isinstance(value, Settings) and not (isinstance(value, Source) and value.source in kinds_of):
                own = value.faults(Path(recipe.output_dir))
                faults += [(".".join(filter(None, (stage.name, setting, part))), fault) for part, fault in own]
    told = [f"{setting}: {fault}" for setting, fault in faults if fault]
    if told:
        raise RecipeError.of(recipe.title, told)


def _fault_of_reference(
    name: str, reference: Reference, kinds_of: Mapping[str, Collection[str]], there: Collection[str]
) -> str | None:
    """What is wrong with a reference; None: it names a suitable model, folder or earlier stage.

    Args:
        name: the stage that has it.
        kinds_of: name of each stage of the recipe, in their order -> what it is.
        there: the stages that have finished, or are to run.
    """
    value, reads, names = reference.value, reference.reads, [*kinds_of]
    is_model = "model" in reads.kinds
    if value in kinds_of:
        if not set(kinds_of[value]) & set(reads.kinds):
            return f"{value} is a stage of type {kinds_of[value][-1]}, not {reads}"
        if names.index(value) >= names.index(name):
            return f"{value} is {'this stage itself' if value == name else 'a later stage: move it up'}"
        return None if value in there else f"the stage {value!r} has not finished. Run it first"
    fitting = [other for other in names if other != name and set(kinds_of[other]) & set(reads.kinds)]
    folder = Path(value)
    is_word = not set(value) & set("/\\.*~") and not folder.exists()
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
