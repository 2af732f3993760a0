"""How experts begin: what is drawn anew, and what stays the dense FFN's."""

import pytest
import torch
from tiny_clip import tiny_clip
from tiny_runs import DENSE, SPARSE, run_stages, same_weights

from clip_moe.conversion.checkpoints import load_dense, load_sparse
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import shared_config, upcycle
from clip_moe.conversion.verification import compare
from lab.methods.expert_starts import RedrawnStage, low_rank, redraw, spherical_clusters
from modeling_clip_moe import CLIPMoEModel
from modeling_clip_moe.experts import CLIPMoEExperts

REDRAWN = {"name": "start", "stage": "lab.methods.expert_starts:RedrawnStage", "model": "sparse"}
CLUSTERS = {"stage": "lab.methods.expert_starts:ClustersStage", "model": "sparse", "dense": "dense"}


@pytest.fixture(scope="module")
def dense():
    return tiny_clip()


def experts_of(dense, **how):
    sparse = upcycle(dense, PRESETS["clip_moe"], seed=1)
    if how:
        redraw(sparse, RedrawnStage(name="start", stage="here", model="sparse", **how), seed=1)
    return [module for module in sparse.modules() if isinstance(module, CLIPMoEExperts)]


@pytest.mark.parametrize("units", ["expert", "tensor"])
def test_half_of_the_hidden_units_are_drawn_anew(dense, units):
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


def test_noise_is_relative_and_random_keeps_nothing(dense):
    copies = experts_of(dense)
    for noisy, random, before in zip(
        experts_of(dense, how="noise", noise=0.1), experts_of(dense, how="random"), copies, strict=True
    ):
        noise = noisy.up_proj - before.up_proj
        assert noise.std().item() == pytest.approx(0.1 * before.up_proj.std().item(), rel=0.1)
        assert torch.corrcoef(torch.stack([random.up_proj.flatten(), before.up_proj.flatten()]))[0, 1].abs() < 0.1
        assert random.up_proj.std().item() == pytest.approx(before.up_proj.std().item(), rel=0.1)


def test_experts_of_a_shared_encoder_are_drawn_once(dense):
    shared = CLIPMoEModel(shared_config(dense.config)).eval()
    copies, experts = (experts_of(shared, **init) for init in ({}, {"how": "drop_upcycling"}))
    changed = (experts[0].up_proj != copies[0].up_proj).any(-1)
    assert (changed.sum(1) == changed.shape[1] // 2).all()


@pytest.mark.slow
def test_a_recipe_repeats_it(tmp_path):
    stages = [DENSE, SPARSE, REDRAWN | {"how": "drop_upcycling"}]
    first, again = (run_stages(tmp_path / name, stages) / "start" for name in ("first", "again"))
    assert same_weights(first, again) and not same_weights(first, first.with_name("sparse"))


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
    centers = torch.nn.functional.normalize(torch.randn(3, 16), dim=-1)
    truth = torch.arange(3).repeat_interleave(20)
    points = (centers[truth] + 0.05 * torch.randn(60, 16)) * (0.1 + 10 * torch.rand(60, 1))
    labels, found = spherical_clusters(points, 3, 0, "here")
    assert all(len(labels[truth == kind].unique()) == 1 for kind in range(3)) and len(labels.unique()) == 3
    for label in range(3):
        mean = torch.nn.functional.normalize(points[labels == label], dim=-1).mean(dim=0)
        torch.testing.assert_close(found[label], torch.nn.functional.normalize(mean, dim=0))


def test_experts_of_clusters_by_their_stage(tmp_path):
    """With all of the energy, experts are the FFN; with less, each is one of low rank, for its router's cluster."""
    sparse = SPARSE | {"changes": {"num_experts": 2, "norm_topk_prob": True, "capacity_factor": None}}
    clusters = CLUSTERS | {"data": {"source": "symbols", "num_samples": 64}}
    all_energy, most = clusters | {"name": "all", "energy": 1.0}, clusters | {"name": "most", "energy": 0.9}
    folder = run_stages(tmp_path, [DENSE, sparse, all_energy, most])
    compare(load_dense(folder / "dense"), load_sparse(folder / "all"), tolerance=1e-4)
    mlp = load_sparse(folder / "most").vision_model.encoder.layers[1].mlp
    torch.testing.assert_close(mlp.router.weight.norm(dim=-1), torch.ones(2))
    ranks = [torch.linalg.matrix_rank(expert) for expert in mlp.experts.up_proj]
    assert max(ranks) < 16 and not torch.equal(*mlp.experts.up_proj)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 30}, "of the calibration data has .* tokens, fewer than the 32 inputs"),
        ({"num_experts": 4000}, "tokens of calibration data cannot make 4000 clusters"),
        ({"moe_intermediate_size": 16}, "start.model: clusters make whole FFNs"),
    ],
)
def test_clusters_that_cannot_be(tmp_path, changes, message):
    clusters = CLUSTERS | {"name": "start", "data": {"source": "symbols", "num_samples": 16}}
    with pytest.raises(ValueError, match=message):
        run_stages(tmp_path, [DENSE, SPARSE | {"changes": changes}, clusters])
