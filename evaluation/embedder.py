"""Embeddings of images and texts by a CLIP, kept on disk: the one way from a model to its features."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from transformers import BatchFeature, CLIPModel, PreTrainedModel, PreTrainedTokenizerBase

import modeling_clip_moe
from clip_moe import conversion, data
from clip_moe.conversion.checkpoints import load_clip
from clip_moe.conversion.processors import load_processor
from clip_moe.engine.digests import file_digests, value_digest
from clip_moe.engine.own_modules import code_of_models
from clip_moe.engine.provenance import PROCESSOR, WEIGHTS, environment, model_fingerprint
from clip_moe.evaluation import batches as reading
from clip_moe.evaluation.batches import Batches, ImageBatches, TextBatches, read_batches
from clip_moe.evaluation.feature_store import Compute, FeatureStore
from clip_moe.evaluation.progress import progress
from modeling_clip_moe import CLIPMoEModel

# Batches that are written together: what a run that is killed loses
BATCHES_PER_SHARD = 8
# Images above which workers that read them save more time than they take to start
WORTH_WORKERS, MOST_WORKERS = 500, 8


@torch.no_grad()
def embed(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The normalized embeddings `image`, `text` or both, (rows, D) in float32 on the CPU, of what a processor made of
    images, texts or pairs. The model itself normalizes those of pairs, as in training, with other last bits.

    Raises:
        ValueError: some are zero or not finite.
    """
    inputs = BatchFeature(dict(inputs)).to(model.device, model.dtype)  # masks, shapes and tokens keep their type
    if "input_ids" not in inputs:
        embeds = {"image": F.normalize(model.get_image_features(**inputs).pooler_output.float().cpu(), dim=-1)}
    elif "pixel_values" not in inputs:
        embeds = {"text": F.normalize(model.get_text_features(**inputs).pooler_output.float().cpu(), dim=-1)}
    else:
        outputs = model(**inputs)
        embeds = {"image": outputs.image_embeds.float().cpu(), "text": outputs.text_embeds.float().cpu()}
    for name, rows in embeds.items():
        # Half precision rounds norms a little; one far from 1 is of what is not finite, or overflowed
        bad = int((~rows.norm(dim=-1).isclose(torch.ones(()), atol=1e-2)).sum())
        if bad:
            raise ValueError(
                f"{bad} of {len(rows)} {name} embeddings by {model.name_or_path} are zero or not finite: its weights "
                f"are damaged, or too large for {str(model.dtype).removeprefix('torch.')}"
            )
    return embeds


