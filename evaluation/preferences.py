"""Which patches of images and which words of texts the experts of one layer take, and which patches none of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import PIL.Image
import torch
from transformers import PreTrainedTokenizerBase

from clip_moe.data.preparation import Preparation
from clip_moe.data.tokenizer import tokenize
from clip_moe.evaluation.embedder import Embedder
from modeling_clip_moe import expert_capacity_mask
from modeling_clip_moe.configuration_clip_moe import CLIPMoETowerConfig
from modeling_clip_moe.sparse_moe import router_probabilities

# Images and texts that are looked at; patches and words, and texts, that are shown of an expert
NUM_IMAGES, NUM_TEXTS, NUM_SHOWN, NUM_CAPTIONS = 128, 2000, 10, 4
# A word counts as preferred if it occurs as often, and its share is so many standard errors above chance
LEAST_OCCURRENCES, LEAST_ERRORS = 5, 3.0


@dataclass(frozen=True)
class RoutedTokens:
    """The decisions of a layer's router on the tokens of some images or texts.

    Args:
        probabilities: (n, S, E), the router's distribution.
        computed: (n, S, E), whether an expert computed a token. None does where it is padding.
        scores, choices: (n, S, K), what the router chose, before capacity drops any: `CLIPMoERouter.choose`.
    """

    layer: int
    probabilities: np.ndarray
    computed: np.ndarray
    scores: np.ndarray
    choices: np.ndarray


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

    def preferred(self, expert: int, number: int = NUM_SHOWN) -> list[int]:
        """The rows of the words that an expert computes more often than by chance, the surest first."""
        chance = self.chance[expert]
        if not 0 < chance < 1:
            return []
        errors = (self.shares[:, expert] - chance) / np.sqrt(chance * (1 - chance) / self.occurrences)
        sure = (errors >= LEAST_ERRORS) & (self.occurrences >= LEAST_OCCURRENCES)
        return [int(row) for row in np.lexsort((-self.occurrences, -errors)) if sure[row]][:number]


def route_images(embedder: Embedder, images: Sequence[PIL.Image.Image], layer: int) -> RoutedImages:
    """Send images through a sparse layer of the vision tower."""
    processor = embedder.processor.image_processor
    prepare = Preparation(processor)
    inputs = torch.stack([prepare(image)["pixel_values"] for image in images])
    mean, std = (torch.tensor(values)[:, None, None] for values in (processor.image_mean, processor.image_std))
    pixels = (inputs * std + mean if processor.do_normalize else inputs).permute(0, 2, 3, 1).clamp(0, 1).numpy()
    routed = _route(embedder, "vision", layer, {"pixel_values": inputs.to(embedder.dtype)})
    return RoutedImages(layer, *routed, pixels, embedder.model.config.vision_config.patch_size)


def route_texts(embedder: Embedder, texts: Sequence[str], layer: int) -> RoutedTexts:
    """Send texts through a sparse layer of the text tower."""
    inputs = tokenize(embedder.processor.tokenizer, list(texts))
    return RoutedTexts(layer, *_route(embedder, "text", layer, inputs), inputs["input_ids"].numpy(), texts)


def _route(embedder: Embedder, tower: str, layer: int, inputs: Mapping[str, torch.Tensor]) -> tuple[np.ndarray, ...]:
    """What a layer's router did: see `RoutedTokens`."""
    config, model = getattr(embedder.model.config, f"{tower}_config"), getattr(embedder.model, f"{tower}_model")
    number, router = sorted(config.moe_layers).index(layer), model.encoder.layers[layer].mlp.router
    parts_of_all = []
    for parts in zip(*(tensor.split(embedder.batch_size) for tensor in inputs.values()), strict=True):
        batch = {name: part.to(embedder.device) for name, part in zip(inputs, parts, strict=True)}
        with torch.no_grad():
            outputs = model(**batch, output_router_logits=True, output_expert_ids=True)
        logits = outputs.router_logits[number]
        probabilities = router_probabilities(logits, config.scoring_func).float()
        ids = torch.nn.functional.one_hot(outputs.expert_ids[number], config.num_experts + 1)
        computed = ids[..., : config.num_experts].sum(dim=2).bool()
        of_batch = probabilities, computed, *router.choose(router.score(logits))
        parts_of_all.append([tensor.cpu().numpy() for tensor in of_batch])
    return tuple(map(np.concatenate, zip(*parts_of_all, strict=True)))


