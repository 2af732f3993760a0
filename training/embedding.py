"""The features of a whole dataset, computed once by any number of processes."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import send_to_device
from transformers import PreTrainedModel

from data.sources import DataArguments
from training.arrays import join_rows, open_arrays
from training.loader import PairLoader
from training.parts import PARTS, read_parts, write_parts
from training.settings import dump

FEATURES = "features.safetensors"
# Batches that are written together: what a run that is killed loses.
BATCHES_PER_PART = 8


def embed_pairs(
    accelerator: Accelerator,
    model: PreTrainedModel,
    loader: PairLoader,
    num_pairs: int,
    directory: Path,
    caption_weights: Sequence[float] | None = None,
) -> None:
    """Embed all pairs in parts of `directory`, see `write_parts`.

    The batches, hence the features to the bit, do not depend on the number of processes.

    Args:
        caption_weights: those of the loader: the text feature of an image is the mean of its captions' so weighted.

    Raises:
        ValueError: a feature is not finite, or a part is damaged, missing or of another size.
    """
    model = model.to(accelerator.device).eval()

    def compute(start: int, stop: int) -> dict[str, torch.Tensor]:
        features = {"image": [], "text": []}
        for batch in loader.in_order(start, stop):
            caption_mask = batch.pop("caption_mask", None)
            with torch.no_grad(), accelerator.autocast():
                outputs = model(**send_to_device(batch, accelerator.device, non_blocking=True))
            texts = outputs.text_embeds.float().cpu()
            features["image"].append(outputs.image_embeds.float().cpu())
            features["text"].append(
                texts if caption_mask is None else mean_of_captions(texts, caption_mask, caption_weights)
            )
        arrays = {name: torch.cat(tensors) for name, tensors in features.items()}
        for name, array in arrays.items():
            bad = int((~array.isfinite()).any(dim=1).sum())
            if bad:
                raise ValueError(f"{bad} {name} features of the pairs from {start} on are not finite: damaged weights?")
        return arrays

    write_parts(accelerator, directory / PARTS, "features", num_pairs, loader.batch_size * BATCHES_PER_PART, compute)


def mean_of_captions(
    text_embeds: torch.Tensor, caption_mask: torch.Tensor, caption_weights: Sequence[float]
) -> torch.Tensor:
    """(B, D), normalized, the weighted mean of the captions of each image.

    Args:
        text_embeds: (captions, D), normalized, those of all images, one after the other.
        caption_mask: (B, L) of bool, False for a missing caption, which leaves its weight to the image's others.
        caption_weights: L, gamma in CLIP-FMoE eq. 4.
    """
    weights = torch.tensor(caption_weights).expand(caption_mask.shape)[caption_mask]  # (captions,)
    image_of = torch.arange(len(caption_mask)).repeat_interleave(caption_mask.sum(dim=1))
    sums = text_embeds.new_zeros(len(caption_mask), text_embeds.shape[1])
    return F.normalize(sums.index_add_(0, image_of, weights[:, None] * text_embeds), dim=1)


def join_parts(directory: Path, num_pairs: int, data: DataArguments, dataset_fingerprint: str) -> None:
    """Make the features of all parts one file, which knows the data they are of.

    Raises:
        ValueError: a part is damaged or not there.
    """
    parts = {name: read_parts(directory / PARTS, name, num_pairs) for name in ("image", "text")}
    arrays = {name: (array for _, array in of_name) for name, of_name in parts.items()}
    metadata = {"data": json.dumps(dump(data)), "dataset_fingerprint": dataset_fingerprint}
    join_rows(directory / FEATURES, arrays, num_pairs, metadata)
    shutil.rmtree(directory / PARTS)


def load_features(directory: Path) -> dict[str, np.ndarray]:
    """The features of an embed stage: `image` and `text` (samples, D), normalized. They are mapped, not read.

    Raises:
        FileNotFoundError: the folder has no features.
        ValueError: the file is damaged.
    """
    with open_arrays(directory / FEATURES, "an embed stage", framework="pt") as file:
        return {name: file.get_tensor(name).numpy() for name in ("image", "text")}


def embedded_data(directory: Path) -> tuple[DataArguments, str]:
    """The data that an embed stage embedded, and their fingerprint. Raises as `load_features`."""
    with open_arrays(directory / FEATURES, "an embed stage") as file:
        metadata = file.metadata()
    return DataArguments(**json.loads(metadata["data"])), metadata["dataset_fingerprint"]
