"""The features of a whole dataset, computed once by any number of processes."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from transformers import PreTrainedModel

from data.sources import DataArguments
from training.arrays import open_arrays, save_arrays
from training.loader import PairLoader
from training.parts import PARTS, read_parts, write_parts
from training.settings import dump

FEATURES = "features.safetensors"
# Batches that are written together: what a run that is killed loses.
BATCHES_PER_PART = 8


def embed_pairs(
    accelerator: Accelerator, model: PreTrainedModel, loader: PairLoader, num_pairs: int, directory: Path
) -> None:
    """Embed all pairs in parts of `directory`, see `write_parts`.

    The batches, hence the features to the bit, do not depend on the number of processes.

    Raises:
        ValueError: a feature is not finite, or a part is damaged, missing or of another size.
    """
    model = model.to(accelerator.device).eval()

    def compute(start: int, stop: int) -> dict[str, torch.Tensor]:
        features = {"image": [], "text": []}
        for batch in loader.in_order(start, stop):
            with torch.no_grad(), accelerator.autocast():
                outputs = model(**send_to_device(batch, accelerator.device))
            features["image"].append(outputs.image_embeds.float().cpu())
            features["text"].append(outputs.text_embeds.float().cpu())
        arrays = {name: torch.cat(tensors) for name, tensors in features.items()}
        for name, array in arrays.items():
            bad = int((~array.isfinite()).any(dim=1).sum())
            if bad:
                raise ValueError(f"{bad} {name} features of the pairs from {start} on are not finite: damaged weights?")
        return arrays

    write_parts(accelerator, directory / PARTS, "features", num_pairs, loader.batch_size * BATCHES_PER_PART, compute)


def join_parts(directory: Path, num_pairs: int, data: DataArguments, dataset_fingerprint: str) -> None:
    """Make the features of all parts one file, which knows the data they are of.

    Raises:
        ValueError: a part is damaged or not there.
    """
    parts = {name: read_parts(directory / PARTS, name, num_pairs) for name in ("image", "text")}
    arrays = {name: np.concatenate([array for _, array in of_name]) for name, of_name in parts.items()}
    metadata = {"data": json.dumps(dump(data)), "dataset_fingerprint": dataset_fingerprint}
    save_arrays(directory / FEATURES, arrays, metadata)
    shutil.rmtree(directory / PARTS)


def load_features(directory: Path) -> dict[str, np.ndarray]:
    """The features of an embed stage: `image` and `text` (samples, D), normalized.

    Raises:
        FileNotFoundError: the folder has no features.
        ValueError: the file is damaged.
    """
    with open_arrays(directory / FEATURES, "an embed stage") as file:
        return {name: file.get_tensor(name) for name in ("image", "text")}


def embedded_data(directory: Path) -> tuple[DataArguments, str]:
    """The data that an embed stage embedded, and their fingerprint. Raises as `load_features`."""
    with open_arrays(directory / FEATURES, "an embed stage") as file:
        metadata = file.metadata()
    return DataArguments(**json.loads(metadata["data"])), metadata["dataset_fingerprint"]
