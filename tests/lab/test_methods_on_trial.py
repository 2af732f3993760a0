"""Methods on trial in lab/methods: by hand, and what they do to a run."""

from dataclasses import replace

import pytest
import test_methods
import torch
from several_processes import run_processes, train_recipe
from test_methods import DATA, upcycled
from tiny_clip import moved, tiny_clip
from tiny_runs import as_stage, losses, read_log, same_weights, train

from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import sparse_blocks, upcycle
from clip_moe.training.losses import all_reduce_sum
from lab.methods.coupling import coupling_loss
from lab.methods.dense_teacher import DenseTeacher
from lab.methods.router_teacher import RouterTeacher

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
        importance = p.mean(0)
        own.append(
            0.005 * (importance.std(correction=0) / importance.mean()) ** 2 - 0.005 * (p * p.log()).sum(-1).mean()
        )
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
    draws, expected, norms = torch.rand(4, 6), 0.0, torch.zeros(4, 4)
    for i in range(4):
        reach = min((router[i] - router[j]).norm() for j in range(4) if j != i) / (2 * router[i].norm())
        noisy = router[i] * (1 + reach.detach() * (2 * draws[i] - 1))
        assert (noisy - router[i]).norm() <= min((noisy - router[j]).norm() for j in range(4)) + 1e-6
        norms = torch.stack([(up_proj[j] @ noisy).norm() for j in range(4)])[None].where(
            torch.arange(4)[:, None] == i, norms
        )
    for i in range(4):
        for j in set(range(4)) - {i}:
            expected += (norms[i, j] - alpha * norms[i, i]).clamp(min=0) + (norms[j, i] - alpha * norms[i, i]).clamp(
                min=0
            )
    torch.testing.assert_close(found, expected / 16)
    torch.testing.assert_close(torch.autograd.grad(found, router), torch.autograd.grad(expected / 16, router))


def test_the_dense_teacher_by_hand():
    model = moved(upcycle(tiny_clip(), PLAIN), (".experts.", ".router."), seed=1).train()
    teacher, batch, read = DenseTeacher(model, coef=1.0, decay=0.75), pairs(), []
    for tower in ("text", "vision"):
        for block in sparse_blocks(getattr(model, f"{tower}_model")).values():
            block.register_forward_hook(lambda block, inputs, output: read.append((block, inputs[0], output)))
    loss = computed(teacher, model, batch)[0]
    distances = []
    for block, hidden_states, output in read:
        # Only texts have padding: 10 tokens, one of which is
        mask = (
            batch["attention_mask"].bool()
            if block in sparse_blocks(model.text_model).values()
            else torch.ones(2, 5).bool()
        )
        experts, target = block.experts, 0.0
        weights = (hidden_states @ block.router.weight.T).softmax(-1)
        for e in range(4):
            hidden = experts.act_fn(hidden_states @ experts.up_proj[e].T + experts.up_proj_bias[e])
            target += weights[..., e, None] * (hidden @ experts.down_proj[e].T + experts.down_proj_bias[e])
        target = target.detach()[mask]
        distances.append((output[mask] - target).square().sum() / target.square().sum())
    torch.testing.assert_close(loss, sum(distances) / 4)
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())

    before = teacher.blocks["text"][0].experts.up_proj.clone()
    moved(model, ".experts.", seed=2)
    teacher.after_step(None)
    now = next(iter(sparse_blocks(model.text_model).values())).experts.up_proj
    torch.testing.assert_close(teacher.blocks["text"][0].experts.up_proj, 0.75 * before + 0.25 * now)


TAUGHT = "lab.methods.router_teacher:TaughtStage"
COUPLED = "lab.methods.coupling:CoupledStage"
DISTILLED = "lab.methods.dense_teacher:DistilledStage"


taught, coupled, distilled = map(as_stage, (TAUGHT, COUPLED, DISTILLED))
STARTS = {
    **{
        how: {"stage": "lab.methods.expert_starts:RedrawnStage", "how": how}
        for how in ("noise", "drop_upcycling", "random")
    },
    "clusters": {"stage": "lab.methods.expert_starts:ClustersStage", "dense": "dense", "data": DATA},
    "more experts": {"stage": "lab.methods.more_experts:MoreExpertsStage", "num_experts": 8, "data": DATA},
}
# What is logged; settings
METHODS = {
    TAUGHT: ("router_divergence", {"change": taught, "teacher": "dense"}),
    COUPLED: ("coupling_loss", {"change": coupled}),
    DISTILLED: ("distillation_loss", {"change": distilled, "distillation_decay": 0.9}),
}


@pytest.mark.parametrize(("logged", "settings"), METHODS.values(), ids=METHODS)
def test_resumed_is_the_same_to_the_bit(whole, tmp_path, logged, settings):
    assert logged in read_log(whole(**settings))[0]
    train(tmp_path, 3, **settings)
    resumed = train(tmp_path, **settings)
    assert losses(resumed) == losses(whole(**settings)) and same_weights(resumed, whole(**settings))


# Without the coupling, whose noise is another for each part
@pytest.mark.parametrize("method", [TAUGHT, DISTILLED])
@pytest.mark.parametrize("memory", [{"gradient_checkpointing": True}, {"mini_batch_size": 4}], ids=str)
def test_what_saves_memory_changes_nothing(whole, method, memory):
    settings = METHODS[method][1]
    torch.testing.assert_close(losses(whole(**settings, **memory)), losses(whole(**settings)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", [TAUGHT, DISTILLED])
def test_two_processes_have_the_losses_of_one(whole, tmp_path, method):
    settings = METHODS[method][1]
    train(tmp_path, only=["dense", "sparse"], **settings)
    run_processes(2, train_recipe, "--config", tmp_path / "recipe.yaml")
    torch.testing.assert_close(losses(tmp_path / "out" / "tuned"), losses(whole(**settings)), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, "random", "more experts"])
def test_the_whole_way(tmp_path, method, monkeypatch, capsys):
    logged, settings = METHODS.get(method, (None, {}))
    trained = {name: value for name, value in settings.items() if name != "change"}
    trained |= {"stage": method} if settings else {}
    starts = [STARTS["clusters" if method == DISTILLED else method]] if method in (DISTILLED, *STARTS) else []
    monkeypatch.setitem(test_methods.ADAPTERS, method, (upcycled(), *starts, trained, logged))
    test_methods.test_the_whole_way(tmp_path, method, monkeypatch, capsys)


def test_what_they_do_not_go_with(tmp_path):
    def with_dense_model(change):
        return lambda recipe: [change(recipe), recipe["stages"][2].update(model="dense")]

    for number, (_, settings) in enumerate(METHODS.values()):
        with pytest.raises(ValueError, match="goes with a sparse model"):
            train(tmp_path / str(number), **settings | {"change": with_dense_model(settings["change"])})
    with pytest.raises(ValueError, match="teacher: it sees whole images"):
        train(tmp_path / "patches", change=taught, teacher="dense", patch_dropout=0.5)
