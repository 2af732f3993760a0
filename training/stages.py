"""The stages of a recipe: each reads folders and writes one folder of its own, whole or not at all.

A stage works in `NAME.partial`, which is renamed to `NAME` when all of it is there. `manifest.json` in the folder
holds what made it: the settings, the seed and the hashes of its inputs. A finished stage whose manifest matches is
skipped, an unfinished one goes on from its last checkpoint, and one that was made with other settings is left alone,
with an error.
"""

import dataclasses
import gc
import itertools
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, set_seed
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CLIPModel,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from conversion import assemble, average, long_context, publish, unify
from conversion.checkpoints import copy_processor, load_clip, load_config, load_model, load_processor, require_loadable
from conversion.files import locked, read_record, respect_umask, save, write_text
from conversion.provenance import (
    ATTEMPTS,
    ENVIRONMENT,
    LOGS,
    MANIFEST,
    PROCESSOR,
    RECIPE,
    environment,
    manifest_fingerprint,
    weights_fingerprint,
)
from conversion.provenance import fingerprint as model_fingerprint
from conversion.rules import cut
from conversion.upcycle import PRESETS, Preset, change_routing, upcycle
from data.captions import build_captions
from data.identity import data_fingerprint, identity
from data.pairs import all_captions, caption_columns, first_caption, load_pairs
from data.sources import DataArguments, reading
from data.tokenizer import SAMPLE, learn_tokenizer, pieces_per_word, warn_of_many_pieces
from evaluation.evaluate import evaluate_model
from evaluation.experts import analyze_experts
from evaluation.report import best_of, write_report
from evaluation.results import write_result
from evaluation.sentence_encoders import (
    TfidfEncoder,
    encode_metadata,
    load_encoder,
    open_encoder,
)
from evaluation.tasks import find_tasks, loaded_once
from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel
from training.arguments import (
    EXPERT_STAGES,
    AnalyzeStage,
    AssembleStage,
    AssignStage,
    AverageStage,
    CaptionsStage,
    ClusterCoarseStage,
    ClusterFineStage,
    ClusterStage,
    EmbedCaptionsStage,
    EmbedStage,
    EvaluateStage,
    HiddenStatesStage,
    InitializeStage,
    LongContextStage,
    Recipe,
    SelectStage,
    Stage,
    TokenizerStage,
    TrainDataExpertStage,
    TrainExpertsStage,
    TrainRouterStage,
    TrainStage,
    UnifyStage,
    UpcycleStage,
    dump,
)
from training.caption_clusters import (
    BATCHES_PER_PART,
    DataClusters,
    balanced_kmeans,
    group_centers,
    load_centers,
    load_data_clusters,
    load_data_labels,
    load_index,
    nearest_centers,
    read_parts,
    sample_rows,
    save_centers,
    save_data_clusters,
    save_index,
    squared_distances,
    write_parts,
)
from training.embedding import embed_pairs, embedded_data, join_parts, load_features
from training.engine import CHECKPOINTS, start_trackers, train
from training.feature_clusters import Clusters, accumulate, contact_sheet, load_clusters, save_clusters, split
from training.freezing import set_trainable
from training.hidden_states import (
    INDEX,
    HiddenStates,
    announce_size,
    frozen_weights,
    keep_hidden_states,
    require_all_parts,
)
from training.initialize import random_clip
from training.loader import PairLoader
from training.manifests import comparable, flatten, has_work, require_same, stage_fingerprint
from training.samplers import ClusterBatchSampler, merge_small_clusters

GO_ON = "What is done is kept: run the same command again to go on from there"
# Of the pictures of data experts: pairs that samples are drawn from
SAMPLES_DRAWN_FROM = 20_000


@dataclass(frozen=True)
class Run:
    """What the stages of one run share."""

    recipe: Recipe
    output_dir: Path
    accelerator: Accelerator
    # The last pairs that were loaded, by their settings and identity: most stages of a recipe use the same.
    _pairs: dict[str, datasets.Dataset | datasets.IterableDataset] = field(default_factory=dict)
    _models: dict[str, str] = field(default_factory=dict)
    # Of the stage that runs: data may change between two stages
    _identities: dict[str, dict[str, Any] | None] = field(default_factory=dict)

    def folder(self, reference: str) -> str:
        """The folder or hub name that a stage names: an earlier stage, a folder or a hub name.

        Raises:
            FileNotFoundError: it names a stage that has not finished.
        """
        if self.finished(reference):
            return str(self.output_dir / reference) if self._is_stage(reference) else reference
        folder = self.output_dir / reference
        raise FileNotFoundError(f"the stage {reference!r} has not finished: {folder} is not there. Run it first")

    def finished(self, reference: str) -> bool:
        """Whether what a stage names is there, as far as this run makes it."""
        return not self._is_stage(reference) or (self.output_dir / reference / MANIFEST).is_file()

    def resolve(self, arguments: DataArguments) -> DataArguments:
        """With the folder as the source where that is a captions stage."""
        return dataclasses.replace(arguments, source=self.folder(arguments.source))

    def pairs(self, arguments: DataArguments) -> datasets.Dataset | datasets.IterableDataset:
        """See `load_pairs`; the source may be a captions stage."""
        arguments = self.resolve(arguments)
        key = json.dumps([dump(arguments), self.identity(arguments)])
        if key not in self._pairs:
            self._pairs.clear()
            with self.accelerator.main_process_first():  # the first process fills the cache that the others read
                self._pairs[key] = load_pairs(arguments)
        return self._pairs[key]

    def fingerprint(self, rows: datasets.Dataset, arguments: DataArguments) -> str:
        """See `data_fingerprint`; every process has to ask for it, as one reads while the others wait."""
        with self.accelerator.main_process_first():
            return data_fingerprint(rows, arguments.image_root)

    def model_fingerprint(self, reference: str) -> str:
        """What a stage, a folder or a hub name holds, which is read once after it was made."""
        folder = self.folder(reference)
        key = f"{reference} {manifest_fingerprint(Path(folder))}" if self._is_stage(reference) else reference
        if key not in self._models:
            self._models[key] = fingerprint(folder)
        return self._models[key]

    def identity(self, arguments: DataArguments) -> dict[str, Any] | None:
        """See `data.identity.identity`; every process has to ask for it."""
        arguments = self.resolve(arguments)
        key = json.dumps(dump(arguments))
        if key not in self._identities:
            with self.accelerator.main_process_first():
                self._identities[key] = identity(arguments)
        return self._identities[key]

    def inputs(self, stage: Stage) -> list[str]:
        """The stages, folders and hub names that a stage reads; of datasets and tokenizers, only those that a stage
        makes."""
        data = getattr(stage, "data", None)
        made = [] if data is None else [data.source]
        made += [stage.tokenizer] if isinstance(stage, InitializeStage) else []
        return _inputs(stage) + [source for source in made if self._is_stage(source)]

    def needed_by(self, experts: Iterable[int]) -> set[str]:
        """The names of the stages that train these experts, and of all that they need but other experts."""
        stages = {stage.name: stage for stage in self.recipe.stages}
        ours = [s.name for s in stages.values() if _is_expert(s) and s.expert in experts]
        needed, open_ = set(), list(ours)
        while open_:
            name = open_.pop()
            if name not in needed and name in stages and (name in ours or not _is_expert(stages[name])):
                needed.add(name)
                open_ += self.inputs(stages[name])
        return needed

    def _is_stage(self, reference: str) -> bool:
        return reference in {stage.name for stage in self.recipe.stages}


