"""Captions as data hold them: which are missing, which say the same, and lists and objects written into a text."""

import ast
import html
import io
import json
import re
import tokenize
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from clip_moe.engine.messages import join_names, shortened

if TYPE_CHECKING:
    from clip_moe.data.columns import Rows

# Words for a missing caption, as pandas reads a table
MISSING = {"NA", "N/A", "n/a", "NULL", "null", "None", "NaN", "nan", "-nan", "-NaN", "<NA>", "#N/A", "#NA"}
# Characters that are written alike, or not seen; and what is around a text
ALIKE = str.maketrans("‘’‚‛“”„«»–—_", "'" * 4 + '"' * 5 + "-- ", "\u200b\u200c\u200d\u00ad\ufeff")
AROUND = " '`.,;:!?。、" + '"'


def present_captions(captions: Any) -> list[str]:
    """The caption or captions of an image without white space around them, and without those that are missing: blank, a
    word for what is missing, or no text."""
    captions = captions if isinstance(captions, list) else [captions]
    texts = map(trimmed, (caption for caption in captions if isinstance(caption, str)))
    return [text for text in texts if text and text not in MISSING]


def present_texts(captions: Any) -> list[str]:
    """`present_captions`, with a ValueError of a caption that is neither a text nor missing, or that holds objects or
    lists of lists."""
    for caption in captions if isinstance(captions, list) else [captions]:
        content, problem = structure(caption), None
        if isinstance(content, dict):
            keys = join_names(map(str, content)) or "none"
            problem = f"an object with the keys {keys}: set caption_column to COLUMN.KEY"
        elif isinstance(content, list) and any(isinstance(item, dict | list) for item in content):
            problem = f"a list of objects or lists: {shortened(caption)}"
        elif not isinstance(caption, str | None) and caption == caption:  # NaN is missing
            problem = f"not text: {shortened(caption)}"
        if problem:
            raise ValueError(f"its caption is {problem}")
    return present_captions(captions)


def first_caption(captions: str | Sequence[str | None]) -> str:
    """The caption of an image, or the first of several that is not missing."""
    return present_captions(captions)[0]


def all_captions(rows: "Rows") -> Iterator[str]:
    """All captions of rows but those that are missing."""
    for batch in rows.select_columns("caption").iter(100):
        for captions in batch["caption"]:
            yield from present_captions(captions)


def trimmed(text: str) -> str:
    """A text without white space and marks of byte order at its ends."""
    return text.strip().strip("\ufeff\u200b\0").strip()


def same_words(text: str) -> str:
    """Equal for texts that differ only in case and white space, as most tokenizers read them."""
    return " ".join(text.lower().split())


def plain_words(text: str) -> str:
    """Equal for texts that say the same: also for those that differ in HTML entities, forms of Unicode, kinds of
    quotes, and quotes and punctuation around them."""
    text = unicodedata.normalize("NFKC", html.unescape(html.unescape(text))).translate(ALIKE)
    words = same_words(text.casefold())
    return words.strip(AROUND) or words


def structure(value: Any) -> dict[str, Any] | list[Any] | None:
    """An object or a list, perhaps one that JSON, Python or numpy wrote into a text; None: it is neither."""
    if not isinstance(value, str) or not re.match(r"\s*[\[{]", value):
        return value if isinstance(value, dict | list) else None
    for parse in (json.loads, _flat_list, ast.literal_eval):
        # Parsers fail in many ways
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError, tokenize.TokenError):
            content = parse(value.strip())
            if content is not None:
                return content if isinstance(content, dict | list) else None
    return None


def _flat_list(text: str) -> list[Any] | None:
    """A list of texts and numbers as Python writes it, or as numpy does, without commas."""
    words = [token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.string.strip()]
    if (words[0], words[-1], words.count("[")) != ("[", "]", 1):
        return None
    return [None if word == "nan" else ast.literal_eval(word) for word in words[1:-1] if word != ","]


def listed(caption: Any) -> list[str] | None:
    """The texts of a list that was written into a text; None: it is no list of texts."""
    texts = structure(caption) if isinstance(caption, str) else None
    if not isinstance(texts, list) or not all(isinstance(text, str | None) or text != text for text in texts):
        return None
    return [text for text in texts if isinstance(text, str)]
