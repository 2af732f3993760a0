"""Which patches of images and which words of texts the experts of one layer take, and which patches none of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import PIL.Image
import torch
from transformers import PreTrainedTokenizerBase

from evaluation.embedder import Embedder
from modeling_clip_moe import CLIPMoEModel, expert_capacity_mask

# Images and texts that are looked at, and patches and words that are shown of an expert
NUM_IMAGES, NUM_TEXTS, NUM_SHOWN = 128, 2000, 10
# A word that occurs less often is not shown: its share would be chance
LEAST_OCCURRENCES = 5
# Characters of a caption that are shown
CAPTION_LENGTH = 240


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
    """Also the ids (n, S) of the tokens, and the texts."""

    ids: np.ndarray
    texts: Sequence[str]


@dataclass(frozen=True)
class Caption:
    """A text, or a part of one, and which of its characters (length,) belong to tokens that an expert computed."""

    text: str
    computed: np.ndarray


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
    probabilities, computed = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return RoutedTexts(layer, probabilities, computed, batch["input_ids"].numpy(), texts)


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


def dropped_patches(
    routed: RoutedImages, num_images: int, num_experts_per_tok: int, capacity_factor: float
) -> np.ndarray:
    """(n, S - 1), whether none of a patch's choices finds room at its expert, where the first `num_images` images, or
    all, share the capacity in their order (CLIP-UP Figure 7). The layers below did what they do at inference."""
    probabilities = torch.from_numpy(routed.probabilities[:num_images])
    ids = probabilities.topk(num_experts_per_tok, dim=-1).indices  # (n, S, K)
    kept = expert_capacity_mask(ids, probabilities.shape[-1], capacity_factor)
    return ~kept.any(dim=-1)[:, 1:].numpy()


def top_words(
    routed: RoutedTexts, tokenizer: PreTrainedTokenizerBase, number: int = NUM_SHOWN
) -> list[list[tuple[str, float, int]]]:
    """Of each expert, the tokens of which it computes the largest share: (word, share, occurrences). Those that begin
    and end a text do not count, nor those that are rare."""
    return [
        [(_word(tokenizer, token), share, occurrences) for token, share, occurrences in tokens]
        for tokens in _top_tokens(routed, tokenizer, number)
    ]


def top_captions(
    routed: RoutedTexts, tokenizer: PreTrainedTokenizerBase, number: int = NUM_SHOWN
) -> list[list[Caption]]:
    """Of each expert and each of its top words, the text in which the router is surest to give it this word, and all
    that the expert computes of it (CLIP-UP Figure 11). No text twice for an expert. The tokenizer is a fast one."""
    options = {"padding": True, "truncation": True, "return_offsets_mapping": True, "return_tensors": "np"}
    spans = tokenizer(list(routed.texts), **options)["offset_mapping"]  # (n, S, 2)
    captions = []
    for expert, tokens in enumerate(_top_tokens(routed, tokenizer, number)):
        sure = np.where(routed.computed[..., expert], routed.probabilities[..., expert], 0)
        captions.append([])
        for token, *_ in tokens:
            row, place = np.unravel_index(np.where(routed.ids == token, sure, 0).argmax(), sure.shape)
            if sure[row, place] > 0:
                computed = np.zeros(len(routed.texts[row]), bool)
                for start, end in spans[row, routed.computed[row, :, expert]]:
                    computed[start:end] = True
                captions[-1].append(_cut(routed.texts[row], computed, spans[row, place, 0]))
                sure[row] = 0
    return captions


def _cut(text: str, computed: np.ndarray, place: int) -> Caption:
    """What is around a place, on one line."""
    text = "".join(character if character.isprintable() else " " for character in text)
    start = int(np.clip(place - CAPTION_LENGTH // 2, 0, max(0, len(text) - CAPTION_LENGTH)))
    before, after = ("…" if cut else "" for cut in (start > 0, start + CAPTION_LENGTH < len(text)))
    shown = slice(start, start + CAPTION_LENGTH)
    return Caption(f"{before}{text[shown]}{after}", np.pad(computed[shown], (len(before), len(after))))


def _top_tokens(
    routed: RoutedTexts, tokenizer: PreTrainedTokenizerBase, number: int
) -> list[list[tuple[int, float, int]]]:
    """As `top_words`, with the id of the token."""
    is_word = routed.computed.any(axis=-1) & ~np.isin(routed.ids, tokenizer.all_special_ids)
    ids, places, occurrences = np.unique(routed.ids[is_word], return_inverse=True, return_counts=True)
    computed = np.zeros((len(ids), routed.computed.shape[-1]))
    np.add.at(computed, places, routed.computed[is_word])
    shares = computed / occurrences[:, None]
    often = occurrences >= LEAST_OCCURRENCES
    top = [
        [row for row in np.lexsort((-occurrences, -of_expert)) if often[row] and of_expert[row] > 0][:number]
        for of_expert in shares.T
    ]
    return [
        [(int(ids[row]), float(shares[row, expert]), int(occurrences[row])) for row in rows]
        for expert, rows in enumerate(top)
    ]


def _word(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token as it is read: `bicy-` where the word goes on."""
    piece = tokenizer.convert_ids_to_tokens(token)
    text = tokenizer.decode([token]).strip() or piece
    return text if piece.endswith("</w>") or not text.isalpha() else f"{text}-"
