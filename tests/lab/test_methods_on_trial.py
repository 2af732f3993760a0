"""Methods on trial in lab/methods: by hand, and what they do to a run."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from several_processes import run_processes, train_recipe
from steps import assert_same_step, gradient_of
from tiny_clip import moved, tiny_clip
from tiny_clip_moe import inputs, tiny_block, tiny_model
from tiny_runs import as_stage, losses, read_log, same_weights, train

from clip_moe.conversion.own_classes import import_models
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import sparse_blocks, upcycle
from clip_moe.training.losses import all_reduce_sum
from lab.methods.coupling import coupling_loss
from lab.methods.entropy_losses import EntropyLosses, EntropyStage, global_entropy_loss, local_entropy_loss
from lab.methods.relu_router import ReluCLIPModel, ReluRouter, ReluVisionConfig
from lab.methods.relu_routing import load_weighted_l1
from lab.methods.router_teacher import RouterTeacher
from modeling_clip_moe import families
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

    divergences, own = [], []
    routers, logits = iter(teacher.routers), iter((*outputs.text_router_logits, *outputs.vision_router_logits))
    for (tower, _), hidden_states in sorted(read.items()):
        mask = batch["attention_mask"].bool() if tower == "text" else torch.ones(2, 5, dtype=torch.bool)
        p = (hidden_states[mask] @ next(routers).T).softmax(-1)
        q = next(logits)[mask].softmax(-1)
        divergences.append((p * (p / q).log()).sum(-1).mean())
        importance, entropy = p.mean(0), -(p * p.log()).sum(-1).mean()
        own.append(0.005 * (importance.std(correction=0) / importance.mean()) ** 2 + 0.005 * entropy)
    torch.testing.assert_close(scalars["router_divergence"], sum(divergences) / 4)
    torch.testing.assert_close(loss, 5 * sum(divergences) / 4 + sum(own))

    loss.backward()
    assert all(parameter.grad is None for parameter in dense.parameters())
    expected = torch.autograd.grad(sum(own), list(teacher.routers))
    for router, gradient in zip(teacher.routers, expected, strict=True):  # not of the divergence
        torch.testing.assert_close(router.grad, gradient)
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
def test_relu_routing_equals_a_loop_over_tokens(padded):
    block = tiny_block(norm_topk_prob=False).train()
    block.router.__class__ = ReluRouter
    mask = torch.rand(6, 7) > 0.3 if padded else torch.ones(6, 7, dtype=torch.bool)
    hidden_states, experts = torch.randn(6, 7, 16, requires_grad=True), block.experts
    expected, numbers = torch.zeros(6, 7, 16), set()
    for b, s in mask.nonzero().tolist():
        scores = block.router.weight @ hidden_states[b, s]
        numbers.add(int((scores > 0).sum()))
        for e in (scores > 0).nonzero().flatten().tolist():
            hidden = experts.act_fn(experts.up_proj[e] @ hidden_states[b, s] + experts.up_proj_bias[e])
            expected[b, s] = expected[b, s] + scores[e] * (experts.down_proj[e] @ hidden + experts.down_proj_bias[e])
    actual = block(hidden_states, mask if padded else None)
    torch.testing.assert_close(actual, expected)
    direction, inputs = torch.randn_like(expected), [hidden_states, *block.parameters()]
    gradients = [torch.autograd.grad((output * direction).sum(), inputs) for output in (actual, expected)]
    torch.testing.assert_close(*gradients)
    assert len(numbers) > 2  # tokens meet different numbers of experts


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

ENTROPY = {"local_coef": {"text": 0.3}, "global_coef": {"text": 0.5, "vision": 0.5}, "min_experts": 3.9}
ENTROPY_STAGE = {"name": "limoe", "stage": "lab.methods.entropy_losses:EntropyStage", "model": "x", "max_steps": 1}
ENTROPY_STAGE |= {"data": {"source": "symbols", "num_samples": 1}, "global_batch_size": 12, "learning_rate": 1e-3}


def test_entropy_losses_by_hand():
    probabilities = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    logits, mask = (probabilities.log(),), torch.tensor([1, 1, 0])
    torch.testing.assert_close(local_entropy_loss(logits, mask), torch.tensor(math.log(2) / 2))
    # Mean of the first two: 1/4, 1/4, 0, 1/2, of entropy 1.5 log 2
    torch.testing.assert_close(global_entropy_loss(logits, 4, mask), torch.tensor(0.5 * math.log(2)))
    assert global_entropy_loss(logits, 2, mask) == 0


def test_entropy_losses_of_a_router_that_is_sure_have_a_gradient():
    logits = torch.tensor([[300.0, 0.0, 0.0, 0.0], [300.0, 0.0, 0.0, 0.0]], requires_grad=True)
    loss = local_entropy_loss((logits,)) + global_entropy_loss((logits,), 2)
    torch.testing.assert_close(loss, torch.tensor(math.log(2)))
    loss.backward()
    assert logits.grad.isfinite().all()


def test_each_tower_has_its_weights_and_both_sides_of_the_threshold():
    """Texts spread over two of four experts, images over one: 1 bit and 0 of entropy in the mean."""
    text = torch.tensor([[[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]]]).log()
    vision = torch.tensor([[[0, 0, 1.0, 0], [0, 0, 1.0, 0], [0, 0, 1.0, 0]]]).log()
    outputs = SimpleNamespace(text_router_logits=(text,), vision_router_logits=(vision,))
    batch = {"attention_mask": torch.ones(1, 2)}
    losses = EntropyLosses({"text": 0.5}, {"text": 3.0, "vision": 2.0}, 2)
    loss, metrics = losses(None, outputs, batch, progress=0.0, reduce=all_reduce_sum)
    # 0.5 * local of texts, + 3 * max(0, log 2 - log 2) + 2 * max(0, log 2 - 0)
    torch.testing.assert_close(loss, torch.tensor(0.5 * math.log(2) + 0 + 2 * math.log(2)))
    expected = {"local_entropy_text": 1, "global_entropy_text": 0, "global_entropy_vision": 1}  # bits
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(expected)


def entropy_gradient(**settings):
    torch.manual_seed(1)
    return gradient_of(tiny_model().train(), EntropyStage(**ENTROPY_STAGE, **ENTROPY, **settings), inputs(12))


def test_parts_have_the_gradient_of_the_whole():
    assert_same_step(entropy_gradient(mini_batch_size=2), entropy_gradient())


def test_towers_without_such_routers_are_refused():
    for fields, message in (({"scoring_func": "sigmoid"}, "no routers with"), ({"num_experts": 2}, "3.9 of 2 experts")):
        with pytest.raises(ValueError, match=message):
            EntropyStage(**ENTROPY_STAGE, **ENTROPY).auxiliary_losses(tiny_model(**fields), SimpleNamespace())


def relu(recipe):
    changes = {"norm_topk_prob": False, "capacity_factor": None, "router_aux_loss_coef": 0, "router_z_loss_coef": 0}
    recipe["stages"][1]["changes"].update(changes)
    recipe["stages"][2]["stage"] = "lab.methods.relu_routing:ReluStage"


TAUGHT = "lab.methods.router_teacher:TaughtStage"
COUPLED = "lab.methods.coupling:CoupledStage"
RELU = "lab.methods.relu_routing:ReluStage"
RELU_LOGGED = [f"{tower}_{name}" for tower in ("text", "vision") for name in ("experts_per_token", "sparsity_weight")]
# What is logged; settings
METHODS = {
    TAUGHT: (["router_divergence"], {"change": as_stage(TAUGHT), "teacher": "dense"}),
    COUPLED: (["coupling_loss"], {"change": as_stage(COUPLED)}),
    RELU: (RELU_LOGGED, {"change": relu}),
}


@pytest.fixture
def method(request):
    """A method's logged values and settings; ReLU routing as with `--import lab.methods.relu_router`, then undone."""
    tables = (families.CLASS_OF_TYPE, families.FAMILY_OF_TYPE, families.FAMILY_OF_TEXT, OWN_CLASSES)
    before = [dict(table) for table in tables]
    if request.param == RELU:
        import_models(ReluCLIPModel.__module__)
    yield METHODS[request.param]
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def each(*methods):
    return pytest.mark.parametrize("method", methods, indirect=True)


