"""A dense or sparse CLIP of any family as mteb measures it, for the tasks of its image benchmark, MIEB.

>>> mteb.evaluate(CLIPEncoder("runs/clip_moe_demo/clip_moe"), mteb.get_tasks(["CIFAR10ZeroShot"]))
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta
from torch.utils.data import DataLoader

from clip_moe.conversion.checkpoints import load_clip
from clip_moe.conversion.processors import load_processor
from clip_moe.data.images import decode_image
from clip_moe.data.tokenizer import tokenize
from clip_moe.engine.provenance import weights_fingerprint
from clip_moe.evaluation.embedder import usable_device


class CLIPEncoder(AbsEncoder):
    """Features of images and texts. Those of an item that has both are added, as mteb does with CLIP's.

    Args:
        model_name: a folder or hub name.
        revision: is mteb's; the weights alone say which model it is, so that none has another one's results.
        device: default: the accelerator, if there is one.
    """

    def __init__(self, model_name: str, revision: str | None = None, device: str | None = None, **kwargs: Any):
        self.device = usable_device(device)
        self.model = load_clip(model_name).to(self.device)
        self.processor = load_processor(model_name)
        about = {"revision": weights_fingerprint(model_name), "modalities": ["text", "image"]}
        self.mteb_model_meta = ModelMeta.create_empty(about | {"name": f"clip-moe/{Path(model_name).name}"})

    @torch.no_grad()
    def encode(self, inputs: DataLoader, **kwargs: Any) -> np.ndarray:
        """(items, D), of batches with `text`, `image` or both."""
        kinds = [kind for kind in ("text", "image") if kind in inputs.dataset.features]
        return torch.cat([sum(self._features(batch, kinds)) for batch in inputs]).float().cpu().numpy()

    def _features(self, batch: dict[str, Any], kinds: list[str]) -> Iterator[torch.Tensor]:
        if "text" in kinds:
            tokens = tokenize(self.processor.tokenizer, list(batch["text"]))
            tokens = {name: tensor.to(self.device) for name, tensor in tokens.items()}
            yield self.model.get_text_features(**tokens).pooler_output
        if "image" in kinds:
            images = [decode_image(image) for image in batch["image"]]
            inputs = self.processor.image_processor(images, return_tensors="pt").to(self.device)
            yield self.model.get_image_features(**inputs).pooler_output
