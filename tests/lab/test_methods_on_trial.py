"""Methods on trial in lab/methods: by hand, and what they do to a run."""

import contextlib
import itertools
import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from sklearn.decomposition import PCA
from test_losses import plain_contrastive_loss
from tiny_clip import moved, tiny_clip
from tiny_clip_moe import tiny_block
from tiny_families import tiny_dense
from tiny_runs import DENSE, SPARSE, TUNED, as_stage, losses, read_log, run_stages, same_weights, train, weights
from torch.nn.functional import normalize

from clip_moe.conversion.checkpoints import load_dense, load_sparse
from clip_moe.conversion.own_classes import import_models
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import shared_config, sparse_blocks, upcycle
from clip_moe.conversion.verification import compare
from clip_moe.training.losses import Pairing, all_reduce_sum
from lab.methods.coupling import coupling_loss
from lab.methods.entropy_losses import EntropyLosses
from lab.methods.expert_starts import RedrawnStage, experts_of_clusters, low_rank, redraw, spherical_clusters
from lab.methods.long_clip import TrainLongCLIPStage, primary_components
from lab.methods.more_experts import add_experts
from lab.methods.patch_dropout import drop_patches
from lab.methods.relu_router import ReluCLIPModel, ReluRouter, ReluVisionConfig
from lab.methods.relu_routing import load_weighted_l1
from lab.methods.router_teacher import RouterTeacher
from lab.methods.routing_contrastive import clusters_of_captions, guided_ids, routing_contrastive_loss
from modeling_clip_moe import CLIPMoEModel, families
from modeling_clip_moe.experts import CLIPMoEExperts
from modeling_clip_moe.families import FAMILIES
from modeling_clip_moe.loading import OWN_CLASSES

PLAIN = replace(PRESETS["clip_moe"], sparse_layers=[1, 3])


def computed(loss, model, batch, progress=0.0):
    outputs = model(**batch, output_router_logits=True, output_expert_ids=True)
    return (*loss(model, outputs, batch, progress, all_reduce_sum), outputs)


def test_the_teacher_of_routers_by_hand():
    dense, batch, read = tiny_clip(), {"pixel_values": torch.randn(2, 3, 16, 16)}, {}
    batch["input_ids"] = torch.tensor([[38, 3, 5, 7, 39], [38, 4, 6, 39, 39]])
    batch["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
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


def test_the_routing_contrastive_loss_by_hand():
    """Two texts, padded; expert 2 of 4 has no token, and a batch without tokens has no loss."""
    tokens, rows = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 6), (4, 6)))
    chosen = torch.tensor([[[0, 1], [1, 3], [3, 0], [1, 0], [4, 4]], [[0, 3], [4, 1], [4, 4], [4, 4], [4, 4]]])
    guided = guided_ids(torch.tensor([7, -1]), torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]), 4)
    assert guided[..., 0].tolist() == [[3, 3, 3, 3, 4], [4] * 5]
    for ids in (chosen, torch.cat([chosen[:1, :, :1], guided[:1]])):
        found, centroids, expected = routing_contrastive_loss(tokens, ids, rows, 0.07, all_reduce_sum), {}, 0.0
        for expert in range(4):
            own = [token for token, of in zip(tokens.flatten(0, 1), ids.flatten(0, 1), strict=True) if expert in of]
            if own:
                centroids[expert] = sum(own) / len(own)
        assert set(centroids) == {0, 1, 3}
        for expert in centroids:
            shares = {e: (torch.cosine_similarity(rows[expert], m, dim=0) / 0.07).exp() for e, m in centroids.items()}
            expected -= (shares[expert] / sum(shares.values())).log() / 3
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(loss, (tokens, rows)) for loss in (found, expected)))
    nothing = routing_contrastive_loss(tokens, torch.full_like(chosen, 4), rows, 0.07, all_reduce_sum)
    assert nothing == 0 and not any(gradient.any() for gradient in torch.autograd.grad(nothing, (tokens, rows)))


