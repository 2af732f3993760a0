"""A frozen model keeps what it knew: the loss that holds embeddings of the model that trains to its own.

As ZSCL (arXiv:2303.06628), on pictures and texts of the task or of other data, and as MoE-ViE (arXiv:2608.17402,
Figure 3), whose loss is 0.5 (1 - cos) of an embedding.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import send_to_device
from transformers import PreTrainedModel

from clip_moe.conversion.checkpoints import load_clip
from clip_moe.conversion.processors import require_same
from clip_moe.data.columns import Rows
from clip_moe.data.pairs import shared_fingerprint
from clip_moe.engine.context import Context
from clip_moe.evaluation.feature_store import INDEX
from clip_moe.training.gradient_cache import TEXTS, split_batch
from clip_moe.training.loader import PairLoader
from clip_moe.training.losses import Pairing, gather
from clip_moe.training.pair_features import open_store
from clip_moe.training.task import Batch
from modeling_clip_moe.configuration_clip_moe import embedding_size

if TYPE_CHECKING:
    from clip_moe.training.stages.train import TrainStage

KeepOf = Literal["embeddings", "similarities"]


class Keep:
    """The teacher and its loss.

    Args:
        teacher: a frozen CLIP; None: batches bring its embeddings, `kept_images` and `kept_texts`.
        weight: factor of this loss, which is added to the contrastive one.
        of: kind of loss, see `embeddings_loss` and `similarities_loss`.
        num_new: pairs of a process's batch that the contrastive loss learns, its first ones.
        keeps_new: whether these are kept, too, or only the others.
    """

    def __init__(self, teacher: PreTrainedModel | None, weight: float, of: KeepOf, num_new: int, keeps_new: bool):
        self.teacher = None if teacher is None else teacher.requires_grad_(False).eval()
        self.weight, self.of, self.num_new, self.keeps_new = weight, of, num_new, keeps_new

    @torch.no_grad()
    def embed(self, batch: Batch, accelerator: Accelerator, mini_batch_size: int | None) -> Batch:
        """A batch with the teacher's embeddings of its images and texts, some pairs at a time."""
        if self.teacher is None:
            return batch
        teacher, kept = self.teacher.to(accelerator.device), []
        inputs = {name: value for name, value in batch.items() if name not in Pairing._fields or name == "caption_mask"}
        for part in [inputs] if mini_batch_size is None else split_batch(inputs, mini_batch_size):
            part = send_to_device(part, accelerator.device, non_blocking=True)
            part.pop("caption_mask", None)
            with accelerator.autocast():
                outputs = teacher(**part)
            kept.append((outputs.image_embeds.float(), outputs.text_embeds.float()))
        images, texts = (torch.cat(embeds) for embeds in zip(*kept, strict=True))
        return batch | {"kept_images": images, "kept_texts": texts}

    def loss(self, images: torch.Tensor, texts: torch.Tensor, scale: torch.Tensor, pairing: Pairing) -> torch.Tensor:
        """This process's part of the loss, whose mean over the processes is that of the global batch.

        Args:
            images, texts: (B, D) and (captions, D), normalized.
            scale: of similarities; it gets no gradient.
            pairing: with the teacher's embeddings.
        """
        first = 0 if self.keeps_new else self.num_new
        ours, theirs = (images[first:], texts[first:]), (pairing.kept_images[first:], pairing.kept_texts[first:])
        if self.of == "similarities":
            return self.weight * similarities_loss(*ours, *theirs, scale.detach())
        return self.weight * embeddings_loss(*ours, *theirs, pairing.caption_mask)

    def new_pairs(self, embeds: tuple, pairing: Pairing) -> tuple[tuple, Pairing]:
        """Embeddings and pairing of what the contrastive loss learns."""
        images, texts, *others = embeds
        if len(images) == self.num_new:
            return embeds, pairing
        keys = pairing.image_keys, pairing.text_keys
        image_keys, text_keys = (None if key is None else key[: self.num_new] for key in keys)
        new = Pairing(image_keys=image_keys, text_keys=text_keys)
        return (images[: self.num_new], texts[: self.num_new], *others), new