def make_accelerator(recipe: Recipe) -> Accelerator:
    """An `Accelerator` as the recipe wants it, on the CPU where there is nothing else.

    Raises:
        ValueError: a tracker is not installed, which Accelerate would leave out without a word.
    """
    accelerator = Accelerator(
        # Without it, Accelerate starts several processes on a machine without a GPU and connects none of them.
        cpu=not torch.accelerator.is_available(),
        mixed_precision=recipe.mixed_precision,
        log_with=recipe.trackers or None,
        # Not beside the stages, one of which may be called as the trackers' project
        project_config=ProjectConfiguration(recipe.output_dir, logging_dir=str(Path(recipe.output_dir) / LOGS)),
        # The other processes wait while the first one evaluates or writes.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=12))],
    )
    missing = sorted(set(recipe.trackers) - {"all", *map(str, accelerator.log_with)})
    if missing:
        raise ValueError(f"trackers: {', '.join(missing)} cannot be imported; install it, or leave it out")
    # With ZeRO-3, transformers would split every model as it is built, also one that a single process builds
    unset_hf_deepspeed_config()
    return accelerator


def run_recipe(recipe: Recipe, only: Iterable[str] | None = None, experts: Iterable[int] | None = None) -> Path:
    """Run the stages of a recipe in order, and return the output folder.

    Args:
        only: names of the stages to run; None: all.
        experts: numbers of the experts to train, with the stages that they need and nothing else; None: everything.

    Raises:
        ValueError: `only` or `experts` names what is not in the recipe, or a stage's folder was made with other
            settings.
        FileNotFoundError: a stage needs the output of another one that has not finished, or an expert that is not among
            `experts`.
    """
    names = [stage.name for stage in recipe.stages]
    unknown = sorted(set(only or ()) - set(names))
    if unknown:
        raise ValueError(f"the recipe has no stage {', '.join(unknown)}; its stages are {', '.join(names)}")
    numbers = [stage.expert for stage in recipe.stages if _is_expert(stage)]
    unknown = sorted(set(experts or ()) - set(numbers))
    if unknown:
        raise ValueError(f"the recipe trains no expert {unknown}; its experts are {numbers}")
    output_dir = Path(recipe.output_dir)
    files = [path for path in (output_dir, *output_dir.parents) if path.exists() and not path.is_dir()]
    if files:
        raise ValueError(f"output_dir {output_dir} cannot be a folder: {files[0]} is a file")
    run = Run(recipe, output_dir, make_accelerator(recipe))
    wanted = set(names) if experts is None else run.needed_by(experts)
    wanted_stages = [stage for stage in recipe.stages if stage.name in wanted and (only is None or stage.name in only)]
    with locked(run.output_dir) if run.accelerator.is_main_process else nullcontext():
        for stage in wanted_stages:
            with stage_errors(stage):
                _require_made_alike(run, stage)
        if run.accelerator.is_main_process:
            run.output_dir.mkdir(parents=True, exist_ok=True)
            write_text(run.output_dir / RECIPE, yaml.safe_dump(dump(recipe), sort_keys=False))
            write_text(run.output_dir / ENVIRONMENT, json.dumps(environment(), indent=2))
        for stage in wanted_stages:
            with stage_errors(stage):
                run_stage(run, stage)
        if only is None and experts is None:
            for name, repository in recipe.push_to_hub.items():
                if run.accelerator.is_main_process:
                    print(f"{name} is at {publish.publish(run.output_dir / name, repository)}")
    # A DDP module that outlives the process group destroys it while it holds the GIL, for which the group's own thread
    # may wait: a deadlock at the very end.
    gc.collect()
    run.accelerator.end_training()
    return run.output_dir


