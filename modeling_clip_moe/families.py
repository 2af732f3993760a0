"""The families of models that become sparse, one row each, and all that depends on the family of a configuration."""

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from transformers import (
    AltCLIPModel,
    ChineseCLIPModel,
    CLIPModel,
    MetaClip2Model,
    MLCDVisionModel,
    PreTrainedConfig,
    PreTrainedModel,
    Siglip2Model,
    SiglipModel,
)

from .loading import OWN_CLASSES, WholeModelMixin, with_relative_imports
from .modeling_clip_moe import CLIPMoEModel, CLIPMoETextModel
from .modeling_metaclip_2_moe import MetaClip2MoEModel
from .modeling_moe_vie import MoEViEModel, ViEModel
from .modeling_siglip_moe import Siglip2MoEModel, SiglipMoEModel
from .modeling_vision_moe import AltCLIPMoEModel, ChineseCLIPMoEModel, MLCDMoEVisionModel

TOWER_CONFIGS = ("text_config", "vision_config")


@dataclass(frozen=True)
class Family:
    """Towers that become sparse have `encoder.layers`, whose FFN is an `mlp`. Whole models have two, `text_model` and
    `vision_model`.

    Args:
        dense, sparse: transformers' class and ours; of MoE-ViE, which transformers does not have, two of ours.
        tokenizer: transformers' class by name, since some need libraries that may not be there; None for an image tower
            alone, which reads no texts.
        sigmoid: whether models have a `logit_bias`, for the sigmoid loss.
        naflex: whether images may have any shape.
        towers: those that become sparse; another one stays dense.
        pooled: which token of a text its embedding is made of. Where it is the last one, texts have to be padded to
            `max_position_embeddings`.
    """

    name: str
    dense: type[PreTrainedModel]
    sparse: type[PreTrainedModel]
    tokenizer: str | None
    sigmoid: bool = False
    naflex: bool = False
    towers: tuple[str, ...] = ("text", "vision")
    pooled: Literal["end", "first", "last"] = "end"

    @property
    def model_type(self) -> str:
        """The `model_type` of its dense models."""
        return self.dense.config_class.model_type

    @property
    def has_own_dense(self) -> bool:
        """Whether the class of its dense models is ours, too."""
        return issubclass(self.dense, WholeModelMixin)

    @property
    def whole_fields(self) -> set[str]:
        """The fields beside the towers that configurations of dense and of sparse models have in common."""
        configs = (self.dense.config_class, self.sparse.config_class, PreTrainedConfig)
        dense, sparse, every = ({field.name for field in fields(config)} for config in configs)
        return (dense & sparse) - every - set(TOWER_CONFIGS)


FAMILIES = (
    Family("CLIP", CLIPModel, CLIPMoEModel, "CLIPTokenizer"),
    Family("MetaCLIP 2", MetaClip2Model, MetaClip2MoEModel, "XLMRobertaTokenizer"),
    Family("SigLIP", SiglipModel, SiglipMoEModel, "SiglipTokenizer", sigmoid=True, pooled="last"),
    Family(
        "SigLIP 2 (NaFlex)", Siglip2Model, Siglip2MoEModel, "Siglip2Tokenizer", sigmoid=True, naflex=True, pooled="last"
    ),
    Family("Chinese-CLIP", ChineseCLIPModel, ChineseCLIPMoEModel, "BertTokenizer", towers=("vision",), pooled="first"),
    Family("AltCLIP", AltCLIPModel, AltCLIPMoEModel, "XLMRobertaTokenizer", towers=("vision",), pooled="first"),
    Family("MoE-ViE", ViEModel, MoEViEModel, "CLIPTokenizer"),
)
# Image towers alone, for LLaVA
IMAGE_TOWERS = (Family("MLCD", MLCDVisionModel, MLCDMoEVisionModel, None, towers=("vision",)),)
_MODELS = [
    (family, model, model.config_class.sub_configs)
    for family in (*FAMILIES, *IMAGE_TOWERS)
    for model in (family.dense, family.sparse)
]
# By the `model_type` of a configuration: the families of all models, dense and sparse, and the classes of whole ones
FAMILY_OF_TYPE = {model.config_class.model_type: family for family, model, _ in _MODELS}
CLASS_OF_TYPE = {model.config_class.model_type: model for _, model, towers in _MODELS if towers}
# By the `model_type` of a text tower's configuration
FAMILY_OF_TEXT = {towers["text_config"].model_type: family for family, _, towers in _MODELS if towers}


