"""Runs the stages of a recipe: each writes one folder of its own, whole or not at all.

A stage works in `NAME.partial`, which is renamed to `NAME` when all of it is there. `manifest.json` in the folder
holds what made it: the settings, the seed and the hashes of its inputs. A finished stage whose manifest matches is
skipped, an unfinished one goes on from its last checkpoint, and one that was made with other settings is left alone,
with an error.
"""

import functools
import gc
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import torch
import yaml
from accelerate.utils import set_seed
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from clip_moe.engine.context import Context, make_accelerator
from clip_moe.engine.files import locked, read_text, respect_umask, write_text
from clip_moe.engine.local_names import paths_here
from clip_moe.engine.own_modules import code_of_models, code_of_stage, found_again, own_settings, reached_code, watching
from clip_moe.engine.plan import require_sound, wanted_stages
from clip_moe.engine.provenance import (
    CHECKPOINTS,
    MANIFEST,
    RECIPE,
    Attempt,
    Record,
    device_name,
    environment,
    goes_on,
    input_fingerprint,
    record_before,
)
from clip_moe.engine.recipe import Recipe, RecipeFile, load_recipe, validated
from clip_moe.engine.settings import dump
from clip_moe.engine.stage import Stage, references, resolve
from clip_moe.engine.yaml_files import read_yaml

GO_ON = "What is done is kept: run the same command again to go on from there"
LESS_MEMORY = "lower mini_batch_size, batch_size or global_batch_size, or set gradient_checkpointing"
USER_ERRORS = FloatingPointError, OSError, OverflowError, MemoryError, ValueError, StrictDataclassError


def run_recipe(recipe: Recipe, only: Iterable[str] | None = None, experts: Iterable[int] | None = None) -> Path:
    """Run the stages of a recipe in order, and return the output folder.

    Args:
        only: names of the stages to run; None: all.
        experts: numbers of the experts to train, with the stages that they need and nothing else; None: everything.
    """
    stages = wanted_stages(recipe, only, experts)
    require_sound(recipe, stages)
    runner, output_dir = Runner(recipe), Path(recipe.output_dir)
    is_main = runner.context.accelerator.is_main_process
    with locked(output_dir) if is_main else nullcontext():
        for stage in stages:  # a run that is refused has written nothing
            final, partial = runner.folders(stage)
            if final.exists() or partial.exists():
                with stage_errors(stage):
                    runner.prepare(stage)
        _require_no_others(recipe)
        if is_main:
            output_dir.mkdir(parents=True, exist_ok=True)
            write_text(output_dir / RECIPE, yaml.safe_dump(runner.settings, sort_keys=False))
        for stage in stages:
            runner.run_stage(stage)
        if is_main and only is None and experts is None:
            for stage in recipe.stages:
                if repository := recipe.push_to_hub.get(stage.name):
                    print(f"{stage.name} is at {stage.publish(output_dir / stage.name, repository)}")
    runner.end()
    return output_dir


def run_alone(recipe: Recipe) -> None:
    """Run a recipe of one stage, whose folder is all that it leaves."""
    require_sound(recipe, recipe.stages)
    runner = Runner(recipe)
    runner.run_stage(recipe.stages[0])
    runner.end()


def usage_hint(recipe: Recipe, only: Collection[str] | None = None) -> str | None:
    """How to use the last model that the stages `only` of a recipe have made; None: there is none."""
    for stage in reversed(recipe.stages):
        folder = Path(recipe.output_dir) / stage.name
        hint = stage.usage(folder) if (only is None or stage.name in only) and folder.is_dir() else None
        if hint is not None:
            return hint
    return None


