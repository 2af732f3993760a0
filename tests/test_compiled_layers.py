import copy

import pytest
import torch
from steps import LOSSES
from tiny_clip_moe import assert_same_gradients, inputs, tiny_model
from torch._dynamo.utils import counters
from transformers import CLIPConfig, CLIPModel

from training.contrastive_task import ContrastiveTask
from training.engine import checkpoint_layers, compile_layers


def clip_up(**towers):
    return tiny_model(capacity_factor=1.0, capacity_group_size=2, router_jitter_noise=0.1, **towers)


def clip_fmoe(**towers):
    model = tiny_model(fusion_gate=True, norm_topk_prob=True, **towers)
    checkpoint_layers(model)
    return model


def dense(**towers):
    sizes = tiny_model(**towers).config
    return CLIPModel(
        CLIPConfig(
            text_config={**sizes.text_config.to_dict(), "model_type": "clip_text_model"},
            vision_config={**sizes.vision_config.to_dict(), "model_type": "clip_vision_model"},
            projection_dim=8,
        )
    )


@pytest.fixture
def without_kernels():
    """Traces forward and backward, but generates no code, which takes a minute."""
    torch.compiler.set_default_backend("aot_eager")
    yield
    torch.compiler.set_default_backend("inductor")


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("make", [clip_up, clip_fmoe, dense])
def test_layers_compute_the_same_and_share_what_is_compiled(make):
    graphs = []
    for layers in (3, 5):
        depth = {"num_hidden_layers": layers, "moe_layers": [1, layers - 1]}
        model = make(text=depth, vision=depth).train()
        plain, batch = copy.deepcopy(model), inputs(8)
        counters.clear()
        compile_layers(model)
        losses = []
        for of in (plain, model):
            if hasattr(of, "seed_router_noise"):
                of.seed_router_noise(0)
            loss, _ = ContrastiveTask(of, LOSSES)(batch)
            loss.backward()
            losses.append(loss)
        torch.testing.assert_close(losses[1], losses[0])
        assert_same_gradients(model, plain, atol=1e-5, rtol=1e-3)
        graphs.append((counters["stats"]["unique_graphs"], counters["graph_break"].total()))
    assert graphs[0] == graphs[1] and graphs[0][1] == 0