@each(*METHODS)
def test_resumed_is_the_same_to_the_bit(whole, tmp_path, method):
    logged, settings = method
    assert set(logged) <= set(read_log(whole(**settings))[0])
    train(tmp_path, 3, **settings)
    resumed = train(tmp_path, **settings)
    assert losses(resumed) == losses(whole(**settings)) and same_weights(resumed, whole(**settings))


@each(TAUGHT, RELU)  # the noise of the coupling is another for each part
@pytest.mark.parametrize("memory", [{"gradient_checkpointing": True}, {"mini_batch_size": 4}], ids=str)
def test_what_saves_memory_changes_nothing(whole, method, memory):
    """Neither losses nor what is logged, such as a weight that is too small to be seen in the loss."""
    logged, settings = method
    logs = [read_log(whole(**settings, **more)) for more in (memory, {})]
    for name in [*logged, "loss", "total_loss"]:
        values = [[entry.get(name, 0) for entry in log] for log in logs]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-12), name


def train_with_relu(*arguments):
    """As `accelerate launch -m clip_moe run --import lab.methods.relu_router`."""
    import_models(ReluCLIPModel.__module__)
    train_recipe(*arguments)


@pytest.mark.slow
@each(TAUGHT, RELU)
def test_two_processes_have_the_losses_of_one(whole, tmp_path, method):
    _, settings = method
    train(tmp_path, only=["dense", "sparse"], **settings)
    function = train_with_relu if method == METHODS[RELU] else train_recipe
    run_processes(2, function, "--config", tmp_path / "recipe.yaml")
    torch.testing.assert_close(losses(tmp_path / "out" / "tuned"), losses(whole(**settings)), atol=1e-4, rtol=0)


@pytest.mark.slow
@each(RELU)
def test_the_weight_follows_the_number_of_experts(tmp_path, method):
    log = read_log(train(tmp_path, **method[1], max_steps=100, learning_rate=3e-3))
    for tower in ("text", "vision"):
        weights = [entry[f"{tower}_sparsity_weight"] for entry in log]
        assert weights[0] == pytest.approx(1e-8)
        above = [entry[f"{tower}_experts_per_token"] > 2 for entry in log]
        assert set(above) == {True, False}
        for before, after, is_above in zip(weights, weights[1:], above, strict=False):
            assert after == pytest.approx(before * 1.2 if is_above else before / 1.2, rel=1e-5)


def test_what_they_do_not_go_with(tmp_path):
    def with_dense_model(change):
        return lambda recipe: [change(recipe), recipe["stages"][2].update(model="dense")]

    for number, (_, settings) in enumerate((METHODS[TAUGHT], METHODS[COUPLED])):
        with pytest.raises(ValueError, match="goes with a sparse model"):
            train(tmp_path / str(number), **settings | {"change": with_dense_model(settings["change"])})