@contextmanager
def stage_errors(stage: Stage) -> Iterator[None]:
    """Errors that a user can cause name the stage, and how to go on where that is to run it again."""
    try:
        yield
    except (torch.OutOfMemoryError, SafetensorError, *USER_ERRORS) as error:
        kinds = (FileNotFoundError, FloatingPointError, OSError, ValueError)
        kind, message = next((kind for kind in kinds if isinstance(error, kind)), ValueError), str(error)
        if isinstance(error, torch.OutOfMemoryError):
            message = f"out of memory: {message.splitlines()[0]} {LESS_MEMORY}"
        if isinstance(error, SafetensorError):  # safetensors raises its own error, not OSError, when a write fails
            kind, message = OSError, f"weights could not be written or read: {message}"
        if not message.startswith((f"{stage.name}.", f"{stage.name}: ", f"stage {stage.name}")):
            message = f"{stage.name}: {message}"
        if kind is OSError and GO_ON not in message:
            message = f"{message}. {GO_ON}"
        raise kind(message) from error


class Runner:
    """Runs stages, and checks their folders against their records."""

    def __init__(self, recipe: Recipe, rehearses: bool = False):
        folder, names, seed = Path(recipe.output_dir), recipe.stage_names, recipe.seed
        new = functools.partial(make_accelerator, folder, recipe.mixed_precision, tuple(recipe.trackers))
        self.context = Context(folder, new(), new, names, seed, rehearses=rehearses)
        self.settings = dump(recipe)
        self._local = paths_here(self.settings)

    def folders(self, stage: Stage) -> tuple[Path, Path]:
        """A stage's folder, and the one in which it works."""
        output_dir = self.context.output_dir
        return output_dir / stage.name, output_dir / f"{stage.name}.partial"

    def run_stage(self, stage: Stage) -> int:
        """Run one stage, unless its folder is there and was made by the same settings, seed, inputs and data. Another
        run, or the stage's own command, may not write its folder meanwhile.

        Returns:
            Bytes that its folder had when it ended, checkpoints included; 0 where it was done before.
        """
        final, _ = self.folders(stage)
        with stage_errors(stage), locked(final) if self.context.accelerator.is_main_process else nullcontext():
            return self._run_locked(stage)

    def _run_locked(self, stage: Stage) -> int:
        context, accelerator = self.context, self.context.accelerator
        final, partial = self.folders(stage)
        say = functools.partial(accelerator.on_main_process(print), flush=True)
        inputs, record = self.prepare(stage)
        if (final / MANIFEST).is_file():
            say(f"{stage.name}: done before, skipped{_report_of(final)}")
            if accelerator.is_main_process:
                _tidy(final)  # a kill may have come before that
            accelerator.wait_for_everyone()
            return 0
        say(f"{stage.name}: begins, {datetime.now():%Y-%m-%d %H:%M:%S}")
        attempt = Attempt(
            device=device_name(accelerator.device),
            num_processes=accelerator.num_processes,
            **environment(),
            seconds=None,  # not known until it has ended
        )
        begins_anew = not record.attempts
        record.attempts.append(attempt)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            if begins_anew:  # what is there is of an attempt that failed, perhaps for its settings
                shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True, exist_ok=True)
            record.write(partial)
        accelerator.wait_for_everyone()
        set_seed(context.seed, device_specific=True)
        started = time.perf_counter()
        if accelerator.is_main_process or not stage.main_process_only:
            try:
                with watching() if record.code else nullcontext():
                    shared = context.without_others() if stage.main_process_only else context
                    trained = stage.run(inputs, shared, partial)
            except BaseException:
                if accelerator.is_main_process and not goes_on(stage, partial):
                    shutil.rmtree(partial, ignore_errors=True)
                raise
            if trained is not None:
                record.pairs, record.duplicates = trained
        accelerator.wait_for_everyone()
        self._require_unchanged(stage, inputs, record, partial)
        if record.code:
            stages = [context.output_dir / name for name in context.stages]
            record.reached = reached_code([*self._local, partial, *stages])
        size = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        accelerator.wait_for_everyone()
        attempt.seconds = round(time.perf_counter() - started, 1)
        if accelerator.is_main_process:
            for leftover in partial.rglob("*.partial"):  # of attempts that were killed
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            record.training, record.weights = stage.training(partial), stage.complete(partial)
            record.write(partial)
            respect_umask(partial)
            os.replace(partial, final)
            _tidy(final)
            if record.training is not None:
                say(f"{stage.name}: {record.training}")
        say(f"{stage.name}: done in {attempt.seconds:g} s{_report_of(final)}")
        accelerator.wait_for_everyone()
        return size

    def prepare(self, stage: Stage) -> tuple[SimpleNamespace, Record]:
        """The inputs of a stage, and the record of its folder as it would be made now, with the attempts before. Writes
        nothing.

        If an input of a finished stage was deleted, everything else is still compared.

        Raises:
            ValueError: its folder was made by something else.
        """
        context, data, (final, partial) = self.context, stage.source, self.folders(stage)
        before = record_before(stage, final, partial)
        inputs, fingerprints = resolve(stage, context), {}
        for reference in references(stage):
            name = reference.value
            if (reference.reads.outside or name in context.stages) and context.is_there(name):
                fingerprints[name] = input_fingerprint(context.folder(name))
        record = Record(
            stage=stage.compared(),
            seed=context.seed,
            mixed_precision=context.accelerator.mixed_precision,
            local=self._local,
            own_settings=own_settings(type(stage)),
            reached=found_again(before.reached) if before else {},
            code=code_of_models() | code_of_stage(type(stage)),
            inputs=fingerprints | stage.fingerprints(inputs),
            models=[reference.value for reference in references(stage) if "model" in reference.reads.kinds],
            data=context.identity(data) if data is not None and context.is_there(data.source) else None,
        )
        if before is not None:
            before.require_same(record, final if (final / MANIFEST).is_file() else partial)
            record.attempts = before.attempts
        return inputs, record

    def _require_unchanged(self, stage: Stage, inputs: SimpleNamespace, record: Record, partial: Path) -> None:
        """Raise a ValueError if inputs or data changed while the stage read them. Deleted data are not checked."""
        now = stage.fingerprints(inputs)
        changed = [key for key in now.keys() & record.inputs if now[key] != record.inputs[key]]
        self.context.forget_identities()
        if record.data and "commit" not in record.data:
            if self.context.identity(stage.source) not in (None, record.data):
                changed.append(stage.source.source)
        if changed:
            raise ValueError(
                f"{changed[0]} changed while the stage read it: restore it, or delete {partial}, and run again"
            )

    def end(self) -> None:
        """End the trackers and the process group. A DDP module that outlives the group destroys it while it holds the
        GIL, for which the group's own thread may wait: a deadlock."""
        if self.context.accelerator.num_processes > 1:
            gc.collect()
        self.context.accelerator.end_training()