@contextmanager
def stage_errors(stage: Stage) -> Iterator[None]:
    """Errors that a user can cause name the stage, and how to go on where that is to run it again."""
    try:
        yield
    except SafetensorError as error:  # of a file that cannot be written, safetensors raises no OSError
        raise OSError(f"{stage.name}: weights could not be written or read: {error}. {GO_ON}") from error
    except (FloatingPointError, OSError, OverflowError, MemoryError, ValueError, StrictDataclassError) as error:
        kinds = (FileNotFoundError, FloatingPointError, OSError, ValueError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), ValueError)
        named = str(error).startswith((f"{stage.name}", f"stage {stage.name}"))
        message = str(error) if named else f"{stage.name}: {error}"
        if kind is OSError and GO_ON not in message:
            message = f"{message}. {GO_ON}"
        raise kind(message) from error


def run_stage(run: Run, stage: Stage) -> None:
    """Run one stage, unless its folder is there and was made by the same settings, seed, inputs and data."""
    final, partial = run.output_dir / stage.name, run.output_dir / f"{stage.name}.partial"
    run._identities.clear()
    _require_made_alike(run, stage)
    if (final / MANIFEST).is_file():
        run.accelerator.print(f"{stage.name}: done before, skipped")
        if run.accelerator.is_main_process:
            shutil.rmtree(final / CHECKPOINTS, ignore_errors=True)
        return
    manifest = _manifest(run, stage)
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        if not has_work(partial):
            shutil.rmtree(partial, ignore_errors=True)  # of an attempt that failed at once, perhaps for its settings
        partial.mkdir(parents=True, exist_ok=True)
        write_text(partial / MANIFEST, json.dumps(manifest, indent=2))
    run.accelerator.wait_for_everyone()
    set_seed(run.recipe.seed, device_specific=True)
    attempts = _begin_attempt(run, partial)
    started = time.perf_counter()
    STAGES[type(stage)](run, stage, partial)
    run.accelerator.wait_for_everyone()
    _require_unchanged(run, stage, manifest["data"], partial)
    if run.accelerator.is_main_process:
        attempts[-1]["seconds"] = round(time.perf_counter() - started, 1)
        write_text(partial / ATTEMPTS, json.dumps(attempts, indent=2))
        if isinstance(stage, MODEL_STAGES):
            require_loadable(partial)
        for leftover in partial.rglob("*.partial"):  # of attempts that were killed
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        respect_umask(partial)
        os.replace(partial, final)
        # Not before: a run that is killed now goes on from the last one.
        shutil.rmtree(final / CHECKPOINTS, ignore_errors=True)
        if isinstance(stage, MODEL_STAGES):  # of what is left
            write_text(final / MANIFEST, json.dumps(manifest | {"weights": weights_fingerprint(str(final))}, indent=2))
    run.accelerator.wait_for_everyone()


def _manifest(run: Run, stage: Stage) -> dict[str, Any]:
    data, inputs = getattr(stage, "data", None), run.inputs(stage)
    given = {stage.processor, stage.tokenizer} - {None, "glyphs", *inputs} if isinstance(stage, InitializeStage) else ()
    processors = {folder: model_fingerprint(folder, PROCESSOR) for folder in sorted(given) if Path(folder).is_dir()}
    return {
        "stage": comparable(dump(stage)),
        "seed": run.recipe.seed,
        "mixed_precision": run.accelerator.mixed_precision,
        "inputs": {reference: run.model_fingerprint(reference) for reference in inputs} | processors,
        "data": None if data is None else run.identity(data),
    }


def _require_unchanged(run: Run, stage: Stage, before: dict[str, Any] | None, partial: Path) -> None:
    """Local data must be what they were when the stage began. Those that are gone have been read.

    Raises:
        ValueError: they are not.
    """
    if before is None or "commit" in before:
        return
    run._identities.clear()
    if run.identity(stage.data) not in (None, before):
        raise ValueError(
            f"{stage.data.source} changed while the stage {stage.name} read it: put back what was there, or delete "
            f"{partial}, and run it again"
        )


def _require_made_alike(run: Run, stage: Stage) -> None:
    """Compare what is in a stage's folders with what the run asks for, as far as its inputs are there. Writes nothing.

    Raises:
        ValueError: they were made otherwise, or the folder is not that of a stage.
    """
    final, partial = run.output_dir / stage.name, run.output_dir / f"{stage.name}.partial"
    if final.exists() and not (final / MANIFEST).is_file() and not (final.is_dir() and not any(final.iterdir())):
        raise ValueError(f"{final} is in the way: it has no {MANIFEST}, so no stage made it. Move it away")
    folders = [final] if (final / MANIFEST).is_file() else []
    folders += [partial] if (partial / MANIFEST).is_file() and has_work(partial) else []
    if folders and all(map(run.finished, run.inputs(stage))):
        manifest, data = _manifest(run, stage), getattr(stage, "data", None)
        data = data and run.resolve(data)
        for folder in folders:
            require_same(folder, manifest, data)


def learn(run: Run, stage: TokenizerStage, directory: Path) -> None:
    """A tokenizer learnt from captions."""
    rows = run.pairs(stage.data)
    if not run.accelerator.is_main_process:
        return
    tokenizer = learn_tokenizer(all_captions(rows), stage.vocab_size, stage.max_length)
    save(tokenizer, directory)
    pieces = pieces_per_word(tokenizer, itertools.islice(all_captions(rows), SAMPLE))
    print(f"{stage.name}: {len(tokenizer)} tokens, learnt from {len(rows)} pairs; {pieces:.2f} pieces a word")


def initialize(run: Run, stage: InitializeStage, directory: Path) -> None:
    """A randomly initialised dense CLIP."""
    if run.accelerator.is_main_process:
        model, processor = random_clip(stage, None if stage.tokenizer is None else run.folder(stage.tokenizer))
        model.save_pretrained(directory)
        save(processor, directory)


def lengthen(run: Run, stage: LongContextStage, directory: Path) -> None:
    """A CLIP with a longer text context."""
    if run.accelerator.is_main_process:
        long_context.convert(run.folder(stage.model), directory, stage.length)


