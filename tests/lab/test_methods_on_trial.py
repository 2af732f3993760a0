"""Methods on trial in lab/methods: by hand, and what they do to a run."""

import contextlib
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from tiny_clip import moved, tiny_clip
from tiny_clip_moe import tiny_block
from tiny_families import tiny_dense
from tiny_runs import as_stage, losses, read_log, same_weights, train

from clip_moe.conversion.own_classes import import_models
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import sparse_blocks, upcycle
from clip_moe.training.losses import all_reduce_sum
from lab.methods.coupling import coupling_loss
from lab.methods.entropy_losses import EntropyLosses
from lab.methods.patch_dropout import drop_patches
from lab.methods.relu_router import ReluCLIPModel, ReluRouter, ReluVisionConfig
from lab.methods.relu_routing import load_weighted_l1
from lab.methods.router_teacher import RouterTeacher
from modeling_clip_moe import families
from modeling_clip_moe.families import FAMILIES
from modeling_clip_moe.loading import OWN_CLASSES

PLAIN = replace(PRESETS["clip_moe"], sparse_layers=[1, 3])


def pairs():
    input_ids = torch.tensor([[38, 3, 5, 7, 39], [38, 4, 6, 39, 39]])
    attention_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    return {"input_ids": input_ids, "attention_mask": attention_mask, "pixel_values": torch.randn(2, 3, 16, 16)}


def computed(loss, model, batch, progress=0.0):
    outputs = model(**batch, output_router_logits=True, output_expert_ids=True)
    return (*loss(model, outputs, batch, progress, all_reduce_sum), outputs)


def test_the_teacher_of_routers_by_hand():
    dense, batch, read = tiny_clip(), pairs(), {}
    for tower in ("text", "vision"):
        for layer in (1, 3):
            norm = dense.get_submodule(f"{tower}_model.encoder.layers.{layer}.layer_norm2")
            norm.register_forward_hook(lambda _, inputs, output, at=(tower, layer): read.update({at: output}))
    model = upcycle(dense, PLAIN).train()
    teacher = RouterTeacher(model, dense, coef=5.0)
    assert computed(teacher, model, batch)[1]["router_divergence"].abs() < 1e-5  # both read and score alike
    moved(model, ".router.", seed=1)
    loss, scalars, outputs = computed(teacher, model, batch)

    divergence, own = 0.0, 0.0
    masks = {"text": batch["attention_mask"].bool(), "vision": torch.ones(2, 5, dtype=torch.bool)}
    router_logits = (*outputs.text_router_logits, *outputs.vision_router_logits)
    for (place, hidden), router, logits in zip(sorted(read.items()), teacher.routers, router_logits, strict=True):
        p, q = (values[masks[place[0]]].softmax(-1) for values in (hidden @ router.T, logits))
        divergence = divergence + (p * (p / q).log()).sum(-1).mean() / 4
        importance, entropy = p.mean(0), -(p * p.log()).sum(-1).mean()
        own = own + 0.005 * (importance.std(correction=0) / importance.mean()) ** 2 + 0.005 * entropy
    torch.testing.assert_close(scalars["router_divergence"], divergence)
    torch.testing.assert_close(loss, 5 * divergence + own)

    loss.backward()
    gradients = [router.grad for router in teacher.routers]
    torch.testing.assert_close(gradients, [*torch.autograd.grad(own, [*teacher.routers])])  # not of the divergence
    assert all(parameter.grad is None for parameter in dense.parameters())
    assert all(block.router.weight.grad.abs().max() > 1e-4 for block in sparse_blocks(model.vision_model).values())
    assert computed(teacher, model, batch, progress=0.5)[0] == 0


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_the_coupling_by_hand(alpha):
    router, up_proj = torch.randn(4, 6, requires_grad=True), torch.randn(4, 5, 6)
    torch.manual_seed(3)
    found = coupling_loss(router, up_proj, alpha)
    torch.manual_seed(3)
    draws, norms, expected = torch.rand(4, 6), [], 0.0
    for i in range(4):
        reach = min((router[i] - router[j]).norm() for j in range(4) if j != i) / (2 * router[i].norm())
        noisy = router[i] * (1 + reach.detach() * (2 * draws[i] - 1))
        assert (noisy - router[i]).norm() <= min((noisy - router[j]).norm() for j in range(4)) + 1e-6
        norms.append([(up_proj[j] @ noisy).norm() for j in range(4)])
    for i, j in itertools.permutations(range(4), 2):
        most = alpha * norms[i][i]
        expected += (norms[i][j] - most).clamp(min=0) + (norms[j][i] - most).clamp(min=0)
    torch.testing.assert_close(found, expected / 16)
    torch.testing.assert_close(torch.autograd.grad(found, router), torch.autograd.grad(expected / 16, router))


