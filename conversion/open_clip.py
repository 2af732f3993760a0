"""open_clip's configuration, which lies beside weights on the Hub: activation, heads and preprocessing."""

from pathlib import Path
from typing import Any

from transformers import CLIPConfig, PreTrainedConfig

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
# Fields that are sizes of the weights -> their names in transformers
SIZES = {"width": "hidden_size", "layers": "num_hidden_layers", "patch_size": "patch_size", "image_size": "image_size"}
SIZES |= {"context_length": "max_position_embeddings", "vocab_size": "vocab_size"}
# Fields of towers that shapes of weights show, or that change nothing that is computed
IGNORED = {"mlp_ratio", "patch_dropout", "hf_tokenizer_name", "tokenizer_kwargs"}
# As transformers' image processors number them
RESAMPLINGS = {"bilinear": 2, "bicubic": 3, "random": 3}


def read_configuration(archive: Path, weights: CLIPConfig) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Settings for `clip_moe.conversion.openai.build` and for the image processor, from the file beside an archive.

    Raises:
        ValueError: it is damaged, a tower is not CLIP's, or its sizes are not those of `weights`.
    """
    path = archive.with_name(FILE)
    if not path.is_file():
        return {}, None
    with loading(path):
        content = read_json(path)
        model = content.get("model_cfg", content)  # alone in open_clip's list of architectures
        vision, text = VISION | model["vision_cfg"], TEXT | model["text_cfg"]
        faults = _faults("vision_cfg", vision, VISION, weights.vision_config)
        if faults := faults + _faults("text_cfg", text, TEXT, weights.text_config):
            raise ValueError(f"{'; '.join(faults)}: replace it with the file that belongs to the weights")
        settings = {
            "activation": "quick_gelu" if model.get("quick_gelu") else "gelu",
            "vision_heads": vision["width"] // vision["head_width"],
            "text_heads": text["heads"],
        }
        preprocessing = content.get("preprocess_cfg")
        image_size = weights.vision_config.image_size
        return settings, None if preprocessing is None else image_processor_settings(preprocessing, image_size)


def _faults(name: str, tower: dict[str, Any], defaults: dict[str, Any], weights: PreTrainedConfig) -> list[str]:
    """Fields that no CLIP tower has, and sizes that differ from those of the weights."""
    faults = [
        f"{name} has {key} {value!r}, which CLIPModel cannot express ({dense_types()})"
        for key, value in tower.items()
        if value and key not in defaults.keys() | IGNORED
    ]
    sizes = {key: getattr(weights, field) for key, field in SIZES.items() if key in defaults}
    return faults + [
        f"its {name} has {key} {tower[key]} (open_clip's default if missing), but the weights have {size}"
        for key, size in sizes.items()
        if tower[key] not in (size, [size, size])
    ]


def image_processor_settings(given: dict[str, Any], size: int) -> dict[str, Any]:
    """The settings of CLIP's image processor, for images of `size` pixels a side."""
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