def make_sparse(run: Run, stage: UpcycleStage, directory: Path) -> None:
    """A dense CLIP made sparse."""
    if not run.accelerator.is_main_process:
        return
    dense = load_model(CLIPModel, run.folder(stage.model))
    model = upcycle(dense, _preset(stage, stage.preset), stage.towers, run.recipe.seed)
    for tower in ("text_config", "vision_config"):
        try:
            change_routing(getattr(model.config, tower), getattr(stage, tower))
        except ValueError as error:
            raise ValueError(f"{stage.name}.{tower}: {error}") from error
    model.save_pretrained(directory)
    copy_processor(run.folder(stage.model), directory)


def embed(run: Run, stage: EmbedStage, directory: Path) -> None:
    """The features of all pairs."""
    source = run.folder(stage.model)
    processor = load_processor(source)
    rows = run.pairs(stage.data)
    loader = PairLoader(rows, processor, stage.data, min(stage.batch_size, len(rows)))
    embed_pairs(run.accelerator, load_clip(source, dtype=torch.float32), loader, len(rows), directory)
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        join_parts(directory, len(rows), stage.data, data_fingerprint(rows, stage.data.image_root))


def make_captions(run: Run, stage: CaptionsStage, directory: Path) -> None:
    """A dataset whose images have several captions each."""
    if not run.accelerator.is_main_process:
        return
    tokenizer = load_processor(run.folder(stage.model)).tokenizer
    rows = caption_columns(stage.data, {policy.column for policy in stage.captions})
    rows = build_captions(rows, stage.captions, tokenizer, run.recipe.seed, stage.data.num_workers or None)
    rows.save_to_disk(directory)
    missing = np.array([[not caption for caption in captions] for captions in rows["caption"]]).sum(axis=0)
    print(
        f"{stage.name}: {len(rows)} images with {len(missing)} captions each, of which are missing: {missing.tolist()}"
    )


def keep_states(run: Run, stage: HiddenStatesStage, directory: Path) -> None:
    """What enters the first sparse layers, for all pairs."""
    source = run.folder(stage.model)
    model, processor = load_model(CLIPMoEModel, source, dtype=torch.float32), load_processor(source)
    rows = run.pairs(stage.data)
    loader = PairLoader(
        rows, processor, stage.data, min(stage.batch_size, len(rows)), caption_weights=stage.caption_weights
    )
    dtype = getattr(torch, stage.dtype)
    index = {
        "captions": _captions(rows, stage),
        "dataset_fingerprint": run.fingerprint(rows, stage.data),
        "weights": frozen_weights(model),
    }
    announce_size(run.accelerator, model, loader, dtype, directory)
    run.accelerator.wait_for_everyone()
    part_size = keep_hidden_states(run.accelerator, model, loader, dtype, directory)
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        require_all_parts(directory, len(rows), part_size)
        write_text(directory / INDEX, json.dumps({"part_size": part_size, **index}))


def cluster(run: Run, stage: ClusterStage, directory: Path) -> None:
    """Labels of all pairs, and a picture of what they mean."""
    source = Path(run.folder(stage.features))
    data, fingerprint = embedded_data(source)
    rows = run.pairs(data)
    if not run.accelerator.is_main_process:
        return
    if data_fingerprint(rows, data.image_root) != fingerprint:
        raise ValueError(f"{stage.name}: {data.source} has changed since {source} was made; delete it to embed it anew")
    features = load_features(source)
    previous = None if stage.previous is None else load_clusters(Path(run.folder(stage.previous)), fingerprint)
    numbers = {
        "image": stage.num_image_clusters,
        "text": stage.num_text_clusters,
        "random": stage.num_random_clusters,
    }
    columns = split(features, numbers, run.recipe.seed, previous.labels if stage.within else None, stage.n_init)
    labels = np.ravel_multi_index(tuple(columns.values()), [numbers[name] for name in columns])
    clusters = accumulate(labels, np.concatenate([features["image"], features["text"]], axis=1), previous)
    save_clusters(directory, clusters, fingerprint)
    # Labels that were found within a cluster mean nothing outside of it.
    columns = {"cluster": previous.labels, **columns} if stage.within else columns
    names = [[f"{name} {label}" for label in of_samples] for name, of_samples in columns.items()]
    titles = [", ".join(name) for name in zip(*names, strict=True)]
    contact_sheet(directory / "clusters.png", rows, np.array(titles), data.image_root, run.recipe.seed)
    if previous is not None and not stage.within:
        combined = np.array([f"cluster {label}" for label in clusters.labels])
        contact_sheet(directory / "accumulated_clusters.png", rows, combined, data.image_root, run.recipe.seed)
    sizes = np.bincount(clusters.labels)
    print(
        f"{stage.name}: {len(sizes)} clusters of {sizes.min()} to {sizes.max()} samples; "
        f"look at {run.output_dir / stage.name / 'clusters.png'}"
    )


def embed_captions(run: Run, stage: EmbedCaptionsStage, directory: Path) -> None:
    """The sentence embeddings of all captions, and their encoder."""
    rows, folder = run.pairs(stage.data), directory / "encoder"
    if run.accelerator.is_main_process and not folder.is_dir():
        partial = directory / "encoder.partial"
        shutil.rmtree(partial, ignore_errors=True)
        if stage.encoder == "tfidf":
            partial.mkdir()
            TfidfEncoder.fit(_texts(rows, 0, len(rows)), stage.dim, run.recipe.seed).save(partial)
        elif (Path(run.folder(stage.encoder)) / "encoder").is_dir():
            shutil.copytree(Path(run.folder(stage.encoder)) / "encoder", partial)
        else:
            partial.mkdir()
            open_encoder(run.folder(stage.encoder), stage.pooling).save(partial)
        os.replace(partial, folder)
    run.accelerator.wait_for_everyone()
    encoder = load_encoder(folder, run.accelerator.device)

    def compute(start: int, stop: int) -> np.ndarray:
        return encoder.encode(_texts(rows, start, stop), stage.batch_size).astype(stage.dtype)

    index = _index(rows, stage, encoder.name)
    write_parts(run.accelerator, directory, "embeddings", len(rows), index["part_size"], compute)
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        for _ in read_parts(directory, "embeddings", len(rows)):
            pass  # raises where one is missing
        save_index(directory, {**index, "dataset_fingerprint": data_fingerprint(rows, stage.data.image_root)})


