"""Models of other programs, tiny and with random weights, around the towers of the symbol CLIP."""

import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from stand_ins import SHORT
from transformers import AutoTokenizer

BASE = "training/symbol_clip"


def tokenizer(length):
    return AutoTokenizer.from_pretrained(BASE, model_max_length=length)


def other_parts(**unet_options):
    """Parts of a pipeline beside its text encoders, tiny and with random weights."""
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
