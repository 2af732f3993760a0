"""How a model came to be: the stages of the runs that made it, and what was measured of its weights."""

import itertools
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from records.digests import value_digest
from records.files import read_json, read_record
from records.local_names import is_hub_name, is_url, without_paths
from records.messages import join_names
from records.provenance import (
    MANIFEST,
    RECIPE,
    Attempt,
    OwnStage,
    Record,
    weights_fingerprint,
)
from records.result_schema import ExpertSummary, require_result, require_summary, results_mark
from records.yaml_files import read_yaml

# Stages whose results tell something of a model
PICTURES = {"report.svg": "scores", "routing.png": "routing"}
TASK_TYPES = {
    "accuracy": ("zero-shot-image-classification", "Zero-shot image classification"),
    "mean_per_class_recall": ("zero-shot-image-classification", "Zero-shot image classification"),
    "mean_of_top1_and_top5": ("zero-shot-image-classification", "Zero-shot image classification"),
    "roc_auc": ("zero-shot-image-classification", "Zero-shot image classification"),
    "group": ("image-text-matching", "Attribute pairs"),
    "image": ("image-text-matching", "Attribute pairs"),
    "image_to_text_recall@1": ("image-text-retrieval", "Image-text retrieval"),
    "text_to_image_recall@1": ("image-text-retrieval", "Image-text retrieval"),
}
# The worlds that this package draws -> texts of theirs
WORLDS = {
    "icons": ["wikipedia", "github"],
    "names": ["grunheim dalos dalos", "helville borum mareth"],
    "symbols": ["a picture of a snowman", "a picture of an anchor"],
}


@dataclass(frozen=True)
class DataOrigin:
    """The data of a stage, as a card shows them.

    Args:
        name: a world, a URL, a name on the Hub, or the last part of a path.
        where: "world", "web", "hub" or "local".
        details: which captions, or which columns.
        pairs: how many a stage trained on, where that is known.
    """

    name: str
    where: str
    details: str
    pairs: int | None = None

    def __str__(self) -> str:
        pairs = "" if self.pairs is None else f"{self.pairs:,} pairs of "
        details = ", ".join(filter(None, ["local" * (self.where == "local"), self.details]))
        return f"{pairs}{self.name}{details and f' ({details})'}"


@dataclass(frozen=True)
class Lineage:
    """The known history of a model. No name in it is one of this machine.

    Args:
        recipe: the recipe of the run that made it.
        stages: records of its stage and of all stages that it goes back to, the first one first; those of other runs
            are called `RUN/STAGE`.
        bases: names on the Hub of the models whose weights the first stages start from.
        unknown: the same for folders that do not tell how they were made, or tell it no more.
        data: the data of all stages that read some.
        results: name of a file -> the scores of these weights in the run.
        experts: whether the experts do anything, by the run's analyses of these weights.
        pictures: name -> file.
    """

    recipe: dict[str, Any] | None = None
    stages: dict[str, Record] = field(default_factory=dict)
    bases: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    data: list[DataOrigin] = field(default_factory=list)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    experts: list[ExpertSummary] = field(default_factory=list)
    pictures: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "Lineage":
        """Reads the folder of a model and, if it is a stage's, the run around it and the runs before that."""
        folder = folder.absolute()
        if not _is_stage(folder):
            return cls()
        if not Record.read(folder).is_of(folder):
            print(f"warning: {folder.name} was changed after its stage had finished: how is not known", file=sys.stderr)
            return cls(unknown=[folder.name], **_measured(folder))
        made = {origin: Record.read(origin) for origin in _stages_before(folder, _all_inputs)}
        names = {origin: _name(origin, folder.parent) for origin in made}
        bases, unknown = _bases(folder)
        recipe = read_yaml((folder.parent / RECIPE).read_text(encoding="utf-8"), str(folder.parent / RECIPE))
        inputs = [reference for origin in made for reference, start, _ in _all_inputs(origin) if start is not None]
        files = (_source(record) for record in made.values() if "files" in (record.data or {}))
        local = {*inputs, str(recipe.get("output_dir")), *(name for name in files if name and not is_url(name))}
        local = local.union(*map(local_paths, {origin.parent for origin in made}))
        return cls(
            recipe=without_paths(recipe, local),
            stages={names[origin]: _published_record(record, local) for origin, record in made.items()},
            bases=bases,
            unknown=unknown,
            data=_all_data(made, local),
            **_measured(folder),
        )

    @property
    def other_runs(self) -> list[str]:
        return sorted({name.split("/")[0] for name in self.stages if "/" in name})

    @property
    def is_from_scratch(self) -> bool:
        """Whether its weights began as random numbers; not where that is not known."""
        starts = [record.stage.get("stage") == "initialize" for record in self.stages.values()]
        return any(starts) and not self.bases and not self.unknown

    @property
    def hours(self) -> float:
        """The time of all finished attempts."""
        return sum(attempt.seconds or 0 for attempt in self._all_attempts) / 3600

    @property
    def interruptions(self) -> int:
        """Attempts that did not end, whose time is not known."""
        return sum(attempt.seconds is None for attempt in self._all_attempts)

    @property
    def hardware(self) -> list[str]:
        return sorted({f"{attempt.num_processes} x {attempt.device}" for attempt in self._all_attempts})

    @property
    def commits(self) -> list[str]:
        return sorted({attempt.commit for attempt in self._all_attempts if attempt.commit})

    @property
    def _all_attempts(self) -> list[Attempt]:
        return [attempt for record in self.stages.values() for attempt in record.attempts]


