"""CLIP tokenizers: learning one from captions, counting the pieces of words, and reading texts with one."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tokenizers import AddedToken, Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizer, PreTrainedTokenizerBase

# The tokens that every vocabulary has: all bytes, within a word and at its end, and the first and the last token of a
# text
ALPHABET = sorted(ByteLevel.alphabet())
BYTES = [*ALPHABET, *(f"{letter}</w>" for letter in ALPHABET)]
SPECIAL = ["<|startoftext|>", "<|endoftext|>"]
SMALLEST = len(BYTES) + len(SPECIAL)

# Captions that pieces are counted of
SAMPLE = 1000
# Texts whose tokens are in memory together
TEXTS_AT_ONCE = 1000


def learn_tokenizer(captions: Iterable[str], vocab_size: int, max_length: int | None = None) -> CLIPTokenizer:
    """CLIP's tokenizer with a vocabulary learned from captions: byte-pair encoding of words' bytes, in lower case. The
    end token has the highest number and pads, as in OpenAI's. The order of the captions does not count.

    Args:
        vocab_size: tokens, at least `SMALLEST`; fewer come of it where the captions have fewer words.
        max_length: tokens of a text, with the first and the last one: `model_max_length`. None: as many as a model
            takes.
    """
    # CLIP's own normalization and splitting into words.
    template = CLIPTokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = template.normalizer, template.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        end_of_word_suffix="</w>",
        # They get their numbers first. Of pairs that are equally frequent, the one with the lower numbers is merged
        # first, and the library numbers letters at the end of words in an order that differs from run to run.
        special_tokens=BYTES,
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [*(token for token, _ in learned), *SPECIAL]
    return CLIPTokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]],
        bos_token=AddedToken(SPECIAL[0], normalized=False, special=True),
        model_max_length=max_length,
    )


def pieces_per_word(tokenizer: PreTrainedTokenizerBase, captions: Iterable[str]) -> float:
    """The average number of tokens of a word; a digit and a run of signs count as words."""
    pieces = words = 0
    for caption in captions:
        pieces += len(tokenizer(caption, add_special_tokens=False, verbose=False)["input_ids"])
        words += len(re.findall(r"[^\W\d]+|\d|[^\w\s]+", caption))
    return pieces / max(words, 1)


def tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: list[str] | None = None, ids: list[list[int]] | None = None
) -> dict[str, torch.Tensor]:
    """The inputs of a batch of texts, cut at the tokenizer's `model_max_length`: `input_ids` and `attention_mask`,
    (B, S) of int64.

    They are padded to the longest. With a mark `pads_to_max_length` on the tokenizer they are padded to
    `model_max_length`, and padding counts as tokens: so was SigLIP trained.

    Args:
        ids: the tokens of the texts, already cut; instead of `texts`.
    """
    whole = getattr(tokenizer, "pads_to_max_length", False)
    length = {"padding": "max_length", "max_length": tokenizer.model_max_length} if whole else {"padding": True}
    if ids is None:
        inputs = tokenizer(texts, truncation=True, return_tensors="pt", **length)
    else:
        inputs = tokenizer.pad({"input_ids": ids}, return_tensors="pt", **length)
    mask = torch.ones_like(inputs["input_ids"]) if whole else inputs["attention_mask"]
    return {"input_ids": inputs["input_ids"], "attention_mask": mask}


@dataclass(frozen=True)
class ReadTexts:
    """Texts as a tokenizer reads them.

    Args:
        max_length: the tokenizer's `model_max_length`.
        digests: for each text's token ids, cut at that length and after the first end token, at which a model reads a
            text's features. To every model, texts of one digest are equal.
        is_cut: whether each text has more tokens than that.
    """

    texts: list[str]
    max_length: int
    digests: list[bytes]
    is_cut: list[bool]


def read_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> ReadTexts:
    """Texts as a tokenizer reads them, in parts that fit into memory."""
    result, end = ReadTexts(texts, tokenizer.model_max_length, [], []), tokenizer.eos_token_id
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        part = texts[start : start + TEXTS_AT_ONCE]
        token_ids = tokenizer(part, verbose=False)["input_ids"]
        is_cut = [len(ids) > result.max_length for ids in token_ids]
        if any(is_cut):
            shorter = iter(tokenizer(list(itertools.compress(part, is_cut)), truncation=True)["input_ids"])
            token_ids = [next(shorter) if cut else ids for ids, cut in zip(token_ids, is_cut, strict=True)]
        token_ids = [ids[: ids.index(end) + 1] if end in ids else ids for ids in token_ids]
        result.digests.extend(hashlib.blake2b(json.dumps(ids).encode(), digest_size=16).digest() for ids in token_ids)
        result.is_cut.extend(is_cut)
    return result
