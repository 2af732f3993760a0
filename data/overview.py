"""A look at captioned images before a model is trained and tested on them: what the captions allow at best."""

import html
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

import datasets
from transformers import PreTrainedTokenizerBase

from clip_moe.data.texts import plain_words, present_captions
from clip_moe.data.tokenizer import read_texts
from clip_moe.engine.messages import shortened

# A caption of more than this share of the pairs dominates
DOMINANT = 0.1
# Captions repeat as classes do if two or more have CLASS_SIZE pictures, and these are CLASS_SHARE of all
CLASS_SIZE, CLASS_SHARE = 5, 0.9


def look_at(
    train: datasets.Dataset, test: datasets.Dataset | None, tokenizer: PreTrainedTokenizerBase, advice: str = ""
) -> list[str]:
    """Sentences about captions that a person should know before the scores.

    Args:
        train, test: a column `caption`, a text or a list of texts an image. Rows of the test, or of training where
            there is no test, count as different images.
        tokenizer: captions that it reads as the same tokens are equal to every model.
        advice: on captions that are cut.
    """
    train_images = [present_captions(captions) for captions in train["caption"]]
    test_images = [] if test is None else [present_captions(captions) for captions in test["caption"]]
    pairs = [caption for captions in train_images for caption in captions]
    counts, test_captions = Counter(pairs), {caption for captions in test_images for caption in captions}
    captions = list(dict.fromkeys([*pairs, *(caption for captions in test_images for caption in captions)]))
    texts = read_texts(tokenizer, captions)
    key_of = dict(zip(captions, texts.digests, strict=True))
    trained_keys = {key_of[caption] for caption in counts}
    has_classes = len(pairs) == len(train_images) and are_classes(counts.values())
    [(most_frequent, number)] = counts.most_common(1)
    share = number / len(pairs)
    lines = [
        f"Training has {len(pairs):,} pairs with {len(counts):,} different captions; the most frequent, "
        f"{shortened(most_frequent)}, belongs to {number:,} ({share:.1%})."
    ]
    if test_images:
        unseen = [caption for caption in test_captions if key_of[caption] not in trained_keys]
        lines.append(
            f"The test has {len(test_images):,} images with {len(test_captions):,} different captions, "
            f"{len(unseen):,} of which training never sees."
        )
        trained_words = set(map(plain_words, counts)) if unseen else set()
        if reworded := sum(plain_words(caption) in trained_words for caption in unseen):
            lines.append(f"{reworded:,} of these are in training with other punctuation, quotes, case or HTML.")
    if not has_classes:
        memory = recalls(ceilings(test_images, key_of, trained_keys)) if test_images else ""
        memory = memory and f"; with the captions of training alone, {memory}"
        best = recalls(ceilings(test_images or train_images, key_of))
        lines.append(f"The greatest R@1 that these captions allow is {best}{memory}.")
    if cut := sum(texts.is_cut):
        lines.append(f"{cut:,} captions are longer than {texts.max_length} tokens, and are cut{advice}.")
    key_counts = Counter(texts.digests)
    if alike := sum(key_counts[key] > 1 for key in texts.digests):
        lines.append(
            f"{alike:,} captions have the same tokens as another caption: they differ only in case, spaces or after "
            "truncation."
        )
    if entities := sum((html.unescape(caption) != caption) * count for caption, count in counts.items()):
        lines.append(f"{entities:,} pairs have HTML in their caption, such as `&amp;`: write the character.")
    if share > DOMINANT and len(counts) > 1 and not has_classes:
        lines.append(
            f"A caption of {share:.0%} of the pairs tells them from others, but not from each other: caption them one "
            "by one, or leave most of them out."
        )
    return lines


def are_classes(sizes: Collection[int]) -> bool:
    """Whether captions repeat as classes do, by the number of pictures of each."""
    large = [size for size in sizes if size >= CLASS_SIZE]
    return len(large) > 1 and sum(large) >= CLASS_SHARE * sum(sizes)


def recalls(by_way: Mapping[str, float]) -> str:
    """Recalls in words: "image→text 66.7% and text→image 75.0%"."""
    return " and ".join(f"{way.replace('_to_', '→')} {value:.1%}" for way, value in by_way.items())


def ceilings(
    captions: Sequence[Sequence[str]], key_of: Mapping[str, bytes], known: Collection[bytes] | None = None
) -> dict[str, float]:
    """The greatest recall at 1 in retrieval, where every image with a caption is right for it, and a tie with what is
    wrong is wrong (`clip_moe.evaluation.retrieval`).

    Args:
        captions: of each image of the test.
        key_of: equal for captions that the model cannot tell apart.
        known: keys of the captions that the model has learned; None: it may know all.
    """
    captions_of_key: dict[bytes, set[str]] = defaultdict(set)
    images_of_key: dict[bytes, Counter[int]] = defaultdict(Counter)
    for image, image_captions in enumerate(map(set, captions)):
        for caption in image_captions:
            captions_of_key[key_of[caption]].add(caption)
            images_of_key[key_of[caption]][image] += 1  # captions of the key that the image has
    known = captions_of_key.keys() if known is None else known
    # An image finds a caption of its own if no other image has one of the same key
    right_images = sum(
        any(captions_of_key[key] <= set(image_captions) for key in known & set(map(key_of.get, image_captions)))
        for image_captions in captions
    )
    # Captions of one key find the same image first: at best, the one that most of them are right for
    right_captions = sum(max(images.values()) for key, images in images_of_key.items() if key in known)
    number = sum(map(len, captions_of_key.values()))
    return {"image_to_text": right_images / len(captions), "text_to_image": right_captions / number}
