"""A look at captioned images before a model is trained and tested on them: what the captions allow at best."""

import html
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import datasets
from transformers import PreTrainedTokenizerBase

from clip_moe.data.texts import plain_words, present_captions
from clip_moe.data.tokenizer import read_texts
from clip_moe.engine.messages import shortened

# A caption of more than this share of the pairs dominates
DOMINANT = 0.1
# Captions repeat as classes do if two or more have so many pictures, and these are so large a share of all
CLASS_SIZE, CLASS_SHARE = 5, 0.9


@dataclass(frozen=True)
class Overview:
    """What captions are like, and the scores that they allow. Captions that a tokenizer reads as the same tokens are
    equal to every model: "alike".

    Args:
        pairs: captions of images in training, each with its image.
        captions: different ones among them.
        most_frequent, most_frequent_count: the caption of most pairs in training, and of how many.
        are_classes: whether captions of training repeat as classes do.
        entities: pairs in training whose caption has an HTML entity, such as &amp;.
        max_length: tokens that the tokenizer reads of a caption.
        cut: different captions, of training and test, that are longer.
        alike: different captions, of training and test, that are alike to another one.
        test_images: images in the test; 0 without one.
        test_captions: different captions in the test.
        unseen: those of them that no caption in training is alike to.
        reworded: of the unseen, those that say the same as a caption in training (`data.texts.plain_words`).
        best: the greatest recall at 1 by direction, `image_to_text` and `text_to_image`, in the test, or without one in
            training.
        by_memory: the same in the test for a model that knows only captions of training.
    """

    pairs: int
    captions: int
    most_frequent: str
    most_frequent_count: int
    are_classes: bool
    entities: int
    max_length: int
    cut: int
    alike: int
    test_images: int
    test_captions: int
    unseen: int
    reworded: int
    best: dict[str, float]
    by_memory: dict[str, float]

    def sentences(self, advice: str = "") -> list[str]:
        """What a person should know before the scores.

        Args:
            advice: on captions that are cut.
        """
        share = self.most_frequent_count / self.pairs
        both, memory = recalls(self.best), recalls(self.by_memory)
        lines = [
            f"Training has {self.pairs:,} pairs with {self.captions:,} different captions; the most frequent, "
            f"{shortened(self.most_frequent)}, belongs to {self.most_frequent_count:,} ({share:.1%}).",
        ]
        if self.test_images:
            lines += [
                f"The test has {self.test_images:,} images with {self.test_captions:,} different captions, "
                f"{self.unseen:,} of which training never sees.",
            ]
            if self.reworded:
                lines.append(
                    f"{self.reworded:,} of these are in training with other punctuation, quotes, case or HTML."
                )
        if not self.are_classes:
            memory = f"; with the captions of training alone, {memory}" * bool(self.test_images)
            lines.append(f"The greatest R@1 that these captions allow is {both}{memory}.")
        if self.cut:
            lines.append(f"{self.cut:,} captions are longer than {self.max_length} tokens, and are cut{advice}.")
        if self.alike:
            lines.append(
                f"The tokenizer reads {self.alike:,} captions as it reads another one: they differ in case, spaces, "
                "or behind the cut."
            )
        if self.entities:
            lines.append(f"{self.entities:,} pairs have HTML in their caption, such as `&amp;`: write the character.")
        if share > DOMINANT and self.captions > 1 and not self.are_classes:
            lines.append(
                f"A caption of {share:.0%} of the pairs tells them from others, but not from each other: caption them "
                "one by one, or leave most of them out."
            )
        return lines


def are_classes(sizes: Collection[int]) -> bool:
    """Whether captions repeat as classes do, by the number of pictures of each."""
    large = [size for size in sizes if size >= CLASS_SIZE]
    return len(large) > 1 and sum(large) >= CLASS_SHARE * sum(sizes)


def recalls(of_ways: Mapping[str, float]) -> str:
    """As "image→text 66.7% and text→image 75.0%"."""
    return " and ".join(f"{way.replace('_to_', '→')} {value:.1%}" for way, value in of_ways.items())


def look_at(train: datasets.Dataset, test: datasets.Dataset | None, tokenizer: PreTrainedTokenizerBase) -> Overview:
    """What captions are like, as a tokenizer reads them.

    Args:
        train, test: a column `caption`, a text or a list of texts an image. No two rows of the test have the same
            image; those of training, where there is no test, count as images.
    """
    of_rows = [present_captions(of_image) for of_image in train["caption"]]
    of_train = [caption for of_image in of_rows for caption in of_image]
    of_test = [] if test is None else [present_captions(of_image) for of_image in test["caption"]]
    different = list(dict.fromkeys([*of_train, *(caption for of_image in of_test for caption in of_image)]))
    read = read_texts(tokenizer, different)
    key_of = dict(zip(different, read.digests, strict=True))
    known = {key_of[caption] for caption in of_train}
    texts = {caption for of_image in of_test for caption in of_image}
    counts, with_key = Counter(of_train), Counter(read.digests)
    unseen = [caption for caption in texts if key_of[caption] not in known]
    words = set(map(plain_words, counts)) if unseen else set()
    [(most_frequent, most_frequent_count)] = counts.most_common(1)
    return Overview(
        pairs=len(of_train),
        captions=len(counts),
        most_frequent=most_frequent,
        most_frequent_count=most_frequent_count,
        are_classes=len(of_train) == len(of_rows) and are_classes(counts.values()),
        entities=sum((html.unescape(caption) != caption) * number for caption, number in counts.items()),
        max_length=read.max_length,
        cut=sum(read.is_cut),
        alike=sum(with_key[key] > 1 for key in read.digests),
        test_images=len(of_test),
        test_captions=len(texts),
        unseen=len(unseen),
        reworded=sum(plain_words(caption) in words for caption in unseen),
        best=ceilings(of_test or of_rows, key_of),
        by_memory={} if test is None else ceilings(of_test, key_of, known),
    )


def ceilings(
    captions: Sequence[Sequence[str]], key_of: Mapping[str, bytes], known: Collection[bytes] | None = None
) -> dict[str, float]:
    """The greatest recall at 1 in retrieval, where every image with a caption is right for it, and a tie with what is
    wrong is wrong (`evaluation.retrieval`).

    Args:
        captions: of each image of the test.
        key_of: equal for captions that the model cannot tell apart.
        known: keys of the captions that the model has learned; None: it may know all.
    """
    with_key: dict[bytes, set[str]] = defaultdict(set)
    images_with_key: dict[bytes, Counter[int]] = defaultdict(Counter)
    for image, of_image in enumerate(map(set, captions)):
        for caption in of_image:
            with_key[key_of[caption]].add(caption)
            images_with_key[key_of[caption]][image] += 1  # captions of the key that the image has
    known = with_key.keys() if known is None else known
    named = sum(
        any(with_key[key] <= set(of_image) for key in known & {*map(key_of.get, of_image)}) for of_image in captions
    )
    # Captions of one key find the same image first: at best, the one that most of them are right for
    found = sum(max(of_key.values()) for key, of_key in images_with_key.items() if key in known)
    number = sum(map(len, with_key.values()))
    return {"image_to_text": named / len(captions), "text_to_image": found / number}
