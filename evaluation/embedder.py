"""A model's embeddings of images and texts, kept on disk."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from transformers import BatchFeature, CLIPModel

import data.images
import data.preparation
import data.shards
import data.tokenizer
import modeling_clip_moe
from conversion import checkpoints, processors
from conversion.checkpoints import load_clip
from conversion.processors import load_processor
from evaluation import batches as reading
from evaluation.batches import Batches, ImageBatches, TextBatches, read_batches
from evaluation.feature_store import FeatureStore
from evaluation.progress import progress
from modeling_clip_moe import CLIPMoEModel
from records.provenance import PROCESSOR, WEIGHTS, environment, file_digest, model_fingerprint, value_digest

# Batches that are written together: what a run that is killed loses
BATCHES_PER_SHARD = 8

# What makes embeddings of inputs
Embed = Callable[[dict[str, torch.Tensor]], torch.Tensor]


class Embedder:
    """A model's normalized embeddings, computed once and kept on disk.

    Args:
        model: a folder or hub name of a dense or sparse CLIP.
        processor: a folder or hub name with the processor; default: the model's.
        cache_dir: where they are kept, each data set in a folder (`FeatureStore`) named by a hash of model, code,
            settings and what is embedded. What is interrupted goes on from there. Any number of evaluations may share
            it. None: nowhere.
        num_workers: processes that read and decode images. None: none for a few small ones, else up to 8.
        state: of the processes that share the work through `cache_dir`, and all call the same methods. None: this
            process works alone.

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
        state: PartialState | None = None,
    ):
        processor = processor or model  # of an expert, the mixture's
        self.fingerprint = model_fingerprint(str(model), WEIGHTS)
        files = [self.fingerprint, model_fingerprint(str(processor), PROCESSOR)]
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
        if model_fingerprint(str(self.source), WEIGHTS) != self.fingerprint:
            raise ValueError(f"{self.source} was changed while it was measured: start again")
        return model.to(self.device)

    def images(self, rows: Dataset, column: str = "image", skip_unreadable: bool = False) -> np.ndarray:
        """(rows, D) of the images of a column; of one that cannot be read zeros, if these are skipped."""

        def embed(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            inputs = BatchFeature(inputs).to(self.device, self.dtype)  # masks and shapes keep their type
            return self.model.get_image_features(**inputs).pooler_output

        batches = ImageBatches(rows, column, self.processor.image_processor, self.batch_size, skip_unreadable)
        return self._embeddings("images", batches, embed)

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """(texts, D) of texts, cut at the tokenizer's `model_max_length`."""

        def embed(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
            return self.model.get_text_features(**inputs).pooler_output

        return self._embeddings("texts", TextBatches(texts, self.processor.tokenizer, self.batch_size), embed)

    def _embeddings(self, what: str, batches: Batches, embed: Embed) -> np.ndarray:
        def compute(shards: list[range]) -> Iterator[dict[str, np.ndarray]]:
            numbers = [range(rows.start // self.batch_size, -(-rows.stop // self.batch_size)) for rows in shards]
            processes = 1 if self.state is None else self.state.num_processes
            num_workers = batches.num_workers(processes) if self.num_workers is None else self.num_workers
            inputs = read_batches(batches, list(chain(*numbers)), num_workers)
            for of_shard in numbers:
                embeds = [self._normalized(what, number, embed, next(inputs)) for number in of_shard]
                yield {"embeds": np.concatenate(embeds)}

        size = self.batch_size * BATCHES_PER_SHARD
        if self.cache_dir is None:  # every process embeds all
            shards = FeatureStore(Path(), len(batches.items), size).shards()
            shown = self.state is None or self.state.is_main_process
            computed = progress(compute(shards), f"embedding {len(batches.items)} {what}", len(shards), shown)
            return np.concatenate([arrays["embeds"] for arrays in computed])
        digest = [batches.digest() if self.state is None or self.state.is_main_process else ""]
        if self.state is not None and self.state.num_processes > 1:
            broadcast_object_list(digest)
        folder = self.cache_dir / value_digest([self.key, digest[0]])[:24]
        store = FeatureStore(folder, len(batches.items), size)
        store.write(self.state, f"embeddings of {what}", compute)
        embeds = store["embeds"][:]
        lengths = np.linalg.norm(embeds, axis=-1)
        if embeds.ndim != 2 or not np.all(np.isclose(lengths, 1, atol=1e-3) | (batches.may_skip & (lengths == 0))):
            raise ValueError(f"{folder} is damaged; delete it, and it is computed again: lengths of embeddings are 1")
        return embeds

    @torch.no_grad()
    def _normalized(self, what: str, number: int, embed: Embed, inputs: dict[str, torch.Tensor]) -> np.ndarray:
        unreadable = inputs.pop("unreadable", None)
        embeds = torch.nn.functional.normalize(embed(inputs).float().cpu(), dim=-1)
        lengths = embeds.norm(dim=-1)  # not 1 of what is not finite, or too small or large for its length
        bad = int((~lengths.isclose(torch.ones(()), atol=1e-3)).sum())
        if bad:
            raise ValueError(
                f"{bad} of the {len(embeds)} {what} in batch {number} have an embedding that is zero or not finite: "
                f"the weights of {self.source} are damaged, or {self.dtype} is too small for them"
            )
        return embeds.numpy() if unreadable is None else embeds.masked_fill(unreadable[:, None], 0).numpy()

    def map(self, compute: Callable[["Embedder"], Any]) -> list[Any]:
        """As `evaluation.ensemble.Ensemble.map`: an ensemble of one."""
        return [compute(self)]

    def weights(self, metadata: Sequence[Sequence[str]], templates: Sequence[str] = ()) -> np.ndarray:
        """As `evaluation.ensemble.Ensemble.weights`."""
        return np.ones((len(metadata), 1), np.float32)

    def image_weights(self, rows: Dataset, column: str = "image") -> None:
        """As `evaluation.ensemble.Ensemble.image_weights`."""

    def image_side(self, embeds: Sequence[np.ndarray], weights: None = None) -> np.ndarray:
        """As `evaluation.ensemble.Ensemble.image_side`."""
        return embeds[0]

    def text_side(self, embeds: Sequence[np.ndarray], weights: np.ndarray) -> np.ndarray:
        """As `evaluation.ensemble.Ensemble.text_side`."""
        return embeds[0]

    def features(self, embeds: Sequence[np.ndarray]) -> np.ndarray:
        """As `evaluation.ensemble.Ensemble.features`."""
        return embeds[0]


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
    model_code = sorted(Path(modeling_clip_moe.__file__).parent.glob("*.py"))
    read_by = reading, data.images, data.preparation, data.shards, data.tokenizer, processors, checkpoints
    files = [*model_code, Path(__file__), *(Path(module.__file__) for module in read_by)]
    return value_digest(list(map(file_digest, files)))
