"""The stages of a recipe: each reads folders and writes one folder of its own, whole or not at all.

A stage works in `NAME.partial`, which is renamed to `NAME` when all of it is there. `manifest.json` in the folder
holds what made it: the settings, the seed and the hashes of its inputs. A finished stage whose manifest matches is
skipped, an unfinished one goes on from its last checkpoint, and one that was made with other settings is left alone,
with an error.
"""

import dataclasses
import gc
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from huggingface_hub import HfApi
from transformers import AutoConfig, AutoProcessor, CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

from conversion.checkpoints import copy_processor, has_file, load_model
from conversion.upcycle import PRESETS, Preset, upcycle
from evaluation.evaluate import environment, evaluate_model
from evaluation.evaluate import fingerprint as model_fingerprint
from evaluation.report import write_report
from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel
from training import glyphs
from training.arguments import (
    EvaluateStage,
    InitializeStage,
    Recipe,
    Stage,
    TrainStage,
    UpcycleStage,
    dump,
)
from training.data import PairLoader, load_pairs
from training.engine import train
from training.freezing import set_trainable

MANIFEST = "manifest.json"
# How often something is logged or saved, and by how many workers data is read, does not change what is computed.
NOT_COMPARED = {"logging_steps", "save_steps", "save_total_limit", "num_workers"}


@dataclass(frozen=True)
class Run:
    """What the stages of one run share."""

    recipe: Recipe
    output_dir: Path
    accelerator: Accelerator

    def model(self, reference: str) -> str:
        """The folder or hub name of a model that a stage names: an earlier stage, a folder or a hub name.

        Raises:
            FileNotFoundError: it names a stage that has not finished.
        """
        if reference not in {stage.name for stage in self.recipe.stages}:
            return reference
        folder = self.output_dir / reference
        if not (folder / MANIFEST).is_file():
            raise FileNotFoundError(f"the stage {reference!r} has not finished: {folder} is not there. Run it first")
        return str(folder)


def make_accelerator(recipe: Recipe) -> Accelerator:
    """An `Accelerator` as the recipe wants it, on the CPU where there is nothing else."""
    return Accelerator(
        # Without it, Accelerate starts several processes on a machine without a GPU and connects none of them.
        cpu=not torch.accelerator.is_available(),
        mixed_precision=recipe.mixed_precision,
        log_with=recipe.trackers or None,
        project_dir=recipe.output_dir,
        # The other processes wait while the first one evaluates or writes.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=12))],
    )


def run_recipe(recipe: Recipe, only: Iterable[str] | None = None) -> Path:
    """Run the stages of a recipe in order, or those named in `only`, and return the output folder.

    Raises:
        ValueError: `only` names a stage that is not in the recipe, or a stage's folder was made with other settings.
        FileNotFoundError: a stage needs the output of another one that has not finished.
    """
    names = [stage.name for stage in recipe.stages]
    unknown = sorted(set(only or ()) - set(names))
    if unknown:
        raise ValueError(f"the recipe has no stage {', '.join(unknown)}; its stages are {', '.join(names)}")
    run = Run(recipe, Path(recipe.output_dir), make_accelerator(recipe))
    if run.accelerator.is_main_process:
        run.output_dir.mkdir(parents=True, exist_ok=True)
        _write(run.output_dir / "recipe.yaml", yaml.safe_dump(dump(recipe), sort_keys=False))
        _write(run.output_dir / "environment.json", json.dumps(environment(), indent=2))
    for stage in recipe.stages:
        if only is None or stage.name in only:
            run_stage(run, stage)
    if only is None:
        for name, repository in recipe.push_to_hub.items():
            if run.accelerator.is_main_process:
                push_to_hub(run.output_dir / name, repository)
    # A DDP module that outlives the process group destroys it while it holds the GIL, for which the group's own thread
    # may wait: a deadlock at the very end.
    gc.collect()
    run.accelerator.end_training()
    return run.output_dir


def run_stage(run: Run, stage: Stage) -> None:
    """Run one stage, unless its folder is there and was made by the same settings, seed and inputs."""
    final, partial = run.output_dir / stage.name, run.output_dir / f"{stage.name}.partial"
    manifest = {
        "stage": _comparable(dump(stage)),
        "seed": run.recipe.seed,
        "inputs": {reference: fingerprint(run.model(reference)) for reference in _inputs(stage)},
    }
    run.accelerator.wait_for_everyone()
    for folder in (final, partial):
        if (folder / MANIFEST).is_file():
            _require_same(json.loads((folder / MANIFEST).read_text(encoding="utf-8")), manifest, folder)
    if (final / MANIFEST).is_file():
        run.accelerator.print(f"{stage.name}: done before, skipped")
        return
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        partial.mkdir(parents=True, exist_ok=True)
        _write(partial / MANIFEST, json.dumps(manifest, indent=2))
    run.accelerator.wait_for_everyone()
    set_seed(run.recipe.seed, device_specific=True)
    STAGES[type(stage)](run, stage, partial)
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        os.replace(partial, final)
    run.accelerator.wait_for_everyone()


def initialize(run: Run, stage: InitializeStage, directory: Path) -> None:
    """A randomly initialised dense CLIP."""
    if not run.accelerator.is_main_process:
        return
    if stage.processor == "glyphs":
        text, vision = CLIPTextConfig(**stage.text_config), CLIPVisionConfig(**stage.vision_config)
        processor = glyphs.build_processor(text.max_position_embeddings, vision.image_size)
    else:
        processor = AutoProcessor.from_pretrained(stage.processor)
    tokenizer = processor.tokenizer
    vocabulary = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = CLIPConfig(
        text_config=vocabulary | stage.text_config,
        vision_config=stage.vision_config,
        projection_dim=stage.projection_dim,
    )
    CLIPModel(config).save_pretrained(directory)
    processor.save_pretrained(directory)


