"""Whether a recipe will work, and what it will take: `--rehearse`.

The stages themselves run, with the real model and the real batch of a process, on few samples and for two steps, each
reading what the one before made. They write into a folder that is removed at the end. Finished stages are read as they
are. All figures are measured.
"""

import contextlib
import dataclasses
import gc
import io
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

from clip_moe.engine.context import Context
from clip_moe.engine.files import locked
from clip_moe.engine.kinds import KINDS, stage_of_kind
from clip_moe.engine.plan import aligned, require_sound
from clip_moe.engine.program import in_words, peak_memory, reset_peak_memory
from clip_moe.engine.provenance import MANIFEST, Record
from clip_moe.engine.recipe import Recipe
from clip_moe.engine.runner import GO_ON, Runner, stage_errors
from clip_moe.engine.settings import Source
from clip_moe.engine.stage import Cost, Reference, Stage, each_setting, references

# Samples of a recipe that trains nothing
FEW = 256
LEGEND = """

memory: the most that a process held, on a GPU in tensors, on a CPU with Python and its libraries
disk: the stage's folder, with one checkpoint if it writes any
time: excludes loading and evaluation during training; an upper bound for stages that only read pairs
-: no estimate (evaluation, clustering, mixtures, epochs of one cluster)"""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A stage in a rehearsal.

    Args:
        seconds: the rehearsal's own.
        memory: bytes at their peak.
        cost: the estimate of the real run.
    """

    seconds: float
    memory: int
    cost: Cost


def rehearse(recipe: Recipe, stages: Collection[Stage], batch_size: int | None = None) -> str:
    """Rehearse stages, and return a table of what a run of them takes.

    Args:
        batch_size: samples in the batch of a process, in place of the real number.

    Raises:
        The error of a stage, with its name. Nothing is kept.
    """
    measured = measure_stages(recipe, stages, batch_size)
    rows = [["stage", "rehearsed in", "a step", "steps", "memory", "disk", "time"]]
    for name, stage in measured.items():
        cost = stage.cost
        step = "-" if cost.step is None else f"{cost.step:.3g} s"
        steps = "-" if cost.steps is None else f"{cost.steps:,}"
        disk = "-" if cost.disk is None else in_words(cost.disk)
        whole = "-" if cost.seconds is None else _clock(cost.seconds)
        rows.append([name, f"{stage.seconds:.1f} s", step, steps, in_words(stage.memory), disk, whole])
    seconds = sum(stage.seconds for stage in measured.values())
    memory = max((stage.memory for stage in measured.values()), default=0)
    disk = sum(stage.cost.disk or 0 for stage in measured.values())
    whole = sum(stage.cost.seconds or 0 for stage in measured.values())
    rows.append(["in all", f"{seconds:.1f} s", "", "", in_words(memory), in_words(disk), _clock(whole)])
    return "\n".join(aligned(rows, left=1)) + LEGEND


def _clock(seconds: float) -> str:
    """As "1:23:45"."""
    return str(timedelta(seconds=round(seconds)))


def measure_stages(recipe: Recipe, stages: Collection[Stage], batch_size: int | None = None) -> dict[str, Measured]:
    """Name of each stage that has not finished -> its rehearsal; see `rehearse`."""
    require_sound(recipe, stages)
    output_dir = Path(recipe.output_dir).resolve()
    # Beside what a run makes, and hidden, so it cannot clash with a user's folder
    beside = output_dir if len(recipe.stages) > 1 else output_dir / recipe.stages[0].name
    folder = beside.with_name(f".{beside.name}.rehearsal")
    done = [stage for stage in recipe.stages if (output_dir / stage.name / MANIFEST).is_file()]
    to_do = [stage for stage in stages if stage not in done]
    num_samples = max([FEW, *(stage.least_samples for stage in to_do)])
    whole_rows = {stage.name for stage in done if stage.has_rows_of_pairs}
    small = dataclasses.replace(recipe, output_dir=str(folder), push_to_hub={}, trackers=[])
    runner = Runner(small, rehearses=True)
    accelerator = runner.context.accelerator
    measured, ratios = {}, {}
    with contextlib.ExitStack() as stack:
        if accelerator.is_main_process:
            stack.enter_context(locked(folder))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for stage in done:
                (folder / stage.name).symlink_to((output_dir / stage.name).resolve(), target_is_directory=True)
        accelerator.wait_for_everyone()
        for stage in to_do:
            with _named(stage, folder):
                rehearsed, source, inputs = stage.rehearsed(num_samples), stage.source, references(stage)
                if batch_size is not None:
                    rehearsed = rehearsed.with_batch(batch_size, accelerator.num_processes)
                if source is not None and _reads_rows(inputs, whole_rows):  # fewer would not be those of the rows
                    rehearsed = dataclasses.replace(rehearsed, data=source)
                    whole_rows |= {stage.name} if stage.has_rows_of_pairs else set()
                elif source is not None and ratios.get(source.source, 1) != 1:  # the pairs to skip may not be there
                    rehearsed = dataclasses.replace(rehearsed, data=rehearsed.source.first(num_samples, skips=False))
                ratios[stage.name] = _ratio(stage, rehearsed, inputs, ratios, runner.context)
                measured[stage.name] = _measure(runner, stage, rehearsed, ratios[stage.name])
            accelerator.on_main_process(print)(f"{stage.name}: {measured[stage.name].seconds:.1f} s", flush=True)
        accelerator.wait_for_everyone()
    return measured


def _reads_rows(inputs: Collection[Reference], whole_rows: Collection[str]) -> bool:
    """Whether one of these is a stage, of this recipe or of another, with a row for each pair that was not cut."""
    for reference in inputs:
        folder = Path(reference.value)
        if reference.value in whole_rows:
            return True
        if reference.reads.outside and (folder / MANIFEST).is_file():
            kind = Record.read(folder).stage.get("stage")
            if kind in KINDS and stage_of_kind(kind).has_rows_of_pairs:
                return True
    return False


@contextlib.contextmanager
def _named(stage: Stage, folder: Path) -> Iterator[None]:
    """Errors name the stage, and other stages as the recipe does."""
    try:
        with stage_errors(stage):
            yield
    except (ValueError, OSError) as error:
        text = str(error).replace(f"{folder}/", "").replace(f". {GO_ON}", "")
        raise type(error)(f"{text}. This was a rehearsal: nothing was saved") from error


def _ratio(
    stage: Stage,
    rehearsed: Stage,
    inputs: Collection[Reference],
    ratios: Mapping[str, float | None],
    context: Context,
) -> float | None:
    """How many times more samples the real stage reads; None: not known."""
    sources = [value for _, value in each_setting(stage) if isinstance(value, Source)]
    if len(sources) > 1:  # how many samples a mixture has is not in proportion to any of its sources
        return None
    if not sources:
        known = [ratios.get(reference.value, 1) for reference in inputs if "model" not in reference.reads.kinds]
        return None if None in known else max(known, default=1)
    ratio = ratios.get(sources[0].source, 1)
    if ratio is None or rehearsed.source == sources[0]:
        return ratio and 1
    few, real = context.resolve(rehearsed.source).count(), context.resolve(sources[0]).count(ratio)
    return 1 if None in (few, real) else real / few


def _measure(runner: Runner, stage: Stage, rehearsed: Stage, ratio: float | None) -> Measured:
    device = runner.context.accelerator.device
    gc.collect()
    runner.context.sample_bytes.clear()
    reset_peak_memory(device)
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        disk = runner.run_stage(rehearsed)
    seconds = time.perf_counter() - started
    if stage.source is not None and rehearsed.source == stage.source:  # what it says of its data is true of the run's
        print(printed.getvalue(), end="")
    memory, (folder, _) = peak_memory(device), runner.folders(rehearsed)
    if device.type == "cpu" and ratio is not None:
        memory += round((ratio - 1) * sum(runner.context.sample_bytes.values()))
    return Measured(seconds, memory, stage.cost(rehearsed, folder, seconds, disk, ratio))
