"""What the backward pass needs, by the formula of --plan and as autograd keeps it."""

import pytest
import torch
from tiny_clip_moe import tiny_config
from tiny_families import IMAGES, NO_DROPOUT, TEXT, WIDTH
from torch.autograd.graph import saved_tensors_hooks

from conversion.presets import PRESETS
from conversion.upcycle import sparse_config
from evaluation.costs import count_activations
from modeling_clip_moe import CLIPMoEModel
from modeling_clip_moe.families import FAMILY_OF_TYPE
from training.engine import checkpoint_layers
from training.optimizers import set_trainable

WIDE = {"hidden_size": 64, "intermediate_size": 192}
PAIRS = 2


def kept(model, forward=None):
    """Numbers of a pair that autograd keeps of a forward pass, or of the encoders, besides weights."""
    weights, storages = {parameter.data_ptr() for parameter in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage  # held, so that no other gets its place
        return tensor

    def encode():
        for encoder, length in ((model.text_model.encoder, 12), (model.vision_model.encoder, 5)):
            encoder(torch.randn(PAIRS, length, 64, requires_grad=True))

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        (forward or encode)()
    return sum(storage.nbytes() for storage in storages.values()) / 4 / PAIRS


@pytest.mark.parametrize("moe", [{}, {"num_experts_per_tok": 1}, {"fusion_gate": True}, {"moe_layers": ()}], ids=str)
def test_activations(moe):
    fields = {"moe_layers": (1, 2), "vision": WIDE, "text": WIDE} | moe
    model = CLIPMoEModel(tiny_config(fields.pop("moe_layers"), **fields)).train()
    model.set_experts_implementation("eager")  # grouped_mm keeps up to 4 % less
    config = model.config
    # Beside what is counted: scalars of tokens, of norms and routers
    assert kept(model) == pytest.approx(count_activations(model, False, 12), rel=0.03)
    checkpoint_layers(model)
    inputs = 3 * 64 * (12 + 5)
    assert kept(model) == pytest.approx(inputs, rel=0.03)
    attention, ffn = 8 * 64, 3 * 192
    chosen = config.text_config.num_experts_per_tok * (ffn + 3 * 64)
    largest = attention + (ffn if moe.get("moe_layers") == () else chosen + moe.get("fusion_gate", 0) * (ffn + 2 * 64))
    assert count_activations(model, True, 12) == inputs + (12 + 5) * largest


def of_family(name):
    """With the norms of a text tower behind its layers' parts, not before."""
    text = TEXT | NO_DROPOUT | WIDE | {"project_dim": 16, "max_position_embeddings": 14}
    towers = {"text_config": text, "vision_config": WIDTH | IMAGES | WIDE, "projection_dim": 16}
    dense = FAMILY_OF_TYPE[name].dense.config_class(**towers)
    return FAMILY_OF_TYPE[name].sparse(sparse_config(dense, PRESETS["clip_moe"]))


MODELS = {
    "plain": lambda: CLIPMoEModel(tiny_config((1, 2), vision=WIDE, text=WIDE)),
    "fused": lambda: CLIPMoEModel(tiny_config((1, 2), vision=WIDE, text=WIDE, fusion_gate=True)),
    "chinese_clip": lambda: of_family("chinese_clip"),
    "altclip": lambda: of_family("altclip"),
}
PARTS = [".", r"\.mlp\.", r"\.mlp\.router\.", r"\.(experts|fusion_gate)\.", r"\.(router|fusion_gate)\."]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("trainable", PARTS)
def test_what_is_frozen_keeps_less(trainable, name):
    """Of a whole step but the loss: frozen weights need no inputs, and nothing is kept below what trains."""
    model = MODELS[name]().train()
    model.set_experts_implementation("eager")
    set_trainable(model, trainable)
    batch = torch.randint(3, 40, (PAIRS, 12)), torch.randn(PAIRS, 3, 16, 16)
    found = kept(model, lambda: model(input_ids=batch[0], pixel_values=batch[1]))
    assert found == pytest.approx(count_activations(model, False, 12), rel=0.07)  # embeddings, scalars of routers