def test_pairs_have_the_clusters_of_their_captions(processor):
    rows = {"caption": ["a red circle", ["a blue square", "a star"], "a cross"]}
    clusters_of = clusters_of_captions(rows, [2, 0, -1], processor.tokenizer)
    batch = processor.tokenizer(["a cross", "a star"], padding=True, return_tensors="pt")
    assert clusters_of(batch).tolist() == [-1, 0]


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
    bits = {"local_entropy_text": 0.5, "global_entropy_text": 0.5}
    bits |= {"local_entropy_vision": 0, "global_entropy_vision": 2}
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(bits)
    torch.testing.assert_close(loss, torch.tensor((0.5 * 0.5 + 3.0 * 0.5 + 2.0 * 2) * math.log(2)))
    loss.backward()
    assert vision.grad.isfinite().all()
    losses.min_experts = 2.0
    assert losses(None, outputs, batch, progress=0.0, reduce=all_reduce_sum)[1]["global_entropy_text"] == 0


# --- patch dropout


@pytest.mark.parametrize(
    "family", [one for one in FAMILIES if not one.naflex and one.name != "MoE-ViE"], ids=lambda one: one.name
)
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


def contrasted(recipe):
    recipe["stages"][1]["changes"]["router_aux_loss_coef"] = 0
    recipe["stages"][-1]["stage"] = CONTRASTED


def guided(recipe):
    contrasted(recipe)
    features = {"name": "features", "stage": "embed", "model": "dense", "data": recipe["defaults"]["train"]["data"]}
    clusters = {"name": "clusters", "stage": "cluster", "features": "features", "num_text_clusters": 4}
    recipe["stages"][2:2] = [features, clusters]


TAUGHT = "lab.methods.router_teacher:TaughtStage"
COUPLED = "lab.methods.coupling:CoupledStage"
RELU = "lab.methods.relu_routing:ReluStage"
ENTROPY = "lab.methods.entropy_losses:EntropyStage"
DROPPED = "lab.methods.patch_dropout:PatchDropoutStage"
CONTRASTED = "lab.methods.routing_contrastive:RoutingContrastStage"
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
    CONTRASTED: (["routing_contrastive_loss"], {"change": contrasted}),
    "guided": (["routing_contrastive_loss"], {"change": guided, "clusters": "clusters"}),
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


@pytest.mark.parametrize("method", METHODS, indirect=True)
def test_resumed_is_the_same_to_the_bit(whole, tmp_path, method):
    logged, settings = method
    assert set(logged) <= set(read_log(whole(**settings))[0])
    train(tmp_path, 3, **settings)
    resumed = train(tmp_path, **settings)
    assert losses(resumed) == losses(whole(**settings)) and same_weights(resumed, whole(**settings))


# The noise of the coupling is another for each part
@pytest.mark.parametrize("method", [TAUGHT, RELU, ENTROPY, CONTRASTED, "guided"], indirect=True)
@pytest.mark.parametrize("memory", [{"gradient_checkpointing": True}, {"mini_batch_size": 4}], ids=str)
def test_what_saves_memory_changes_nothing(whole, method, memory):
    """Neither losses nor what is logged, such as a weight that is too small to be seen in the loss."""
    logged, settings = method
    logs = [read_log(whole(**settings, **more)) for more in (memory, {})]
    for name in [*logged, "loss", "total_loss"]:
        values = [[entry.get(name, 0) for entry in log] for log in logs]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-12), name


