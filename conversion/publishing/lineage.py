"""The lineage of a model: the stages of the runs that made it, and the results of its weights."""

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from clip_moe.data.worlds import is_world
from clip_moe.engine.digests import value_digest
from clip_moe.engine.files import read_json, read_record
from clip_moe.engine.local_names import is_hub_name, is_url, without_paths
from clip_moe.engine.messages import join_names
from clip_moe.engine.provenance import (
    ANSWER,
    MANIFEST,
    RECIPE,
    Attempt,
    Record,
    stage_folder,
    weights_fingerprint,
)
from clip_moe.engine.result_schema import ExpertSummary, require_result, require_summary, results_mark
from clip_moe.engine.yaml_files import read_yaml

# Pictures of results -> their titles
PICTURES = {"report.svg": "scores", "routing.png": "routing"}
CLASSIFICATION = ("zero-shot-image-classification", "Zero-shot image classification")
PAIRS, RETRIEVAL = ("image-text-matching", "Attribute pairs"), ("image-text-retrieval", "Image-text retrieval")
# Metric -> type and name of its task on the Hub
TASK_TYPES = {
    **dict.fromkeys(("accuracy", "mean_per_class_recall", "mean_of_top1_and_top5", "roc_auc"), CLASSIFICATION),
    **dict.fromkeys(("group", "image"), PAIRS),
    **dict.fromkeys(("image_to_text_recall@1", "text_to_image_recall@1"), RETRIEVAL),
}


@dataclass(frozen=True)
class DataOrigin:
    """The data of a stage, as a card shows them."""

    name: str  # a world, a URL, a name on the Hub, or the last part of a path
    where: Literal["world", "web", "hub", "local"]
    details: str  # which captions, or which columns
    pairs: int | None = None  # how many a stage trained on, where that is known

    def __str__(self) -> str:
        pairs = "" if self.pairs is None else f"{self.pairs:,} pairs of "
        details = ", ".join(filter(None, ["local" * (self.where == "local"), self.details]))
        return f"{pairs}{self.name}{details and f' ({details})'}"


class Answer(TypedDict):
    """The verdict of a report, as a file."""

    verdict: str
    use: str


@dataclass(frozen=True)
class Verdict:
    """The verdict of a fine-tuning report: did experts help, and which model to use?

    Args:
        sentence: whether experts helped, as markdown.
        row: the report's name of the model.
        is_recommended: whether the report recommends it.
        use_folder: the last part of the recommended model's folder, or its name on the Hub.
        twin: the stage of the dense model beside a sparse one; None of a dense one.
    """

    sentence: str
    row: str
    is_recommended: bool
    use_folder: str
    twin: str | None

    @classmethod
    def of(cls, folder: Path) -> "Verdict | None":
        """From the newest report of a model's run that measured it as it is now; None if there is none."""
        folder = folder.absolute()
        reports = folder.parent.glob(f"*/{ANSWER}") if _is_stage(folder) else ()
        for path in sorted(reports, key=lambda path: path.stat().st_mtime, reverse=True):
            answer = read_record(path, Answer)
            record = Record.read(path.parent)
            models = {row: stage for row, stage in record.stage["models"].items() if stage in record.inputs}
            row = next((row for row, stage in models.items() if folder.parent / stage == folder), None)
            if row and record.inputs[models[row]] == Record.read(folder).digest:
                twin = models.get(row.replace("sparse", "dense", 1)) if row.startswith("sparse") else None
                twin = Path(twin).name if twin and (folder.parent / twin).parent == folder.parent else None
                used = record.stage["models"].get(answer["use"], answer["use"])
                used = used if is_hub_name(used) and not Path(used).exists() else Path(used).name
                return cls(answer["verdict"], row, row == answer["use"], used, twin)
        return None