def top_patches(routed: RoutedImages) -> list[list[tuple[int, int]]]:
    """For each expert, the patches (image, patch) that it computes with the highest probabilities, one an image."""
    patches = np.where(routed.computed, routed.probabilities, -np.inf)[:, 1:]  # without the class token
    best, places = patches.max(axis=1), patches.argmax(axis=1)  # (n, E)
    return [
        [
            (image, places[image, expert])
            for image in np.argsort(-of_expert, kind="stable")[:NUM_SHOWN]
            if of_expert[image] > 0
        ]
        for expert, of_expert in enumerate(best.T)
    ]


def dropped_patches(
    routed: RoutedImages, num_images: int, config: CLIPMoETowerConfig, capacity_factor: float
) -> np.ndarray:
    """(n, S - 1), whether none of a patch's choices finds room at its expert, where the first `num_images` images, or
    all, share the capacity in their order (CLIP-UP Figure 7). The layers below did what they do at inference."""
    scores, ids = (torch.from_numpy(of_all[:num_images]) for of_all in (routed.scores, routed.choices))  # (n, S, K)
    priorities = scores if config.token_drop_policy == "probs" else None
    kept = expert_capacity_mask(ids, config.num_experts, capacity_factor, priorities=priorities)
    return ~kept.any(dim=-1)[:, 1:].numpy()


def word_shares(routed: RoutedTexts, tokenizer: PreTrainedTokenizerBase) -> WordShares:
    """How much of each word of the texts the experts compute."""
    is_word = routed.computed.any(axis=-1) & ~np.isin(routed.ids, tokenizer.all_special_ids)
    ids, places, occurrences = np.unique(routed.ids[is_word], return_inverse=True, return_counts=True)
    computed = np.zeros((len(ids), routed.computed.shape[-1]))
    np.add.at(computed, places, routed.computed[is_word])
    return WordShares(ids, occurrences, computed / occurrences[:, None], computed.sum(axis=0) / occurrences.sum())


def top_captions(routed: RoutedTexts, words: WordShares, tokenizer: PreTrainedTokenizerBase) -> list[list[str]]:
    """For each expert and each of its preferred words, the text in which the router is surest to give it this word,
    with ⟦ ⟧ around all that the expert computes of it (CLIP-UP Figure 11). An expert has no text twice. The tokenizer
    is a fast one."""
    options = {"padding": True, "truncation": True, "return_offsets_mapping": True, "return_tensors": "np"}
    spans = tokenizer(list(routed.texts), **options)["offset_mapping"]  # (n, S, 2)
    captions: list[list[str]] = []
    for expert in range(len(words.chance)):
        sure = np.where(routed.computed[..., expert], routed.probabilities[..., expert], 0)
        captions.append([])
        for word in words.preferred(expert, NUM_CAPTIONS):
            row, place = np.unravel_index(np.where(routed.ids == words.ids[word], sure, 0).argmax(), sure.shape)
            if sure[row, place] > 0:
                computed = np.zeros(len(routed.texts[row]), bool)
                for start, end in spans[row, routed.computed[row, :, expert]]:
                    computed[start:end] = True
                captions[-1].append(_marked(routed.texts[row], computed))
                sure[row] = 0
    return captions


def _marked(text: str, computed: np.ndarray) -> str:
    """A text with its computed characters between ⟦ and ⟧."""
    runs = groupby(zip(text, computed, strict=True), lambda character: character[1])
    parts = [(is_computed, "".join(character for character, _ in run)) for is_computed, run in runs]
    return "".join(f"⟦{part}⟧" if is_computed else part for is_computed, part in parts).replace("⟧ ⟦", " ")


def word_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token as it is read: `bicy-` where the word goes on."""
    piece = tokenizer.convert_ids_to_tokens(token)
    text = tokenizer.decode([token]).strip() or piece
    return text if piece.endswith("</w>") or not text.isalpha() else f"{text}-"
