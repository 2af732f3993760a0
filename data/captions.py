"""Several captions for every image, made once from those of a dataset (CLIP-FMoE section 5.1 and appendix A.1)."""

import re
from collections.abc import Sequence

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from clip_moe.data.arguments import CaptionPolicy
from clip_moe.data.columns import mapped
from clip_moe.data.texts import present_texts

# A line's end, or the space between a full stop, question or exclamation mark, perhaps with a closing quote or bracket,
# and a capital or a digit, unless the full stop is that of one of a few abbreviations
SENTENCE_END = re.compile(
    r"\s*\n\s*|(?:(?<=[.!?])|(?<=[.!?][\"')\]]))(?<!\b(?:Dr|Mr|Ms|St|No)\.)(?<!\bMrs\.)\s+(?=[\"'(\[]?[A-Z0-9])"
)
# Drawings of sentences for each caption that is wanted, before it counts as missing
TRIES = 20


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, without the space around them; a rule of thumb for English."""
    return [sentence.strip() for sentence in SENTENCE_END.split(text) if sentence.strip()]


def pack_sentences(sentences: Sequence[str], lengths: Sequence[int], limit: int, count: int, rng) -> list[str]:
    """Different random combinations of whole sentences, each as long as the limit of tokens lets it be. They come in
    the order of the text, chosen in a random one.

    Args:
        lengths: tokens of each sentence.
        rng: NumPy's generator.

    Returns:
        `count` texts; where there are not enough different combinations, the last ones are empty.
    """
    combinations: list[tuple[int, ...]] = []
    for _ in range(count * TRIES):
        if len(combinations) == count:
            break
        chosen, free = [], limit
        for number in rng.permutation(len(sentences)):
            if lengths[number] <= free:
                chosen.append(int(number))
                free -= lengths[number]
        combination = tuple(sorted(chosen))
        if combination and combination not in combinations:
            combinations.append(combination)
    texts = [" ".join(sentences[number] for number in combination) for combination in combinations]
    return texts + [""] * (count - len(texts))


def build_captions(
    rows: datasets.Dataset,
    policies: Sequence[CaptionPolicy],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    num_proc: int | None = None,
) -> datasets.Dataset:
    """The images of a dataset with a list of `sum(policy.count)` captions each, in the order of the policies, empty
    where there is none.

    Args:
        rows: with the column `image` and those that the policies name.
        tokenizer: counts the tokens of sentences; a packed caption fits its `model_max_length` with the first and the
            last token, or a policy's `max_tokens`.
        seed: draws the combinations.
    """

    def build(row: dict, index: int) -> dict:
        captions = []
        for number, policy in enumerate(policies):
            text = " ".join(present_texts(row[policy.column]))
            if policy.policy == "full":
                captions.append(text.strip())
            elif policy.policy == "first_sentence":
                captions += (split_sentences(text) or [""])[:1]
            else:
                sentences = split_sentences(text)
                lengths = [len(tokenizer(sentence, add_special_tokens=False)["input_ids"]) for sentence in sentences]
                limit = (policy.max_tokens or tokenizer.model_max_length) - 2
                rng = np.random.default_rng([seed, index, number])
                captions += pack_sentences(sentences, lengths, limit, policy.count, rng)
        return {"caption": captions}

    return mapped(
        rows,
        build,
        with_indices=True,
        remove_columns=[name for name in rows.column_names if name != "image"],
        features=datasets.Features(
            {"image": rows.features["image"], "caption": datasets.List(datasets.Value("string"))}
        ),
        num_proc=num_proc,
        desc="captions",
    )
