"""Conversations about images: LLaVA's files, and questions about the pictures of the built-in worlds."""

import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from clip_moe.data.annotations import NoSplit
from clip_moe.data.arguments import DataArguments
from clip_moe.data.local_data import reading
from clip_moe.data.pairs import load_pairs
from clip_moe.data.readable import readable_pairs
from clip_moe.data.worlds import is_world
from clip_moe.engine.files import read_json
from clip_moe.engine.messages import shortened

# How LLaVA's files mark the image in a question
IMAGE = "<image>"
# Questions about a picture of a built-in world, by the column of the answer
QUESTIONS = {
    "kind": "What is it?",
    "color": "Which color is it?",
    "size": "How large is it?",
    "position": "Where is it?",
    "background": "Which color is the background?",
    "texture": "Which pattern is on the background?",
}
DESCRIBE = "Describe the picture."
ASKED = 2  # of the questions, after the description


def load_conversations(arguments: DataArguments) -> datasets.Dataset:
    """The conversations of a .json in LLaVA's layout, or of a built-in world.

    LLaVA's layout is a list of `{"id": ..., "image": path, "conversations": [{"from": "human", "value": question},
    {"from": "gpt", "value": answer}, ...]}`; an entry without an image has no key of that name. Wherever `<image>`
    stands in an entry, the image comes before its first question. Every image is decoded once here, as by `load_pairs`.

    Returns:
        Rows of `image` (None where there is none) and `turns`: a question, its answer, the next question, and so on.
        Those with an image come first.
    """
    if is_world(arguments.source):
        return drawn_conversations(arguments)
    with reading(arguments.source):
        entries = read_json(Path(arguments.source))
        if arguments.split != "train":
            raise NoSplit(arguments.source, arguments.split, ["train"])
        if not isinstance(entries, list):
            raise ValueError(f"{arguments.source} is no list of conversations")
        first, entries = arguments.taken_rows.start, entries[arguments.taken_rows]
        rows = [_read_entry(entry, first + number, arguments) for number, entry in enumerate(entries)]
    features = datasets.Features(
        {name: datasets.Value("string") for name in ("image", "caption")}
        | {"turns": datasets.List(datasets.Value("string"))}
    )
    # `readable_pairs` wants a caption: that of a conversation is its first answer
    parts = []
    seen = [row for row in rows if row["image"] is not None]
    if seen:
        parts.append(readable_pairs(datasets.Dataset.from_list(seen, features), arguments)[0])
    blind = [row for row in rows if row["image"] is None]
    if blind:
        parts.append(datasets.Dataset.from_list(blind, features))
    return datasets.concatenate_datasets(parts).remove_columns("caption")


def _read_entry(entry: Any, number: int, arguments: DataArguments) -> dict[str, Any]:
    """A row of an entry."""
    try:
        image = entry.get("image")
        turns = [(turn["from"], turn["value"].replace(IMAGE, "").strip()) for turn in entry["conversations"]]
    except (AttributeError, KeyError, TypeError):
        turns = []
    if turns and turns[0][0] == "gpt":  # as some of LLaVA's begin, which leaves that turn out, too
        turns = turns[1:]
    turns = turns[: len(turns) // 2 * 2]  # a last question without an answer
    if not turns or [speaker for speaker, _ in turns] != ["human", "gpt"] * (len(turns) // 2):
        raise ValueError(f"{arguments.source}: entry {number} needs turns of human and gpt in text: {shortened(entry)}")
    texts = [text for _, text in turns]
    if image is not None:
        image = os.path.join(arguments.image_root or "", image)
        texts[0] = f"{IMAGE}\n{texts[0]}"
    return {"image": image, "caption": texts[1], "turns": texts}


def drawn_conversations(arguments: DataArguments) -> datasets.Dataset:
    """Every picture is described, by its caption, and some questions are asked about it."""
    rows = load_pairs(arguments)
    attributes = rows.remove_columns(["image", "caption"])
    turns = []
    for number, (caption, row) in enumerate(zip(rows["caption"], attributes, strict=True)):
        rng = np.random.default_rng([arguments.seed or 0, number])
        # With two symbols, it is not clear which one is meant
        names = ["background", "texture"] if row.get("second_kind") else list(QUESTIONS)
        chosen_names = [names[index] for index in rng.permutation(len(names))[:ASKED]]
        turns.append(
            [f"{IMAGE}\n{DESCRIBE}", caption, *(text for name in chosen_names for text in (QUESTIONS[name], row[name]))]
        )
    feature = datasets.List(datasets.Value("string"))
    return rows.select_columns("image").add_column("turns", turns, feature=feature)
