"""The kinds of stages that a recipe knows by name: each is a class in the file of its name."""

import importlib

from training.stages.base import Stage

KINDS = (
    *("openai", "released_clip_moe", "export_clip_moe", "tokenizer", "initialize", "long_context", "upcycle", "unify"),
    *("assemble", "average", "dense", "llava", "mixture", "captions", "embed", "cluster", "embed_captions"),
    *("cluster_fine", "cluster_coarse", "select", "train", "train_long_clip", "train_experts", "train_data_expert"),
    *("train_router", "evaluate", "analyze", "embeddings"),
)


def stage_of_kind(kind: str) -> type[Stage]:
    """The class of one of `KINDS`, whose file alone is imported."""
    members = vars(importlib.import_module(f"training.stages.{kind}")).values()
    return next(one for one in members if isinstance(one, type) and vars(one).get("kind") == kind)
