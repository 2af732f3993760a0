"""Puts whole CLIPs into one `CLIPMoDEModel`, each in a folder of its own (MoDE)."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from clip_moe.conversion.checkpoints import load_clip, load_config, load_mixture
from clip_moe.conversion.processors import copy_processor, require_same
from clip_moe.conversion.verification import check_equal, sample_inputs
from clip_moe.engine.files import save
from modeling_clip_moe import CLIPMoDEModel
from modeling_clip_moe.families import family_of

# Folder of the repository for the encoder of the metadata
ENCODER = "metadata_encoder"


def convert(experts: Sequence[str | Path], folder: Path, encoder_folder: Path | None = None, **config) -> None:
    """Saves experts (folders or hub names) with their processor, and verifies the result. Experts that read texts or
    images differently keep a processor each.

    Args:
        encoder_folder: the metadata's encoder, which is copied.
        config: other arguments of `CLIPMoDEModel.from_experts`.
    """
    families = {family_of(load_config(source)).name for source in experts}
    own_processors = len(families) > 1
    try:
        require_same(experts)
    except ValueError:
        own_processors = True
    models = [load_clip(source) for source in experts]
    mixture = CLIPMoDEModel.from_experts(models, own_processors=own_processors, **config)
    save(mixture, folder)
    for number, source in enumerate(experts if own_processors else experts[:1]):
        copy_processor(source, folder / mixture.config.experts[number] if own_processors else folder)
    if encoder_folder is not None:
        shutil.copytree(encoder_folder, folder / ENCODER, dirs_exist_ok=True)  # after a kill
    verify(experts, folder)


@torch.no_grad()
def verify(experts: Sequence[str | Path], folder: Path) -> None:
    """Compares a saved mixture, with all weight on expert i, with the i-th expert's model, in float32."""
    mixture = load_mixture(folder, dtype=torch.float32)
    inputs = [sample_inputs(load_config(expert)) for expert in experts]
    for number, source in enumerate(experts):
        model = load_clip(source, dtype=torch.float32)
        alone = torch.zeros(len(experts)).index_fill(0, torch.tensor([number]), 1)
        logits = mixture(expert_inputs=inputs, routing_weights=alone).logits_per_image
        name = f"expert {number}: logits"
        check_equal({name: model(**inputs[number]).logits_per_image}, {name: logits})