def _measured(folder: Path) -> dict[str, Any]:
    """The scores of a folder's weights in its run, what its analyses say of the experts, and the pictures of both."""
    weights = weights_fingerprint(folder)
    results, analyses = _results(folder, weights), dict(_results_of_weights("*/experts.json", folder, weights))
    return {
        "results": {name: _published(read_json(path)) | {"source": folder.name} for name, path in results.items()},
        "experts": [require_summary(analysis.get("summary"), str(path)) for path, analysis in analyses.items()],
        "pictures": _pictures({path.parent for path in results.values()}, {path.parent for path in analyses}),
    }


def _published_record(record: Record, local: Collection[str]) -> Record:
    """The record of a stage without paths, as a card shows it."""
    plain = {name: without_paths(getattr(record, name), local) for name in ("stage", "inputs")}
    own = record.own and OwnStage(**without_paths(record.own.model_dump(), local))
    return record.model_copy(update=plain | {"own": own, "local": []})


def _published(result: dict[str, Any]) -> dict[str, Any]:
    """A result without what is true on this machine alone."""
    return without_paths(result, result.pop("local", []))


def local_paths(run: Path) -> list[str]:
    """Texts in the recipe of a run that were paths on the machines that it ran on."""
    return [path for manifest in run.glob(f"*/{MANIFEST}") for path in Record.read(manifest.parent).local]


