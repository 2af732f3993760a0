import copy
from functools import cache

import pytest
import torch
from steps import LOSSES
from tiny_clip_moe import SWIGLU, assert_same_gradients, dense_clip, inputs, tiny_block, tiny_config, tiny_model
from torch._dynamo.utils import counters

from clip_moe.training.contrastive_task import ContrastiveTask
from clip_moe.training.loop import checkpoint_layers, compile_layers
from modeling_clip_moe import expert_kernels


def clip_up(**towers):
    return tiny_model(capacity_factor=1.0, capacity_group_size=2, router_jitter_noise=0.1, **towers)


def clip_fmoe(**towers):
    model = tiny_model(fusion_gate=True, norm_topk_prob=True, **towers)
    checkpoint_layers(model)
    return model


def dense(**towers):
    return dense_clip(tiny_config(**towers))


if not hasattr(torch.compiler, "set_default_backend"):
    pytest.skip("torch 2.13 can trace without generating kernels, which takes minutes", allow_module_level=True)


@pytest.fixture
def without_kernels():
    """Traces forward and backward, but generates no code, which takes a minute."""
    torch.compiler.set_default_backend("aot_eager")
    yield
    torch.compiler.set_default_backend("inductor")


@pytest.mark.slow
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
            torch.manual_seed(0)
            loss, _ = ContrastiveTask(of, LOSSES)(batch)
            loss.backward()
            losses.append(loss)
        torch.testing.assert_close(losses[1], losses[0])
        assert_same_gradients(model, plain, atol=1e-5, rtol=1e-3)
        graphs.append((counters["stats"]["unique_graphs"], counters["graph_break"].total()))
    assert graphs[0] == graphs[1] and graphs[0][1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, SWIGLU | {"moe_intermediate_size": None}], ids=["plain", "gated"])
def test_fused_passes_are_compiled_for_each_width_and_any_number_of_tokens(monkeypatch, fields):
    """A GPU's settings on a CPU: kernels whose widths are variables take up to four times as long."""
    torch.compiler.reset()
    monkeypatch.setattr(expert_kernels, "_is_fused", lambda tensor: not torch.compiler.is_compiling())
    monkeypatch.setattr(
        expert_kernels, "compiled", cache(lambda function: torch.compile(function, backend="aot_eager"))
    )
    sizes = [{"hidden_size": width, "intermediate_size": 3 * width} for width in (16, 32)]
    blocks = [tiny_block(**size, capacity_factor=1 + size["hidden_size"] / 64, **fields) for size in sizes]
    graphs = []
    counters.clear()
    for length in (5, 6, 7, 9):
        for block in blocks:
            plain = copy.deepcopy(block)
            hidden_states = torch.randn(4, length, block.config.hidden_size, requires_grad=True)
            block.router.config._experts_implementation = "grouped"
            outputs = [of(hidden_states) for of in (block, plain)]
            for output in outputs:
                output.square().mean().backward()
            torch.testing.assert_close(*outputs)
            assert_same_gradients(block, plain, atol=1e-5, rtol=1e-3)
            block.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    functions = 6  # the router, two passes of the forward and three of the backward
    assert graphs == [2 * functions, 4 * functions, 4 * functions, 4 * functions]
    assert not counters["graph_break"]


def test_without_a_gpu_nothing_is_fused(caplog):
    expert_kernels.logger.addHandler(caplog.handler)
    assert not expert_kernels._can_fuse.__wrapped__() and "Experts run slower" in caplog.text
    expert_kernels.logger.removeHandler(caplog.handler)