def add_family(model: type[PreTrainedModel]) -> Family:
    """The family of a custom model class, see `modeling_clip_moe.register_model`."""
    config, base = model.config_class, next((known for known in FAMILIES if issubclass(model, known.sparse)), None)
    file = Path(sys.modules[model.__module__].__file__)
    refusals = {
        "is not a subclass of a sparse model, such as CLIPMoEModel": base is None,
        f"needs a model_type of its own: {config.model_type!r} is another class's": (
            CLASS_OF_TYPE.get(config.model_type, model) is not model
        ),
        f"and its configuration {config.__name__} are in two files: put them into one": (
            sys.modules[config.__module__].__file__ != str(file)
        ),
    }
    for refusal, applies in refusals.items():
        if applies:
            raise ValueError(f"{model.__name__} {refusal}")
    with_relative_imports(file)  # refuses what could not be published
    OWN_CLASSES[model] = file
    whole = f"{file.stem}.{model.__name__}"
    config.auto_classes = {"AutoConfig": f"{file.stem}.{config.__name__}", "AutoModel": whole}
    config.auto_classes["AutoModelForZeroShotImageClassification"] = whole
    family = replace(base, name=model.__name__, sparse=model)
    CLASS_OF_TYPE[config.model_type] = model
    FAMILY_OF_TYPE.update({config.model_type: family, family.model_type: family})
    FAMILY_OF_TEXT[config.sub_configs["text_config"].model_type] = family
    return family


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a whole model or of an image tower alone, dense or sparse. ValueError if there is none."""
    if config.model_type not in FAMILY_OF_TYPE:
        raise ValueError(f"model type {config.model_type!r} is not supported; {dense_types()}")
    return FAMILY_OF_TYPE[config.model_type]


def dense_types() -> str:
    """The supported types of transformers' dense models, for errors."""
    types = dict.fromkeys(family.model_type for family in FAMILY_OF_TYPE.values())
    return f"supported are {', '.join(types)}, see docs/families.md"


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of a model of a family, dense or sparse."""
    family = family_of(config)
    return family.dense if config.model_type == family.model_type else family.sparse


def sparse_towers(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """The configurations of a whole model's towers with sparse layers, by "text" and "vision"; none of a dense family,
    whatever else its configuration holds."""
    if family_of(config).model_type == config.model_type:
        return {}
    towers = {name.removesuffix("_config"): getattr(config, name) for name in TOWER_CONFIGS}
    return {name: tower for name, tower in towers.items() if getattr(tower, "moe_layers", ())}


def is_clip(config: PreTrainedConfig) -> bool:
    """Whether it is of a whole model, dense or sparse, of one of the families."""
    return config.model_type in CLASS_OF_TYPE


def pooled_token(text: PreTrainedConfig) -> str | None:
    """Which token of a text a tower pools, see `Family`; None: it is the text tower of no family."""
    family = FAMILY_OF_TEXT.get(text.model_type)
    return None if family is None else family.pooled


def pools_highest(text: PreTrainedConfig) -> bool:
    """Whether a text tower pools at the highest token id of a text, as CLIP's does where eos_token_id is 2."""
    family = FAMILY_OF_TEXT.get(text.model_type)
    pooled = family and getattr(family.sparse.text_model_class, "pooled_positions", None)
    return pooled is CLIPMoETextModel.pooled_positions and text.eos_token_id == 2


def longest_text(text: PreTrainedConfig) -> int:
    """The most tokens that a text tower takes. AltCLIP numbers them from behind its padding token, as RoBERTa does."""
    first = text.pad_token_id + 1 if text.model_type.startswith("altclip") else 0
    return text.max_position_embeddings - first
