"""Whether a recipe will work, and what it will take: `--rehearse`.

The stages themselves run, with the real model and the real batch of a process, on few samples and for two steps, each
reading what the one before made. They write into a folder that is removed at the end. Finished stages are read as they
are. All figures are measured.
"""

import contextlib
import dataclasses
import gc
import io
import json
import math
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

from clip_moe.data.arguments import DataArguments
from clip_moe.data.sources import open_rows
from clip_moe.data.worlds import is_world
from clip_moe.engine.checks import require_same_settings, require_sound
from clip_moe.engine.context import Context
from clip_moe.engine.files import locked
from clip_moe.engine.kinds import KINDS, stage_of_kind
from clip_moe.engine.memory import in_words, peak_memory, reset_peak_memory
from clip_moe.engine.plan import aligned
from clip_moe.engine.provenance import LOG, MANIFEST, Record
from clip_moe.engine.recipe import Recipe
from clip_moe.engine.runner import GO_ON, Runner, stage_errors
from clip_moe.engine.stage import Stage, each_setting, references
from clip_moe.training.stages.steps import REHEARSED_STEPS, StepsStage

# Samples of a recipe that trains nothing
FEW = 256
# Endings of files that hold rows, in folders that are no model
ROWS = (".npy", ".arrow", ".safetensors", ".parquet", ".jsonl")


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a stage took in a rehearsal.

    Args:
        seconds: what all of it took.
        step: seconds of the second step; None: it takes none.
        steps: those of the real run; None: not known, or it takes none.
        whole: seconds of the real run; None: not known.
        memory, disk: bytes, disk with a checkpoint where it writes any; None: not known.
    """

    seconds: float
    step: float | None
    steps: int | None
    whole: float | None
    memory: int
    disk: int | None


def rehearse(recipe: Recipe, stages: Collection[Stage], batch_size: int | None = None) -> str:
    """Rehearse stages, and tell what a run of them takes.

    Args:
        batch_size: samples in the batch of a process, in place of the real number.

    Raises:
        What a stage raises, with its name. Nothing is kept.
    """
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise ValueError(f"--rehearse_batch takes a number of samples, not {batch_size!r}")
    measured = measure_stages(recipe, stages, batch_size)
    rows = [["stage", "rehearsed in", "a step", "steps", "memory", "disk", "time"]]
    for name, of_stage in measured.items():
        step = "-" if of_stage.step is None else f"{of_stage.step:.3g} s"
        steps = "-" if of_stage.steps is None else f"{of_stage.steps:,}"
        whole = "-" if of_stage.whole is None else _clock(of_stage.whole)
        sizes = in_words(of_stage.memory), "-" if of_stage.disk is None else in_words(of_stage.disk)
        rows.append([name, f"{of_stage.seconds:.1f} s", step, steps, *sizes, whole])
    known = [of_stage.whole for of_stage in measured.values() if of_stage.whole is not None]
    most = max((of_stage.memory for of_stage in measured.values()), default=0)
    disk = sum(of_stage.disk or 0 for of_stage in measured.values())
    seconds = sum(of_stage.seconds for of_stage in measured.values())
    rows.append(["in all", f"{seconds:.1f} s", "", "", in_words(most), in_words(disk), _clock(sum(known))])
    return "\n".join(
        [
            *aligned(rows, left=1),
            "",
            "memory: the most that a process held, on a GPU in tensors, on a CPU with Python and its libraries",
            "disk: of a stage's folder, with one checkpoint where it writes any",
            "time: without loading, and without what `evaluation` measures while training; of a stage that only reads "
            "pairs at most, since what it does once is multiplied, too",
            "-: not known here, as of a stage that measures, clusters, mixes data or trains epochs of a cluster",
        ]
    )


def _clock(seconds: float) -> str:
    """As "1:23:45"."""
    return str(timedelta(seconds=round(seconds)))


def measure_stages(recipe: Recipe, stages: Collection[Stage], batch_size: int | None = None) -> dict[str, Measured]:
    """Name of each stage that has not finished -> what it takes; see `rehearse`."""
    require_sound(recipe, stages)
    require_same_settings(recipe)
    output_dir = Path(recipe.output_dir).resolve()
    # Beside what a run makes, and hidden, so it cannot clash with a user's folder
    made = output_dir if len(recipe.stages) > 1 else output_dir / recipe.stages[0].name
    folder = made.with_name(f".{made.name}.rehearsal")
    done = [stage for stage in recipe.stages if (output_dir / stage.name / MANIFEST).is_file()]
    to_do = [stage for stage in stages if stage not in done]
    batches = [stage.global_batch_size for stage in to_do if isinstance(stage, StepsStage)]
    num_samples = max([FEW, *(REHEARSED_STEPS * batch for batch in batches)])
    of_all_pairs = {stage.name for stage in done if stage.has_rows_of_pairs}
    small = Recipe(
        output_dir=str(folder), stages=recipe.stages, seed=recipe.seed, mixed_precision=recipe.mixed_precision
    )
    runner = Runner(small, rehearses=True)
    accelerator = runner.context.accelerator
    measured, ratios = {}, {}
    with contextlib.ExitStack() as held:
        if accelerator.is_main_process:
            held.enter_context(locked(folder))
            held.callback(shutil.rmtree, folder, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for stage in done:
                (folder / stage.name).symlink_to((output_dir / stage.name).resolve(), target_is_directory=True)
        accelerator.wait_for_everyone()
        for stage in to_do:
            with _named(stage, folder):
                rehearsed = _with_batch(stage.rehearsed(num_samples), batch_size, accelerator.num_processes)
                data = getattr(stage, "data", None)
                if data is not None and ratios.get(data.source, 1) != 1:  # the pairs to skip may not be there
                    rehearsed = dataclasses.replace(rehearsed, data=dataclasses.replace(rehearsed.data, skip=None))
                if data is not None and _reads_rows(stage, of_all_pairs):
                    rehearsed = dataclasses.replace(rehearsed, data=data)  # fewer would not be those of the rows
                    of_all_pairs |= {stage.name} if stage.has_rows_of_pairs else set()
                ratios[stage.name] = _ratio(stage, rehearsed, ratios, runner.context)
                measured[stage.name] = _measure(runner, stage, rehearsed, ratios[stage.name])
            accelerator.on_main_process(print)(f"{stage.name}: {measured[stage.name].seconds:.1f} s", flush=True)
        accelerator.wait_for_everyone()
    return measured


def _reads_rows(stage: Stage, of_all_pairs: Collection[str]) -> bool:
    """Whether it reads a row for each pair from a stage that was not cut, of this recipe or of another."""
    outside = [
        Record.read(Path(one.value)).stage.get("stage")
        for one in references(stage)
        if one.value not in of_all_pairs and one.reads.outside and (Path(one.value) / MANIFEST).is_file()
    ]
    names = {one.value for one in references(stage)}
    return bool(names & set(of_all_pairs)) or any(
        kind in KINDS and stage_of_kind(kind).has_rows_of_pairs for kind in outside
    )


def _with_batch(stage: Stage, batch_size: int | None, num_processes: int) -> Stage:
    if batch_size is None or not isinstance(stage, StepsStage):
        return stage
    changes = {"global_batch_size": batch_size * num_processes * stage.gradient_accumulation_steps}
    if stage.mini_batch_size is not None:
        changes["mini_batch_size"] = math.gcd(stage.mini_batch_size, batch_size)
    return dataclasses.replace(stage, **changes)


@contextlib.contextmanager
def _named(stage: Stage, folder: Path) -> Iterator[None]:
    """Errors name the stage, and other stages as the recipe does."""
    try:
        with stage_errors(stage):
            yield
    except (ValueError, OSError) as error:
        text = str(error).replace(f"{folder}/", "").replace(f". {GO_ON}", "")
        raise type(error)(f"{text}. It was a rehearsal, of which nothing is kept") from error


def _reads_all(stage: Stage, rehearsed: Stage) -> bool:
    return getattr(stage, "data", None) is not None and rehearsed.data == stage.data


def _ratio(stage: Stage, rehearsed: Stage, ratios: Mapping[str, float | None], context: Context) -> float | None:
    """How many times more pairs the real stage reads; None: not known."""
    data = [value for _, value in each_setting(stage) if isinstance(value, DataArguments)]
    if len(data) > 1:  # how many pairs a mixture has is not in proportion to any of its sources
        return None
    if not data:
        read = [one.value for one in references(stage) if "model" not in one.reads.kinds]
        known = [ratios.get(name, 1) for name in read]
        return None if None in known else max(known, default=1)
    (data,), cut = data, ratios.get(data[0].source, 1)
    if rehearsed.data == data or data.streaming or cut is None:
        return None if cut is None else 1
    there = dataclasses.replace(data, skip=None, num_samples=None) if cut != 1 else data
    number = data.num_samples if is_world(data.source) else len(open_rows(context.resolve(there)))
    real = number if cut == 1 else min(cut * number - (data.skip or 0), data.num_samples or math.inf)
    return real / min(number, rehearsed.data.num_samples)


def _measure(runner: Runner, stage: Stage, rehearsed: Stage, ratio: float | None) -> Measured:
    accelerator = runner.context.accelerator
    gc.collect()
    runner.context.held.clear()
    reset_peak_memory(accelerator.device)
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        disk = runner.run_stage(rehearsed)
    seconds = time.perf_counter() - started
    if _reads_all(stage, rehearsed):  # what it says of its data is true of the run's
        print(printed.getvalue(), end="")
    memory, (folder, _) = peak_memory(accelerator.device), runner.folders(rehearsed)
    if accelerator.device.type == "cpu" and ratio is not None:
        memory += round((ratio - 1) * sum(runner.context.held.values()))
    if not isinstance(stage, StepsStage):
        # Where only the data were cut, all grows with them
        data = {"data": stage.data} if hasattr(stage, "data") else {}
        if ratio is None or dataclasses.replace(rehearsed, **data) != stage:
            return Measured(seconds, None, None, None, memory, None)
        return Measured(seconds, None, None, seconds * ratio, memory, _size(folder, ratio))
    step = _second_step(folder, rehearsed.global_batch_size)
    steps, pairs = stage.max_steps, Record.read(folder).pairs
    # Few pairs do not tell how many a cluster has
    if steps is None and None not in (pairs, ratio) and not hasattr(stage, "cluster"):
        steps = stage.num_epochs * (round(pairs * ratio) // stage.global_batch_size)
    # A step of another batch does not tell the time of the real one
    is_real = rehearsed.global_batch_size == stage.global_batch_size
    whole = steps * step if is_real and steps is not None else None
    return Measured(seconds, step, steps, whole, memory, disk)


def _size(folder: Path, ratio: float) -> int:
    """Size of the folder with `ratio` times as many pairs; only files with rows grow."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return round(sum(path.stat().st_size * (ratio if path.suffix in ROWS else 1) for path in files))


def _second_step(folder: Path, batch_size: int) -> float:
    """Seconds of the second step of a stage, which logged each."""
    lines = map(json.loads, (folder / LOG).read_text(encoding="utf-8").splitlines())
    first, second = [batch_size / line["images_per_second"] for line in lines if "images_per_second" in line]
    return 2 * second - first