def cluster_fine(run: Run, stage: ClusterFineStage, directory: Path) -> None:
    """Fine-grained cluster centers of caption embeddings."""
    if not run.accelerator.is_main_process:
        return
    captions = Path(run.folder(stage.captions))
    index = load_index(captions, "an embed_captions stage")
    num_rows = index["num_rows"]
    parts = read_parts(captions, "embeddings", num_rows)
    sample = sample_rows(parts, num_rows, stage.num_samples or num_rows, run.recipe.seed).astype(np.float32)
    device = run.accelerator.device
    centers = balanced_kmeans(sample, stage.num_centers, run.recipe.seed, stage.iterations, device)[0]
    save_centers(directory, centers, index["encoder"])
    sizes = np.bincount(nearest_centers(sample, torch.as_tensor(centers, device=device)), minlength=len(centers))
    print(
        f"{stage.name}: {len(centers)} centers of {len(sample)} captions, of which {sizes.min()} to {sizes.max()} are "
        "nearest to one"
    )


def assign(run: Run, stage: AssignStage, directory: Path) -> None:
    """The nearest center of every caption."""
    captions = Path(run.folder(stage.captions))
    index = load_index(captions, "an embed_captions stage")
    centers, encoder_name = load_centers(Path(run.folder(stage.centers)))
    if encoder_name != index["encoder"]:
        raise ValueError(
            f"{stage.name}: the centers were made with {encoder_name}, the captions with {index['encoder']}"
        )
    on_device = torch.as_tensor(centers, device=run.accelerator.device)
    if stage.data is None:

        def features(start: int, stop: int) -> np.ndarray:
            return next(read_parts(captions, "embeddings", stop, start))[1]

    else:
        rows, encoder = run.pairs(stage.data), load_encoder(captions / "encoder", run.accelerator.device)
        index = _index(rows, stage, encoder.name)

        def features(start: int, stop: int) -> np.ndarray:
            return encoder.encode(_texts(rows, start, stop), stage.batch_size)

    def compute(start: int, stop: int) -> np.ndarray:
        return nearest_centers(features(start, stop), on_device)

    write_parts(run.accelerator, directory, "labels", index["num_rows"], index["part_size"], compute)
    run.accelerator.wait_for_everyone()
    if not run.accelerator.is_main_process:
        return
    sizes = np.zeros(len(centers), int)
    for _, labels in read_parts(directory, "labels", index["num_rows"]):
        sizes += np.bincount(labels, minlength=len(centers))
    save_centers(directory, centers, encoder_name)
    fingerprint = index.get("dataset_fingerprint") or data_fingerprint(rows, stage.data.image_root)
    save_index(directory, {**index, "dataset_fingerprint": fingerprint})
    print(f"{stage.name}: {sizes.sum()} pairs, {sizes.min()} to {sizes.max()} to a center")


def cluster_coarse(run: Run, stage: ClusterCoarseStage, directory: Path) -> None:
    """The experts that the centers and the pairs belong to."""
    rows = _assigned_pairs(run, stage)
    if not run.accelerator.is_main_process:
        return
    centers, _ = load_centers(Path(run.folder(stage.assignment)))
    if len(centers) < stage.num_experts:
        raise ValueError(f"{stage.name}: {len(centers)} centers cannot be shared by {stage.num_experts} experts")
    expert_of_center, coarse_centers = group_centers(centers, stage.num_experts, run.recipe.seed)
    _save_experts(run, stage, directory, rows, DataClusters(centers, expert_of_center, coarse_centers))


def select(run: Run, stage: SelectStage, directory: Path) -> None:
    """The pairs that are nearest to the metadata of tasks."""
    rows = _assigned_pairs(run, stage)
    if not run.accelerator.is_main_process:
        return
    centers, encoder_name = load_centers(Path(run.folder(stage.assignment)))
    encoder = load_encoder(Path(run.folder(stage.captions)) / "encoder")
    if encoder.name != encoder_name:
        raise ValueError(
            f"{stage.name}: the centers were made with {encoder_name}, {stage.captions} with {encoder.name}"
        )
    if stage.num_nearest > len(centers):
        raise ValueError(f"{stage.name}: num_nearest {stage.num_nearest} of {len(centers)} centers")
    metadata = torch.as_tensor(encode_metadata(encoder, stage.metadata))
    distances = squared_distances(metadata, torch.as_tensor(centers))
    nearest = distances.topk(stage.num_nearest, largest=False).indices.unique().numpy()
    expert_of_center = np.where(np.isin(np.arange(len(centers)), nearest), 0, -1)
    mean = centers[nearest].mean(axis=0, keepdims=True)
    _save_experts(run, stage, directory, rows, DataClusters(centers, expert_of_center, mean))


