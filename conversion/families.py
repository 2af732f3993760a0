"""What conversions ask about the family of a model; the families are in `modeling_clip_moe.families`."""

import logging
import re

from transformers import PreTrainedConfig, PreTrainedModel

from modeling_clip_moe.families import CLASS_OF_TYPE, FAMILY_OF_TYPE, Family

# The first and the last token of SigLIP's configurations are CLIP's by default, above their vocabulary. transformers
# warns of them wherever it compares a configuration with the default. SigLIP reads neither
DEFAULT_TOKENS = re.compile(r"[be]os_token_id must be .* 0 and 31999\), got (49406|49407)\.")
logging.getLogger("transformers.configuration_utils").addFilter(
    lambda record: DEFAULT_TOKENS.search(record.getMessage()) is None
)


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a whole model or of an image tower alone, dense or sparse.

    Raises:
        ValueError: there is none.
    """
    if config.model_type not in FAMILY_OF_TYPE:
        raise ValueError(f"a model of type {config.model_type!r} is of no family that becomes sparse: {dense_types()}")
    return FAMILY_OF_TYPE[config.model_type]


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of a model of a family, dense or sparse."""
    family = family_of(config)
    return family.dense if config.model_type == family.model_type else family.sparse


def dense_types() -> str:
    """The types of dense models of transformers that become sparse, for errors."""
    types = dict.fromkeys(family.model_type for family in FAMILY_OF_TYPE.values())
    return f"there are {', '.join(types)}, see docs/families.md"


def is_clip(config: PreTrainedConfig) -> bool:
    """Whether it is of a whole model, dense or sparse, of one of the families."""
    return config.model_type in CLASS_OF_TYPE