class Embedder:
    """A model's normalized embeddings, computed once and kept on disk.

    Args:
        model: a folder or hub name of a dense or sparse CLIP.
        processor: a folder or hub name with the processor; default: the model's.
        cache_dir: where they are kept, each data set in a `FeatureStore` named by a hash of model, code, settings and
            data, so that evaluations share it and resume. None: nowhere.
        num_workers: processes that read and decode images. None: none for fewer than 500, else up to 8.
        state: the processes that share the work through `cache_dir` and call the same methods; an `Accelerator` also
            has its precision. None: this process works alone.

    Raises:
        ValueError: the weights changed since the embedder was made, embeddings are zero or not finite, or a file of
            them is damaged.
    """

    def __init__(
        self,
        model: str | Path,
        cache_dir: Path | None,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        processor: str | Path | None = None,
        *,
        num_workers: int | None = None,
        state: PartialState | Accelerator | None = None,
    ):
        processor = processor or model  # of an expert, the mixture's
        self.fingerprint = model_fingerprint(model, WEIGHTS)
        files = [self.fingerprint, model_fingerprint(processor, PROCESSOR)]
        self.processor = load_processor(processor)
        self.source, self.cache_dir = model, cache_dir
        self.batch_size, self.device, self.dtype = batch_size, device, dtype
        self.num_workers, self.state = num_workers, state
        # Whether torchvision is installed decides of which class a folder's image processor is, and how it resizes.
        # Capacity at inference would make an embedding depend on its batch, hence the batch size.
        images, versions = type(self.processor.image_processor).__name__, environment()["versions"]
        self.key = value_digest([*files, images, code_digest(), versions, str(dtype), device.type, batch_size])

    @cached_property
    def model(self) -> CLIPModel | CLIPMoEModel:
        """Loaded when something is embedded that was not kept."""
        model = load_clip(self.source, dtype=self.dtype)
        if model_fingerprint(self.source, WEIGHTS) != self.fingerprint:
            raise ValueError(f"{self.source} was changed while it was measured: run again")
        return model.to(self.device)

    def images(self, rows: Dataset, column: str = "image") -> np.ndarray:
        """(rows, D) of the images of a column."""
        return self._kept("image", ImageBatches(rows, column, self.processor.image_processor, self.batch_size))

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """(texts, D) of texts, cut at the tokenizer's `model_max_length`."""
        return self._kept("text", TextBatches(texts, self.processor.tokenizer, self.batch_size))

    def compute(self, batches: Batches) -> Compute:
        """A function for `FeatureStore.write`: `image`, `text` or both of the batches. The batches, hence the
        embeddings to the bit, do not depend on the number of processes."""

        def compute(shards: list[range]) -> Iterator[dict[str, np.ndarray]]:
            size, processes = batches.batch_size, 1 if self.state is None else self.state.num_processes
            numbers = [range(rows.start // size, -(-rows.stop // size)) for rows in shards]
            num_workers = self.num_workers
            if num_workers is None:
                are_few = isinstance(batches, TextBatches) or len(batches.items) < WORTH_WORKERS
                num_workers = 0 if are_few else min(MOST_WORKERS, max(1, (os.cpu_count() or 1) // processes))
            inputs = read_batches(batches, list(chain.from_iterable(numbers)), num_workers)
            for batch_numbers in numbers:
                embeds = [self._embed(next(inputs)) for _ in batch_numbers]
                yield {name: torch.cat([batch[name] for batch in embeds]).numpy() for name in embeds[0]}

        return compute

    def _kept(self, name: str, batches: Batches) -> np.ndarray:
        """The embeddings of this name, read from `cache_dir` or computed and kept there."""
        size, compute, noun = self.batch_size * BATCHES_PER_SHARD, self.compute(batches), f"{name}s"
        if self.cache_dir is None:  # every process embeds all
            shards = FeatureStore(Path(), len(batches.items), size).shards()
            shown = self.state is None or self.state.is_main_process
            computed = progress(f"embedding {len(batches.items)} {noun}", len(shards), compute(shards), shown=shown)
            return np.concatenate([arrays[name] for arrays in computed])
        digest = [batches.digest() if self.state is None or self.state.is_main_process else ""]
        if self.state is not None and self.state.num_processes > 1:
            broadcast_object_list(digest)
        folder = self.cache_dir / value_digest([self.key, digest[0]])[:24]
        store = FeatureStore(folder, len(batches.items), size)
        store.write(self.state, f"embeddings of {noun}", compute)
        embeds = store[name][:]
        lengths = np.linalg.norm(embeds, axis=-1)
        if embeds.ndim != 2 or not np.all(np.isclose(lengths, 1, atol=1e-3)):
            raise ValueError(f"{folder} is damaged (its embeddings are not normalized): delete it to compute it again")
        return embeds

    def _embed(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of an image with several captions, the text is their weighted mean (gamma in CLIP-FMoE eq. 4). A missing one
        leaves its weight to the others."""
        mask, weights = (inputs.pop(name, None) for name in ("caption_mask", "caption_weights"))  # (B, L) and (L,)
        with getattr(self.state, "autocast", nullcontext)():
            embeds = embed(self.model, inputs)
        if mask is not None:
            texts, weights = embeds["text"], weights.expand(mask.shape)[mask]  # (captions, D) and (captions,)
            image_of = torch.arange(len(mask)).repeat_interleave(mask.sum(dim=1))
            sums = texts.new_zeros(len(mask), texts.shape[1]).index_add_(0, image_of, weights[:, None] * texts)
            embeds["text"] = F.normalize(sums, dim=1)
        return embeds

    # An ensemble of one, with the methods of `clip_moe.evaluation.ensemble.Ensemble`

    @property
    def tokenizers(self) -> list[PreTrainedTokenizerBase]:
        return [self.processor.tokenizer]

    def map(self, compute: Callable[["Embedder"], Any]) -> list[Any]:
        return [compute(self)]

    def weights(self, metadata: Sequence[Sequence[str]], templates: Sequence[str] = ()) -> np.ndarray:
        return np.ones((len(metadata), 1), np.float32)

    def image_weights(self, rows: Dataset, column: str = "image") -> None:
        return None

    def image_side(self, embeds: Sequence[np.ndarray], weights: Any = None) -> np.ndarray:
        return embeds[0]

    text_side = features = image_side


def usable_device(device: str | torch.device | None) -> torch.device:
    """The device, or the accelerator if there is one. Raises a ValueError if it does not compute."""
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    try:
        return (torch.ones(1, device=device) + 1).device
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"cannot compute on the device {device}: {error}") from error


def code_digest() -> str:
    """The digest of the code that makes embeddings, as it is on disk: a commit would not tell two uncommitted changes
    apart."""
    folders = [Path(package.__file__).parent for package in (modeling_clip_moe, conversion, data)]
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    return value_digest([file_digests([*files, __file__, reading.__file__]), code_of_models()])
