"""The features of a whole dataset, computed once by any number of processes."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from conversion.files import new_file
from data.sources import DataArguments
from training.loader import PairLoader
from training.settings import dump

FILE = "features.safetensors"
# Batches that are written together: what a run that is killed loses.
BATCHES_PER_PART = 8


def embed_pairs(
    accelerator: Accelerator, model: PreTrainedModel, loader: PairLoader, num_pairs: int, directory: Path
) -> None:
    """Embed all pairs; every process computes its share of `directory/parts`, and parts that are there are kept.

    The batches, hence the features to the bit, do not depend on the number of processes.

    Raises:
        ValueError: a feature is not finite.
    """
    parts = directory / "parts"
    parts.mkdir(exist_ok=True)
    model = model.to(accelerator.device).eval()
    part_size = loader.batch_size * BATCHES_PER_PART
    starts = range(0, num_pairs, part_size)[accelerator.process_index :: accelerator.num_processes]
    for start in tqdm(starts, desc=f"embedding {num_pairs} pairs", disable=not accelerator.is_local_main_process):
        path = parts / f"{start:012d}.safetensors"
        if path.exists():
            continue
        features = {"image": [], "text": []}
        for batch in loader.in_order(start, min(start + part_size, num_pairs)):
            with torch.no_grad(), accelerator.autocast():
                outputs = model(**send_to_device(batch, accelerator.device))
            features["image"].append(outputs.image_embeds.float().cpu())
            features["text"].append(outputs.text_embeds.float().cpu())
        arrays = {name: torch.cat(tensors).numpy() for name, tensors in features.items()}
        for name, array in arrays.items():
            bad = int((~np.isfinite(array)).any(axis=1).sum())
            if bad:
                raise ValueError(f"{bad} {name} features of the pairs from {start} on are not finite: damaged weights?")
        with new_file(path) as partial:
            save_file(arrays, partial)


def join_parts(directory: Path, num_pairs: int, data: DataArguments, dataset_fingerprint: str) -> None:
    """Make the features of all parts one file, which knows the data they are of.

    Raises:
        ValueError: a part is not there, or its end is not the next one's start.
    """
    parts, rows = [], 0
    for file in sorted((directory / "parts").glob("*.safetensors")):
        if int(file.stem) != rows:
            break
        parts.append(load_file(file))
        rows += len(parts[-1]["image"])
    if rows != num_pairs:
        raise ValueError(
            f"{directory / 'parts'} holds the features of the first {rows} of {num_pairs} pairs only: do all processes "
            "see this folder? Delete it to begin anew"
        )
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in ("image", "text")}
    metadata = {"data": json.dumps(dump(data)), "dataset_fingerprint": dataset_fingerprint}
    with new_file(directory / FILE) as partial:
        save_file(arrays, partial, metadata)
    shutil.rmtree(directory / "parts")


def load_features(directory: Path) -> dict[str, np.ndarray]:
    """The features of an embed stage: `image` and `text` (samples, D), normalized.

    Raises:
        FileNotFoundError: the folder has no features.
        ValueError: the file is damaged.
    """
    with open_arrays(directory / FILE, "an embed stage") as file:
        return {name: file.get_tensor(name) for name in ("image", "text")}


def embedded_data(directory: Path) -> tuple[DataArguments, str]:
    """The data that an embed stage embedded, and their fingerprint. Raises as `load_features`."""
    with open_arrays(directory / FILE, "an embed stage") as file:
        metadata = file.metadata()
    return DataArguments(**json.loads(metadata["data"])), metadata["dataset_fingerprint"]


@contextmanager
def open_arrays(path: Path, maker: str):
    """Open a safetensors file that `maker` wrote.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: {path.parent} is not the folder of {maker}")
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged; delete {path.parent} to have it made anew: {error}") from error
