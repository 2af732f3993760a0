"""Stages that write a model: what upcycling may set, that every model loads, and experts that become dense models."""

import shutil

import pytest
from tiny_clip import change_weights
from tiny_runs import DENSE, SPARSE
from transformers import AutoModel

from clip_moe.conversion.stages.initialize import InitializeStage
from clip_moe.conversion.stages.upcycle import UpcycleStage
from clip_moe.conversion.upcycle import ROUTING_FIELDS, SPARSE_FIELDS
from clip_moe.conversion.verification import require_loadable


def test_all_of_routing_can_be_set(run):
    settings = {"attention_dropout": 0.1, "capacity_factor": 3.0, "capacity_group_size": 4, "num_experts_per_tok": 1}
    settings |= {"eval_capacity_factor": 2.0, "router_jitter_noise": 0.1}
    settings |= {"norm_before_capacity": True, "norm_topk_prob": True}
    settings |= {"scoring_func": "sigmoid", "use_expert_bias": True, "routed_scaling_factor": 2.5}
    structure = {"num_experts", "moe_layers", "moe_intermediate_size", "moe_mlp_bias", "num_shared_experts"}
    structure |= {"fusion_gate", "use_gated_mlp"}
    assert set(settings) == ROUTING_FIELDS == SPARSE_FIELDS - structure | {"attention_dropout"}
    output = run([DENSE, {**SPARSE, "vision_config": settings}])
    model = AutoModel.from_pretrained(output / "sparse")
    assert {name: getattr(model.config.vision_config, name) for name in settings} == settings
    assert model.config.text_config.num_experts_per_tok == 2


def test_what_a_stage_wrote_has_to_load(dense, tmp_path):
    require_loadable(dense)
    folder = shutil.copytree(dense, tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot load .*model"):
        require_loadable(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    require_loadable(folder)  # half a processor is no error: a source without one converts


@pytest.mark.parametrize("stage, name", [(InitializeStage, "dense"), (UpcycleStage, "sparse")])
def test_a_model_that_does_not_load_gets_no_name(run, tmp_path, monkeypatch, stage, name):
    write = stage.run

    def damage(stage, inputs, context, directory):
        write(stage, inputs, context, directory)
        change_weights(directory / "model.safetensors", lambda tensors: tensors.pop(min(tensors)))

    monkeypatch.setattr(stage, "run", damage)
    with pytest.raises(ValueError, match=f"{name}.partial does not .*[mM]issing"):
        run([DENSE, SPARSE])
    assert not (tmp_path / "out" / name).exists()