@pytest.mark.parametrize("padded", [False, True])
def test_relu_routing_is_the_sum_of_all_experts(padded):
    block = tiny_block(norm_topk_prob=False).train()
    block.router.__class__ = ReluRouter
    mask = torch.rand(6, 7) > 0.3 if padded else torch.ones(6, 7, dtype=torch.bool)
    hidden_states, experts = torch.randn(6, 7, 16, requires_grad=True), block.experts
    scores = (hidden_states @ block.router.weight.T).relu()
    hidden = torch.einsum("bsd,eid->bsei", hidden_states, experts.up_proj) + experts.up_proj_bias
    outputs = torch.einsum("bsei,edi->bsed", experts.act_fn(hidden), experts.down_proj) + experts.down_proj_bias
    expected = (scores[..., None] * outputs).sum(dim=2) * mask[..., None]
    actual = block(hidden_states, mask if padded else None)
    torch.testing.assert_close(actual, expected)
    direction, inputs = torch.randn_like(expected), [hidden_states, *block.parameters()]
    gradients = [torch.autograd.grad((output * direction).sum(), inputs) for output in (actual, expected)]
    torch.testing.assert_close(*gradients)
    assert len((scores > 0).sum(-1).unique()) > 2  # tokens meet different numbers of experts


def test_the_loss_of_relu_routing_by_hand():
    logits, mask = torch.randn(2, 3, 5, 4), torch.rand(3, 5) > 0.3
    loss, share = load_weighted_l1(tuple(logits), 2, mask)
    by_layer = []
    for layer in logits:
        scores = layer[mask].clamp(min=0)
        by_layer.append(sum((scores[:, e] > 0).float().mean() * scores[:, e].mean() * 4 / 2 for e in range(4)))
    torch.testing.assert_close(loss, sum(by_layer) / 2)
    torch.testing.assert_close(share, (logits[:, mask] > 0).float().mean())


def test_settings_without_a_meaning_for_relu_routing_are_refused():
    with pytest.raises(ValueError, match="ReLU routing goes without norm_topk_prob, eval_capacity_factor"):
        ReluVisionConfig(moe_layers=[1], eval_capacity_factor=1.0)


# --- LIMoE's entropy losses


def test_entropy_losses_by_hand():
    """Two texts, padded, spread over three experts; the router is sure that images go to one of four."""
    text = torch.tensor([[[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]]]).log()
    vision = torch.tensor([[[300.0, 0.0, 0.0, 0.0]] * 2], requires_grad=True)
    outputs = SimpleNamespace(text_router_logits=(text,), vision_router_logits=(vision,))
    losses = EntropyLosses({"text": 0.5, "vision": 7.0}, {"text": 3.0, "vision": 2.0}, 4)
    batch = {"attention_mask": torch.tensor([[1, 1, 0]])}
    loss, metrics = losses(None, outputs, batch, progress=0.0, reduce=all_reduce_sum)
    # Texts: a bit and none; the mean is 1/4, 1/4, 0, 1/2, of 1.5 bits of 2
    bits = {
        "local_entropy_text": 0.5,
        "global_entropy_text": 0.5,
        "local_entropy_vision": 0,
        "global_entropy_vision": 2,
    }
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(bits)
    torch.testing.assert_close(loss, torch.tensor((0.5 * 0.5 + 3.0 * 0.5 + 2.0 * 2) * math.log(2)))
    loss.backward()
    assert vision.grad.isfinite().all()
    losses.min_experts = 2.0
    assert losses(None, outputs, batch, progress=0.0, reduce=all_reduce_sum)[1]["global_entropy_text"] == 0


# --- patch dropout


