"""The kinds of stages that a recipe knows by name: each is a class in the file of its name."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clip_moe.training.stages.base import Stage

# What they are for -> kinds, in the order of docs/settings.md
PURPOSES = {
    "weights of other forms": ("openai", "released_clip_moe", "export_clip_moe", "llava"),
    "models made of models": (
        "initialize",
        "long_context",
        "upcycle",
        "add_experts",
        "unify",
        "assemble",
        "average",
        "dense",
    ),
    "data": ("split", "tokenizer", "mixture", "captions", "features", "cluster"),
    "data experts": ("embed_captions", "cluster_fine", "cluster_coarse", "select"),
    "training": ("train", "train_long_clip", "train_experts", "train_data_expert", "train_router"),
    "measures": ("evaluate", "answer", "analyze", "embed"),
}
KINDS = tuple(kind for kinds in PURPOSES.values() for kind in kinds)


def stage_of_kind(kind: str) -> "type[Stage]":
    """The class of one of `KINDS`, whose file alone is imported."""
    members = vars(importlib.import_module(f"clip_moe.training.stages.{kind}")).values()
    return next(one for one in members if isinstance(one, type) and vars(one).get("kind") == kind)
