"""Sparse models of a few thousand parameters, and their computations one token at a time."""

import math

import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel

from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel, CLIPMoEVisionConfig
from modeling_clip_moe.sparse_moe import CLIPMoESparseMoeBlock

EOS, PAD = 49, 0
IMPLEMENTATIONS = ("eager", "grouped", "grouped_mm", "batched_mm", "by_device")
# Experts as MoE-ViE's. Their width, 9, is one that grouped products do not take, nor transformers' `grouped_mm`
SWIGLU = {"use_gated_mlp": True, "hidden_act": "silu", "moe_mlp_bias": False, "moe_intermediate_size": 9}


def tower_fields(**moe):
    return {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2} | moe


def tiny_config(moe_layers=(1, 2), *, text=None, vision=None, **moe):
    moe = {"num_experts": 4, "moe_layers": list(moe_layers), **moe}
    special = {"pad_token_id": PAD, "bos_token_id": 48, "eos_token_id": EOS}
    sizes = {"vocab_size": 50, "max_position_embeddings": 12, "projection_dim": 8}
    text_config = {**tower_fields(**moe), **special, **sizes, **(text or {})}
    vision_config = {**tower_fields(**moe), "image_size": 16, "patch_size": 8, "projection_dim": 8, **(vision or {})}
    return CLIPMoEConfig(text_config=text_config, vision_config=vision_config, projection_dim=8)


def dense_clip(config):
    """transformers' CLIP of the same sizes."""
    towers = {name: getattr(config, name).to_dict() for name in config.sub_configs}
    for tower in towers.values():
        tower.pop("model_type"), tower.pop("auto_map")
    return CLIPModel(CLIPConfig(**towers, projection_dim=config.projection_dim)).eval()


def tiny_model(*args, std=0.3, **moe):
    """A model with weights large enough for experts and routers to matter."""
    model = CLIPMoEModel(tiny_config(*args, **moe))
    for name, parameter in model.named_parameters():
        if "mlp" in name:
            nn.init.normal_(parameter, std=std)
    return model.eval()


def tiny_block(std=0.3, **fields):
    config = CLIPMoEVisionConfig(**tower_fields(num_experts=4, **fields))
    config.moe_layers = [1]
    config._experts_implementation = "eager"
    block = CLIPMoESparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=std)
    return block


def inputs(batch_size=4, padded=True):
    """Captions of random lengths, padded to 10 tokens, and images."""
    input_ids = torch.randint(1, 48, (batch_size, 10))
    lengths = torch.randint(3, 11, (batch_size,)) if padded else torch.full((batch_size,), 10)
    positions = torch.arange(10)
    input_ids[positions == lengths[:, None] - 1] = EOS
    input_ids[positions >= lengths[:, None]] = PAD
    attention_mask = (positions < lengths[:, None]).long()
    pixel_values = torch.randn(batch_size, 3, 16, 16)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "pixel_values": pixel_values}


def gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same_gradients(actual, expected, **tolerance):
    actual, expected = gradients(actual), gradients(expected)
    assert any(gradient is not None and gradient.abs().max() > 1e-4 for gradient in expected.values())
    torch.testing.assert_close(actual, expected, **tolerance)


def plain_block(block, hidden_states, mask, capacity_factor, group_size):
    """The sparse block as a loop over tokens, and its number of dropped choices."""
    config, experts = block.router.config, block.experts
    logits = hidden_states @ block.router.weight.T
    probabilities = 1 / (1 + (-logits).exp()) if config.scoring_func == "sigmoid" else logits.softmax(dim=-1)
    order = probabilities if block.router.expert_bias is None else probabilities + block.router.expert_bias
    output, num_dropped = torch.zeros_like(hidden_states), 0
    for start in range(0, len(hidden_states), group_size):
        tokens = [(b, s) for b in range(start, start + group_size) for s in range(mask.shape[1]) if mask[b, s]]
        capacity = math.inf
        if capacity_factor is not None:
            capacity = math.ceil(len(tokens) * capacity_factor / config.num_experts)
        load, kept = [0] * config.num_experts, {token: [] for token in tokens}
        for choice in range(config.num_experts_per_tok):
            for token in tokens:
                expert = order[token].argsort(descending=True)[choice].item()
                if load[expert] < capacity:
                    load[expert] += 1
                    kept[token].append(expert)
                else:
                    num_dropped += 1
        for token, chosen in kept.items():
            summed = order[token].topk(config.num_experts_per_tok).indices.tolist()
            summed = summed if config.norm_before_capacity else chosen
            total = sum(probabilities[token][expert] for expert in summed) if config.norm_topk_prob else 1
            for expert in chosen:
                up_proj, up_bias, down_proj, down_bias = (w if w is None else w[expert] for w in experts.weights())
                hidden = up_proj @ hidden_states[token] + (0 if up_bias is None else up_bias)
                if config.use_gated_mlp:
                    gate, up = hidden.split(config.expert_size)
                    hidden = experts.act_fn(gate) * up
                else:
                    hidden = experts.act_fn(hidden)
                hidden = down_proj @ hidden + (0 if down_bias is None else down_bias)
                weight = config.routed_scaling_factor * probabilities[token][expert] / total
                output[token] = output[token] + weight * hidden
    if block.shared_experts is not None:
        output = output + block.shared_experts(hidden_states) * mask[..., None]
    if block.fusion_gate is not None:
        gate = (hidden_states @ block.fusion_gate.proj.weight.T).sigmoid() * mask[..., None]
        output = gate * block.base(hidden_states) + (1 - gate) * output
    return output, num_dropped