@pytest.mark.parametrize("method", [RELU], indirect=True)
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
        (CONTRASTED, "dense", {}, "goes with sparse towers of their own"),
        (CONTRASTED, "sparse", {}, "it replaces the balance loss: set router_aux_loss_coef of the model to 0"),
        (RELU, "sparse", {}, "goes with a sparse model of lab.methods.relu_router"),
        (DROPPED, "sparse", {"patch_dropout": 0.9}, "it leaves none of 4 patches: take at most 0.750"),
    ],
)
def test_what_they_do_not_go_with(tmp_path, stage, model, settings, message):
    change = {"change": lambda recipe: recipe["stages"][2].update(stage=stage, model=model)}
    with pytest.raises(ValueError, match=message):
        train(tmp_path, **METHODS[stage][1] | settings | change)


# --- Long-CLIP's loss against PCA and numbers by hand, value and gradient; and its stage

PAIRS, WIDTH, COMPONENTS = 8, 6, 2
SYMBOLS = {"source": "symbols", "num_samples": 24, "captions": "detailed"}
LOSS = {"num_components": COMPONENTS, "caption_weights": [0.3, 0.7], "label_smoothing": 0.1}
STAGE = TrainLongCLIPStage(**TUNED | {"data": SYMBOLS, "global_batch_size": PAIRS}, **LOSS)
POLICIES = [{"policy": policy, "column": "caption"} for policy in ("full", "first_sentence")]
CAPTIONS = {"name": "captions", "stage": "captions", "model": "dense", "data": SYMBOLS, "captions": POLICIES}
LONG = TUNED | {"stage": "lab.methods.long_clip:TrainLongCLIPStage", "num_components": 3, "logging_steps": 1}
LONG |= {"data": {"source": "captions", "in_memory": True}, "global_batch_size": 8, "max_steps": 4}


def long_clip_loss(towers, images, long, short, keys):
    """The stage's own."""
    texts = torch.stack([long, short], dim=1).flatten(0, 1)
    embeds = normalize(towers[0](images), dim=-1), normalize(towers[1](texts), dim=-1)
    pairing = Pairing(torch.ones(PAIRS, 2).bool(), torch.arange(PAIRS), keys.flatten())
    return STAGE.contrastive_loss(*embeds, torch.tensor([5.0]), pairing).squeeze()


def plain_long_clip_loss(towers, images, long, short, keys):
    """Long with images, short with what sklearn's directions leave of them, which autograd gets by an SVD."""
    sides = (towers[0], images), (towers[1], long), (towers[1], short)
    images, long, short = (normalize(tower(features), dim=-1) for tower, features in sides)
    mean = images.mean(dim=0)
    left, sizes, right = torch.linalg.svd(images - mean, full_matrices=False)
    primary = left[:, :COMPONENTS] * sizes[:COMPONENTS] @ right[:COMPONENTS] + mean
    pca = PCA(COMPONENTS).fit(images.detach().numpy())
    reconstructed = pca.inverse_transform(pca.transform(images.detach().numpy()))
    torch.testing.assert_close(primary.detach(), torch.from_numpy(reconstructed), atol=1e-5, rtol=1e-4)
    total = 0.0
    for place, (weight, image_side, text_side) in enumerate(((0.3, images, long), (0.7, primary, short))):
        are_equal = partial(lambda place, i, j: keys[i, place] == keys[j, place], place)
        total = total + weight * plain_contrastive_loss(image_side, text_side, 5.0, 0.1, are_equal)
    return total


@pytest.mark.parametrize("equal", [(), ([0, 1], 0), ([2, 3], 1)], ids=["different", "long", "short"])
def test_the_loss_of_long_clip_is_the_plain_one(equal):
    """Equal texts are positives among those of their place."""
    images, long, short = torch.randn(3, PAIRS, WIDTH)
    images, keys = images * torch.arange(1, WIDTH + 1), torch.arange(2 * PAIRS).view(PAIRS, 2)
    if equal:
        keys[equal] = -1
    towers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)])
    losses_of = [function(towers, images, long, short, keys) for function in (long_clip_loss, plain_long_clip_loss)]
    torch.testing.assert_close(*losses_of, atol=1e-5, rtol=1e-4)
    ours, plain = (torch.autograd.grad(loss, [*towers.parameters()]) for loss in losses_of)
    assert min(gradient.abs().max() for gradient in plain) > 1e-3
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


