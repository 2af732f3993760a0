"""Stretches the text context of a CLIP, dense or sparse, as Long-CLIP does (https://arxiv.org/abs/2403.15378)."""

import copy
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from clip_moe.conversion.checkpoints import load_clip
from clip_moe.conversion.verification import check_equal, sample_inputs
from modeling_clip_moe.families import pooled_token

KEPT_POSITIONS = 20
POSITIONS = "text_model.embeddings.position_embedding.weight"


def stretch_positions(table: Tensor, length: int, keep: int = KEPT_POSITIONS) -> Tensor:
    """Interpolates the rows of a position table.

    Row i from `keep` on becomes r = (length - keep) / (rows - keep) rows: (1 - k/r) * row i + k/r * row i+1 for k from
    0 to r - 1. The row after the last is extrapolated from the last two.

    Args:
        table: (rows, D).
        length: rows of the result; 77 rows become 248 with r = 4.
        keep: rows that stay as they are.

    Returns:
        (length, D), in the table's dtype.
    """
    rows = len(table)
    stretched = rows - keep
    ratio, rest = divmod(length - keep, max(stretched, 1))
    if stretched < 2 or rest or ratio < 2:  # the last row is extrapolated from two
        possible = ", ".join(str(keep + stretched * r) for r in range(2, 6))
        raise ValueError(
            f"cannot stretch {rows} positions to {length} if the first {keep} stay: choose {possible}, ..."
        )
    start = table[keep:].to(torch.promote_types(table.dtype, torch.float32))
    step = torch.cat([start.diff(dim=0), start[-1:] - start[-2:-1]])
    shares = torch.arange(ratio, dtype=start.dtype, device=table.device)[:, None] / ratio  # (r, 1)
    new = start[:, None] + shares * step[:, None]  # (rows - keep, r, D)
    return torch.cat([table[:keep], new.flatten(0, 1).to(table.dtype)])


def lengthen(model: PreTrainedModel, length: int, keep: int = KEPT_POSITIONS) -> PreTrainedModel:
    """The same CLIP or text tower alone, dense or sparse, with `length` text positions, in evaluation mode, of the same
    dtype and on the same device."""
    if pooled_token(model.config.get_text_config()) != "end":  # SigLIP pools the last place: texts would be others
        raise ValueError(
            f"a longer context needs a CLIP or MetaCLIP 2, got a model of type {model.config.model_type!r}"
        )
    state = model.state_dict()
    name = POSITIONS if POSITIONS in state else POSITIONS.removeprefix("text_model.")
    state[name] = stretch_positions(state[name], length, keep)
    config = copy.deepcopy(model.config)
    config.get_text_config().max_position_embeddings = length
    with torch.random.fork_rng(devices=[]):  # building the model draws weights that are all replaced
        longer = type(model)(config).to(model.device, model.dtype)
    longer.load_state_dict(state)
    return longer.eval()


@torch.no_grad()
def verify(source: str | Path, folder: Path, keep: int = KEPT_POSITIONS) -> None:
    """Compares the embeddings of images, and of texts that end within the first `keep` tokens, in float32."""
    before, after = (load_clip(model, dtype=torch.float32) for model in (source, folder))
    inputs = sample_inputs(before.config)
    end = inputs["input_ids"][:, -1:]
    inputs["input_ids"] = torch.cat([inputs["input_ids"][:, : keep - 1], end], dim=1)
    expected, converted = (model(**inputs) for model in (before, after))
    names = ("text_embeds", "image_embeds")
    check_equal({name: expected[name] for name in names}, {name: converted[name] for name in names})