def make_sparse(run: Run, stage: UpcycleStage, directory: Path) -> None:
    """A dense CLIP made sparse."""
    if not run.accelerator.is_main_process:
        return
    dense = load_model(CLIPModel, run.model(stage.model))
    fields = {field.name for field in dataclasses.fields(Preset)}
    unknown = sorted(set(stage.changes) - fields)
    if unknown:
        raise ValueError(
            f"{stage.name}.changes: a preset has no {', '.join(unknown)}, only {', '.join(sorted(fields))}"
        )
    preset = dataclasses.replace(PRESETS[stage.preset], **stage.changes)
    model = upcycle(dense, preset, stage.towers, run.recipe.seed)
    for tower, settings in (("text", stage.text_config), ("vision", stage.vision_config)):
        config = getattr(model.config, f"{tower}_config")
        for name, value in settings.items():
            if name not in {field.name for field in dataclasses.fields(config)}:
                raise ValueError(f"{stage.name}.{tower}_config: {type(config).__name__} has no field {name!r}")
            setattr(config, name, value)
    model.save_pretrained(directory)
    copy_processor(run.model(stage.model), directory)


def train_model(run: Run, stage: TrainStage, directory: Path) -> None:
    """A model trained on pairs of images and captions."""
    source = run.model(stage.model)
    sparse = AutoConfig.from_pretrained(source).model_type == CLIPMoEConfig.model_type
    model = load_model(CLIPMoEModel if sparse else CLIPModel, source, dtype=torch.float32)
    if not has_file(source, "tokenizer.json", "vocab.json"):  # transformers would make up an empty one
        raise FileNotFoundError(f"{stage.name}: {source} has no processor; copy the one of the dense model there")
    processor = AutoProcessor.from_pretrained(source)
    trainable, frozen = set_trainable(model, stage.trainable)
    accelerator = make_accelerator(run.recipe)
    share, rest = divmod(stage.global_batch_size, accelerator.num_processes * stage.gradient_accumulation_steps)
    if rest:
        raise ValueError(
            f"{stage.name}: global_batch_size {stage.global_batch_size} cannot be shared by "
            f"{accelerator.num_processes} processes x {stage.gradient_accumulation_steps} accumulation steps"
        )
    with accelerator.main_process_first():  # the first process fills the cache that the others read
        rows = load_pairs(stage.data)
    loader = PairLoader(
        rows, processor, stage.data, share, accelerator.process_index, accelerator.num_processes, run.recipe.seed
    )
    total_steps = stage.max_steps or stage.num_epochs * (len(loader) // stage.gradient_accumulation_steps)
    accelerator.print(
        f"{stage.name}: {total_steps} steps of {stage.global_batch_size} pairs on {accelerator.num_processes} x "
        f"{accelerator.device.type}, {len(trainable)} parameters train, {len(frozen)} are frozen"
    )
    if accelerator.log_with:
        accelerator.init_trackers("clip_moe", config=_flatten(dump(stage)))
    state_dict = train(accelerator, model, loader.batches, stage, total_steps, directory)
    for tracker in accelerator.trackers:
        tracker.finish()
    if accelerator.is_main_process:
        model.save_pretrained(directory, state_dict=state_dict)
        processor.save_pretrained(directory)
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)


def evaluate(run: Run, stage: EvaluateStage, directory: Path) -> None:
    """Models side by side, with a report."""
    if not run.accelerator.is_main_process:
        return
    results = []
    for title, reference in stage.models.items():
        results += evaluate_model(run.model(reference), stage.tasks, directory, name=title, batch_size=stage.batch_size)
    print(write_report(results, directory, baseline=stage.baseline))


STAGES: dict[type, Callable[[Run, Any, Path], None]] = {
    InitializeStage: initialize,
    UpcycleStage: make_sparse,
    TrainStage: train_model,
    EvaluateStage: evaluate,
}


def push_to_hub(folder: Path, repository: str) -> None:
    """Upload a finished stage to the Hub, creating the repository if it is not there."""
    api = HfApi()
    repository = api.create_repo(repository, exist_ok=True).repo_id
    url = api.upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=[MANIFEST, "log.jsonl"])
    print(f"{folder} is at {url}")


def fingerprint(model: str) -> str:
    """What a model is: its manifest's hash for a stage's folder, else see `evaluation.evaluate.fingerprint`."""
    manifest = Path(model) / MANIFEST
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    return model_fingerprint(model)


def _inputs(stage: Stage) -> list[str]:
    if isinstance(stage, EvaluateStage):
        return sorted(set(stage.models.values()))
    return [] if isinstance(stage, InitializeStage) else [stage.model]


def _comparable(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {key: _comparable(value) for key, value in settings.items() if key not in NOT_COMPARED}
    return settings


def _require_same(old: dict, new: dict, folder: Path) -> None:
    if old != new:
        old, new = _flatten(old), _flatten(new)
        changed = [f"{k}: {old.get(k)!r} -> {new.get(k)!r}" for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
        raise ValueError(
            f"{folder} was made with other settings ({'; '.join(changed)}). Delete it to make it anew, or choose "
            "another --output-dir"
        )


def _flatten(settings: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in settings.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _write(path: Path, text: str) -> None:
    """Replace a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)
