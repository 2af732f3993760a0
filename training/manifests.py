"""Whether the folder of a stage is what a run asks for, as its record tells."""

from pathlib import Path
from typing import Any

from data.identity import newest_file
from data.sources import DataArguments
from records.provenance import LOG, MANIFEST, Record
from training.engine import CHECKPOINTS

# How often something is logged or saved, and how data is read ahead, does not change what is computed.
NOT_COMPARED = {"logging_steps", "save_steps", "save_total_limit", "num_workers", "prefetch_factor"}


def has_work(partial: Path) -> bool:
    """Whether a stage that has not finished left something to go on from: neither how it was begun nor a log is, nor a
    best model without a checkpoint."""
    paths = [*partial.glob("*"), *partial.glob(f"{CHECKPOINTS}/step-*")]
    no_work = (MANIFEST, LOG, CHECKPOINTS)
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


def require_same(folder: Path, new: Record, data: DataArguments | None) -> None:
    """
    Args:
        data: of the stage, where it may be read.

    Raises:
        ValueError: the record of a folder tells that it was made otherwise, or is damaged.
    """
    found = Record.read(folder).differences(new)
    if not found:
        return
    differing = "; ".join(f"{key}: {how}" for key, how in found.items())
    of_data = all(key.startswith("data.") for key in found)
    newest = f", of which {newest_file(data)} changed last" if of_data and data and "data.sha256" in found else ""
    raise ValueError(
        f"{folder} was made with other {'data' if of_data else 'settings'} ({differing}){newest}. Delete it to make it "
        "anew, or choose another --output-dir"
    )
