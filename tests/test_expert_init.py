"""How experts begin: what is drawn anew, and what stays the dense FFN's."""

import pytest
import torch
from tiny_clip import tiny_clip
from tiny_runs import DENSE, SPARSE, run_stages
from transformers import AutoModel

from clip_moe.conversion.checkpoints import load_dense, load_sparse
from clip_moe.conversion.expert_init import low_rank, spherical_clusters
from clip_moe.conversion.presets import PRESETS, ExpertInit
from clip_moe.conversion.upcycle import shared_config, upcycle
from clip_moe.conversion.verification import compare
from modeling_clip_moe import CLIPMoEModel
from modeling_clip_moe.experts import CLIPMoEExperts


@pytest.fixture(scope="module")
def dense():
    return tiny_clip()


def experts_of(dense, **how):
    sparse = upcycle(dense, PRESETS["clip_moe"], seed=1, expert_init=ExpertInit(**how))
    return [module for module in sparse.modules() if isinstance(module, CLIPMoEExperts)]


@pytest.mark.parametrize("units", ["expert", "tensor"])
def test_half_of_the_hidden_units_are_drawn_anew(dense, units):
    copies = experts_of(dense)
    for experts, before in zip(experts_of(dense, kind="drop_upcycling", units=units), copies, strict=True):
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
        experts_of(dense, kind="noise", noise=0.1), experts_of(dense, kind="random"), copies, strict=True
    ):
        noise = noisy.up_proj - before.up_proj
        assert noise.std().item() == pytest.approx(0.1 * before.up_proj.std().item(), rel=0.1)
        assert torch.corrcoef(torch.stack([random.up_proj.flatten(), before.up_proj.flatten()]))[0, 1].abs() < 0.1
        assert random.up_proj.std().item() == pytest.approx(before.up_proj.std().item(), rel=0.1)


def test_experts_of_a_shared_encoder_are_drawn_once(dense):
    shared = CLIPMoEModel(shared_config(dense.config)).eval()
    copies, experts = (experts_of(shared, **init) for init in ({}, {"kind": "drop_upcycling"}))
    changed = (experts[0].up_proj != copies[0].up_proj).any(-1)
    assert (changed.sum(1) == changed.shape[1] // 2).all()


@pytest.mark.slow
def test_a_recipe_chooses_and_repeats_it(tmp_path, capsys):
    """Only copies are compared with the dense model."""
    run_stages(tmp_path / "copies", [DENSE, SPARSE])
    assert "largest difference" in capsys.readouterr().out
    stage = {**SPARSE, "expert_init": {"kind": "drop_upcycling"}}
    first, again = (run_stages(tmp_path / name, [DENSE, stage]) / "sparse" for name in ("first", "again"))
    assert "largest difference" not in capsys.readouterr().out
    for one, other in zip(*(AutoModel.from_pretrained(folder).parameters() for folder in (first, again)), strict=True):
        assert torch.equal(one, other)


REFUSED = {
    "sparse.expert_init: noise: copies takes none": {"noise": 0.1},
    "expert_init.ratio: Input should be greater than 0": {"kind": "drop_upcycling", "ratio": 0},
    "expert_init.kind: Input should be 'copies', 'noise', 'drop_upcycling', 'random' or 'clusters'": {"kind": "svd"},
    "sparse.expert_init.rate: there is no such key: did you mean 'ratio'": {"kind": "noise", "rate": 1},
}


@pytest.mark.parametrize(("message", "init"), REFUSED.items(), ids=[*map(str, REFUSED.values())])
def test_what_makes_no_sense_is_one_line(tmp_path, message, init):
    with pytest.raises(ValueError, match=message):
        run_stages(tmp_path, [DENSE, {**SPARSE, "expert_init": init}])


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
    data = {"source": "symbols", "num_samples": 64}
    clusters = SPARSE | {"changes": {"num_experts": 2, "norm_topk_prob": True, "capacity_factor": None}}
    clusters |= {"data": data}
    stages = [DENSE]
    for name, energy in (("all", 1.0), ("most", 0.9)):
        stages.append(clusters | {"name": name, "expert_init": {"kind": "clusters", "energy": energy}})
    folder = run_stages(tmp_path, stages)
    compare(load_dense(folder / "dense"), load_sparse(folder / "all"), tolerance=1e-4)
    mlp = load_sparse(folder / "most").vision_model.encoder.layers[1].mlp
    torch.testing.assert_close(mlp.router.weight.norm(dim=-1), torch.ones(2))
    ranks = [torch.linalg.matrix_rank(expert) for expert in mlp.experts.up_proj]
    assert max(ranks) < 16 and not torch.equal(*mlp.experts.up_proj)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": None}, "data: pairs for expert_init.kind: clusters"),
        ({"expert_init": {"kind": "copies"}}, "data: pairs for expert_init.kind: clusters"),
        ({"changes": {"num_experts": 30}}, "of the calibration data has .* tokens, fewer than the 32 inputs"),
        ({"changes": {"num_experts": 4000}}, "tokens of calibration data cannot make 4000 clusters"),
        ({"changes": {"moe_intermediate_size": 16}}, "clusters makes whole FFNs"),
    ],
)
def test_clusters_that_cannot_be(tmp_path, change, message):
    data = {"source": "symbols", "num_samples": 16}
    stage = SPARSE | {"expert_init": {"kind": "clusters"}, "data": data} | change
    with pytest.raises(ValueError, match=message):
        run_stages(tmp_path, [DENSE, stage])
