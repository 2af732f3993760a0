"""The families of CLIPs that become sparse: of each, transformers' class of dense models and ours of sparse ones."""

import logging
import re
from dataclasses import dataclass, fields

from transformers import CLIPModel, MetaClip2Model, PreTrainedConfig, PreTrainedModel, Siglip2Model, SiglipModel

from modeling_clip_moe import CLIPMoEModel, MetaClip2MoEModel, Siglip2MoEModel, SiglipMoEModel

TOWER_CONFIGS = ("text_config", "vision_config")

# The first and the last token of SigLIP's configurations are CLIP's by default, above their vocabulary. transformers
# warns of them wherever it compares a configuration with the default. SigLIP reads neither
DEFAULT_TOKENS = re.compile(r"[be]os_token_id must be .* 0 and 31999\), got (49406|49407)\.")
logging.getLogger("transformers.configuration_utils").addFilter(
    lambda record: DEFAULT_TOKENS.search(record.getMessage()) is None
)


@dataclass(frozen=True)
class Family:
    """A family. Its models have `text_model` and `vision_model` with `encoder.layers`, whose FFN is an `mlp`."""

    name: str
    dense: type[PreTrainedModel]
    sparse: type[PreTrainedModel]
    # Whether models have a `logit_bias`, for the sigmoid loss
    sigmoid: bool = False
    # Whether images may have any shape
    naflex: bool = False

    @property
    def model_type(self) -> str:
        """The `model_type` of its dense models."""
        return self.dense.config_class.model_type

    @property
    def logit_scale_shape(self) -> tuple[int, ...]:
        """The shape in dense models; sparse ones have (1,), since FSDP2 does not shard scalars."""
        return (1,) if self.sigmoid else ()

    @property
    def whole_fields(self) -> set[str]:
        """The fields beside the towers that configurations of dense and of sparse models have in common."""
        names = [{field.name for field in fields(model.config_class)} for model in (self.dense, self.sparse)]
        return set.intersection(*names) - {field.name for field in fields(PreTrainedConfig)} - set(TOWER_CONFIGS)


FAMILIES = (
    Family("CLIP", CLIPModel, CLIPMoEModel),
    Family("MetaCLIP 2", MetaClip2Model, MetaClip2MoEModel),
    Family("SigLIP", SiglipModel, SiglipMoEModel, sigmoid=True),
    Family("SigLIP 2 (NaFlex)", Siglip2Model, Siglip2MoEModel, sigmoid=True, naflex=True),
)
# The family of a whole model, dense or sparse, by the type in its configuration
FAMILY_OF_TYPE = {
    model.config_class.model_type: family for family in FAMILIES for model in (family.dense, family.sparse)
}


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a whole model, dense or sparse.

    Raises:
        ValueError: there is none.
    """
    if not is_clip(config):
        raise ValueError(f"a model of type {config.model_type!r} is of no family that becomes sparse: {dense_types()}")
    return FAMILY_OF_TYPE[config.model_type]


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of a whole model, dense or sparse."""
    family = family_of(config)
    return family.dense if config.model_type == family.model_type else family.sparse


def dense_types() -> str:
    """The types of dense models of transformers that become sparse, for errors."""
    return f"there are {', '.join(family.model_type for family in FAMILIES)}, see docs/families.md"


def is_clip(config: PreTrainedConfig) -> bool:
    """Whether it is of a whole model, dense or sparse, of one of the families."""
    return config.model_type in FAMILY_OF_TYPE
