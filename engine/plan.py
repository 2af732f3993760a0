"""What a run would do, told at once: `--plan`."""

from collections.abc import Collection
from pathlib import Path

from clip_moe.engine.checks import require_same_settings, require_sound
from clip_moe.engine.processes import num_processes
from clip_moe.engine.provenance import CHECKPOINTS, MANIFEST, has_work
from clip_moe.engine.recipe import Recipe
from clip_moe.engine.stage import Stage, references


def plan(recipe: Recipe, stages: Collection[Stage]) -> str:
    """A table of the stages to run, what they read and how far they are. Raises a RecipeError of what is wrong."""
    require_sound(recipe, stages)
    require_same_settings(recipe)
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
    return "goes on" if has_work(partial) and not stage.main_process_only else "to do"


def aligned(table: list[list[str]], left: int) -> list[str]:
    """Lines of a table whose first columns stand at the left of their cells, and the others at the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = zip(row, widths, strict=True)
        lines.append("  ".join(f"{cell:{'<' if at < left else '>'}{width}}" for at, (cell, width) in enumerate(cells)))
    return [line.rstrip() for line in lines]
