"""The experts of a mixture, measured together (MoDE)."""

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from huggingface_hub import snapshot_download

from clip_moe.conversion.assemble import ENCODER
from clip_moe.conversion.checkpoints import load_clip_config, load_config, load_mixture
from clip_moe.engine.hub import hub_options
from clip_moe.engine.local_names import output_inside
from clip_moe.evaluation.embedder import Embedder
from clip_moe.evaluation.sentence_encoders import SentenceEncoder, load_encoder
from modeling_clip_moe import CLIPMoDEConfig
from modeling_clip_moe.mode_routing import side_by_side

logger = logging.getLogger(__name__)


class Ensemble:
    """The experts of a `CLIPMoDEModel`, with the weights that a task gives them (MoDE eq. 4).

    The weighted sum of the experts' similarities is one product of embeddings: those of all experts one after the
    other, on one side times the weights. So an ensemble is measured as a CLIP is.

    Args:
        model: a folder or hub name.
        cache_dir, batch_size, device, options: see `Embedder`.
        changes: fields of its configuration that the mixture is measured with in place of its own.
    """

    def __init__(
        self,
        model: str | Path,
        cache_dir: Path | None,
        batch_size: int,
        device: torch.device,
        changes: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        folder = Path(model) if Path(model).is_dir() else Path(snapshot_download(str(model), **hub_options(model)))
        self.folder, self.batch_size, self.device = folder, batch_size, device
        self.mixture = load_mixture(folder, **(changes or {}))
        experts = self.mixture.experts.values()
        self.scales = np.array([expert.logit_scale.exp().item() for expert in experts])
        # Bias that each adds to its scores; 0 for a CLIP
        self.biases = np.array([getattr(expert, "logit_bias", torch.zeros(1)).item() for expert in experts])
        self.mixture.experts.clear()  # `map` loads them one by one
        own = self.mixture.config.own_processors
        self.experts = [
            Embedder(expert, cache_dir, batch_size, device, processor=expert if own else folder, **options)
            for expert in (folder / name for name in self.mixture.config.experts)
        ]
        # Each expert's, or the one of all
        self.tokenizers = [expert.processor.tokenizer for expert in self.experts[: None if own else 1]]
        self._embeds: dict[str, np.ndarray] = {}  # of prompts, by the metadata encoder

    def map(self, compute: Callable[[Embedder], Any]) -> list[Any]:
        """Results of a computation with every expert; one expert is in memory at a time."""
        return [compute(copy(expert)) for expert in self.experts]  # with the copy, the model that it loads goes

    def weights(self, metadata: Sequence[Sequence[str]], templates: Sequence[str] = ("{}",)) -> np.ndarray:
        """(m, n) weights of the n experts' cosine similarities, from m equally long lists of metadata and the experts'
        own temperatures.

        Args:
            templates: prompts with a {} for the text, whose mean of length 1 the authors' code takes
                (facebookresearch/MetaCLIP, mode/prep_feature.py); the paper's routing takes the text itself.
        """
        if self.mixture.centers is None or self.mixture.config.metadata_modality == "image":
            weights = np.ones((len(metadata), self.mixture.num_experts))
        else:
            templates = templates if self.mixture.config.routing == "released" else ("{}",)
            prompts = {text: [t.format(text) for t in templates] for texts in metadata for text in texts}
            unknown = sorted({prompt for some in prompts.values() for prompt in some} - set(self._embeds))
            if unknown:
                self._embeds |= dict(zip(unknown, self.encoder.encode(unknown), strict=True))
            means = {text: _mean([self._embeds[p] for p in text_prompts]) for text, text_prompts in prompts.items()}
            embeds = np.stack([[means[text] for text in texts] for texts in metadata])
            if number := int((~embeds.any(axis=-1)).sum()):
                message = "%s: the encoder knows no word of %d texts; a task with only such metadata gets equal weights"
                logger.warning(message, self.folder, number)
            weights = self.mixture.route(torch.as_tensor(embeds), self.encoder.name).numpy()
        weights = weights * self.scales
        return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)

    def image_weights(self, rows: Dataset, column: str = "image") -> np.ndarray | None:
        """(rows, n) weights beside those of `weights`, where every image is its own metadata (MoDE section 5.3), else
        None."""
        if self.mixture.config.metadata_modality == "text":
            return None
        rows = rows.select_columns(column).rename_columns({column: "image"})
        embeds = self.encoder.encode(rows, self.batch_size)
        return self.mixture.route(torch.as_tensor(embeds)[:, None], self.encoder.name).numpy()

    def image_side(self, embeds: Sequence[np.ndarray], weights: np.ndarray | None) -> np.ndarray:
        """Images (..., n * D), whose product with `text_side` is the mixture's score: the embeddings (..., D) of n
        experts side by side, times the weights (..., n) of `image_weights`. Where these weigh biases that differ, they
        are n more columns."""
        side = _side_by_side(embeds, weights)
        return self._finite(np.concatenate([side, weights], axis=-1) if self._has_offsets else side)

    def text_side(self, embeds: Sequence[np.ndarray], weights: np.ndarray) -> np.ndarray:
        """Texts (..., n * D), see `image_side`, times the weights (..., n) of `weights`."""
        side = _side_by_side(embeds, weights)
        if self._has_offsets:
            offsets = (weights * self.biases / self.scales).astype(side.dtype)
            side = np.concatenate([side, np.broadcast_to(offsets, (*side.shape[:-1], len(embeds)))], axis=-1)
        return self._finite(side)

    def _finite(self, side: np.ndarray) -> np.ndarray:
        if not np.isfinite(side).all():
            raise ValueError(
                f"{self.folder}: the weights of its experts are not finite: its centers, its metadata encoder or an "
                "expert's temperature is damaged"
            )
        return side

    @property
    def _has_offsets(self) -> bool:
        """Whether images weigh biases that differ, as a SigLIP's and the 0 of a CLIP."""
        return self.mixture.config.metadata_modality == "image" and len(set(self.biases)) > 1

    def features(self, embeds: Sequence[np.ndarray]) -> np.ndarray:
        """The embeddings (..., D) of n experts as a linear probe takes them: one after the other, or their sum."""
        return self.mixture.combine_features(list(map(torch.as_tensor, embeds))).numpy()

    @cached_property
    def encoder(self) -> SentenceEncoder:
        return load_encoder(self.folder / ENCODER, self.device)