def test_the_gradient_of_long_clip_where_eigenvalues_are_equal():
    """Those within the chosen components, and those within the others: an SVD's gradient is not finite there."""
    images = torch.tensor([[3.0, 0, 0, 0], [0, 3, 0, 0], [-3, 0, 0, 0], [0, -3, 0, 0]]).requires_grad_()
    found = primary_components(images, 2)
    torch.testing.assert_close(found, images)
    (found * torch.arange(4.0)[:, None]).sum().backward()
    assert images.grad.isfinite().all() and images.grad.abs().max() > 0


def test_the_stage_of_long_clip(tmp_path):
    """All parameters train, and the loss of the same few pairs falls."""
    output = run_stages(tmp_path, [DENSE, CAPTIONS, LONG | {"max_steps": 40, "global_batch_size": 24}])
    before, after = weights(output / "dense"), weights(output / "tuned")
    assert not [name for name in before if torch.equal(before[name], after[name])]
    step_losses = losses(output / "tuned")
    assert step_losses[-1] < 0.9 * step_losses[0]


def test_mistakes_of_long_clip(tmp_path):
    for changes, message in (
        ({"data": SYMBOLS}, "tuned: image 0 of symbols has no long and short caption"),
        ({"num_components": 7}, "num_components 7 leave nothing out of a batch of 8"),
    ):
        with pytest.raises(ValueError, match=message):
            run_stages(tmp_path, [DENSE, CAPTIONS, LONG | changes])


# --- how experts begin: drawn anew, as clusters of the FFN's inputs, or as copies of fewer experts

TINY = tiny_clip()
STARTS = {
    "redrawn": {"stage": "lab.methods.expert_starts:RedrawnStage", "model": "sparse", "how": "random"},
    "more": {"stage": "lab.methods.more_experts:MoreExpertsStage", "model": "sparse", "num_experts": 8},
}
CLUSTERS = {"stage": "lab.methods.expert_starts:ClustersStage", "model": "sparse", "dense": "dense"}
CLUSTERS["data"] = {"source": "symbols", "num_samples": 64}


def experts_of(dense=TINY, **how):
    sparse = upcycle(dense, PRESETS["clip_moe"], seed=1)
    if how:
        redraw(sparse, RedrawnStage(name="start", stage="here", model="sparse", **how), seed=1)
    return [module for module in sparse.modules() if isinstance(module, CLIPMoEExperts)]


