"""What a run will take, told before it begins: `--plan`. Nothing is computed or written."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from data.sources import opened_once
from records.processes import is_first_process, num_processes
from records.provenance import CHECKPOINTS, MANIFEST, Record
from training.checks import SETTING_ERRORS, Outlook, error_text, find_faults
from training.estimates import AtMost, Unknown, parameters
from training.recipe import Recipe
from training.recipe_file import RecipeError
from training.runner import comparable, has_work, require_same_record, wanted_stages
from training.settings import dump
from training.stages.base import Stage, references
from training.training_state import latest_checkpoint

NUMBERS = (
    *("parameters", "activated", "trainable", "steps", "samples"),
    *("memory", "memory a pair", "disk", "disk at most"),
)
COUNTS = NUMBERS[:3]
BYTES, AT_ONCE = NUMBERS[5:], NUMBERS[5:7]


@dataclass(frozen=True)
class Row:
    """What is known of a stage.

    Args:
        state: done, to do, the step that it goes on from, or that its folder was made otherwise.
        reads: the references of its settings.
        numbers: by the names of `NUMBERS`; a text: why it is unknown. Those that a stage has not are left out.
        notes: see `Stage.notes`.
    """

    name: str
    kind: str
    state: str
    reads: list[str]
    numbers: dict[str, int | str]
    notes: list[str]


def print_plan(recipe: Recipe, only: Iterable[str] | None = None, experts: Iterable[int] | None = None) -> None:
    """Print what a run would do, and raise what would keep it from beginning; see `training.runner.run_recipe`."""
    rows, faults = plan(recipe, wanted_stages(recipe, only, experts), num_processes())
    if is_first_process():
        print(render(recipe.title, rows, num_processes()), flush=True)
    if faults:
        raise RecipeError(recipe.title, faults)


def plan(recipe: Recipe, stages: Iterable[Stage], num_processes: int) -> tuple[list[Row], list[str]]:
    """The stages of a run, and the faults that would keep it from beginning.

    Args:
        stages: those to run.
    """
    stages, rows = list(stages), []
    with opened_once():
        outlook = Outlook(recipe.stages, recipe.output_dir, num_processes)
        faults = [*find_faults(outlook, {stage.name for stage in stages})]
        for stage in stages:
            errors = [*_changed_settings(stage, recipe, outlook.output_dir)]
            faults += [f"{stage.name}: {error}" for error in errors]
            row = _row(stage, outlook)
            try:
                row.notes.extend(stage.notes(outlook.inputs[stage.name]) if row.state != "done" else ())
            except ValueError as error:
                faults.append(str(error))
            rows.append(replace(row, state="made otherwise") if errors else row)
    return rows, faults


def _changed_settings(stage: Stage, recipe: Recipe, output_dir: Path) -> Iterable[ValueError]:
    """What keeps a folder that is there from being used, as far as settings tell: data and inputs are not read."""
    for folder in (output_dir / stage.name, output_dir / f"{stage.name}.partial"):
        try:
            if (folder / MANIFEST).is_file() and (has_work(folder) or folder.suffix != ".partial"):
                asked = {"stage": comparable(dump(stage)), "seed": recipe.seed}
                require_same_record(folder, Record.read(folder).model_copy(update=asked), None)
        except ValueError as error:
            yield error


def _row(stage: Stage, outlook: Outlook) -> Row:
    inputs, output = outlook.inputs[stage.name], outlook.outputs[stage.name]
    reads = [reference.value for reference in references(stage)]
    state = _state(stage, outlook)
    asked: dict[str, Callable[[], int]] = {}
    if stage.makes_model:
        asked["parameters"] = lambda: parameters(output.known_configs)["total"]
        asked["activated"] = lambda: parameters(output.known_configs)["activated"]
    if state != "done":
        cost = stage.cost(inputs)
        asked |= {"disk at most": cost["disk"]} | cost
    numbers = {name: number for name, ask in asked.items() if (number := _number_or_reason(ask)) != 0}
    return Row(stage.name, stage.stage, state, list(dict.fromkeys(reads)), numbers, [])


def _number_or_reason(ask: Callable[[], int]) -> int | str:
    try:
        return ask()
    except Unknown as why:
        return str(why)
    except SETTING_ERRORS as error:
        return error_text(error)


def _state(stage: Stage, outlook: Outlook) -> str:
    if outlook.finished(stage.name):
        return "done"
    partial = outlook.output_dir / f"{stage.name}.partial"
    latest = latest_checkpoint(partial / CHECKPOINTS)
    if latest is not None:
        return f"goes on from step {int(latest.name.removeprefix('step-'))}"
    return "goes on" if has_work(partial) else "to do"


def render(title: str, rows: list[Row], num_processes: int) -> str:
    """Two tables, of what the stages are and of what they take; the reasons for unknown numbers stand below."""
    reasons: list[str] = []
    first = [["stage", "kind", "state", "reads"]]
    first += [[row.name, row.kind, row.state, ", ".join(row.reads) or "-"] for row in rows]
    second = [["stage", *NUMBERS]]
    second += [[row.name, *(_numbered(name, row.numbers.get(name, 0), reasons) for name in NUMBERS)] for row in rows]
    second.append(["in all", *(_sum(name, rows) for name in NUMBERS)])
    notes = [f"unknown ({number}): {reason}" for number, reason in enumerate(reasons, 1)]
    notes += [f"{row.name}: {note}" for row in rows for note in row.notes]
    return "\n".join(
        [
            f"{title}: {len(rows)} stages on {num_processes} process{'es' if num_processes > 1 else ''}",
            "",
            *_aligned(first, left=4),
            "",
            *_aligned(second, left=1),
            *([""] if notes else []),
            *notes,
            "",
            "memory: the most that a process takes for weights, gradients, moments, activations, images and features, "
            "in float32; moments of adamw_8bit in 8 bits",
            f"peak: on a CPU, a process holds this memory and {_formatted('memory', held_before())} of Python and its "
            "libraries (measured now)",
            "memory a pair: of it, for each pair that a process computes at a time; half in bf16",
            "disk: of the finished stage; disk at most: while it runs, with its checkpoints",
        ]
    )


def held_before() -> int:
    """Bytes that a process holds when it has imported and looked at everything, but computed nothing: this one."""
    return psutil.Process().memory_info().rss


def _numbered(name: str, value: int | str, reasons: list[str]) -> str:
    if isinstance(value, int):
        return cell(name, value)
    if value not in reasons:
        reasons.append(value)
    return f"unknown ({reasons.index(value) + 1})"


def cell(name: str, value: int | str) -> str:
    """A number of a row as it is printed."""
    if isinstance(value, str):
        return "unknown"
    return ("≤ " if isinstance(value, AtMost) else "") + _formatted(name, value)


def _formatted(name: str, value: int) -> str:
    if value == 0:
        return "-"
    if name in BYTES:
        return f"{value / 1e9:,.2f} GB" if value >= 1e9 else f"{value / 1e6:,.2f} MB"
    if name in COUNTS:
        return f"{value / 1e6:,.2f} M" if value >= 1e6 else f"{value / 1e3:,.2f} k"
    return f"{value:,}"


def _sum(name: str, rows: list[Row]) -> str:
    """The sum over all stages to do; the largest memory. Disk is fullest while a stage runs, beside those before it."""
    if name in COUNTS:
        return "-"
    values = [row.numbers[name] for row in rows if name in row.numbers]
    numbers = [value for value in values if not isinstance(value, str)]
    if name == "disk at most":
        sizes = [[_known(row.numbers.get(column, 0)) for column in ("disk", name)] for row in rows]
        total = max((sum(disk for disk, _ in sizes[:at]) + most for at, (_, most) in enumerate(sizes)), default=0)
    else:
        total = max(numbers, default=0) if name in AT_ONCE else sum(numbers)
    bound = "≤ " if any(isinstance(value, AtMost) for value in numbers) else ""
    if len(numbers) == len(values):
        return bound + _formatted(name, total)
    return f"{bound}{_formatted(name, total)} + unknown" if total else "unknown"


def _known(value: int | str) -> int:
    return 0 if isinstance(value, str) else value


def _aligned(table: list[list[str]], left: int) -> list[str]:
    """Lines of a table whose first columns stand at the left of their cells, and the others at the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = zip(row, widths, strict=True)
        lines.append("  ".join(f"{cell:{'<' if at < left else '>'}{width}}" for at, (cell, width) in enumerate(cells)))
    return [line.rstrip() for line in lines]
