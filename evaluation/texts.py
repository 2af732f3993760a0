"""Texts of a task that a tokenizer cuts, and texts that it makes equal."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Literal

from clip_moe.data.tokenizer import ReadTexts
from clip_moe.engine.messages import warn_once
from clip_moe.engine.result_schema import TextCounts
from clip_moe.evaluation.task import Task


def count_texts(
    task: Task,
    kind: Literal["captions", "prompts"],
    tokens: ReadTexts,
    owners: Sequence[Hashable],
    contests: Sequence[Hashable] | None = None,
) -> TextCounts:
    """Counts the texts of a task that are cut or that a model cannot tell apart, and warns of them.

    Args:
        owners: the image, class or side of a pair of each text. Texts of one owner need not be told apart.
        contests: the pair or the group of classes of each text. Texts of two contests need not be told apart; None:
            there is one contest.
    """
    contests = contests or [None] * len(tokens.texts)
    digests, texts = (list(zip(contests, keys, strict=True)) for keys in (tokens.digests, tokens.texts))
    places = set(zip(digests, texts, owners, strict=True))
    with_tokens, with_text = Counter(place[0] for place in places), Counter(place[1] for place in places)
    with_both = Counter((place[0], place[2]) for place in places)
    counts = TextCounts(
        kind=kind,
        number=len(texts),
        max_length=tokens.max_length,
        cut=sum(tokens.is_cut),
        # Places of the same tokens that have another text and another owner
        alike=sum(
            with_tokens[own] - with_text[text] - with_both[own, owner] + 1 > 0
            for own, text, owner in zip(digests, texts, owners, strict=True)
        ),
        repeated=sum(with_text[text] > 1 for text in texts),
    )
    # Images of one caption tie by nature, but a pair of one can never be right, nor can recall be high where most do
    never = task.kind == "pairs" or 2 * counts.repeated > counts.number
    if counts.cut or counts.alike or (counts.repeated and never):
        warn_once(f"{task.title}: {counts.sentence}")
    return counts


def require_told_apart(task: Task, tokens: ReadTexts) -> None:
    """Raises a ValueError if all prompts of two classes of a group have the same token ids.

    Args:
        tokens: the prompts of all templates, one class after the other.
    """
    prompts_of_class = [
        slice(start, start + len(task.templates)) for start in range(0, len(tokens.texts), len(task.templates))
    ]
    first: dict[Hashable, int] = {}
    for number, name in enumerate(task.classes):
        other = first.setdefault((task.group_of_class.get(name), *tokens.digests[prompts_of_class[number]]), number)
        if other == number:
            continue
        are_cut = zip(tokens.is_cut[prompts_of_class[other]], tokens.is_cut[prompts_of_class[number]], strict=True)
        if all(any(pair) for pair in are_cut):
            why = f"all prompts are cut at {tokens.max_length} tokens, before they differ: shorten names or templates"
        else:
            why = "its tokenizer ignores the difference, such as case: rename one, or merge them into one class"
        raise ValueError(
            f"{task.title}: the model cannot tell the classes {task.classes[other]!r} and {name!r} apart: {why}"
        )
