"""CLIP with sparse Mixture-of-Experts layers, and mixtures of whole CLIPs.

Importing this package makes transformers' Auto classes know them.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForZeroShotImageClassification,
    AutoProcessor,
    AutoTokenizer,
    CLIPProcessor,
    CLIPTokenizer,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import is_torchvision_available, is_vision_available

from .configuration_clip_mode import CLIPMoDEConfig
from .configuration_clip_moe import CLIPMoEConfig, CLIPMoETextConfig, CLIPMoEVisionConfig
from .modeling_clip_mode import CLIPMoDEModel, routing_weights
from .modeling_clip_moe import (
    CLIPMoEForImageClassification,
    CLIPMoEModel,
    CLIPMoEPreTrainedModel,
    CLIPMoETextModel,
    CLIPMoETextModelWithProjection,
    CLIPMoEVisionModel,
    CLIPMoEVisionModelWithProjection,
    expert_capacity_mask,
    global_entropy_loss,
    load_balancing_loss,
    local_entropy_loss,
    router_z_loss,
)

for config_class, model_class in (
    (CLIPMoEConfig, CLIPMoEModel),
    (CLIPMoETextConfig, CLIPMoETextModel),
    (CLIPMoEVisionConfig, CLIPMoEVisionModel),
    (CLIPMoDEConfig, CLIPMoDEModel),
):
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    AutoModel.register(config_class, model_class, exist_ok=True)
    if config_class in (CLIPMoEConfig, CLIPMoDEConfig):
        AutoModelForZeroShotImageClassification.register(config_class, model_class, exist_ok=True)
        AutoProcessor.register(config_class, CLIPProcessor, exist_ok=True)
AutoModelForImageClassification.register(CLIPMoEConfig, CLIPMoEForImageClassification, exist_ok=True)

for config_class in (CLIPMoEConfig, CLIPMoETextConfig, CLIPMoDEConfig):
    AutoTokenizer.register(config_class, CLIPTokenizer, exist_ok=True)

image_processors = {}
if is_vision_available():
    from transformers import CLIPImageProcessorPil

    image_processors["pil"] = CLIPImageProcessorPil
if is_torchvision_available():
    from transformers import CLIPImageProcessor

    image_processors["torchvision"] = CLIPImageProcessor
if image_processors:
    for config_class in (CLIPMoEConfig, CLIPMoEVisionConfig, CLIPMoDEConfig):
        AutoImageProcessor.register(config_class, image_processor_classes=image_processors, exist_ok=True)

__all__ = [
    "CLIPMoDEConfig",
    "CLIPMoDEModel",
    "CLIPMoEConfig",
    "CLIPMoEForImageClassification",
    "CLIPMoEModel",
    "CLIPMoEPreTrainedModel",
    "CLIPMoETextConfig",
    "CLIPMoETextModel",
    "CLIPMoETextModelWithProjection",
    "CLIPMoEVisionConfig",
    "CLIPMoEVisionModel",
    "CLIPMoEVisionModelWithProjection",
    "expert_capacity_mask",
    "global_entropy_loss",
    "load_balancing_loss",
    "local_entropy_loss",
    "router_z_loss",
    "routing_weights",
]
