"""The patches of images and the words of texts that the experts of one layer prefer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import PIL.Image
import torch
from transformers import PreTrainedTokenizerBase

from clip_moe.data.preparation import Preparation
from clip_moe.data.tokenizer import tokenize
from clip_moe.evaluation.embedder import Embedder
from modeling_clip_moe.router_losses import router_probabilities

# Images and texts that are looked at; patches and words that are shown of an expert
NUM_IMAGES, NUM_TEXTS, NUM_SHOWN = 128, 2000, 10
# A word counts as preferred if it occurs as often, and its share is so many standard errors above chance
LEAST_OCCURRENCES, LEAST_ERRORS = 5, 3.0


@dataclass(frozen=True)
class RoutedTokens:
    """The decisions of a layer's router on the tokens of some images or texts.

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


@dataclass(frozen=True)
class WordShares:
    """How much of each word the experts compute. Tokens that begin and end a text are no words.

    Args:
        ids, occurrences: (W,).
        shares: (W, E), of the occurrences that each expert computes.
        chance: (E,), of all words: what a share would be if the word did not matter.
    """

    ids: np.ndarray
    occurrences: np.ndarray
    shares: np.ndarray
    chance: np.ndarray

    def preferred(self, expert: int) -> list[int]:
        """The rows of the words that an expert computes more often than by chance, the surest first."""
        chance = self.chance[expert]
        if not 0 < chance < 1:
            return []
        errors = (self.shares[:, expert] - chance) / np.sqrt(chance * (1 - chance) / self.occurrences)
        sure = (errors >= LEAST_ERRORS) & (self.occurrences >= LEAST_OCCURRENCES)
        return [int(row) for row in np.lexsort((-self.occurrences, -errors)) if sure[row]][:NUM_SHOWN]


def route_images(embedder: Embedder, images: Sequence[PIL.Image.Image], layer: int) -> RoutedImages:
    """Send images through a sparse layer of the vision tower."""
    processor = embedder.processor.image_processor
    prepare = Preparation(processor)
    inputs = torch.stack([prepare(image)["pixel_values"] for image in images])
    mean, std = (torch.tensor(values)[:, None, None] for values in (processor.image_mean, processor.image_std))
    pixels = (inputs * std + mean if processor.do_normalize else inputs).permute(0, 2, 3, 1).clamp(0, 1).numpy()
    probabilities, computed = _route(embedder, "vision", layer, {"pixel_values": inputs.to(embedder.dtype)})
    return RoutedImages(layer, probabilities, computed, pixels, embedder.model.config.vision_config.patch_size)


def route_texts(embedder: Embedder, texts: Sequence[str], layer: int) -> RoutedTexts:
    """Send texts through a sparse layer of the text tower."""
    inputs = tokenize(embedder.processor.tokenizer, list(texts))
    probabilities, computed = _route(embedder, "text", layer, inputs)
    return RoutedTexts(layer, probabilities, computed, inputs["input_ids"].numpy())


def _route(
    embedder: Embedder, tower: str, layer: int, inputs: Mapping[str, torch.Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """The `probabilities` and `computed` of `RoutedTokens`."""
    config, model = getattr(embedder.model.config, f"{tower}_config"), getattr(embedder.model, f"{tower}_model")
    number, all_probabilities, all_computed = sorted(config.moe_layers).index(layer), [], []
    for parts in zip(*(tensor.split(embedder.batch_size) for tensor in inputs.values()), strict=True):
        batch = {name: part.to(embedder.device) for name, part in zip(inputs, parts, strict=True)}
        with torch.no_grad():
            outputs = model(**batch, output_router_logits=True, output_expert_ids=True)
        probabilities = router_probabilities(outputs.router_logits[number], config.scoring_func)
        all_probabilities.append(probabilities.float().cpu().numpy())
        ids = torch.nn.functional.one_hot(outputs.expert_ids[number], config.num_experts + 1)
        all_computed.append(ids[..., : config.num_experts].sum(dim=2).bool().cpu().numpy())
    return np.concatenate(all_probabilities), np.concatenate(all_computed)


def top_patches(routed: RoutedImages) -> list[list[tuple[int, int]]]:
    """For each expert, the patches (image, patch) that it computes with the highest probabilities, one an image."""
    patches = np.where(routed.computed, routed.probabilities, -np.inf)[:, 1:]  # without the class token
    best, places = patches.max(axis=1), patches.argmax(axis=1)  # (n, E)
    return [
        [
            (image, places[image, expert])
            for image in np.argsort(-probabilities, kind="stable")[:NUM_SHOWN]
            if probabilities[image] > 0
        ]
        for expert, probabilities in enumerate(best.T)
    ]


def word_shares(routed: RoutedTexts, tokenizer: PreTrainedTokenizerBase) -> WordShares:
    """How much of each word of the texts the experts compute."""
    is_word = routed.computed.any(axis=-1) & ~np.isin(routed.ids, tokenizer.all_special_ids)
    ids, places, occurrences = np.unique(routed.ids[is_word], return_inverse=True, return_counts=True)
    computed = np.zeros((len(ids), routed.computed.shape[-1]))
    np.add.at(computed, places, routed.computed[is_word])
    return WordShares(ids, occurrences, computed / occurrences[:, None], computed.sum(axis=0) / occurrences.sum())


def word_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token as it is read: `bicy-` where the word goes on."""
    piece = tokenizer.convert_ids_to_tokens(token)
    text = tokenizer.decode([token]).strip() or piece
    return text if piece.endswith("</w>") or not text.isalpha() else f"{text}-"
