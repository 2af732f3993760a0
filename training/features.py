"""What an encoder makes of a whole data set, in a `FeatureStore`: images and captions by a CLIP, one of them by any
encoder, and the hidden states of tokens that enter the first sparse layers of both towers.

The layers below those are frozen in CLIP-FMoE's stages: with their output on disk, no step has to compute them again.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import send_to_device
from safetensors import safe_open
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from data.identity import OTHER_DATA
from data.images import decode_image
from data.pairs import first_caption
from evaluation.feature_store import Compute, FeatureStore
from evaluation.sentence_encoders import SentenceEncoder
from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel
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


def hidden_states(accelerator: Accelerator, model: CLIPMoEModel, loader: PairLoader, dtype: torch.dtype) -> Compute:
    """`vision` (images, S, D), `text` (tokens of all captions, D), and where each caption `starts` and `ends` in it
    (images, captions): what enters the first sparse layers."""
    model = model.to(accelerator.device).eval()
    first = {tower: min(getattr(model, tower).config.moe_layers) for tower in ("text_model", "vision_model")}

    def compute(shards: list[range]) -> Iterator[dict[str, torch.Tensor]]:
        for pairs in shards:
            images, texts, lengths = [], [], []
            for batch in loader.in_order(pairs.start, pairs.stop):
                mask = batch.pop("caption_mask", None)
                with torch.no_grad(), accelerator.autocast():
                    outputs = model(
                        **send_to_device(batch, accelerator.device, non_blocking=True), output_hidden_states=True
                    )
                images.append(outputs.vision_model_output.hidden_states[first["vision_model"]].to(dtype).cpu())
                states = outputs.text_model_output.hidden_states[first["text_model"]].to(dtype).cpu()
                of_texts = batch["attention_mask"].sum(dim=1)
                texts += [state[:length] for state, length in zip(states, of_texts.tolist(), strict=True)]
                mask = torch.ones(len(of_texts), 1, dtype=torch.bool) if mask is None else mask
                # (B, L) tokens of each caption, 0 for a missing one
                lengths.append(torch.zeros(mask.shape, dtype=torch.long).masked_scatter(mask, of_texts))
            lengths = torch.cat(lengths)
            ends = lengths.flatten().cumsum(0).view(lengths.shape)
            yield {"vision": torch.cat(images), "text": torch.cat(texts), "starts": ends - lengths, "ends": ends}

    return compute


def frozen_weights_hash(model: CLIPMoEModel) -> str:
    """The hash of all weights below the first sparse layer of each tower."""
    digest = hashlib.sha256()
    for tower in ("text_model", "vision_model"):
        submodel = getattr(model, tower)
        for name, tensor in sorted(submodel.state_dict().items()):
            parts = name.split(".")
            in_encoder = parts[:2] == ["encoder", "layers"]
            if (in_encoder and int(parts[2]) < min(submodel.config.moe_layers)) or parts[0] in (
                "embeddings",
                "pre_layrnorm",
            ):
                digest.update(f"{tower}.{name}".encode())
                digest.update(tensor.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def captions_per_image(rows: datasets.Dataset, caption_weights: Sequence[float] | None) -> int:
    """How many captions of an image hidden states are of: all, or the only one."""
    if caption_weights is not None:
        return len(caption_weights)
    if not isinstance(rows[0]["caption"], str):
        raise ValueError("hidden states need caption_weights where images have several captions")
    return 1


def size_on_disk(config: CLIPMoEConfig, images: int, text_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the hidden states of images and of the tokens of all their texts."""
    text, vision = config.text_config, config.vision_config
    vision_tokens = images * ((vision.image_size // vision.patch_size) ** 2 + 1)
    return dtype.itemsize * (vision_tokens * vision.hidden_size + text_tokens * text.hidden_size)


class HiddenStates:
    """Hidden states on disk, by the number of a pair.

    Args:
        directory: of a hidden_states stage.
        model: the one that is to be trained on them.
        dataset_fingerprint: of the pairs, see `data.identity.data_fingerprint`.
        num_captions: of an image.
    """

    def __init__(self, directory: Path, model: CLIPMoEModel, dataset_fingerprint: str, num_captions: int):
        keys = {"captions": int, "dataset_fingerprint": str, "weights": str}
        self.store = FeatureStore.open(directory, "a hidden_states stage", keys)
        about = self.store.about
        checks = (
            ("dataset_fingerprint", dataset_fingerprint, OTHER_DATA),
            ("captions", num_captions, f"{about['captions']} captions, not of {num_captions}"),
            ("weights", frozen_weights_hash(model), "a model with other weights below the sparse layers"),
        )
        for key, value, other in checks:
            if about[key] != value:
                raise ValueError(f"the hidden states in {directory} are of {other}")
        self.shards: dict[int, safe_open] = {}

    def __call__(self, pairs: Sequence[int]) -> dict[str, torch.Tensor]:
        """`vision_sparse_inputs` (B, S, D) and `text_sparse_inputs` (captions, S, D) in float32, padded with zeros; the
        captions of a pair that are missing are left out."""
        images, texts = [], []
        for pair in pairs:
            row = pair % self.store.shard_size
            file = self._shard(pair - row)
            images.append(file.get_slice("vision")[row])
            states = file.get_slice("text")
            bounds = zip(file.get_slice("starts")[row].tolist(), file.get_slice("ends")[row].tolist(), strict=True)
            texts += [states[first:last] for first, last in bounds if last > first]
        return {
            "vision_sparse_inputs": torch.stack(images).float(),
            "text_sparse_inputs": pad_sequence(texts, batch_first=True).float(),
        }

    def _shard(self, start: int) -> safe_open:
        if start not in self.shards:
            self.shards[start] = self.store.shard(start)
        return self.shards[start]
