"""Every family: a dense model becomes sparse, computes the same, is saved, loaded, trained, and made dense again."""

import logging

import pytest
import torch
from tiny_clip import moved
from tiny_families import tiny_dense
from transformers import AutoModel, MetaClip2Model, SiglipTextConfig

from conversion.average import average
from conversion.checkpoints import model_outputs, sample_inputs
from conversion.dense import extract
from conversion.families import FAMILIES
from conversion.presets import PRESETS
from conversion.unify import unify
from conversion.upcycle import upcycle

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)


def inputs_of(model):
    """Two texts and two images; where texts may be of any length, the first one is padded."""
    inputs = sample_inputs(model.config)
    if not hasattr(model, "logit_bias"):
        inputs["input_ids"][0, 5] = inputs["input_ids"][0, -1]
        inputs["attention_mask"] = (torch.arange(8) < torch.tensor([[6], [8]])).long()
    return inputs


def assert_same(outputs, expected):
    for name in ("text_embeds", "image_embeds", "logits_per_image", "logits_per_text"):
        torch.testing.assert_close(outputs[name], expected[name], atol=1e-6, rtol=1e-6)


@families
@pytest.mark.parametrize("preset", PRESETS)
@torch.no_grad()
def test_a_sparse_model_computes_what_the_dense_one_does_and_goes_back_to_it(family, preset, tmp_path):
    dense = tiny_dense(family)
    sparse = upcycle(dense, PRESETS[preset])
    for tower in (sparse.config.text_config, sparse.config.vision_config):
        tower.norm_topk_prob = True
    inputs = inputs_of(dense)
    assert_same(sparse(**inputs), dense(**inputs))
    sparse.save_pretrained(tmp_path / "sparse")
    loaded = AutoModel.from_pretrained(tmp_path / "sparse")
    assert type(loaded) is family.sparse
    assert_same(loaded(**inputs), sparse(**inputs))
    loaded.save_pretrained(tmp_path / "again")
    AutoModel.from_pretrained(tmp_path / "again").save_pretrained(tmp_path / "and again")
    for file in (tmp_path / "again").iterdir():
        assert file.read_bytes() == (tmp_path / "and again" / file.name).read_bytes(), file.name
    back = extract(sparse, 1)
    assert type(back) is family.dense
    torch.testing.assert_close(back.state_dict(), dense.state_dict(), atol=0, rtol=0)
    assert_same(back(**inputs), dense(**inputs))


@families
def test_towers_load_alone_and_dense_classes_refuse_the_folder(family, tmp_path):
    sparse = upcycle(tiny_dense(family), PRESETS["clip_moe"])
    sparse.save_pretrained(tmp_path / "sparse")
    for tower in (sparse.text_model, sparse.vision_model):
        alone = type(tower).from_pretrained(tmp_path / "sparse")
        alone.save_pretrained(tmp_path / tower.config.base_config_key)
        for loaded in (alone, AutoModel.from_pretrained(tmp_path / tower.config.base_config_key)):
            torch.testing.assert_close(loaded.state_dict(), tower.state_dict(), atol=0, rtol=0)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        family.dense.from_pretrained(tmp_path / "sparse")


@families
def test_router_losses_join_the_models_own_and_checkpointing_keeps_every_gradient(family):
    torch.manual_seed(0)
    sparse = moved(upcycle(tiny_dense(family), PRESETS["clip_moe"]), "experts", seed=1).train()
    inputs, gradients = inputs_of(sparse), []
    for checkpointing in (False, True):
        if checkpointing:
            sparse.gradient_checkpointing_enable({"use_reentrant": False})
        sparse.zero_grad()
        outputs = sparse(**inputs, return_loss=True, output_router_logits=True)
        outputs.loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in sparse.named_parameters()})
    assert len(outputs.text_router_logits) == len(outputs.vision_router_logits) == 4
    plain = sparse(**inputs, return_loss=True)
    assert plain.aux_loss is None
    torch.testing.assert_close(outputs.loss, plain.loss + outputs.aux_loss)
    torch.testing.assert_close(*gradients)


@families
@torch.no_grad()
def test_trained_ffns_become_experts_and_models_are_averaged(family, tmp_path):
    dense = tiny_dense(family)
    experts = [moved(tiny_dense(family), ".mlp.fc", seed) for seed in (1, 2)]
    for expert in experts:  # SigLIP's pooling has an FFN of that name, which is none of a layer
        for name, parameter in expert.named_parameters():
            if ".layers." not in name:
                parameter.copy_(dense.get_parameter(name))
    unified, inputs = unify(dense, experts), sample_inputs(dense.config)
    for number, model in enumerate((dense, *experts)):
        with unified.force_expert(number):
            torch.testing.assert_close(model_outputs(unified, inputs), model_outputs(model, inputs))
    for number, model in enumerate((dense, experts[0])):
        model.save_pretrained(tmp_path / str(number))
    mean = average([tmp_path / "0", tmp_path / "1"])
    name = "text_model.encoder.layers.0.mlp.fc1.weight"
    halves = (dense.get_parameter(name) + experts[0].get_parameter(name)) / 2
    torch.testing.assert_close(mean.get_parameter(name), halves)


@torch.no_grad()
def test_texts_of_siglip_that_are_not_padded_are_refused():
    sparse = upcycle(tiny_dense(FAMILIES[2]), PRESETS["clip_moe"])
    with pytest.raises(ValueError, match='have 5 tokens a text, but SigLIP needs 8: pass padding="max_length"'):
        sparse.get_text_features(torch.zeros(2, 5, dtype=torch.long))


@torch.no_grad()
def test_padding_among_patches_goes_to_no_expert():
    sparse = upcycle(tiny_dense(FAMILIES[3]), PRESETS["clip_moe"])
    inputs = sample_inputs(sparse.config)
    (ids, *_) = sparse(**inputs, output_expert_ids=True).vision_model_output.expert_ids
    assert ((ids == 4).all(-1) == (inputs["pixel_attention_mask"] == 0)).all()


@torch.no_grad()
def test_metaclip_2_pools_at_the_first_end_of_a_text():
    family = next(family for family in FAMILIES if family.dense is MetaClip2Model)
    dense = tiny_dense(family)
    sparse, ids = upcycle(dense, PRESETS["clip_moe"]), torch.tensor([[0, 39, 5, 2, 1, 1, 1, 2]])
    torch.testing.assert_close(sparse.encode_text(ids), dense.get_text_features(ids).pooler_output)
    assert sparse.text_model.pooled_positions(ids).item() == 3


def test_of_tokens_outside_of_the_vocabulary_transformers_warns_but_for_siglips_defaults():
    logger, records, handler = logging.getLogger("transformers.configuration_utils"), [], logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    try:
        logging.Logger.warning_once.cache_clear()
        SiglipTextConfig()
        SiglipTextConfig(vocab_size=40, bos_token_id=41, eos_token_id=2)
    finally:
        logger.removeHandler(handler)
    (message,) = [record.getMessage() for record in records]
    assert "bos_token_id must be" in message and "got 41" in message
