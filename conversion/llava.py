"""Puts a CLIP-MoE into a LLaVA of transformers, in place of its vision tower.

    python -m conversion.llava llava-hf/llava-1.5-7b-hf clip-moe-l14-336 llava-moe

LLAVA is a folder or hub name of a `LlavaForConditionalGeneration`, TOWER one of a `CLIPMoEModel` or a
`CLIPMoEVisionModel`. The language model and the projector stay as they are: a tower upcycled from the CLIP that the
LLaVA was trained with fits at once, any other one of the same width needs the projector trained again. Before OUTPUT
appears, the saved model is loaded again: its image features must be the projected hidden states of the tower, and its
language model must compute what it computed. To load it, `import modeling_clip_moe` first.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoProcessor, LlavaForConditionalGeneration
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from conversion.checkpoints import check_equal, has_file, load_model, new_folder, one_line_errors
from modeling_clip_moe import CLIPMoEVisionConfig, CLIPMoEVisionModel


def load_tower(source: str | Path, **kwargs) -> CLIPMoEVisionModel:
    """Loads the vision tower of a whole model or of a folder of its own.

    Raises:
        ValueError: another kind of model.
    """
    config = AutoConfig.from_pretrained(source)
    if not isinstance(getattr(config, "vision_config", config), CLIPMoEVisionConfig):
        raise ValueError(f"{source} has no vision tower of a CLIP-MoE: it is of type {config.model_type!r}")
    return CLIPMoEVisionModel.from_pretrained(source, **{"dtype": "auto"} | kwargs).eval()


def swap(llava: LlavaForConditionalGeneration, tower: CLIPMoEVisionModel) -> None:
    """Replaces the vision tower of a LLaVA, in place, and takes its dtype.

    Raises:
        ValueError: the projector takes another width, or the tower lacks a hidden state that LLaVA looks at.
    """
    config, old, new = llava.config, llava.config.vision_config, tower.config
    if new.hidden_size != old.hidden_size:
        raise ValueError(
            f"the projector takes hidden states of width {old.hidden_size}, the tower's have {new.hidden_size}: choose "
            "a tower made from the CLIP that this LLaVA was trained with"
        )
    layers = config.vision_feature_layer
    for layer in [layers] if isinstance(layers, int) else layers:
        if not -new.num_hidden_layers - 1 <= layer <= new.num_hidden_layers:
            raise ValueError(f"vision_feature_layer {layer} is not there in a tower of {new.num_hidden_layers} layers")
    config.vision_config = new
    config.image_seq_length = (new.image_size // new.patch_size) ** 2
    llava.model.vision_tower = tower.to(llava.dtype)


@torch.no_grad()
def image_features(llava: LlavaForConditionalGeneration, pixel_values: torch.Tensor) -> torch.Tensor:
    """Features (images, patches, width) that the language model gets."""
    return torch.stack(list(llava.model.get_image_features(pixel_values).pooler_output))


@torch.no_grad()
def verify(source: str | Path, tower_source: str | Path, folder: Path) -> dict[str, float]:
    """Compares the saved LLaVA with what it was made of, in float32.

    Raises:
        ValueError: its image features are not the tower's, projected, or its language model differs.
    """
    found = load_model(LlavaForConditionalGeneration, folder, dtype=torch.float32)
    old = load_model(LlavaForConditionalGeneration, source, dtype=torch.float32)
    tower = load_tower(tower_source, dtype=torch.float32)
    config = tower.config
    generator = torch.Generator().manual_seed(0)
    pixel_values = torch.randn(2, config.num_channels, config.image_size, config.image_size, generator=generator)
    hidden_states = tower(pixel_values, output_hidden_states=True).hidden_states
    layers, strategy = old.config.vision_feature_layer, old.config.vision_feature_select_strategy
    selected = [hidden_states[layer] for layer in ([layers] if isinstance(layers, int) else layers)]
    selected = torch.cat([states[:, 1:] if strategy == "default" else states for states in selected], dim=-1)
    input_ids = torch.arange(min(16, old.config.text_config.vocab_size - 1))[None]
    return check_equal(
        {"image features": old.model.multi_modal_projector(selected), "text logits": old(input_ids).logits},
        {"image features": image_features(found, pixel_values), "text logits": found(input_ids).logits},
    )


def write_processor(source: str | Path, tower_source: str | Path, folder: Path) -> None:
    """Saves LLaVA's processor with the tower's way to prepare images, if it has one."""
    processor = AutoProcessor.from_pretrained(source)
    if has_file(tower_source, "processor_config.json", "preprocessor_config.json"):
        processor.image_processor = AutoImageProcessor.from_pretrained(tower_source)
    processor.patch_size = AutoConfig.from_pretrained(folder).vision_config.patch_size
    processor.save_pretrained(folder)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m conversion.llava", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("llava", metavar="LLAVA", help="folder or hub name of a LlavaForConditionalGeneration")
    parser.add_argument("tower", metavar="TOWER", help="folder or hub name of a CLIPMoEModel or CLIPMoEVisionModel")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="new folder for the LLaVA")
    args = parser.parse_args(argv)
    with one_line_errors(), new_folder(args.output) as folder:
        llava = load_model(LlavaForConditionalGeneration, args.llava)
        swap(llava, load_tower(args.tower))
        llava.save_pretrained(folder)
        write_processor(args.llava, args.tower, folder)
        verify(args.llava, args.tower, folder)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
