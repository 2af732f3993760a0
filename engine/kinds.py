"""The kinds of stages that a recipe knows by name. Each is a class in the file of its name, beside what it calls."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clip_moe.engine.stage import Stage

# What they are for -> kind -> its room, in the order of docs/settings.md
PURPOSES = {
    "weights of other forms": dict.fromkeys(("openai", "released_clip_moe", "export_clip_moe", "llava"), "conversion"),
    "models made of models": {
        "initialize": "conversion",
        "long_context": "conversion",
        "upcycle": "conversion",
        "unify": "conversion",
        "assemble": "training",
        "average": "conversion",
        "dense": "conversion",
    },
    "data": {
        "split": "training",
        "tokenizer": "data",
        "captions": "training",
        "embed": "training",
        "cluster": "training",
    },
    "training": dict.fromkeys(("train", "train_experts", "train_data_expert", "train_router"), "training"),
    "measures": dict.fromkeys(("evaluate", "answer", "analyze"), "evaluation"),
}
KINDS = {kind: room for kinds in PURPOSES.values() for kind, room in kinds.items()}


def stage_of_kind(kind: str) -> "type[Stage]":
    """The class of one of `KINDS`, whose file alone is imported."""
    members = vars(importlib.import_module(f"clip_moe.{KINDS[kind]}.stages.{kind}")).values()
    return next(one for one in members if isinstance(one, type) and vars(one).get("kind") == kind)