@dataclass(frozen=True)
class Lineage:
    """The known history of a model. No name in it is one of this machine.

    Args:
        recipe: the recipe of the run that made it.
        stages: records of its stage and of those before it, oldest first; those of other runs are called `RUN/STAGE`.
        bases: names on the Hub of the models whose weights the first stages start from.
        unknown: folders they start from that do not tell how they were made.
        data: of all stages that read some.
        results: name of a file -> the scores of these weights in the run.
        baselines: the same name -> the scores of the model that the evaluation calls its baseline.
        experts: whether the experts do anything, by the run's analyses of these weights.
        pictures: name -> file.
        verdict: of the report of a fine-tuning, if there is one.
    """

    recipe: dict[str, Any] | None = None
    stages: dict[str, Record] = field(default_factory=dict)
    bases: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    data: list[DataOrigin] = field(default_factory=list)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    baselines: dict[str, dict[str, Any]] = field(default_factory=dict)
    experts: list[ExpertSummary] = field(default_factory=list)
    pictures: dict[str, Path] = field(default_factory=dict)
    verdict: Verdict | None = None

    @classmethod
    def of(cls, folder: Path) -> "Lineage":
        """Reads the folder of a model and, if it is a stage's, its run and the runs before."""
        folder = folder.absolute()
        if not _is_stage(folder):
            return cls()
        measured = _measured(folder)
        if not Record.read(folder).is_of(folder):
            print(f"warning: {folder.name} was changed after its stage finished, in an unknown way", file=sys.stderr)
            return replace(measured, unknown=[folder.name])
        records = {origin: Record.read(origin) for origin in _stages_before(folder)}
        starts = [start for origin in _stages_before(folder, True) for start in _inputs(origin, True) if not start[2]]
        recipe = read_yaml((folder.parent / RECIPE).read_text(encoding="utf-8"), str(folder.parent / RECIPE))
        inputs = [reference for origin in records for reference, start, _ in _inputs(origin) if start is not None]
        files = (_source(record) for record in records.values() if "files" in (record.data or {}))
        manifests = {path for origin in records for path in origin.parent.glob(f"*/{MANIFEST}")}
        local = {*inputs, str(recipe.get("output_dir")), *(name for name in files if name and not is_url(name))}
        local.update(path for manifest in manifests for path in Record.read(manifest.parent).local)
        names = {
            origin: origin.name if origin.parent == folder.parent else f"{origin.parent.name}/{origin.name}"
            for origin in records
        }
        return replace(
            measured,
            recipe=without_paths(recipe, local),
            stages={names[origin]: _published_record(record, local) for origin, record in records.items()},
            bases=sorted({reference for reference, start, _ in starts if start is None}),
            unknown=sorted({start.name for _, start, _ in starts if start is not None}),
            data=_all_data(records, local),
            verdict=Verdict.of(folder),
        )

    @property
    def attempts(self) -> list[Attempt]:
        return [attempt for record in self.stages.values() for attempt in record.attempts]


def _measured(folder: Path) -> Lineage:
    """The scores of a folder's weights in its run, the analyses of its experts, and the pictures of both."""
    weights, latest, results, baselines = weights_fingerprint(folder), {}, {}, {}
    for path, result in _results_of_weights("*/*--*.json", folder, weights):
        require_result(result, str(path))
        data = value_digest([result.get("data"), result["batch_size"] if result.get("depends_on_batch") else None])
        # Where results differ only in their scores, the later one counts
        latest[result["task"], result["protocol"], result["dtype"], data] = path, result
    # A look at some rows of a task (`max_rows`) counts where the whole task has no score
    whole = {result["task"] for _, result in latest.values() if not _is_look(result)}
    counting = [found for found in latest.values() if not _is_look(found[1]) or found[1]["task"] not in whole]
    for path, result in sorted(counting, key=lambda found: (_is_look(found[1]), found[0])):
        name = path.name if path.name not in results else f"{path.parent.name}--{path.name}"
        if (baseline := _baseline(path.parent, result)) is not None:
            baselines[name] = baseline
        results[name] = without_paths(result, result.pop("local", [])) | {"source": folder.name}
    analyses = dict(_results_of_weights("*/experts.json", folder, weights))
    return Lineage(
        results=results,
        baselines=baselines,
        experts=[require_summary(analysis.get("summary"), str(path)) for path, analysis in analyses.items()],
        pictures=_pictures({path.parent for path, _ in counting}, {path.parent for path in analyses}),
    )


def _is_look(result: dict[str, Any]) -> bool:
    return "max_rows" in (result.get("data") or {})


def _baseline(evaluation: Path, result: dict[str, Any]) -> dict[str, Any] | None:
    """The result of an evaluation's baseline on the same task; None if there is none, or this is its own."""
    name = Record.read(evaluation).stage.get("baseline") if (evaluation / MANIFEST).is_file() else None
    if name in (None, result["model"]):
        return None
    same = {key: result.get(key) for key in ("task", "protocol", "dtype", "data")} | {"model": name}
    results = (read_json(path) for path in sorted(evaluation.glob("*--*.json")))
    found = next((other for other in results if all(other.get(key) == value for key, value in same.items())), None)
    return found and without_paths(require_result(found, str(evaluation)), found.pop("local", []))


def _published_record(record: Record, local: Collection[str]) -> Record:
    """The record of a stage without paths, as a card shows it."""
    plain = {name: without_paths(getattr(record, name), local) for name in ("stage", "inputs")}
    return record.model_copy(update=plain | {"local": []})


