"""What an encoder makes of a whole data set, in a `FeatureStore`: images and captions by a CLIP, or one of them by any
encoder."""

from collections.abc import Iterator, Sequence

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import send_to_device
from transformers import PreTrainedModel

from data.images import decode_image
from data.pairs import first_caption
from evaluation.feature_store import Compute
from evaluation.sentence_encoders import SentenceEncoder
from training.loader import PairLoader

# Which pairs of the data have features and labels: those with a readable image, or with a caption
READABLE, CAPTIONED = "readable", "captioned"
# Batches that are written together: what a run that is killed loses, and what is in memory at a time
BATCHES_PER_SHARD, CAPTION_BATCHES_PER_SHARD = 8, 128


def clip_features(
    accelerator: Accelerator, model: PreTrainedModel, loader: PairLoader, caption_weights: Sequence[float] | None = None
) -> Compute:
    """`image` and `text` (pairs, D), normalized. The batches, hence the features to the bit, do not depend on the
    number of processes.

    Args:
        caption_weights: those of the loader: the text feature of an image is the mean of its captions' so weighted.
    """
    model = model.to(accelerator.device).eval()

    def compute(shards: list[range]) -> Iterator[dict[str, torch.Tensor]]:
        for pairs in shards:
            features = {"image": [], "text": []}
            for batch in loader.in_order(pairs.start, pairs.stop):
                caption_mask = batch.pop("caption_mask", None)
                with torch.no_grad(), accelerator.autocast():
                    outputs = model(**send_to_device(batch, accelerator.device, non_blocking=True))
                texts = outputs.text_embeds.float().cpu()
                if caption_mask is not None:
                    texts = mean_of_captions(texts, caption_mask, caption_weights)
                features["image"].append(outputs.image_embeds.float().cpu())
                features["text"].append(texts)
            arrays = {name: torch.cat(tensors) for name, tensors in features.items()}
            for name, array in arrays.items():
                _require_usable(array.numpy(), name, pairs)
            yield arrays

    return compute


def _require_usable(features: np.ndarray, name: str, pairs: range, zeros: bool = False) -> None:
    """Clusters of features that are not finite mean nothing, nor of zeros, which a CLIP makes of too large ones.

    Args:
        zeros: are fine, as TF-IDF's of a text without a known word.
    """
    lengths = np.linalg.norm(features.astype(np.float32), axis=1)
    good = np.isclose(lengths, 1, atol=1e-2) | (zeros & (lengths == 0))  # half precision rounds them
    if not good.all():
        kinds = "not finite" if zeros else "zero or not finite"
        place = f"{name} features of the pairs from {pairs.start} on"
        raise ValueError(f"{(~good).sum()} {place} are {kinds}: damaged weights, or too large for their precision?")


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


def encoder_features(
    encoder: SentenceEncoder, rows: datasets.Dataset, batch_size: int, dtype: str = "float32"
) -> Compute:
    """`embeddings` (pairs, d) of captions or of images; one batch of images is in memory at a time."""

    def embed(pairs: range) -> np.ndarray:
        if encoder.modality == "text":
            return encoder.encode(captions_of(rows, pairs.start, pairs.stop), batch_size)
        images, embeddings = rows.select_columns("image"), []
        for first in range(pairs.start, pairs.stop, batch_size):
            batch = images[first : min(first + batch_size, pairs.stop)]["image"]
            embeddings.append(encoder.encode([*map(decode_image, batch)]))
        return np.concatenate(embeddings)

    def compute(shards: list[range]) -> Iterator[dict[str, np.ndarray]]:
        for pairs in shards:
            embeddings = embed(pairs).astype(dtype)
            _require_usable(embeddings, encoder.modality, pairs, zeros=True)  # a CLIP's encoder refuses them itself
            yield {"embeddings": embeddings}

    return compute


def captions_of(rows: datasets.Dataset, start: int, stop: int) -> list[str]:
    """The captions of rows, of several the first."""
    captions = rows.select_columns("caption")[start:stop]["caption"]  # the images stay where they are
    return [*map(first_caption, captions)]