@pytest.mark.parametrize("is_shared", [False, True], ids=["two encoders", "a shared one"])
@pytest.mark.parametrize("units", ["expert", "tensor"])
def test_half_of_the_hidden_units_are_drawn_anew(units, is_shared):
    dense = moved(CLIPMoEModel(shared_config(TINY.config)).eval(), ".mlp.", seed=1) if is_shared else TINY
    copies = experts_of(dense)
    for experts, before in zip(experts_of(dense, how="drop_upcycling", units=units), copies, strict=True):
        changed = {}
        for name, axis in {"up_proj": 2, "down_proj": 1}.items():  # over the other axis
            differs = getattr(experts, name) != getattr(before, name)
            changed[name] = differs.any(axis)
            assert torch.equal(differs.all(axis), changed[name])  # whole units
            assert (changed[name].sum(1) == changed[name].shape[1] // 2).all()
        assert torch.equal(experts.up_proj_bias != before.up_proj_bias, changed["up_proj"])
        assert torch.equal(experts.down_proj_bias, before.down_proj_bias)
        assert (changed["up_proj"] == changed["down_proj"]).all() == (units == "expert")
        assert not torch.equal(changed["up_proj"][0], changed["up_proj"][1])  # each expert has others
        drawn, replaced = experts.up_proj[changed["up_proj"]], before.up_proj[changed["up_proj"]]
        assert drawn.std().item() == pytest.approx(replaced.std().item(), rel=0.15)
        assert drawn.mean().item() == pytest.approx(replaced.mean().item(), abs=0.1 * replaced.std().item())


def test_random_weights_keep_nothing():
    for random, before in zip(experts_of(how="random"), experts_of(), strict=True):
        assert torch.corrcoef(torch.stack([random.up_proj.flatten(), before.up_proj.flatten()]))[0, 1].abs() < 0.1
        assert random.up_proj.std().item() == pytest.approx(before.up_proj.std().item(), rel=0.1)


def test_a_recipe_repeats_them(tmp_path):
    """Redrawn experts, and more of them."""
    stages = [stage | {"name": f"{name}_{run}"} for name, stage in STARTS.items() for run in (1, 2)]
    output = run_stages(tmp_path, [DENSE, SPARSE, *stages])
    for name in STARTS:
        assert same_weights(output / f"{name}_1", output / f"{name}_2")
        assert not same_weights(output / f"{name}_1", output / "sparse")
    assert {block.num_experts for block in sparse_blocks(load_sparse(output / "more_1")).values()} == {8}


def test_low_rank_keeps_most_of_what_the_data_make():
    weight, inputs = torch.randn(6, 8), torch.randn(40, 8) * torch.tensor([9.0, 5, 3, 1, 1, 1, 1, 0.1])
    outputs = inputs @ weight.T
    spectrum = torch.linalg.svdvals(outputs).square()
    for rank in range(1, 7):
        least = (spectrum[:rank].sum() / spectrum.sum()).item()
        found = low_rank(weight, inputs, least - 1e-4)
        assert torch.linalg.matrix_rank(found) == rank
        lost = (outputs - inputs @ found.T).square().sum()
        torch.testing.assert_close(lost, spectrum[rank:].sum(), rtol=1e-3, atol=1e-2)  # Eckart-Young: no rank has less
    torch.testing.assert_close(low_rank(weight, inputs, 1.0), weight, rtol=1e-4, atol=1e-4)


def test_spherical_clusters_are_by_direction():
    centers, truth = normalize(torch.randn(3, 16), dim=-1), torch.arange(3).repeat_interleave(20)
    points = (centers[truth] + 0.05 * torch.randn(60, 16)) * (0.1 + 10 * torch.rand(60, 1))
    labels, found = spherical_clusters(points, 3, 0, "here")
    assert all(len(labels[truth == kind].unique()) == 1 for kind in range(3)) and len(labels.unique()) == 3
    for label in range(3):
        mean = normalize(points[labels == label], dim=-1).mean(dim=0)
        torch.testing.assert_close(found[label], normalize(mean, dim=0))


def test_experts_of_clusters_by_their_stage(tmp_path):
    """With all of the energy, experts are the FFN; with less, each is one of low rank, for its router's cluster."""
    sparse = SPARSE | {"changes": {"num_experts": 2, "norm_topk_prob": True, "capacity_factor": None}}
    all_energy, most = CLUSTERS | {"name": "all", "energy": 1.0}, CLUSTERS | {"name": "most", "energy": 0.9}
    cut = sparse | {"name": "cut", "changes": {"moe_intermediate_size": 16}}
    with pytest.raises(ValueError, match="narrow.model: clusters make whole FFNs"):
        run_stages(tmp_path, [DENSE, sparse, all_energy, most, cut, CLUSTERS | {"name": "narrow", "model": "cut"}])
    folder = tmp_path / "out"
    compare(load_dense(folder / "dense"), load_sparse(folder / "all"), tolerance=1e-4)
    mlp = load_sparse(folder / "most").vision_model.encoder.layers[1].mlp
    torch.testing.assert_close(mlp.router.weight.norm(dim=-1), torch.ones(2))
    ranks = [torch.linalg.matrix_rank(expert) for expert in mlp.experts.up_proj]
    assert max(ranks) < 16 and not torch.equal(*mlp.experts.up_proj)


# --- more experts from fewer


def test_copies_and_their_rows():
    sparse = moved(upcycle(TINY, PRESETS["clip_moe"]), (".experts.", ".router."), seed=1)
    more = add_experts(sparse, 6)
    assert more.config.text_config.num_experts == 6 and sparse.config.text_config.num_experts == 4
    before, after = sparse.vision_model.encoder.layers[2].mlp, more.vision_model.encoder.layers[2].mlp
    for name, tensor in before.experts.named_parameters():
        assert torch.equal(after.experts.get_parameter(name), tensor[[0, 1, 2, 3, 0, 1]])
    rows, std = after.router.weight, before.router.weight.std()
    assert torch.equal(rows[:4], before.router.weight)
    assert 0.005 < (rows[4:] - rows[:2]).std() / std < 0.02
    reseeded = add_experts(sparse, 6, seed=1).vision_model.encoder.layers[2].mlp
    assert not torch.equal(reseeded.router.weight, rows)


def test_a_shared_encoder_has_the_same_copies_and_biases_keep_their_digits():
    shared = CLIPMoEModel(shared_config(TINY.config)).eval()
    routing = {f"{tower}_config": {"use_expert_bias": True} for tower in ("text", "vision")}
    sparse = upcycle(shared, PRESETS["clip_moe"], routing=routing).bfloat16()
    biases = torch.tensor([0.1234567, 0.3, 0.0, -0.7])
    for block in sparse_blocks(sparse).values():
        block.router.expert_bias.copy_(biases)
    more = add_experts(sparse, 6)
    blocks = [getattr(more, f"{tower}_model").encoder.layers[0].mlp for tower in ("text", "vision")]
    assert torch.equal(blocks[0].router.weight, blocks[1].router.weight) and more.dtype == torch.bfloat16
    assert torch.equal(blocks[0].router.expert_bias, biases[[0, 1, 2, 3, 0, 1]])


def test_experts_that_cannot_be():
    """Too few tokens for clusters, and no more experts than there are or than fit."""
    sparse = upcycle(TINY, PRESETS["clip_moe"])
    inputs = torch.randn(40, TINY.config.text_config.hidden_size)
    for few, message in ((inputs, "cluster . of .* has .* tokens, fewer than the"), (inputs[:3], "3 tokens .* make 4")):
        with pytest.raises(ValueError, match=f"layer 1 of the text tower: .*{message}"):
            experts_of_clusters(sparse, {("text", 1): few}, 0.99, seed=0)
    for number, message in ((4, "num_experts: 4 are no more than the 4"), (10**9, "choose a smaller num_experts")):
        with pytest.raises(ValueError, match=message):
            add_experts(sparse, number)


def test_new_experts_beside_the_base_keep_it(tmp_path):
    """The start is the dense model, which the stage compares; what is frozen stays to the bit, and new experts move."""
    beside = {"name": "beside", "stage": "lab.methods.beside_base:BesideStage", "model": "dense"}
    learned = TUNED | {"model": "beside", "data": {"source": "symbols", "num_samples": 8}, "max_steps": 3}
    output = run_stages(tmp_path, [DENSE, beside, learned | {"trainable": ["experts", "routers"]}])
    base, before, after = (weights(output / name) for name in ("dense", "beside", "tuned"))
    moved_keys = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved_keys and all(re.search(r"\.(experts|router)\.", key) for key in moved_keys)
    for key, tensor in base.items():
        kept = re.sub(r"\.mlp\.(fc[12])", r".mlp.shared_experts.\1", key)
        assert torch.equal(after[kept].view_as(tensor), tensor), key
    with pytest.raises(ValueError, match=r"beside.parts: 5 does not divide .*mlp's 32"):
        run_stages(tmp_path / "odd", [DENSE, beside | {"parts": 5}])