def load_teacher(
    stage: "TrainStage", inputs: SimpleNamespace, rows: Rows, model: PreTrainedModel, context: Context
) -> tuple[Mapping[str, np.ndarray], PreTrainedModel | None]:
    """The teacher of a `train` stage: its embeddings of `rows`, where an embed stage has them, or itself.

    Raises:
        ValueError: it gives other tokens, pixels or widths than the model, or the embeddings are of other pairs.
    """
    if not (Path(inputs.keep) / INDEX).is_file():
        require_same([inputs.model, inputs.keep])
        teacher = load_clip(inputs.keep, dtype=torch.float32)
        _require_width(stage, embedding_size(teacher.config), model)
        return {}, teacher
    if stage.keep_data is not None or stage.augmentation is not None or stage.data.streaming:
        raise ValueError("embeddings of an embed stage go without keep_data, augmentation and data.streaming")
    store = open_store(Path(inputs.keep), "an embed stage", by_encoder=False)
    if store.about["dataset_fingerprint"] != shared_fingerprint(context, rows):
        raise ValueError(f"{inputs.keep} has embeddings of other pairs than this stage learns")
    if not all(isinstance(caption, str) for caption in rows["caption"]):
        raise ValueError("embeddings of an embed stage are of one caption an image: name the model, which embeds all")
    kept = {"kept_images": store["image"][:], "kept_texts": store["text"][:]}
    _require_width(stage, kept["kept_images"].shape[1], model)
    return kept, None


def _require_width(stage: "TrainStage", width: int, model: PreTrainedModel) -> None:
    expected = embedding_size(model.config)
    if stage.keep_of == "embeddings" and width != expected:
        raise ValueError(
            f"its embeddings have {width} numbers, the model's {expected}: keep_of: similarities "
            "compares models of different widths"
        )


def embeddings_loss(
    images: torch.Tensor,
    texts: torch.Tensor,
    kept_images: torch.Tensor,
    kept_texts: torch.Tensor,
    caption_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """1 - cos between our embeddings and the teacher's: the mean of that of images and that of texts.

    Args:
        images, kept_images: (B, D).
        texts, kept_texts: (captions, D), those of all images, one after the other.
        caption_mask: (B, L), which captions are there; the captions of an image count 1 together. None: one each.
    """
    image_losses, text_losses = 1 - F.cosine_similarity(images, kept_images), 1 - F.cosine_similarity(texts, kept_texts)
    if caption_mask is not None:
        placed = text_losses.new_zeros(caption_mask.shape).masked_scatter(caption_mask, text_losses)
        text_losses = placed.sum(dim=1) / caption_mask.sum(dim=1)
    return (image_losses.mean() + text_losses.mean()) / 2


def similarities_loss(
    images: torch.Tensor, texts: torch.Tensor, kept_images: torch.Tensor, kept_texts: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """KL(teacher || model) of the softmax over the global batch, from images to texts and back, the mean of both.

    Args:
        images, texts, kept_images, kept_texts: (B, D), (B, D), (B, D'), (B, D'): the teacher may have another width.
        scale: the inverse of both temperatures.
    """
    sides = (images, texts, kept_images, kept_texts), (texts, images, kept_texts, kept_images)
    divergences = []
    for rows, columns, kept_rows, kept_columns in sides:
        ours = (scale * rows @ gather(columns).T).log_softmax(dim=1)
        theirs = (scale * kept_rows @ gather(kept_columns).T).log_softmax(dim=1)
        divergences.append(F.kl_div(ours, theirs, reduction="batchmean", log_target=True))
    return torch.stack(divergences).mean()


class JoinedLoader:
    """Batches of new pairs, each followed by as many of other data."""

    def __init__(self, new: PairLoader, kept: PairLoader):
        self.new, self.kept = new, kept

    def __len__(self) -> int:
        return len(self.new)

    def batches(self, start: int) -> Iterator[Batch]:
        """See `PairLoader.batches`."""
        padding = {"input_ids": self.new.processor.tokenizer.pad_token_id or 0}
        for new, kept in zip(self.new.batches(start), self.kept.batches(start), strict=True):
            yield join(new, kept, padding)


def join(new: Batch, kept: Batch, padding: Mapping[str, int]) -> Batch:
    """One batch of two. Keys of duplicates, which only new pairs have, are filled with zeros."""
    length = max(batch["input_ids"].shape[1] for batch in (new, kept))
    joined = {}
    for name, value in new.items():
        other = kept.get(name)
        if other is None:
            other = value.new_zeros(len(kept["input_ids"]), *value.shape[1:])
        elif name in TEXTS:
            fill = padding.get(name, 0)
            value, other = (F.pad(ids, (0, length - ids.shape[1]), value=fill) for ids in (value, other))
        joined[name] = torch.cat([value, other])
    return joined
