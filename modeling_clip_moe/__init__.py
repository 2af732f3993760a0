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
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES, AutoImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import is_torchvision_available, is_vision_available

from .configuration_clip_mode import CLIPMoDEConfig
from .configuration_clip_moe import CLIPMoEConfig, CLIPMoETextConfig, CLIPMoEVisionConfig
from .configuration_metaclip_2_moe import MetaClip2MoEConfig
from .configuration_moe_vie import MoEViEConfig, ViEConfig
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
from .modeling_moe_vie import MoEViEModel, ViEModel
from .modeling_siglip_moe import Siglip2MoEModel, SiglipMoEModel
from .modeling_vision_moe import AltCLIPMoEModel, ChineseCLIPMoEModel, MLCDMoEVisionModel
from .router_losses import load_balancing_loss, router_z_loss

__all__ = """
AltCLIPMoEConfig AltCLIPMoEModel CLIPMoDEConfig CLIPMoDEModel CLIPMoEConfig CLIPMoEForImageClassification CLIPMoEModel
CLIPMoEPreTrainedModel CLIPMoETextConfig CLIPMoETextModel CLIPMoETextModelWithProjection CLIPMoEVisionConfig
CLIPMoEVisionModel CLIPMoEVisionModelWithProjection ChineseCLIPMoEConfig ChineseCLIPMoEModel MLCDMoEVisionConfig
MLCDMoEVisionModel MetaClip2MoEConfig MetaClip2MoEModel MoEViEConfig MoEViEModel Siglip2MoEConfig Siglip2MoEModel
SiglipMoEConfig SiglipMoEModel ViEConfig ViEModel load_balancing_loss register_model router_z_loss routing_weights
""".split()


def _register(family: Family, model: type[PreTrainedModel]) -> None:
    """Makes the Auto classes know a whole model or a tower, with the processors of the family's dense models."""
    config, tower = model.config_class, model.config_class.base_config_key  # "" of a whole model
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, model, exist_ok=True)
    if not tower:
        AutoModelForZeroShotImageClassification.register(config, model, exist_ok=True)
        processor = PROCESSOR_MAPPING.get(family.dense.config_class, transformers.CLIPProcessor)  # the latter of ViE
        AutoProcessor.register(config, processor, exist_ok=True)
    if tower != "vision_config":
        AutoTokenizer.register(config, getattr(transformers, family.tokenizer), exist_ok=True)
    if tower != "text_config" and is_vision_available():
        # By library; transformers names none of ViE, and those of MLCD, which are CLIP's, under another type
        names = IMAGE_PROCESSOR_MAPPING_NAMES.get(family.model_type, IMAGE_PROCESSOR_MAPPING_NAMES["clip"])
        missing = () if is_torchvision_available() else ("torchvision",)
        classes = {library: getattr(transformers, name) for library, name in names.items() if library not in missing}
        AutoImageProcessor.register(config, image_processor_classes=classes, exist_ok=True)


def _register_all() -> None:
    # From the last to CLIP, whose vision tower others have, too
    for family in reversed(FAMILIES):
        for whole in (family.sparse, *([family.dense] if family.has_own_dense else [])):
            for model in (whole, whole.text_model_class, whole.vision_model_class):
                _register(family, model)
    for family in IMAGE_TOWERS:
        _register(family, family.sparse)
    _register(FAMILIES[0], CLIPMoDEModel)
    AutoModelForImageClassification.register(CLIPMoEConfig, CLIPMoEForImageClassification, exist_ok=True)


_register_all()


def register_model(model: type[PreTrainedModel]) -> None:
    """Register a custom model class, a subclass of a sparse one such as `CLIPMoEModel`, with Auto classes and commands.

    Its configuration is in the same file, with a `model_type` of its own. From then on, dense models of its family are
    upcycled into it. `clip-moe COMMAND --import MODULE` calls this for each such class of a module.

    Raises:
        ValueError: its `model_type` is taken, or its file cannot be published.
    """
    _register(add_family(model), model)
