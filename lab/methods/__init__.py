"""Methods on trial: each one file, through the doors that every user has."""

from collections.abc import Mapping
from typing import Any

import torch

TOWERS = ("text", "vision")


def logits_and_mask(
    tower: str, outputs: Any, batch: Mapping[str, torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """The router logits of each sparse layer of a tower, and the mask of its tokens."""
    mask = batch["attention_mask"] if tower == "text" else batch.get("pixel_attention_mask")
    return getattr(outputs, f"{tower}_router_logits") or (), mask
