"""What made a stage's folder, as its `manifest.json` tells, and whether that is what a run asks for."""

import re
from pathlib import Path
from typing import Any

from data.identity import newest_file
from data.sources import DataArguments
from records.files import read_record
from records.provenance import ATTEMPTS, LOG, MANIFEST, is_as_made, manifest_fingerprint, model_fingerprint
from training.engine import CHECKPOINTS

# How often something is logged or saved, and how data is read ahead, does not change what is computed.
NOT_COMPARED = {"logging_steps", "save_steps", "save_total_limit", "num_workers", "prefetch_factor"}


def stage_fingerprint(folder: Path) -> str:
    """See `manifest_fingerprint`.

    Raises:
        ValueError: the manifest is damaged, or the model beside it was changed after the stage had finished.
    """
    if not is_as_made(folder, read_record(folder / MANIFEST, dict)):
        raise ValueError(
            f"the model in {folder} was changed after its stage had finished: delete the folder to make it anew, or "
            f"copy it elsewhere without {MANIFEST} and name that folder"
        )
    return manifest_fingerprint(folder)


def input_fingerprint(model: str) -> str:
    """What a stage reads: the hash of the manifest in the folder of a stage, else see `model_fingerprint`."""
    return stage_fingerprint(Path(model)) if (Path(model) / MANIFEST).is_file() else model_fingerprint(model)


def has_work(partial: Path) -> bool:
    """Whether a stage that has not finished left something to go on from: neither how it was begun nor a log is, nor a
    best model without a checkpoint."""
    paths = [*partial.glob("*"), *partial.glob(f"{CHECKPOINTS}/step-*")]
    no_work = (MANIFEST, ATTEMPTS, LOG, CHECKPOINTS)
    return any(path.name not in no_work and path.suffix not in (".partial", ".tmp") for path in paths)


def comparable(settings: Any) -> Any:
    """Settings without those of `NOT_COMPARED`; but workers of a stream settle its order, and scores while training may
    settle which model is kept."""
    if not isinstance(settings, dict):
        return settings
    left_out = NOT_COMPARED - ({"num_workers"} if settings.get("streaming") else set())
    evaluation = settings.get("evaluation")
    if not (isinstance(evaluation, dict) and evaluation.get("keep_best")):
        left_out |= {"evaluation"}
    return {key: comparable(value) for key, value in settings.items() if key not in left_out}


def flatten(settings: dict, prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted keys."""
    flat = {}
    for key, value in settings.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def require_same(folder: Path, new: dict[str, Any], data: DataArguments | None) -> None:
    """Compare a folder's manifest, if it has one, with what it would be now.

    Args:
        data: of the stage, whose identity is in `new`.

    Raises:
        ValueError: they differ, or the manifest is damaged.
    """
    if not (folder / MANIFEST).is_file():
        return
    way_out = "Delete it to make it anew, or choose another --output-dir"
    old, new = read_record(folder / MANIFEST, dict), dict(new)
    for manifest in (old, new):
        manifest.pop("weights", None)  # known when it has finished
        manifest.pop("own", None)  # in its code
    # Data that are not here now count as the same
    data_then, data_now = old.pop("data", None), new.pop("data", None)
    # An input that is not here now counts as the same: the settings name all inputs, so that another one is seen there
    then, now = old.get("inputs", {}), new.get("inputs", {})
    if not isinstance(then, dict):
        raise ValueError(f"{folder / MANIFEST} is damaged: its inputs are no dictionary. {way_out}")
    old["inputs"], new["inputs"] = ({key: some[key] for key in then.keys() & now} for some in (then, now))
    old, new = flatten(old), flatten(new)
    keys = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    changed = [f"{key}: {_shown(old.get(key))} -> {_shown(new.get(key))}" for key in keys]
    if changed:
        raise ValueError(f"{folder} was made with other settings ({'; '.join(changed)}). {way_out}")
    if data_then is not None and data_now is not None and data_then != data_now:
        newest = f", of which {newest_file(data)} changed last" if "files" in data_now else ""
        raise ValueError(
            f"{folder} was made with other data: {data.source} was {_short(data_then)} and is {_short(data_now)}"
            f"{newest}. {way_out}"
        )


def _shown(value: Any) -> str:
    """A setting, or the beginning of a hash."""
    is_hash = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
    return repr(value[:12] if is_hash else value)


def _short(identity: dict[str, Any]) -> str:
    if "commit" in identity:
        return f"commit {identity['commit']}"
    return f"{identity['files']} files with the hash {identity['sha256'][:12]}"
