"""Which patches of images and which words of texts the experts of one layer take."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import PIL.Image
import torch
from transformers import PreTrainedTokenizerBase

from evaluation.embedder import Embedder
from modeling_clip_moe import CLIPMoEModel

# Images and texts that are looked at, and patches and words that are shown of an expert
NUM_IMAGES, NUM_TEXTS, NUM_SHOWN = 128, 2000, 10
# A word that occurs less often is not shown: its share would be chance
LEAST_OCCURRENCES = 5


@dataclass(frozen=True)
class RoutedTokens:
    """What the router of a layer does with the tokens of some images or texts.

    Args:
        probabilities: (n, S, E), the router's distribution.
        computed: (n, S, E), whether an expert computed a token. None does where it is padding.
    """

    layer: int
    probabilities: np.ndarray
    computed: np.ndarray


@dataclass(frozen=True)
class RoutedImages(RoutedTokens):
    """Also the images (n, height, width, 3), from 0 to 1, as the processor makes them, and the side of a patch."""

    pixels: np.ndarray
    patch_size: int

    @property
    def grid(self) -> tuple[int, int]:
        """How many patches are below and beside each other. Those are the tokens from 1 on. What is left of an image at
        the right and below, the model does not see."""
        height, width = self.pixels.shape[1:3]
        return height // self.patch_size, width // self.patch_size


@dataclass(frozen=True)
class RoutedTexts(RoutedTokens):
    """Also the ids (n, S) of the tokens."""

    ids: np.ndarray


def route_images(embedder: Embedder, images: Sequence[PIL.Image.Image], layer: int) -> RoutedImages:
    """Send images through a sparse layer of the vision tower."""
    model, process = embedder.model, embedder.processor.image_processor
    found, pixels = [], []
    for start in range(0, len(images), embedder.batch_size):
        batch = list(images[start : start + embedder.batch_size])
        inputs = process(batch, return_tensors="pt")["pixel_values"].to(embedder.device, embedder.dtype)
        with torch.no_grad():
            outputs = model.vision_model(inputs, output_router_logits=True, output_expert_ids=True)
        found.append(_routed(model, "vision", layer, outputs))
        shown = process(batch, return_tensors="pt", do_normalize=False)["pixel_values"]
        pixels.append(shown.permute(0, 2, 3, 1).float().clamp(0, 1).numpy())
    probabilities, computed = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return RoutedImages(layer, probabilities, computed, np.concatenate(pixels), model.config.vision_config.patch_size)


def route_texts(embedder: Embedder, texts: Sequence[str], layer: int) -> RoutedTexts:
    """Send texts through a sparse layer of the text tower."""
    model = embedder.model
    batch = embedder.processor.tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
    found = []
    for start in range(0, len(texts), embedder.batch_size):
        rows = slice(start, start + embedder.batch_size)
        inputs = {name: batch[name][rows].to(embedder.device) for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            outputs = model.text_model(**inputs, output_router_logits=True, output_expert_ids=True)
        found.append(_routed(model, "text", layer, outputs))
    return RoutedTexts(
        layer, *(np.concatenate(parts) for parts in zip(*found, strict=True)), batch["input_ids"].numpy()
    )


def _routed(model: CLIPMoEModel, tower: str, layer: int, outputs) -> tuple[np.ndarray, np.ndarray]:
    config = getattr(model.config, f"{tower}_config")
    number = sorted(config.moe_layers).index(layer)
    ids = torch.nn.functional.one_hot(outputs.expert_ids[number], config.num_experts + 1)
    computed = ids[..., : config.num_experts].sum(dim=2).bool()
    return outputs.router_logits[number].softmax(dim=-1).float().cpu().numpy(), computed.cpu().numpy()


def top_patches(routed: RoutedImages, number: int = NUM_SHOWN) -> list[list[tuple[int, int]]]:
    """Of each expert, the patches (image, patch) that it computes with the highest probabilities, one an image."""
    patches = np.where(routed.computed, routed.probabilities, -np.inf)[:, 1:]  # without the class token
    best, places = patches.max(axis=1), patches.argmax(axis=1)  # (n, E)
    return [
        [
            (image, places[image, expert])
            for image in np.argsort(-of_expert, kind="stable")[:number]
            if of_expert[image] > 0
        ]
        for expert, of_expert in enumerate(best.T)
    ]


def top_words(
    routed: RoutedTexts, tokenizer: PreTrainedTokenizerBase, number: int = NUM_SHOWN
) -> list[list[tuple[str, float, int]]]:
    """Of each expert, the tokens of which it computes the largest share: (word, share, occurrences). Those that begin
    and end a text do not count, nor those that are rare."""
    is_word = routed.computed.any(axis=-1) & ~np.isin(routed.ids, tokenizer.all_special_ids)
    ids, places, occurrences = np.unique(routed.ids[is_word], return_inverse=True, return_counts=True)
    computed = np.zeros((len(ids), routed.computed.shape[-1]))
    np.add.at(computed, places, routed.computed[is_word])
    shares = computed / occurrences[:, None]
    often = occurrences >= LEAST_OCCURRENCES
    words = [
        [row for row in np.lexsort((-occurrences, -of_expert)) if often[row] and of_expert[row] > 0][:number]
        for of_expert in shares.T
    ]
    return [
        [(_word(tokenizer, ids[row]), float(shares[row, expert]), int(occurrences[row])) for row in rows]
        for expert, rows in enumerate(words)
    ]


def _word(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token as it is read: `bicy-` where the word goes on."""
    piece = tokenizer.convert_ids_to_tokens(int(token))
    text = tokenizer.decode([int(token)]).strip() or piece
    return text if piece.endswith("</w>") or not text.isalpha() else f"{text}-"
