"""open_clip's configuration, which lies beside weights on the Hub: activation, heads and preprocessing."""

from pathlib import Path
from typing import Any

from transformers import CLIPConfig

from clip_moe.conversion.checkpoints import loading
from clip_moe.engine.files import read_json
from modeling_clip_moe.families import dense_types

FILE = "open_clip_config.json"
# The fields of a CLIP's towers and of its preprocessing, with open_clip's defaults
VISION = {"image_size": 224, "layers": 12, "width": 768, "head_width": 64, "patch_size": 16}
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12}
PREPROCESSING = {
    "mean": [0.48145466, 0.4578275, 0.40821073],
    "std": [0.26862954, 0.26130258, 0.27577711],
    "interpolation": "bicubic",
    "resize_mode": "shortest",
}
# Fields of towers that shapes of weights show, or that change nothing that is computed
IGNORED = {"mlp_ratio", "patch_dropout", "hf_tokenizer_name", "tokenizer_kwargs"}
# As transformers' image processors number them
RESAMPLINGS = {"bilinear": 2, "bicubic": 3, "random": 3}


def read_configuration(archive: Path, weights: CLIPConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings that the configuration beside an archive gives to `conversion.openai.build`, and those of the
    image processor. Both are empty where there is none.

    Args:
        weights: whose sizes are those of the archive's tensors.

    Raises:
        ValueError: it is damaged, a tower is not CLIP's, or it is of another model.
    """
    path = archive.with_name(FILE)
    if not path.is_file():
        return {}, {}
    with loading(path):
        content = read_json(path)
        model = content.get("model_cfg", content)  # alone in open_clip's list of architectures
        vision, text = VISION | model["vision_cfg"], TEXT | model["text_cfg"]
        _require_tower("vision_cfg", vision, weights)
        _require_tower("text_cfg", text, weights)
        settings = {
            "activation": "quick_gelu" if model.get("quick_gelu") else "gelu",
            "vision_heads": vision["width"] // vision["head_width"],
            "text_heads": text["heads"],
        }
        given = content.get("preprocess_cfg")
        return settings, {} if given is None else _image_processor(given, weights.vision_config.image_size)


def _require_tower(name: str, tower: dict[str, Any], weights: CLIPConfig) -> None:
    known = (VISION if name == "vision_cfg" else TEXT).keys() | IGNORED
    if others := [f"{key} {value!r}" for key, value in tower.items() if value and key not in known]:
        raise ValueError(f"{name} has {', '.join(others)}, which CLIPModel cannot express: {dense_types()}")
    vision, text = weights.vision_config, weights.text_config
    sizes = {
        "vision_cfg": {"width": vision.hidden_size, "layers": vision.num_hidden_layers}
        | {"patch_size": vision.patch_size, "image_size": vision.image_size},
        "text_cfg": {"width": text.hidden_size, "layers": text.num_hidden_layers}
        | {"context_length": text.max_position_embeddings, "vocab_size": text.vocab_size},
    }
    for key, size in sizes[name].items():
        if tower[key] not in (size, [size, size]):
            raise ValueError(
                f"it is of another model: its {name} has {key} {tower[key]} (open_clip's default where it is left "
                f"out), but the weights have {size}: put the file that belongs to them there"
            )


def _image_processor(given: dict[str, Any], size: int) -> dict[str, Any]:
    """The settings of CLIP's image processor, for images of so many pixels a side."""
    settings = PREPROCESSING | {key: value for key, value in given.items() if value is not None}
    square, crops = {"height": size, "width": size}, {"shortest": True, "squash": False}[settings["resize_mode"]]
    return {
        "image_mean": settings["mean"],
        "image_std": settings["std"],
        "resample": RESAMPLINGS[settings["interpolation"]],
        "size": {"shortest_edge": size} if crops else square,
        "do_center_crop": crops,
        "crop_size": square,
    }