def _is_stage(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and (folder.parent / RECIPE).is_file()


def _stages_before(folder: Path, only_weights: bool = False) -> dict[Path, None]:
    """The unchanged ancestors of a stage, oldest first, then the stage."""
    ancestors: dict[Path, None] = {}
    for _, origin, is_known in _inputs(folder, only_weights):
        if is_known:
            ancestors |= _stages_before(origin, only_weights)
    return ancestors | {folder: None}


def _inputs(folder: Path, only_weights: bool = False) -> Iterator[tuple[str, Path | None, bool]]:
    """(reference, folder, whether it is a stage that has not changed since) for each input of a stage; the folder is
    None for a name on the Hub. `only_weights` leaves out models that embedded or clustered its data."""
    record = Record.read(folder)
    for reference, recorded in record.inputs.items():
        if only_weights and reference not in record.models:
            continue
        if recorded.startswith(f"{reference}@"):  # see clip_moe.engine.provenance.model_fingerprint
            yield reference, None, False
            continue
        origin = stage_folder(folder, reference, recorded)
        before = Record.read(origin) if _is_stage(origin) else None
        yield reference, origin, before is not None and before.digest == recorded and before.is_of(origin)


def _source(record: Record) -> str | None:
    """The source of a stage's data, as its settings name it."""
    settings = record.stage.get("data")
    source = settings.get("source") if isinstance(settings, dict) else None
    return source if isinstance(source, str) else None


def _all_data(records: dict[Path, Record], local: Collection[str]) -> list[DataOrigin]:
    """The data that no stage made, once each, with the most pairs that a stage trained on. A stage of one cluster does
    not tell how many pairs its data have."""
    pairs_of: dict[tuple[str, DataOrigin], int | None] = {}
    for origin, record in records.items():
        source = _source(record)
        inputs = {name: is_known for name, _, is_known in _inputs(origin)}
        if source is not None and not inputs.get(source):
            is_on_hub = "commit" in (record.data or {}) or is_hub_name(source)
            data = source, _data(record.stage["data"], source in local or source in inputs or not is_on_hub)
            pairs = record.pairs if record.stage.get("cluster") is None else None
            pairs_of[data] = max(pairs_of.get(data) or 0, pairs or 0) or None
    return sorted((replace(data, pairs=pairs) for (_, data), pairs in pairs_of.items()), key=str)


def _data(settings: dict[str, Any], is_local: bool) -> DataOrigin:
    source = settings["source"]
    if is_world(source):
        kinds = settings.get("kinds", "all")
        kinds_shown = "" if kinds == "all" else f" of {kinds}"
        return DataOrigin(source, "world", f"{settings.get('captions', 'web')} captions{kinds_shown}")
    details = f"columns {settings.get('image_column', 'image')} and {settings.get('caption_column', 'caption')}"
    where = "web" if is_url(source) else "local" if is_local else "hub"
    return DataOrigin(without_paths(source, [source]) if where == "local" else source, where, details)


def _results_of_weights(pattern: str, folder: Path, weights: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The results in a run, oldest first, of the weights in a folder as they are now. Warns of those that only share
    its name."""
    from clip_moe.engine.own_modules import code_of_models  # with torch, which records alone do not need

    left_out = []
    for path in sorted(folder.parent.glob(pattern), key=lambda path: path.stat().st_mtime):
        result = read_record(path)
        is_same_code = (result.get("code") or {}) == code_of_models()
        if result.get("weights") == weights and is_same_code and not result.get("changes"):
            yield path, result
        elif Path(str(result.get("source"))).name == folder.name:
            left_out.append(path.relative_to(folder.parent).as_posix())
    if left_out:
        print(
            f"warning: {len(left_out)} results of {folder.name} are left out, of other weights, code or configuration: "
            f"measure again ({join_names(left_out)})",
            file=sys.stderr,
        )


def _pictures(result_folders: set[Path], analysis_folders: set[Path]) -> dict[str, Path]:
    """Name -> file of the pictures in folders of results, which show these and no earlier ones, and of analyses."""
    pictures = [folder / "routing.png" for folder in sorted(analysis_folders)]
    for folder in sorted(result_folders):
        picture, results = folder / "report.svg", [read_json(path) for path in folder.glob("*--*.json")]
        if picture.is_file() and results_mark(results) in picture.read_text(encoding="utf-8"):
            pictures.append(picture)
    return {path.name: path for path in pictures if path.is_file() and not path.is_symlink()}  # a link may be anything
