"""Puts whole CLIPs into one `CLIPMoDEModel`, each in a folder of its own (MoDE)."""

if __name__ == "__main__":
    from conversion.commands import assemble

    assemble.main()

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from conversion.checkpoints import load_clip, load_config, load_mixture
from conversion.families import family_of
from conversion.processors import copy_processor, require_same
from conversion.verification import check_equal, sample_inputs
from modeling_clip_moe import CLIPMoDEConfig, CLIPMoDEModel
from modeling_clip_moe.configuration_clip_mode import DEFAULT_ROUTING
from modeling_clip_moe.configuration_clip_moe import embedding_size

# Folder of the repository for the encoder of the metadata
ENCODER = "metadata_encoder"


def convert(
    experts: Sequence[str | Path],
    folder: Path,
    centers: torch.Tensor | None = None,
    expert_of_center: torch.Tensor | None = None,
    metadata_encoder: str | None = None,
    encoder_folder: Path | None = None,
    **config,
) -> None:
    """Saves experts (folders or hub names) and the processor of the first, and verifies the result. One expert is in
    memory at a time.

    Args:
        centers, expert_of_center, metadata_encoder: see `CLIPMoDEModel.from_experts`.
        encoder_folder: the metadata's encoder, which is copied.
        config: other fields of `CLIPMoDEConfig`, see `CLIPMoDEModel.from_experts`.
    """
    configs = [load_config(source) for source in experts]
    for source, of_source in zip(experts, configs, strict=True):
        require_same_sizes(experts[0], configs[0], source, of_source)
    require_same(experts)
    dtype = None
    for number, source in enumerate(experts):
        expert = load_clip(source)
        dtype = dtype or expert.config.dtype
        expert.save_pretrained(folder / f"expert_{number}")
    names = [f"expert_{number}" for number in range(len(experts))]
    config = {"projection_dim": embedding_size(configs[0]), "dtype": dtype, "routing": DEFAULT_ROUTING, **config}
    CLIPMoDEConfig(experts=names, **config).save_pretrained(folder)
    model = CLIPMoDEModel.from_pretrained(folder, max_loaded_experts=1)
    if centers is not None:
        model.set_centers(centers, expert_of_center, metadata_encoder)
    model.save_pretrained(folder)
    copy_processor(experts[0], folder)
    if encoder_folder is not None:
        shutil.copytree(encoder_folder, folder / ENCODER, dirs_exist_ok=True)  # after a kill
    verify(experts, folder)


def require_same_sizes(
    name: str | Path, config: PreTrainedConfig, other: str | Path, of_other: PreTrainedConfig
) -> None:
    """Raises ValueError unless two models are of one family, take the same texts and images and give embeddings of the
    same size."""
    families = family_of(config), family_of(of_other)
    if families[0] != families[1]:
        raise ValueError(
            f"{other} is a {families[1].name}, but {name} a {families[0].name}: the experts of a mixture are of one "
            "family, dense or sparse, since they read the same texts and images and score alike"
        )
    sizes, sizes_of_other = (
        {"projection_dim": embedding_size(config)}
        | {key: getattr(config.text_config, key) for key in ("vocab_size", "eos_token_id", "max_position_embeddings")}
        | {key: getattr(config.vision_config, key, None) for key in ("image_size", "num_channels")}
        for config in (config, of_other)
    )
    for key, size in sizes_of_other.items():
        if size != sizes[key]:
            raise ValueError(f"{other} has {key} {size}, but {name} has {sizes[key]}")


@torch.no_grad()
def verify(experts: Sequence[str | Path], folder: Path) -> dict[str, float]:
    """Compares a saved mixture, with all weight on expert i, with the i-th expert's model, in float32."""
    mixture = load_mixture(folder, max_loaded_experts=1, dtype=torch.float32)
    expected, converted = {}, {}
    for number, source in enumerate(experts):
        model = load_clip(source, dtype=torch.float32)
        inputs = sample_inputs(model.config)
        alone = torch.zeros(len(experts)).index_fill(0, torch.tensor([number]), 1)
        expected[f"expert {number}: logits"] = model(**inputs).logits_per_image
        converted[f"expert {number}: logits"] = mixture(**inputs, routing_weights=alone).logits_per_image
    return check_equal(expected, converted)