def _require_no_others(recipe: Recipe) -> None:
    """Raises a ValueError where finished stages are of the recipe that was run there before, and not of this one:
    recipe.yaml would no longer describe them. Also where the recipe itself is the file that would be overwritten."""
    output_dir, stages = Path(recipe.output_dir), [stage.name for stage in recipe.stages]
    path = output_dir / RECIPE
    if not path.is_file():
        return
    before = read_yaml(read_text(path), str(path))
    if path.resolve() == Path(recipe.title).resolve() and before != dump(load_recipe(path)):
        raise ValueError(f"{path} would be overwritten by the recipe with all its settings: rename it")
    names = {stage["name"] for stage in validated(RecipeFile, before, path)["stages"]} - {*stages}
    others = sorted(name for name in names if (output_dir / name / MANIFEST).is_file())
    if others:
        raise ValueError(
            f"{output_dir} has stages of another recipe ({', '.join(others)}): choose another output_dir, or move them"
        )


def _report_of(folder: Path) -> str:
    """Where the report of a stage is, if it wrote one."""
    return f"; its report is {folder / 'report.md'}" if (folder / "report.md").is_file() else ""


def _tidy(final: Path) -> None:
    """Delete the checkpoints of a finished stage. Until the folder has its name, a killed run resumes from them."""
    shutil.rmtree(final / CHECKPOINTS, ignore_errors=True)