@pytest.mark.parametrize("family", [one for one in FAMILIES if not one.naflex], ids=lambda one: one.name)
def test_patch_dropout_leaves_patches_out(family):
    """The rest are whole patches in arbitrary order, with the gradient that they have alone."""
    model = tiny_dense(family).train()
    vision, size = model.vision_model, model.config.vision_config.image_size
    pixels = torch.randn(8, 3, size, size)
    whole = vision.embeddings(pixels)
    first = whole.shape[1] - (size // vision.config.patch_size) ** 2
    drop_patches(model, 0.3)
    rows = vision.embeddings(pixels)
    assert torch.equal(rows[:, :first], whole[:, :first])
    patches, rows = whole[:, first:], rows[:, first:]
    same = (rows[:, :, None] == patches[:, None]).all(dim=-1)
    assert rows.shape[1] == 3 and (same.sum(dim=2) == 1).all() and (same.sum(dim=1) <= 1).all()
    assert len(same.unique(dim=0)) > 1
    weight, kept = vision.embeddings.patch_embedding.weight, patches[same.any(dim=1)]
    gradients = [torch.autograd.grad(values.square().sum(), weight)[0] for values in (rows, kept)]
    torch.testing.assert_close(*gradients)
    assert vision(pixels).last_hidden_state.shape[1] == first + 3
    assert torch.equal(model.eval().vision_model.embeddings(pixels), whole)


# --- runs


def relu(recipe):
    changes = {"norm_topk_prob": False, "capacity_factor": None, "router_aux_loss_coef": 0, "router_z_loss_coef": 0}
    recipe["stages"][1]["changes"].update(changes)
    recipe["stages"][2]["stage"] = "lab.methods.relu_routing:ReluStage"


TAUGHT = "lab.methods.router_teacher:TaughtStage"
COUPLED = "lab.methods.coupling:CoupledStage"
RELU = "lab.methods.relu_routing:ReluStage"
ENTROPY = "lab.methods.entropy_losses:EntropyStage"
DROPPED = "lab.methods.patch_dropout:PatchDropoutStage"
RELU_LOGGED = [f"{tower}_{name}" for tower in ("text", "vision") for name in ("experts_per_token", "sparsity_weight")]
COEFS = {"local_coef": {"text": 0.3}, "global_coef": {"text": 0.5, "vision": 0.5}, "min_experts": 3.9}
ENTROPY_LOGGED = ["local_entropy_text", "global_entropy_text", "global_entropy_vision"]
# What is logged; settings
METHODS = {
    TAUGHT: (["router_divergence"], {"change": as_stage(TAUGHT), "teacher": "dense"}),
    COUPLED: (["coupling_loss"], {"change": as_stage(COUPLED)}),
    RELU: (RELU_LOGGED, {"change": relu}),
    ENTROPY: (ENTROPY_LOGGED, {"change": as_stage(ENTROPY), **COEFS}),
    DROPPED: ([], {"change": as_stage(DROPPED), "patch_dropout": 0.3}),
}


@pytest.fixture
def method(request):
    """A method's logged values and settings; ReLU routing as with `--import lab.methods.relu_router`, then undone."""
    with contextlib.ExitStack() as stack:
        for table in (families.CLASS_OF_TYPE, families.FAMILY_OF_TYPE, families.FAMILY_OF_TEXT, OWN_CLASSES):
            stack.enter_context(patch.dict(table))
        if request.param == RELU:
            import_models(ReluCLIPModel.__module__)
        yield METHODS[request.param]


def each(*methods):
    return pytest.mark.parametrize("method", methods, indirect=True)


@each(*METHODS)
def test_resumed_is_the_same_to_the_bit(whole, tmp_path, method):
    logged, settings = method
    assert set(logged) <= set(read_log(whole(**settings))[0])
    train(tmp_path, 3, **settings)
    resumed = train(tmp_path, **settings)
    assert losses(resumed) == losses(whole(**settings)) and same_weights(resumed, whole(**settings))


@each(TAUGHT, RELU, ENTROPY)  # the noise of the coupling is another for each part
@pytest.mark.parametrize("memory", [{"gradient_checkpointing": True}, {"mini_batch_size": 4}], ids=str)
def test_what_saves_memory_changes_nothing(whole, method, memory):
    """Neither losses nor what is logged, such as a weight that is too small to be seen in the loss."""
    logged, settings = method
    logs = [read_log(whole(**settings, **more)) for more in (memory, {})]
    for name in [*logged, "loss", "total_loss"]:
        values = [[entry.get(name, 0) for entry in log] for log in logs]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-12), name


@each(RELU)
def test_the_weight_follows_the_number_of_experts(whole, method):
    log, directions = read_log(whole(**method[1])), set()
    for tower in ("text", "vision"):
        weights = [entry[f"{tower}_sparsity_weight"] for entry in log]
        is_above = [entry[f"{tower}_experts_per_token"] > 2 for entry in log]
        steps = [1.2 if above else 1 / 1.2 for above in is_above[:-1]]
        assert weights == pytest.approx([1e-8 * math.prod(steps[:number]) for number in range(len(weights))], rel=1e-5)
        directions |= {*is_above[:-1]}
    assert directions == {True, False}


@pytest.mark.parametrize(
    ("stage", "model", "settings", "message"),
    [
        (TAUGHT, "dense", {}, "goes with a sparse model"),
        (COUPLED, "dense", {}, "goes with a sparse model"),
        (ENTROPY, "dense", {}, "tower has no routers with softmax scores"),
        (ENTROPY, "sparse", {"min_experts": 5}, "min_experts: 5 of 4 experts"),
        (RELU, "sparse", {}, "goes with a sparse model of lab.methods.relu_router"),
        (DROPPED, "sparse", {"patch_dropout": 0.9}, "it leaves none of 4 patches: take at most 0.750"),
    ],
)
def test_what_they_do_not_go_with(tmp_path, stage, model, settings, message):
    def change(recipe):
        recipe["stages"][2].update(stage=stage, model=model)

    with pytest.raises(ValueError, match=message):
        train(tmp_path, **METHODS[stage][1] | settings | {"change": change})
