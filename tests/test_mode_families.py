"""Mixtures of whole models of other families than CLIP."""

import pytest
import torch
from tiny_clip import error_of, moved
from tiny_families import saved, tiny_dense
from torch.nn.functional import logsigmoid

from conversion.checkpoints import load_config, load_mixture
from conversion.commands import assemble
from conversion.presets import PRESETS
from conversion.publishing.card import render
from conversion.publishing.lineage import Lineage
from conversion.upcycle import upcycle
from conversion.verification import sample_inputs
from modeling_clip_moe import CLIPMoDEModel
from modeling_clip_moe.families import FAMILIES


def two_experts(family):
    """A dense and a sparse one."""
    return tiny_dense(family), moved(upcycle(tiny_dense(family), PRESETS["clip_moe"]), "experts", seed=1)


@pytest.mark.parametrize("family", FAMILIES[1:3], ids=lambda family: family.model_type)
@torch.no_grad()
def test_a_mixture_scores_with_the_mean_of_its_experts(family, tmp_path):
    experts = two_experts(family)
    folders = [str(saved(family, expert, tmp_path / str(number))) for number, expert in enumerate(experts)]
    assemble.main([str(tmp_path / "mixture"), "--experts", *folders])
    inputs = sample_inputs(experts[0].config)
    outputs = load_mixture(tmp_path / "mixture")(**inputs, return_loss=True)
    logits = torch.stack([expert(**inputs).logits_per_text for expert in experts]).mean(dim=0)
    torch.testing.assert_close(outputs.logits_per_text, logits)
    card = str(render(load_config(tmp_path / "mixture"), Lineage(), "user/mixture", None, None, experts[0].config))
    assert f"A mixture of 2 {family.name}s" in card and ('padding="max_length"' in card) == family.sigmoid
    if family.sigmoid:  # each pair is a yes or a no
        pairs = [logsigmoid(logit if i == j else -logit) for i, row in enumerate(logits) for j, logit in enumerate(row)]
        torch.testing.assert_close(outputs.loss, -sum(pairs) / len(logits))


def test_experts_of_two_families_are_refused(tmp_path):
    clip, _, siglip, *_ = FAMILIES
    for family in (clip, siglip):
        saved(family, tiny_dense(family), tmp_path / family.model_type)
    error = error_of(assemble.main, tmp_path / "mixture", "--experts", tmp_path / "clip", tmp_path / "siglip")
    assert "siglip is a SigLIP, but" in error and "experts of a mixture are of one family" in error
    with pytest.raises(ValueError, match="all data experts must be of one family"):
        CLIPMoDEModel.from_experts([tiny_dense(clip), tiny_dense(siglip)])


def test_texts_that_are_not_padded_are_refused():
    mixture, ids = CLIPMoDEModel.from_experts(two_experts(FAMILIES[2])), torch.zeros(2, 5, dtype=torch.long)
    for call in (mixture.get_text_features, lambda ids: mixture(ids, torch.zeros(2, 3, 16, 16))):
        with pytest.raises(ValueError, match="have 5 tokens a text, but SigLIP needs 8"):
            call(ids)