def _is_stage(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and (folder.parent / RECIPE).is_file()


def _name(origin: Path, run: Path) -> str:
    return origin.name if origin.parent == run else f"{origin.parent.name}/{origin.name}"


def _stages_before(folder: Path, inputs) -> dict[Path, None]:
    """The unchanged ancestors of a stage, oldest first, then the stage."""
    ancestors: dict[Path, None] = {}
    for _, origin, is_known in inputs(folder):
        if is_known:
            ancestors |= _stages_before(origin, inputs)
    return ancestors | {folder: None}


def _all_inputs(folder: Path) -> Iterator[tuple[str, Path | None, bool]]:
    """(reference, folder, whether that is a stage which has not changed since) of what a stage was made of; the folder
    is None for a name on the Hub."""
    for reference, recorded in Record.read(folder).inputs.items():
        if recorded.startswith(f"{reference}@"):  # see records.provenance.model_fingerprint
            yield reference, None, False
            continue
        origin = folder.parent / reference
        origin = origin if _is_stage(origin) else Path(reference).absolute()
        record = Record.read(origin) if _is_stage(origin) else None
        yield reference, origin, record is not None and record.digest == recorded and record.is_of(origin)


def _inputs_of_weights(folder: Path) -> Iterator[tuple[str, Path | None, bool]]:
    """The inputs whose weights it goes on with: not what embedded or clustered its data."""
    inputs = list(_all_inputs(folder))
    stage = Record.read(folder).stage
    lists = [stage[key] for key in ("models", "experts") if isinstance(stage.get(key), list)]
    references = [stage.get("model"), *itertools.chain(*lists)]
    return (part for part in inputs if part[0] in references)


def _bases(folder: Path) -> tuple[list[str], list[str]]:
    """The starting points of the weights: names on the Hub, and folders of unknown lineage."""
    hub, unknown = set(), set()
    for origin in _stages_before(folder, _inputs_of_weights):
        for reference, start, is_known in _inputs_of_weights(origin):
            if start is None:
                hub.add(reference)
            elif not is_known:
                unknown.add(start.name)
    return sorted(hub), sorted(unknown)


def _source(record: Record) -> str | None:
    """The source of a stage's data, as its settings name it."""
    settings = record.stage.get("data")
    source = settings.get("source") if isinstance(settings, dict) else None
    return source if isinstance(source, str) else None


def _all_data(made: dict[Path, Record], local: Collection[str]) -> list[DataOrigin]:
    """The data of stages that no stage made; what several read stands once, with the most pairs that one trained on.

    A stage of one cluster does not tell how many pairs its data have.
    """
    pairs_of: dict[tuple[str, DataOrigin], int | None] = {}
    for origin, record in made.items():
        source = _source(record)
        inputs = {name: is_known for name, _, is_known in _all_inputs(origin)}
        if source is not None and not inputs.get(source):
            of_hub = "commit" in (record.data or {}) or is_hub_name(source)
            one = source, _data(record.stage["data"], source in local or source in inputs or not of_hub)
            pairs = record.pairs if record.stage.get("cluster") is None else None
            pairs_of[one] = max(pairs_of.get(one) or 0, pairs or 0) or None
    return sorted((replace(one, pairs=pairs) for (_, one), pairs in pairs_of.items()), key=str)


def _data(settings: dict[str, Any], is_local: bool) -> DataOrigin:
    source = settings["source"]
    if source in WORLDS:
        kinds = settings.get("kinds", "all")
        return DataOrigin(
            source, "world", f"{settings.get('captions', 'web')} captions{f' of {kinds}' * (kinds != 'all')}"
        )
    details = f"columns {settings.get('image_column', 'image')} and {settings.get('caption_column', 'caption')}"
    if is_url(source):
        return DataOrigin(source, "web", details)
    return (
        DataOrigin(without_paths(source, [source]), "local", details)
        if is_local
        else DataOrigin(source, "hub", details)
    )


def _results_of_weights(pattern: str, folder: Path, weights: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The results in a run, oldest first, that are of the weights in a folder as they are now.

    Warns of those that only share its name.
    """
    others = []
    for path in sorted(folder.parent.glob(pattern), key=lambda path: path.stat().st_mtime):
        result = read_record(path, dict)
        if result.get("weights") == weights and not result.get("changes"):
            yield path, result
        elif Path(str(result.get("source"))).name == folder.name:
            others.append(path.relative_to(folder.parent).as_posix())
    if others:
        print(
            f"warning: {len(others)} results of {folder.name} are left out: other weights or another configuration "
            f"were measured, or no weights are named; measure again ({join_names(others)})",
            file=sys.stderr,
        )


def _results(folder: Path, weights: str) -> dict[str, Path]:
    """Name -> file of the results in a run that are of these weights. Of two that differ in nothing but their scores,
    the later one counts."""
    latest = {}
    for path, result in _results_of_weights("*/*--*.json", folder, weights):
        require_result(result, str(path))
        data = value_digest([result.get("data"), result["batch_size"] if result.get("depends_on_batch") else None])
        latest[result["task"], result["protocol"], result["dtype"], data] = path
    results: dict[str, Path] = {}
    for path in sorted(latest.values()):
        results[path.name if path.name not in results else f"{path.parent.name}--{path.name}"] = path
    return results


def _pictures(of_results: set[Path], of_analyses: set[Path]) -> dict[str, Path]:
    """Name -> file of the pictures in folders of results, which show these and no earlier ones, and of analyses."""
    pictures = [folder / "routing.png" for folder in sorted(of_analyses)]
    for folder in sorted(of_results):
        picture, results = folder / "report.svg", [read_json(path) for path in folder.glob("*--*.json")]
        if picture.is_file() and results_mark(results) in picture.read_text(encoding="utf-8"):
            pictures.append(picture)
    return {path.name: path for path in pictures if path.is_file() and not path.is_symlink()}  # a link may be anything
