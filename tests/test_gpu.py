"""Tests that need a GPU: `make test-gpu`."""

import copy

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from steps import LOSSES, steps_of
from tiny_clip_moe import IMPLEMENTATIONS, assert_same_gradients, inputs, tiny_block, tiny_model

from clip_moe.training.contrastive_task import ContrastiveTask
from clip_moe.training.gradient_cache import cached_gradient
from clip_moe.training.loop import checkpoint_layers, compile_layers
from clip_moe.training.optimizers import make_optimizer
from clip_moe.training.train_settings import LoopSettings
from modeling_clip_moe import CLIPMoEModel
from modeling_clip_moe.router_losses import choose_top_k

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device is visible; `pytest -m gpu` does not hide it",
    ),
]
CUDA = torch.device("cuda")
SYSTEMS = {
    "CLIP-UP": {"capacity_factor": 1.0, "capacity_group_size": 2},
    "CLIP-MoE": {"norm_topk_prob": True},
    "CLIP-FMoE": {"fusion_gate": True, "norm_topk_prob": True},
}


@pytest.fixture(autouse=True)
def exact():
    """float32 products in float32, and no precision of a test before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


def on_gpu(batch):
    return {name: value.to(CUDA) for name, value in batch.items()}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_compute_what_they_do_on_a_cpu(implementation, dtype):
    block = tiny_block(capacity_factor=1.0)
    reference, hidden = copy.deepcopy(block), torch.randn(4, 16, 16)
    expected = reference(hidden)
    expected.square().mean().backward()
    block.router.config._experts_implementation = implementation
    block = block.to(CUDA, dtype)
    block.router.to(torch.float32)
    found = block(hidden.to(CUDA, dtype))
    found.float().square().mean().backward()
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.1, "rtol": 0.1}
    torch.testing.assert_close(found.float().cpu(), expected, **tolerance)
    if dtype is torch.float32:
        assert_same_gradients(block.cpu(), reference, **tolerance)


def test_the_chosen_experts_are_those_of_topk():
    probabilities = torch.randn(500, 8, device=CUDA).softmax(dim=-1)
    for found, expected in zip(choose_top_k(probabilities, 3), probabilities.topk(3), strict=True):
        assert torch.equal(found, expected)
    assert choose_top_k(torch.ones(1, 4, device=CUDA), 2)[1].tolist() == [[0, 1]]  # of equal ones, the first


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("system", SYSTEMS)
def test_no_forward_waits_for_the_gpu(system, train):
    """The vision tower queues its kernels without a single synchronization."""
    tower = tiny_model(**SYSTEMS[system]).vision_model.to(CUDA, torch.bfloat16).train(train)
    images = torch.randn(4, 3, 16, 16, device=CUDA, dtype=torch.bfloat16)
    tower(images)  # the first call may load kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = tower(images, output_router_logits=True).pooler_output
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.isfinite().all()


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("compiled", [False, True])
def test_no_step_waits_for_the_gpu(system, compiled):
    """A whole training step: towers, losses, backward pass, clipping, AdamW, the average of the weights."""
    step = steps_of(tiny_model(**SYSTEMS[system]).to(CUDA).train(), torch_compile=compiled)
    batches = [{name: value.pin_memory() for name, value in inputs(8).items()} for _ in range(4)]
    for batch in batches[:3]:  # the first ones compile
        step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(batches[3])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("system", SYSTEMS)
def test_layers_compiled_on_the_gpu(system):
    torch.manual_seed(0)
    model, batch = tiny_model(**SYSTEMS[system]).train().to(CUDA), on_gpu(inputs(8))
    plain = copy.deepcopy(model)
    compile_layers(model)
    for of in (plain, model):
        ContrastiveTask(of, LOSSES)(batch)[0].backward()
    assert_same_gradients(model, plain, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("system", SYSTEMS)
def test_compiled_without_graph_breaks(system):
    tower = tiny_model(**SYSTEMS[system]).vision_model.to(CUDA)
    images = torch.randn(4, 3, 16, 16, device=CUDA)
    with torch.no_grad():
        expected = tower(images).pooler_output
        found = torch.compile(tower, fullgraph=True)(images).pooler_output
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_step_in_parts_is_one_of_the_whole(system, checkpointing):
    grads = []
    for size in (None, 4):
        torch.manual_seed(0)
        model = tiny_model(**SYSTEMS[system]).train().to(CUDA)
        if checkpointing:
            checkpoint_layers(model)
        task, accelerator, batch = ContrastiveTask(model, LOSSES), Accelerator(), inputs(12)
        if size is None:
            task(on_gpu(batch))[0].backward()
        else:
            cached_gradient(accelerator, task, batch, size, 1.0, True)
        grads.append(model)
    assert_same_gradients(grads[1], grads[0], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("system", SYSTEMS)
def test_it_learns_in_bfloat16(system):
    """Autocast, fused AdamW, the same batch again and again."""
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16")
    task = ContrastiveTask(tiny_model(**SYSTEMS[system]).train(), LOSSES)
    optimizer = make_optimizer(
        task.to(CUDA), LoopSettings(learning_rate=1e-3, weight_decay=0.1, global_batch_size=8), CUDA
    )
    assert optimizer.param_groups[0]["fused"]
    task, optimizer = accelerator.prepare(task, optimizer)
    batch, losses = on_gpu(inputs(8)), []
    for _ in range(40):
        loss, metrics = task(batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(metrics["loss"].item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loaded_onto_the_gpu(tmp_path, dtype):
    model, batch = tiny_model(norm_topk_prob=True), inputs()
    model.save_pretrained(tmp_path)
    loaded = CLIPMoEModel.from_pretrained(tmp_path, dtype=dtype, device_map="cuda")
    assert loaded.device.type == "cuda" and loaded.dtype is dtype
    with torch.no_grad():
        expected = model(**batch).image_embeds
        found = loaded(**on_gpu(batch)).image_embeds
    torch.testing.assert_close(found.float().cpu(), expected, atol=0.1, rtol=0.1)
