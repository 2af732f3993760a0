"""A recipe before it runs: which stages will, its faults as far as settings and local folders tell, and `--plan`.
`clip_moe.engine.rehearsal` finds the faults that need data or models."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from clip_moe.engine.kinds import FORMER, KINDS, stage_of_kind
from clip_moe.engine.local_names import is_hub_name, output_inside
from clip_moe.engine.messages import most_similar, suggestion
from clip_moe.engine.program import num_processes
from clip_moe.engine.provenance import CHECKPOINTS, MANIFEST, Record, goes_on
from clip_moe.engine.recipe import Recipe, RecipeError
from clip_moe.engine.settings import Settings, Source
from clip_moe.engine.stage import Reference, Stage, each_setting, kinds, references

# Files that mark a folder as a model or a sentence encoder
MODEL_FILES = ("config.json", "modules.json")


def wanted_stages(recipe: Recipe, only: Iterable[str] | None, experts: Iterable[int] | None) -> list[Stage]:
    """The stages to run, in their order; see `run_recipe`."""
    stages = {stage.name: stage for stage in recipe.stages}
    numbers = {name: stage.expert_number for name, stage in stages.items() if stage.expert_number is not None}
    for kind, given, known in (("stage", only, stages), ("expert", experts, {*numbers.values()})):
        if unknown := sorted({*(given or ())} - {*known}):
            unknown, known = ", ".join(map(str, unknown)), ", ".join(map(str, known)) or "none"
            raise ValueError(f"the recipe has no {kind} {unknown}; it has {known}")
    wanted = {*stages}
    if experts is not None:
        chosen = [name for name, number in numbers.items() if number in experts]
        wanted, waiting = set(), list(chosen)
        while waiting:  # all that these need, but other experts
            name = waiting.pop()
            if name in stages and name not in wanted and (name in chosen or name not in numbers):
                wanted.add(name)
                waiting += [reference.value for reference in references(stages[name])]
    return [stage for stage in recipe.stages if stage.name in wanted and (only is None or stage.name in only)]


def require_sound(recipe: Recipe, stages: Collection[Stage]) -> None:
    """Raises a RecipeError of all that is wrong with the stages to run that have not finished, and a ValueError if a
    finished stage was made with other settings. Inputs and data are left to the run, which reads them."""
    output_dir = Path(recipe.output_dir)
    done = {stage.name: stage for stage in recipe.stages if (output_dir / stage.name / MANIFEST).is_file()}
    there = {*done, *(stage.name for stage in stages)}
    named = [stage for stage in recipe.stages if stage.name in recipe.stage_names]
    kinds_of = {stage.name: [*kinds(type(stage)), stage.stage] for stage in named}
    faults = []
    for stage in stages:
        if stage.name in done:
            continue
        for reference in references(stage):
            fault = _fault_of_reference(stage.name, reference, kinds_of, there)
            if fault is None and reference.value not in kinds_of and "model" in reference.reads.kinds:
                fault = output_inside(output_dir / stage.name, reference.value)
            faults.append((stage, reference.setting, fault))
        for setting, value in each_setting(stage):
            if isinstance(value, Settings) and not (isinstance(value, Source) and value.source in kinds_of):
                own = value.faults(output_dir)
                faults += [(stage, ".".join(filter(None, (setting, part))), fault) for part, fault in own]
    if texts := [f"{stage.name}.{setting}: {fault}" for stage, setting, fault in faults if fault]:
        raise RecipeError.of(recipe.title, texts)
    run = {"seed": recipe.seed} | ({"mixed_precision": recipe.mixed_precision} if recipe.mixed_precision else {})
    for name, stage in done.items():
        before = Record.read(output_dir / name)
        before.require_same(before.model_copy(update=run | {"stage": stage.compared()}), output_dir / name)


def _fault_of_reference(
    name: str, reference: Reference, kinds_of: Mapping[str, Collection[str]], there: Collection[str]
) -> str | None:
    """The fault of a reference; None: it names a suitable model, folder or earlier stage.

    Args:
        name: the stage that has it.
        kinds_of: name of each stage of the recipe, in their order -> its kinds.
        there: the stages that have finished, or are to run.
    """
    value, reads, names = reference.value, reference.reads, [*kinds_of]
    if reference.is_drawn:
        return f"{value} is built in: rename the stage" if value in kinds_of else None
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
    if kind in FORMER:
        return f"{value} was made by a stage of the former kind {kind}: make it again with {FORMER[kind]}"
    if kind in KINDS and not set(kinds(stage_of_kind(kind))) & set(reads.kinds):
        return f"{value} is the folder of a stage of type {kind}, not {reads}"
    return None


def plan(recipe: Recipe, stages: Collection[Stage]) -> str:
    """A table of the stages to run, what they read and how far they are. Raises as `require_sound` does."""
    require_sound(recipe, stages)
    rows = [["stage", "kind", "state", "reads"]]
    for stage in stages:
        reads = dict.fromkeys(reference.value for reference in references(stage))
        rows.append([stage.name, stage.stage, state(stage, Path(recipe.output_dir)), ", ".join(reads) or "-"])
    processes = f"{num_processes()} process{'es' if num_processes() > 1 else ''}"
    return "\n".join([f"{recipe.title}: {len(stages)} stages on {processes}", "", *aligned(rows, left=4)])


def state(stage: Stage, output_dir: Path) -> str:
    """How far a stage is."""
    if (output_dir / stage.name / MANIFEST).is_file():
        return "done"
    partial = output_dir / f"{stage.name}.partial"
    steps = [path.name for path in (partial / CHECKPOINTS).glob("step-*") if path.suffix != ".partial"]
    if steps:
        return f"goes on from step {int(max(steps).removeprefix('step-'))}"
    return "goes on" if goes_on(stage, partial) else "to do"


def aligned(table: list[list[str]], left: int) -> list[str]:
    """Lines of a table whose first `left` columns are aligned to the left, and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = zip(row, widths, strict=True)
        lines.append("  ".join(f"{cell:{'<' if at < left else '>'}{width}}" for at, (cell, width) in enumerate(cells)))
    return [line.rstrip() for line in lines]
