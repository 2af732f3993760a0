"""Models of other programs, tiny and with random weights, around the towers of the symbol CLIP; and inputs for all."""

import torch
from converters import tiny_llava
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from stand_ins import SHORT
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel, LlavaProcessor

from data import symbols

BASE = "training/symbol_clip"
IMAGE_TOKEN = "<image>"


def symbol_inputs(processor, split, number):
    rows = symbols.load(split, "detailed", number)
    texts, images = list(rows["caption"]), list(rows["image"])
    return dict(processor(text=texts, images=images, padding=True, truncation=True, return_tensors="pt"))


def save_dense_llava(folder):
    """A LLaVA with the dense symbol CLIP's tower, and its processor."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    base = CLIPModel.from_pretrained(BASE)
    image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    model = tiny_llava(base.config.vision_config, len(tokenizer), image_token)
    model.model.vision_tower.load_state_dict(base.vision_model.state_dict())
    model.save_pretrained(folder)
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil.from_pretrained(BASE),
        tokenizer=tokenizer,
        patch_size=base.config.vision_config.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


def tokenizer(length):
    return AutoTokenizer.from_pretrained(BASE, model_max_length=length)


def other_parts(**unet_options):
    """What a pipeline has beside its text encoders, tiny and with random weights."""
    torch.manual_seed(0)
    sizes = {"sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1, "attention_head_dim": 8}
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    blocks = {"down_block_types": down, "up_block_types": up, "norm_num_groups": 4}
    unet = UNet2DConditionModel(**sizes, **blocks, **unet_options)
    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    blocks = {"down_block_types": down, "up_block_types": up, "norm_num_groups": 4}
    vae = AutoencoderKL(block_out_channels=(8, 8), latent_channels=4, **blocks)
    return {"unet": unet.eval(), "vae": vae.eval(), "scheduler": EulerDiscreteScheduler(steps_offset=1)}


def stable_diffusion(text_encoder, length=SHORT):
    return StableDiffusionPipeline(
        text_encoder=text_encoder,
        tokenizer=tokenizer(length),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **other_parts(cross_attention_dim=64),
    )


def sdxl(text_encoder, text_encoder_2, length=SHORT):
    embedding = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
    embedding |= {"projection_class_embeddings_input_dim": 6 * 8 + 64}
    return StableDiffusionXLPipeline(
        text_encoder=text_encoder,
        text_encoder_2=text_encoder_2,
        tokenizer=tokenizer(length),
        tokenizer_2=tokenizer(length),
        add_watermarker=False,
        **other_parts(cross_attention_dim=2 * 64, **embedding),
    )
