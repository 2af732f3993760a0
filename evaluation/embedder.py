"""A model's embeddings of images and texts, kept on disk."""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Image
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tqdm.auto import tqdm
from transformers import CLIPModel

import data.images
import modeling_clip_moe
from conversion.checkpoints import load_clip
from conversion.files import new_file, output_folder
from conversion.processors import load_processor
from conversion.provenance import PROCESSOR, WEIGHTS, environment, model_fingerprint
from data.images import decode_image
from modeling_clip_moe import CLIPMoEModel


class Embedder:
    """A model's normalized embeddings, computed once and kept on disk.

    Args:
        model: a folder or hub name of a dense or sparse CLIP.
        processor: a folder or hub name with the processor; default: the model's.
        cache_dir: where they are kept, under a hash of model, code, settings and what is embedded. None: nowhere.

    Raises:
        FileNotFoundError: there is no such model, or it has no tokenizer or no image processor.
        ValueError: the batch size is below 1, it is no CLIP, its weights do not fit, embeddings are not finite, or
            a kept file of them is damaged.
    """

    def __init__(
        self,
        model: str | Path,
        cache_dir: Path | None,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        processor: str | Path | None = None,
    ):
        processor = processor or model
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        files = [model_fingerprint(str(model), WEIGHTS), model_fingerprint(str(processor), PROCESSOR)]
        self.processor = load_processor(processor)
        self.source, self.cache_dir = model, cache_dir
        self.batch_size, self.device, self.dtype = batch_size, device, dtype
        # Capacity at inference would make an embedding depend on its batch, hence the batch size.
        versions = environment()["versions"]
        self.key = json.dumps([*files, code_hash(), versions, str(dtype), device.type, batch_size])

    @cached_property
    def model(self) -> CLIPModel | CLIPMoEModel:
        """Loaded when something is embedded that was not kept."""
        return load_clip(self.source, dtype=self.dtype).to(self.device)

    def images(self, rows: Dataset, column: str = "image") -> np.ndarray:
        """(rows, D) of the images of a column."""
        rows = rows.select_columns(column)
        if isinstance(rows.features[column], Image):
            rows = rows.cast_column(column, Image(decode=False))
        digest = hashlib.sha256()
        for row in rows:
            value = row[column] if isinstance(row[column], dict) else {"path": row[column]}
            digest.update(value.get("bytes") or Path(value["path"]).read_bytes())

        def embed(start: int) -> torch.Tensor:
            images = [decode_image(value) for value in rows[start : start + self.batch_size][column]]
            pixel_values = self.processor.image_processor(images, return_tensors="pt")["pixel_values"]
            return self.model.get_image_features(pixel_values.to(self.device, self.dtype)).pooler_output

        return self._cached(f"images {digest.hexdigest()}", len(rows), embed)

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """(texts, D) of texts, cut at the tokenizer's `model_max_length`."""

        def embed(start: int) -> torch.Tensor:
            batch = self.processor.tokenizer(
                list(texts[start : start + self.batch_size]), padding=True, truncation=True, return_tensors="pt"
            )
            inputs = {name: batch[name].to(self.device) for name in ("input_ids", "attention_mask")}
            return self.model.get_text_features(**inputs).pooler_output

        return self._cached(f"texts {hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()}", len(texts), embed)

    def _cached(self, content: str, number: int, embed: Callable[[int], torch.Tensor]) -> np.ndarray:
        if self.cache_dir is None:
            return self._embed(content, number, embed)
        path = self.cache_dir / f"{hashlib.sha256(f'{self.key} {content}'.encode()).hexdigest()[:32]}.safetensors"
        if path.is_file():
            try:
                embeds = load_file(path)["embeds"]
                if embeds.dtype != np.float32 or embeds.shape[:-1] != (number,) or not np.isfinite(embeds).all():
                    raise ValueError(f"it holds no {number} embeddings that are finite")
            except (SafetensorError, KeyError, ValueError) as error:
                raise ValueError(f"{path} is damaged; delete it, and it is computed again: {error}") from error
            return embeds
        embeds = self._embed(content, number, embed)
        with output_folder(self.cache_dir), new_file(path) as partial:
            save_file({"embeds": embeds}, partial)
        return embeds

    def map(self, compute: Callable[["Embedder"], Any]) -> list[Any]:
        """As `evaluation.ensemble.Ensemble.map`: an ensemble of one."""
        return [compute(self)]

    def weights(self, metadata: Sequence[Sequence[str]], templates: Sequence[str] = ()) -> np.ndarray:
        """As `evaluation.ensemble.Ensemble.weights`."""
        return np.ones((len(metadata), 1), np.float32)

    def image_weights(self, rows: Dataset, column: str = "image") -> None:
        """As `evaluation.ensemble.Ensemble.image_weights`."""

    def features(self, embeds: Sequence[np.ndarray]) -> np.ndarray:
        """As `evaluation.ensemble.Ensemble.features`."""
        return embeds[0]

    @torch.no_grad()
    def _embed(self, content: str, number: int, embed: Callable[[int], torch.Tensor]) -> np.ndarray:
        starts = tqdm(range(0, number, self.batch_size), desc=f"embedding {number} {content.split()[0]}", leave=False)
        embeds = torch.cat([embed(start).float().cpu() for start in starts])
        bad = number - int(embeds.isfinite().all(dim=1).sum())
        if bad:
            raise ValueError(
                f"{bad} of {number} {content.split()[0]} have an embedding that is not finite: the weights of "
                f"{self.source} are damaged, or {self.dtype} is too small for them"
            )
        return torch.nn.functional.normalize(embeds, dim=-1).numpy()


def usable_device(device: str | torch.device | None) -> torch.device:
    """The device, or the accelerator if there is one.

    Raises:
        ValueError: it is not there, or does not compute.
    """
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    try:
        number = torch.ones(1, device=device) + 1
        number.item()  # a meta tensor has none
        return number.device
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"cannot compute on the device {device}: {error}") from error


def code_hash() -> str:
    """Of the code that makes embeddings, as it is on disk: a commit would not tell two uncommitted changes apart."""
    digest = hashlib.sha256()
    model_code = sorted(Path(modeling_clip_moe.__file__).parent.glob("*.py"))
    for file in [*model_code, Path(__file__), Path(data.images.__file__)]:
        digest.update(file.read_bytes())
    return digest.hexdigest()