def open_model(
    model: str | Path,
    cache_dir: Path | None,
    batch_size: int,
    device: torch.device,
    changes: Mapping[str, Any] | None = None,
    **options: Any,
) -> Embedder | Ensemble:
    """A model to be measured: an `Ensemble` of a mixture, an `Embedder` of any other."""
    if cache_dir is not None and output_inside(cache_dir, str(model)):
        raise ValueError(
            f"{cache_dir} is in the folder of the model {model}, where embeddings would count as its weights: choose a "
            "folder outside it"
        )
    if is_mixture(model):
        return Ensemble(model, cache_dir, batch_size, device, changes, **options)
    if changes:
        raise ValueError(f"{model} is not a mixture, so {', '.join(changes)} cannot be changed")
    return Embedder(model, cache_dir, batch_size, device, **options)


def is_mixture(model: str | Path) -> bool:
    """Whether a model is a mixture of CLIPs, and not one CLIP. Raises a ValueError if it is neither."""
    mixture = isinstance(load_config(model), CLIPMoDEConfig)
    if not mixture:
        load_clip_config(model)
    return mixture


def _side_by_side(embeds: Sequence[np.ndarray], weights: np.ndarray | None) -> np.ndarray:
    return side_by_side(
        list(map(torch.as_tensor, embeds)), None if weights is None else torch.as_tensor(weights)
    ).numpy()


def _mean(embeds: Sequence[np.ndarray]) -> np.ndarray:
    """The mean direction, of length 1; a single embedding and zeros stay as they are."""
    if len(embeds) == 1:
        return embeds[0]
    return sum(embeds) / (np.linalg.norm(sum(embeds)) or 1)
