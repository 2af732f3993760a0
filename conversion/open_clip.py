"""open_clip's configuration, which lies beside its weights on the Hub, held to these weights."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError
from transformers import CLIPConfig

from modeling_clip_moe.families import dense_types
from records.files import read_json
from records.messages import in_one_line

FILE = "open_clip_config.json"
# As transformers' image processors number them
RESAMPLINGS = {"bilinear": 2, "bicubic": 3, "random": 3}


class Part(BaseModel):
    """A part of the configuration: of its fields, some with open_clip's defaults. `model_extra` has the others."""

    model_config = ConfigDict(strict=True, extra="allow")


class VisionTower(Part):
    """The fields of an image tower that is CLIP's; any other changes what the tower computes."""

    image_size: int | list[int] = 224
    layers: int | list[int] = 12  # a list has those of a ResNet
    width: PositiveInt = 768
    head_width: PositiveInt = 64
    patch_size: int | list[int] = 16
    mlp_ratio: float = 4
    patch_dropout: float = 0


class TextTower(Part):
    """The fields of a text tower that is CLIP's; any other changes what the tower computes."""

    context_length: int = 77
    vocab_size: int = 49408
    width: PositiveInt = 512
    heads: PositiveInt = 8
    layers: int = 12
    mlp_ratio: float = 4
    hf_tokenizer_name: str | None = None
    tokenizer_kwargs: dict | None = None


class ModelConfiguration(Part):
    vision_cfg: VisionTower
    text_cfg: TextTower
    quick_gelu: bool = False


class Preprocessing(Part):
    """How images become those of the model; OpenAI's mean and standard deviation by default."""

    mean: list[float] = [0.48145466, 0.4578275, 0.40821073]
    std: list[float] = [0.26862954, 0.26130258, 0.27577711]
    interpolation: Literal[*RESAMPLINGS] = "bicubic"
    resize_mode: Literal["shortest", "squash"] = "shortest"

    def image_processor(self, size: int) -> dict[str, Any]:
        """The settings of CLIP's image processor, for images of so many pixels a side."""
        square, crops = {"height": size, "width": size}, self.resize_mode == "shortest"
        return {
            "image_mean": self.mean,
            "image_std": self.std,
            "resample": RESAMPLINGS[self.interpolation],
            "size": {"shortest_edge": size} if crops else square,
            "do_center_crop": crops,
            "crop_size": square,
        }


class Configuration(Part):
    """The whole file, or `model_cfg` alone, as in open_clip's list of architectures."""

    model_cfg: ModelConfiguration
    preprocess_cfg: Preprocessing | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What the weights do not tell: see `conversion.openai.convert`."""
        vision, text = self.model_cfg.vision_cfg, self.model_cfg.text_cfg
        return {
            "activation": "quick_gelu" if self.model_cfg.quick_gelu else "gelu",
            "vision_heads": vision.width // vision.head_width,
            "text_heads": text.heads,
        }


def read_configuration(archive: Path, weights: CLIPConfig) -> Configuration | None:
    """The configuration beside an archive, if there is one.

    Args:
        weights: whose sizes are those of the archive's tensors.

    Raises:
        ValueError: it is damaged, a tower is not CLIP's, or it is of another model.
    """
    path = archive.with_name(FILE)
    if not path.is_file():
        return None
    content = read_json(path)
    if isinstance(content, dict) and "model_cfg" not in content:
        content = {"model_cfg": content}
    try:
        configuration = Configuration.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"{path}: {in_one_line(error.errors())}") from None
    vision, text = weights.vision_config, weights.text_config
    sizes_of = {
        "vision_cfg": {"width": vision.hidden_size, "layers": vision.num_hidden_layers}
        | {"patch_size": vision.patch_size, "image_size": vision.image_size},
        "text_cfg": {"width": text.hidden_size, "layers": text.num_hidden_layers}
        | {"context_length": text.max_position_embeddings, "vocab_size": text.vocab_size},
    }
    for name, sizes in sizes_of.items():
        tower = getattr(configuration.model_cfg, name)
        if other := {key: value for key, value in tower.model_extra.items() if value}:
            settings = ", ".join(f"{key} {value!r}" for key, value in other.items())
            raise ValueError(f"{path}: {name} has {settings}, which CLIPModel cannot express: {dense_types()}")
        for key, size in sizes.items():
            if (value := getattr(tower, key)) not in (size, [size, size]):
                raise ValueError(
                    f"{path} is of another model: its {name} has {key} {value} (open_clip's default where it is left "
                    f"out), but the weights in {archive.name} have {size}: put the file that belongs to them there"
                )
    heads = configuration.settings
    for width, number in ((vision.hidden_size, heads["vision_heads"]), (text.hidden_size, heads["text_heads"])):
        if not number or width % number:
            raise ValueError(f"{path}: a tower of width {width} cannot have {number} attention heads")
    return configuration