def assemble_experts(run: Run, stage: AssembleStage, directory: Path) -> None:
    """Data experts as one model."""
    if not run.accelerator.is_main_process:
        return
    experts = [run.folder(reference) for reference in stage.experts]
    if stage.clusters is None:
        assemble.convert(experts, directory)
        return
    clusters, metadata = load_data_clusters(Path(run.folder(stage.clusters)))
    folder = Path(run.folder(stage.captions)) / "encoder"
    encoder_name = load_encoder(folder).name
    if encoder_name != metadata["encoder"]:
        raise ValueError(f"{stage.name}: the clusters were made with {metadata['encoder']}, not with {encoder_name}")
    number, known = len(experts), len(clusters.coarse_centers)
    if number > known:
        raise ValueError(f"{stage.name}: {number} experts, but {stage.clusters} has {known} clusters")
    if stage.centers == "coarse":
        centers, expert_of_center = clusters.coarse_centers[:number], np.arange(number)
    else:
        ours = (clusters.expert_of_center >= 0) & (clusters.expert_of_center < number)
        centers, expert_of_center = clusters.centers[ours], clusters.expert_of_center[ours]
    assemble.convert(
        experts,
        directory,
        torch.as_tensor(centers),
        torch.as_tensor(expert_of_center),
        encoder_name,
        folder,
        stage.routing_temperature,
    )


def average_models(run: Run, stage: AverageStage, directory: Path) -> None:
    """The mean of several models."""
    if run.accelerator.is_main_process:
        average.convert([run.folder(reference) for reference in stage.models], directory)


