"""The kinds of stages that a recipe knows by name. Each is a class in the file of its name, beside what it calls."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clip_moe.engine.stage import Stage

# Room -> its kinds, in the order of docs/settings.md
KINDS_OF_ROOM = {
    "conversion": "openai released_clip_moe released_moe_vie export_released llava initialize "
    "long_context upcycle unify average dense",
    "data": "tokenizer",
    "training": "split captions embed cluster train train_experts train_data_expert train_router assemble",
    "evaluation": "evaluate answer analyze",
}
KINDS = {kind: room for room, kinds in KINDS_OF_ROOM.items() for kind in kinds.split()}
# Former kinds -> the kind, or the class in a checkout, that has their settings
FORMER = {
    **dict.fromkeys(("cluster_fine", "cluster_coarse", "select"), "cluster"),
    **dict.fromkeys(("features", "embed_captions"), "embed"),
    **dict.fromkeys(("export_clip_moe", "export_moe_vie"), "export_released"),
    "add_experts": "lab.methods.more_experts:MoreExpertsStage",
    "mixture": "lab.mixture:MixtureStage",
    "train_long_clip": "lab.methods.long_clip:TrainLongCLIPStage",
}


def stage_of_kind(kind: str) -> "type[Stage]":
    """The class of one of `KINDS`, whose file alone is imported."""
    members = vars(importlib.import_module(f"clip_moe.{KINDS[kind]}.stages.{kind}")).values()
    return next(member for member in members if isinstance(member, type) and vars(member).get("kind") == kind)
