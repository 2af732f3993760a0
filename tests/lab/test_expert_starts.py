"""How experts begin: drawn anew, as clusters of the FFN's inputs, or as copies of fewer experts."""

import pytest
import torch
from tiny_clip import moved, tiny_clip
from tiny_runs import DENSE, SPARSE, run_stages, same_weights
from torch.nn.functional import normalize

from clip_moe.conversion.checkpoints import load_dense, load_sparse
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import shared_config, sparse_blocks, upcycle
from clip_moe.conversion.verification import compare
from lab.methods.expert_starts import RedrawnStage, experts_of_clusters, low_rank, redraw, spherical_clusters
from lab.methods.more_experts import add_experts
from modeling_clip_moe import CLIPMoEModel
from modeling_clip_moe.experts import CLIPMoEExperts

STARTS = {
    "redrawn": {"stage": "lab.methods.expert_starts:RedrawnStage", "model": "sparse", "how": "random"},
    "more": {"stage": "lab.methods.more_experts:MoreExpertsStage", "model": "sparse", "num_experts": 8},
}
CLUSTERS = {"stage": "lab.methods.expert_starts:ClustersStage", "model": "sparse", "dense": "dense"}


@pytest.fixture(scope="module")
def dense():
    return tiny_clip()


def experts_of(dense, **how):
    sparse = upcycle(dense, PRESETS["clip_moe"], seed=1)
    if how:
        redraw(sparse, RedrawnStage(name="start", stage="here", model="sparse", **how), seed=1)
    return [module for module in sparse.modules() if isinstance(module, CLIPMoEExperts)]


@pytest.mark.parametrize("is_shared", [False, True], ids=["two encoders", "a shared one"])
@pytest.mark.parametrize("units", ["expert", "tensor"])
def test_half_of_the_hidden_units_are_drawn_anew(dense, units, is_shared):
    dense = moved(CLIPMoEModel(shared_config(dense.config)).eval(), ".mlp.", seed=1) if is_shared else dense
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


def test_random_weights_keep_nothing(dense):
    for random, before in zip(experts_of(dense, how="random"), experts_of(dense), strict=True):
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
    clusters = CLUSTERS | {"data": {"source": "symbols", "num_samples": 64}}
    all_energy, most = clusters | {"name": "all", "energy": 1.0}, clusters | {"name": "most", "energy": 0.9}
    narrow = {"name": "narrow", "model": "cut", "data": {"source": "symbols", "num_samples": 16}}
    cut = sparse | {"name": "cut", "changes": {"moe_intermediate_size": 16}}
    with pytest.raises(ValueError, match="narrow.model: clusters make whole FFNs"):
        run_stages(tmp_path, [DENSE, sparse, all_energy, most, cut, CLUSTERS | narrow])
    folder = tmp_path / "out"
    compare(load_dense(folder / "dense"), load_sparse(folder / "all"), tolerance=1e-4)
    mlp = load_sparse(folder / "most").vision_model.encoder.layers[1].mlp
    torch.testing.assert_close(mlp.router.weight.norm(dim=-1), torch.ones(2))
    ranks = [torch.linalg.matrix_rank(expert) for expert in mlp.experts.up_proj]
    assert max(ranks) < 16 and not torch.equal(*mlp.experts.up_proj)


def test_too_few_tokens_for_clusters(dense):
    sparse = upcycle(dense, PRESETS["clip_moe"])
    inputs = torch.randn(40, dense.config.text_config.hidden_size)
    for few, message in ((inputs, "cluster . of .* has .* tokens, fewer than the"), (inputs[:3], "3 tokens .* make 4")):
        with pytest.raises(ValueError, match=f"layer 1 of the text tower: .*{message}"):
            experts_of_clusters(sparse, {("text", 1): few}, 0.99, seed=0)


# --- more experts from fewer


def test_copies_and_their_rows(dense):
    sparse = moved(upcycle(dense, PRESETS["clip_moe"]), (".experts.", ".router."), seed=1)
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


def test_a_shared_encoder_has_the_same_copies_and_biases_keep_their_digits(dense):
    shared = CLIPMoEModel(shared_config(dense.config)).eval()
    routing = {f"{tower}_config": {"use_expert_bias": True} for tower in ("text", "vision")}
    sparse = upcycle(shared, PRESETS["clip_moe"], routing=routing).bfloat16()
    biases = torch.tensor([0.1234567, 0.3, 0.0, -0.7])
    for block in sparse_blocks(sparse).values():
        block.router.expert_bias.copy_(biases)
    more = add_experts(sparse, 6)
    blocks = [getattr(more, f"{tower}_model").encoder.layers[0].mlp for tower in ("text", "vision")]
    assert torch.equal(blocks[0].router.weight, blocks[1].router.weight) and more.dtype == torch.bfloat16
    assert torch.equal(blocks[0].router.expert_bias, biases[[0, 1, 2, 3, 0, 1]])


def test_more_experts_that_cannot_be(dense):
    sparse = upcycle(dense, PRESETS["clip_moe"])
    for number, message in ((4, "num_experts: 4 are no more than the 4"), (10**9, "choose a smaller num_experts")):
        with pytest.raises(ValueError, match=message):
            add_experts(sparse, number)