def train_model(run: Run, stage: TrainStage, directory: Path) -> None:
    """A model trained on pairs of images and captions."""
    source = run.folder(stage.model)
    model, processor = load_clip(source, dtype=torch.float32), load_processor(source)
    trainable, frozen = set_trainable(model, stage.trainable)
    _require_choices(model, stage)
    accelerator = make_accelerator(run.recipe)
    rank, num_processes = accelerator.process_index, accelerator.num_processes
    share, rest = divmod(stage.global_batch_size, num_processes * stage.gradient_accumulation_steps)
    if rest:
        raise ValueError(
            f"{stage.name}: global_batch_size {stage.global_batch_size} cannot be shared by "
            f"{num_processes} processes x {stage.gradient_accumulation_steps} accumulation steps"
        )
    rows, seed = run.pairs(stage.data), run.recipe.seed if stage.seed is None else stage.seed
    if isinstance(stage, TrainDataExpertStage):
        rows = _pairs_of_expert(run, stage, rows)
    sampler = None
    if isinstance(stage, TrainExpertsStage):
        clusters = load_clusters(Path(run.folder(stage.clusters)), run.fingerprint(rows, stage.data))
        labels = _labels(stage, clusters, share * num_processes, accelerator)
        sampler = ClusterBatchSampler(labels, share, rank, num_processes, seed, stage.order)
    hidden_states = None
    if stage.hidden_states is not None:
        _require_frozen_below(model, trainable, stage)
        kept = Path(run.folder(stage.hidden_states))
        hidden_states = HiddenStates(kept, model, run.fingerprint(rows, stage.data), _captions(rows, stage))
    loader = PairLoader(
        rows,
        processor,
        stage.data,
        share,
        rank,
        num_processes,
        seed,
        sampler,
        stage.caption_weights,
        hidden_states,
    )
    if accelerator.is_main_process:
        with reading(stage.data):
            warn_of_many_pieces(processor.tokenizer, all_captions(rows), stage.name)
            loader.report_cut_captions()
    total_steps = stage.max_steps or stage.num_epochs * (len(loader) // stage.gradient_accumulation_steps)
    if total_steps == 0:
        raise ValueError(
            f"{stage.name}: an epoch of {len(loader)} batches has no step of {stage.gradient_accumulation_steps} "
            "accumulation steps: lower gradient_accumulation_steps, or set max_steps"
        )
    accelerator.print(
        f"{stage.name}: {total_steps} steps of {stage.global_batch_size} pairs on {accelerator.num_processes} x "
        f"{accelerator.device.type}, {len(trainable)} parameters train, {len(frozen)} are frozen"
    )
    start_trackers(accelerator, flatten(dump(stage)))
    # Whatever was drawn on the way here, such as by a cache that had to be filled
    set_seed(run.recipe.seed, device_specific=True)
    state_dict = train(accelerator, model, loader.batches, stage, total_steps, directory, seed)
    for tracker in accelerator.trackers:
        tracker.finish()
    if accelerator.is_main_process:
        model.save_pretrained(directory, state_dict=state_dict)
        save(processor, directory)


def unify_experts(run: Run, stage: UnifyStage, directory: Path) -> None:
    """Experts as one sparse model."""
    if not run.accelerator.is_main_process:
        return
    base, *experts = (run.folder(reference) for reference in (stage.model, *stage.experts))
    preset, config = _preset(stage, stage.preset), load_config(base)
    if isinstance(config, CLIPMoEConfig):
        ignored = sorted(set(stage.changes) - {"num_experts_per_tok", "fusion_gate"})
        if ignored or set(stage.towers) != {"text", "vision"}:
            raise ValueError(
                f"{stage.name}: {stage.model} is sparse already, which settles {', '.join(ignored) or 'towers'}; only "
                "num_experts_per_tok and fusion_gate can change"
            )
        if stage.changes.get("fusion_gate") is False and config.vision_config.fusion_gate:
            raise ValueError(f"{stage.name}: the experts were trained with fusion gates, which cannot be left out now")
    unify.convert(base, experts, directory, preset, stage.towers, run.recipe.seed, stage.base_expert)


def evaluate(run: Run, stage: EvaluateStage, directory: Path) -> None:
    """Models side by side, with a report."""
    if not run.accelerator.is_main_process:
        return
    results, tasks = [], loaded_once(find_tasks(stage.tasks))
    for title, reference in stage.models.items():
        results += evaluate_model(run.folder(reference), tasks, directory, name=title, batch_size=stage.batch_size)
    oracles = [result for title, rows in stage.oracles.items() for result in best_of(results, title, rows)]
    for result in oracles:
        write_result(result, directory)
    results += oracles
    print(write_report(results, directory, baseline=stage.baseline))
    print(f"\nThe whole report is {run.output_dir / stage.name / 'report.md'}")


def analyze(run: Run, stage: AnalyzeStage, directory: Path) -> None:
    """What every expert of a sparse model knows, and which tokens it gets."""
    if run.accelerator.is_main_process:
        options = {"num_experts_per_tok": stage.num_experts_per_tok, "batch_size": stage.batch_size}
        print(analyze_experts(run.folder(stage.model), find_tasks(stage.tasks), directory, **options))


STAGES: dict[type, Callable[[Run, Any, Path], None]] = {
    TokenizerStage: learn,
    InitializeStage: initialize,
    LongContextStage: lengthen,
    UpcycleStage: make_sparse,
    CaptionsStage: make_captions,
    EmbedStage: embed,
    HiddenStatesStage: keep_states,
    ClusterStage: cluster,
    TrainStage: train_model,
    TrainExpertsStage: train_model,
    UnifyStage: unify_experts,
    TrainRouterStage: train_model,
    EmbedCaptionsStage: embed_captions,
    ClusterFineStage: cluster_fine,
    AssignStage: assign,
    ClusterCoarseStage: cluster_coarse,
    SelectStage: select,
    TrainDataExpertStage: train_model,
    AssembleStage: assemble_experts,
    AverageStage: average_models,
    EvaluateStage: evaluate,
    AnalyzeStage: analyze,
}
# Those whose folder is a model
MODEL_STAGES = (
    InitializeStage,
    LongContextStage,
    UpcycleStage,
    TrainStage,
    UnifyStage,
    AssembleStage,
    AverageStage,
)


def fingerprint(model: str) -> str:
    """What a model is: its manifest's hash for a stage's folder, else see `conversion.provenance.fingerprint`."""
    if (Path(model) / MANIFEST).is_file():
        return stage_fingerprint(Path(model))
    return model_fingerprint(model)


def _begin_attempt(run: Run, partial: Path) -> list[dict[str, Any]]:
    """What a stage ran on, each time that it was begun; its time is not known until it has ended."""
    path, device = partial / ATTEMPTS, run.accelerator.device
    attempts = read_record(path, list) if path.is_file() else []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
    here = {"device": name, "num_processes": run.accelerator.num_processes, **environment(), "seconds": None}
    attempts.append(here)
    if run.accelerator.is_main_process:
        write_text(path, json.dumps(attempts, indent=2))
    return attempts


def _is_expert(stage: Stage) -> bool:
    return isinstance(stage, EXPERT_STAGES)


def _inputs(stage: Stage) -> list[str]:
    """The stages, folders and hub names that a stage reads."""
    match stage:
        case InitializeStage() | TokenizerStage():
            references = []
        case EvaluateStage():
            references = sorted(set(stage.models.values()))
        case ClusterStage():
            references = [stage.features, stage.previous]
        case UnifyStage():
            references = [stage.model, *stage.experts]
        case EmbedCaptionsStage():
            references = [None if stage.encoder == "tfidf" else stage.encoder]
        case ClusterFineStage():
            references = [stage.captions]
        case AssignStage():
            references = [stage.captions, stage.centers]
        case ClusterCoarseStage():
            references = [stage.assignment]
        case SelectStage():
            references = [stage.assignment, stage.captions]
        case AssembleStage():
            references = [*stage.experts, stage.clusters, stage.captions]
        case AverageStage():
            references = stage.models
        case TrainExpertsStage() | TrainDataExpertStage():
            references = [stage.model, stage.clusters, stage.hidden_states]
        case TrainStage():
            references = [stage.model, stage.hidden_states]
        case _:
            references = [stage.model]
    return [reference for reference in references if reference is not None]


def _preset(stage: UpcycleStage | UnifyStage, name: str) -> Preset:
    """The preset of that name with the stage's changes."""
    fields = {field.name for field in dataclasses.fields(Preset)}
    # YAML has no functions, and what is unified has as many experts as it has.
    fields -= {"sparse_layers"} | ({"num_experts"} if isinstance(stage, UnifyStage) else set())
    unknown = sorted(set(stage.changes) - fields)
    if unknown:
        raise ValueError(
            f"{stage.name}.changes: a preset has no {', '.join(unknown)} to change, only {', '.join(sorted(fields))}"
        )
    return dataclasses.replace(PRESETS[name], **stage.changes)


def _captions(rows: datasets.Dataset, stage: HiddenStatesStage | TrainStage) -> int:
    """How many captions of an image hidden states are of: all, or the only one.

    Raises:
        ValueError: images have several, of which each epoch would draw one.
    """
    if stage.caption_weights is not None:
        return len(stage.caption_weights)
    if not isinstance(rows[0]["caption"], str):
        raise ValueError(f"{stage.name}: hidden states need caption_weights where images have several captions")
    return 1


def _require_choices(model: CLIPModel | CLIPMoEModel, stage: TrainStage) -> None:
    """A balance loss can count no more choices than there are experts."""
    if stage.balance_top_k is None or not isinstance(model, CLIPMoEModel):
        return
    for config in (model.config.text_config, model.config.vision_config):
        if config.moe_layers and stage.balance_top_k > config.num_experts:
            raise ValueError(f"{stage.name}: balance_top_k {stage.balance_top_k} of {config.num_experts} experts")


def _require_frozen_below(model: CLIPMoEModel, trainable: list[str], stage: TrainStage) -> None:
    """Nothing that trains may lie below the first sparse layers, whose input is kept."""
    kept = []
    if not isinstance(model, CLIPMoEModel):
        raise ValueError(f"{stage.name}: hidden_states go with a sparse model, but {stage.model} is dense")
    for tower in ("text_model", "vision_model"):
        below = "|".join(str(layer) for layer in range(min(getattr(model, tower).config.moe_layers, default=0)))
        pattern = re.compile(rf"{tower}\.(embeddings|pre_layrnorm|encoder\.layers\.({below or '(?!)'}))\.")
        kept += [name for name in trainable if pattern.match(name)]
    if kept:
        raise ValueError(
            f"{stage.name}: hidden_states go with frozen layers below the first sparse ones, but {cut(kept)} train"
        )


def _labels(stage: TrainExpertsStage, clusters: Clusters, batch_size: int, accelerator: Accelerator) -> np.ndarray:
    """(samples,) the cluster of each sample whose batches train this expert, or -1. Reports what stays unused.

    Raises:
        ValueError: there is no such first-level cluster.
    """
    labels = clusters.labels.copy()
    if stage.cluster is not None:
        known = np.unique(clusters.tuples[:, 0])
        if stage.cluster not in known:
            raise ValueError(f"{stage.name}: there is no cluster {stage.cluster}; there are {known.tolist()}")
        labels[clusters.tuples[labels, 0] != stage.cluster] = -1
    ours = labels >= 0
    merged = labels.copy()
    merged[ours] = merge_small_clusters(labels[ours], clusters.centers, batch_size)
    choices = {"drop": labels, "merge": merged}
    for setting, choice in choices.items():
        sizes = np.unique(choice[ours], return_counts=True)[1]
        unused = (sizes % batch_size).sum()
        accelerator.print(
            f"{stage.name}: {len(sizes)} clusters with small_clusters: {setting}"
            f"{' (chosen)' if setting == stage.small_clusters else ''}, {(sizes < batch_size).sum()} of them smaller "
            f"than a batch; batches of one cluster leave {unused} of {sizes.sum()} samples "
            f"({unused / sizes.sum():.1%}) unused in an epoch"
        )
    return choices[stage.small_clusters]


def _texts(rows: datasets.Dataset, start: int, stop: int) -> list[str]:
    """The captions of rows, of several the first."""
    captions = rows.select_columns("caption")[start:stop]["caption"]  # the images stay where they are
    return [caption if isinstance(caption, str) else first_caption(caption) for caption in captions]


def _index(rows: datasets.Dataset, stage: EmbedCaptionsStage | AssignStage, encoder: str) -> dict[str, Any]:
    """What the parts of a stage belong to."""
    return {
        "num_rows": len(rows),
        "part_size": stage.batch_size * BATCHES_PER_PART,
        "encoder": encoder,
        "data": dump(stage.data),
    }


def _assigned_pairs(run: Run, stage: ClusterCoarseStage | SelectStage) -> datasets.Dataset:
    """The pairs of an assign stage; every process has to ask for them, as one reads while the others wait."""
    index = load_index(Path(run.folder(stage.assignment)), "an assign stage")
    return run.pairs(DataArguments(**index["data"]))


def _save_experts(
    run: Run,
    stage: ClusterCoarseStage | SelectStage,
    directory: Path,
    rows: datasets.Dataset,
    clusters: DataClusters,
) -> None:
    """Keep the clusters and the expert of every pair, and draw some pairs of each.

    Raises:
        ValueError: the pairs are not those that were assigned, or none belongs to an expert.
    """
    assignment = Path(run.folder(stage.assignment))
    index = load_index(assignment, "an assign stage")
    if data_fingerprint(rows, index["data"]["image_root"]) != index["dataset_fingerprint"]:
        raise ValueError(f"the pairs have changed since {assignment} was made; delete it to assign them anew")
    parts = read_parts(assignment, "labels", index["num_rows"])
    labels = np.concatenate([clusters.expert_of_center[part].astype(np.int16) for _, part in parts])
    if isinstance(stage, ClusterCoarseStage) and stage.random:
        labels = np.random.default_rng(run.recipe.seed).permutation(labels)
    if not (labels >= 0).any():
        raise ValueError("no pair belongs to the centers that the metadata retrieve: raise num_nearest")
    save_data_clusters(directory, clusters, labels, {name: index[name] for name in ("encoder", "dataset_fingerprint")})
    drawn = np.random.default_rng(run.recipe.seed).permutation(np.flatnonzero(labels >= 0))[:SAMPLES_DRAWN_FROM]
    drawn, root = np.sort(drawn), index["data"]["image_root"]
    titles = np.array([f"expert {label}" for label in labels[drawn]])
    contact_sheet(directory / "clusters.png", rows.select(drawn), titles, root, run.recipe.seed)
    sizes = np.bincount(labels[labels >= 0], minlength=len(clusters.coarse_centers))
    ranges = ", ".join(f"{size} pairs (range {r:.2f})" for size, r in zip(sizes, clusters.ranges, strict=True))
    print(f"{stage.name}: {ranges}; look at {run.output_dir / stage.name / 'clusters.png'}")


def _pairs_of_expert(run: Run, stage: TrainDataExpertStage, rows: datasets.Dataset) -> datasets.Dataset:
    """The pairs of one cluster.

    Raises:
        ValueError: there is no such cluster, or it has fewer pairs than a batch.
    """
    folder = Path(run.folder(stage.clusters))
    known = len(load_data_clusters(folder)[0].coarse_centers)
    if stage.cluster >= known:
        raise ValueError(f"{stage.name}: there is no cluster {stage.cluster}; {stage.clusters} has {known}")
    chosen = np.flatnonzero(load_data_labels(folder, run.fingerprint(rows, stage.data)) == stage.cluster)
    if len(chosen) < stage.global_batch_size:
        raise ValueError(
            f"{stage.name}: cluster {stage.cluster} of {stage.clusters} has {len(chosen)} pairs, fewer than "
            f"global_batch_size {stage.global_batch_size}: lower it, or make fewer clusters"
        )
    run.accelerator.print(f"{stage.name}: {len(chosen)} of {len(rows)} pairs")
    return rows.select(chosen)
