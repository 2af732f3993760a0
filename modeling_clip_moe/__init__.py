"""CLIP with sparse Mixture-of-Experts layers, and mixtures of whole CLIPs.

Importing this package makes transformers' Auto classes know them.
"""

import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForZeroShotImageClassification,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import is_torchvision_available, is_vision_available

from .configuration_clip_mode import CLIPMoDEConfig
from .configuration_clip_moe import CLIPMoEConfig, CLIPMoETextConfig, CLIPMoEVisionConfig
from .configuration_metaclip_2_moe import MetaClip2MoEConfig
from .configuration_siglip_moe import Siglip2MoEConfig, SiglipMoEConfig
from .configuration_vision_moe import AltCLIPMoEConfig, ChineseCLIPMoEConfig, MLCDMoEVisionConfig
from .families import FAMILIES, IMAGE_TOWERS, Family, add_family
from .mode_routing import routing_weights
from .modeling_clip_mode import CLIPMoDEModel
from .modeling_clip_moe import (
    CLIPMoEForImageClassification,
    CLIPMoEModel,
    CLIPMoEPreTrainedModel,
    CLIPMoETextModel,
    CLIPMoETextModelWithProjection,
    CLIPMoEVisionModel,
    CLIPMoEVisionModelWithProjection,
)
from .modeling_metaclip_2_moe import MetaClip2MoEModel
from .modeling_siglip_moe import Siglip2MoEModel, SiglipMoEModel
from .modeling_vision_moe import AltCLIPMoEModel, ChineseCLIPMoEModel, MLCDMoEVisionModel
from .router_losses import (
    load_balancing_loss,
    router_z_loss,
)


def _register(
    family: Family,
    whole: type[PreTrainedModel] | None,
    text: type[PreTrainedModel] | None = None,
    vision: type[PreTrainedModel] | None = None,
) -> None:
    """Makes the Auto classes know a model and its towers, with the processors of its dense models."""
    for model in filter(None, (whole, text, vision)):
        AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        AutoModel.register(model.config_class, model, exist_ok=True)
    if whole is not None:
        AutoModelForZeroShotImageClassification.register(whole.config_class, whole, exist_ok=True)
        AutoProcessor.register(whole.config_class, PROCESSOR_MAPPING[family.dense.config_class], exist_ok=True)
    for model in filter(None, (whole, text)):
        AutoTokenizer.register(model.config_class, getattr(transformers, family.tokenizer), exist_ok=True)
    image_processors = {}
    if is_vision_available():
        image_processors["pil"] = getattr(transformers, f"{family.image_processor}Pil")
    if is_torchvision_available():
        image_processors["torchvision"] = getattr(transformers, family.image_processor)
    for model in filter(None, (whole, vision)):
        if image_processors:
            AutoImageProcessor.register(model.config_class, image_processor_classes=image_processors, exist_ok=True)


# From the last to CLIP, whose vision tower others have, too
for family in reversed(FAMILIES):
    _register(family, family.sparse, family.sparse.text_model_class, family.sparse.vision_model_class)
for family in IMAGE_TOWERS:
    _register(family, None, vision=family.sparse)
_register(FAMILIES[0], CLIPMoDEModel)
AutoModelForImageClassification.register(CLIPMoEConfig, CLIPMoEForImageClassification, exist_ok=True)


def register_model(model: type[PreTrainedModel]) -> None:
    """Register a custom model class, a subclass of a sparse one such as `CLIPMoEModel`, with Auto classes and commands.

    Its configuration is in the same file, with a `model_type` of its own. From then on, dense models of its family are
    upcycled into it. `clip-moe COMMAND --import MODULE` calls this for each such class of a module.

    Raises:
        ValueError: its `model_type` is taken, or its file cannot be published.
    """
    _register(add_family(model), model)
