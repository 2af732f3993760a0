"""What models say about images and labels that somebody types: the functions behind the page of `evaluation.app`."""

import io
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from datasets import Dataset

from data.images import FORMATS, decode_image
from evaluation.embedder import Embedder
from evaluation.ensemble import Ensemble, concatenate
from evaluation.own_data import is_template
from evaluation.preferences import route_images
from evaluation.routing_pictures import draw_patches

logger = logging.getLogger(__name__)

Model = Embedder | Ensemble
SUFFIXES = {suffix for suffix, name in PIL.Image.registered_extensions().items() if name in FORMATS}
NUM_FOUND = 8


def _is_utf8(text: str) -> bool:
    return text.encode(errors="ignore").decode() == text


def _typed(text: str | None) -> str:
    """What somebody typed; null, which a client may send, is nothing."""
    if not _is_utf8(text or ""):
        raise ValueError(f"{text!r} has half a character, a lone surrogate: type it anew")
    return text or ""


def read_labels(text: str | None) -> list[str]:
    """Labels, one a line, each once.

    Raises:
        ValueError: there are none, or one has half a character.
    """
    labels = list(dict.fromkeys(line.strip() for line in _typed(text).splitlines() if line.strip()))
    if not labels:
        raise ValueError("there are no labels: type some, one a line")
    return labels


def require_image(image: str | Path | None) -> str:
    """The path of an image that can be read.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    if not image:
        raise ValueError("there is no image: drop one first")
    try:
        decode_image(str(image))
    except OSError as error:
        raise ValueError(f"this image cannot be read: {error}") from error
    return str(image)


def label_scores(
    model: Model, image: str | Path | None, labels: str | None, template: str | None = "{}"
) -> dict[str, float]:
    """The probability of each label, by the model's own temperature.

    Args:
        image: its path.
        labels: one a line.
        template: a text with a {} for a label.

    Raises:
        ValueError: there is no image that can be read, there are no labels, the template has not one {}, or a text has
            half a character.
    """
    rows, names = Dataset.from_dict({"image": [require_image(image)]}), read_labels(labels)
    template = _typed(template)
    if not is_template(template):
        raise ValueError(f"the template needs one {{}} for the label, got {template!r}")
    prompts = [template.format(name) for name in names]
    cosines = np.concatenate(model.map(lambda e: e.images(rows) @ e.texts(prompts).T))  # (experts, labels)
    weights = model.weights([names], [template])[0]
    of_image = model.image_weights(rows)
    weights = weights if of_image is None else weights * of_image[0]
    # They have the experts' temperatures as factors. Without these, weights sum to 1
    logits = weights @ cosines / (weights / _temperatures(model)).sum()
    return dict(zip(names, torch.from_numpy(logits).softmax(dim=0).tolist(), strict=True))


def _temperatures(model: Model) -> np.ndarray:
    """(experts,) what each expert's cosine similarities are multiplied by; of a CLIP, its one."""
    return model.scales if isinstance(model, Ensemble) else np.array([model.model.logit_scale.exp().item()])


def sparse_layers(model: Model) -> list[int]:
    """Of the vision tower, from 0."""
    if isinstance(model, Ensemble):
        return []
    return sorted(getattr(model.model.config.vision_config, "moe_layers", ()))


def patch_map(model: Embedder, image: str | Path | None, layer: int) -> PIL.Image.Image:
    """An image and the expert that the router likes best for each of its patches. Raises as `require_image`."""
    routed, picture = route_images(model, [decode_image(require_image(image))], layer), io.BytesIO()
    draw_patches(routed, picture)
    return PIL.Image.open(picture)


class ImageSearch:
    """The images of a folder and of those below, found by texts.

    Args:
        models: name -> model, which embeds the texts.
        keepers: name -> the same model, which embeds all images once and may keep that; default: `models`.

    Raises:
        ValueError: there is no such folder, no image in it that can be read, or an image whose name is no UTF-8.
    """

    def __init__(self, models: Mapping[str, Model], folder: str | Path, keepers: Mapping[str, Model] | None = None):
        if not Path(folder).is_dir():
            raise ValueError(f"there is no folder {folder}")
        paths = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in SUFFIXES)
        for path in paths:
            if not _is_utf8(str(path)):
                raise ValueError(f"the name of {str(path)!r} is no UTF-8: rename it")
        self.paths = [path for path in paths if _is_readable(path)]
        if not self.paths:
            raise ValueError(f"{folder} has no image that can be read")
        if len(self.paths) < len(paths):
            logger.warning("%d of %d images in %s cannot be read", len(paths) - len(self.paths), len(paths), folder)
        rows = Dataset.from_dict({"image": [str(path) for path in self.paths]})
        self.models = models
        self.images = {
            name: concatenate(model.map(lambda e: e.images(rows)), model.image_weights(rows))
            for name, model in (keepers or models).items()
        }

    def find(self, name: str, text: str | None, number: int = NUM_FOUND) -> list[Path]:
        """The images that the model of this name finds most similar to a text, the best one first.

        Raises:
            ValueError: there is no text, or it has half a character.
        """
        text = _typed(text)
        if not text.strip():
            raise ValueError("there is nothing to search for: type what the images should show")
        model = self.models[name]
        texts = concatenate(model.map(lambda e: e.texts([text])), model.weights([[text]]))
        best = np.argsort(-(self.images[name] @ texts[0]), kind="stable")
        return [self.paths[row] for row in best[:number]]


def _is_readable(path: Path) -> bool:
    try:
        decode_image(str(path))
    except OSError:
        return False
    return True
