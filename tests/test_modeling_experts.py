"""Experts: dense layers they stand for, one that is forced, the fusion gate, and the kernels that compute them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_clip import tiny_clip
from tiny_clip_moe import IMPLEMENTATIONS, SWIGLU, assert_same_gradients, inputs, tiny_block, tiny_model

import modeling_clip_moe.experts as modeling
from clip_moe.conversion.dense import force_expert
from modeling_clip_moe import CLIPMoEModel
from modeling_clip_moe.experts import CLIPMoEExperts


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, CLIPMoEExperts)]


def assert_same_embeds(outputs, expected):
    for field in ("image_embeds", "text_embeds"):
        torch.testing.assert_close(outputs[field], expected[field])


FORCED = [{}, {"num_experts_per_tok": 1, "eval_capacity_factor": 0.5}, {"fusion_gate": True}]


@pytest.mark.parametrize("fields", [*FORCED, *({"norm_topk_prob": False} | fields for fields in FORCED)], ids=str)
@torch.no_grad()
def test_a_forced_expert_computes_every_token(fields):
    """With the weight that a token's experts have together: as the routed model if all experts were that one."""
    model, batch = tiny_model(num_experts=3, **fields), inputs()
    routed, mask = model(**batch), batch["attention_mask"].bool()
    for expert in range(3):
        with force_expert(model, expert):
            forced = model(**batch, output_expert_ids=True)
        other = copy.deepcopy(model)
        other.config.text_config.eval_capacity_factor = other.config.vision_config.eval_capacity_factor = None
        for parameter in (weight for module in experts_of(other) for weight in module.parameters()):
            parameter.copy_(parameter[expert].expand_as(parameter).clone())
        assert_same_embeds(forced, other(**batch))
        for ids in forced.text_model_output.expert_ids:
            assert set(ids[mask].flatten().tolist()) == {expert} and set(ids[~mask].flatten().tolist()) <= {3}
    assert torch.equal(model(**batch).logits_per_image, routed.logits_per_image)
    assert not torch.allclose(forced.logits_per_image, routed.logits_per_image)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@torch.no_grad()
def test_a_forced_expert_takes_a_given_scale(norm_topk_prob):
    """One for each sparse layer, text tower first, does what it does in the expert's last layer."""
    model = tiny_model(num_experts=3, norm_topk_prob=norm_topk_prob)
    batch, scale, scaled = inputs(), [0.3, 0.5, 0.7, 1.2], copy.deepcopy(model)
    for module, layer_scale in zip(experts_of(scaled), scale, strict=True):
        module.down_proj[1] *= layer_scale
        module.down_proj_bias[1] *= layer_scale
    with force_expert(model, 1, scale), force_expert(scaled, 1, 1.0):
        forced = model(**batch)
        assert_same_embeds(forced, scaled(**batch))
    with force_expert(model.vision_model, 1, scale[2:]):
        assert torch.equal(model(**batch).image_embeds, forced.image_embeds)


def test_forcing_an_expert_ends_with_the_block_and_knows_its_number():
    model, batch = tiny_model(num_experts=3), inputs()
    routed = model(**batch).image_embeds
    for expert in (-1, 3):
        with pytest.raises(ValueError, match=f"no expert {expert}, only 0, 1, 2"), force_expert(model, expert):
            raise AssertionError
    with pytest.raises(KeyError), force_expert(model, 2):
        assert not torch.allclose(model(**batch).image_embeds, routed)
        raise KeyError
    assert torch.equal(model(**batch).image_embeds, routed)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"capacity_factor": 0.75},
        {"norm_topk_prob": False, "capacity_factor": 0.5},
        {"moe_intermediate_size": 9},
        {"use_gated_mlp": True, "capacity_factor": 0.75},
        {**SWIGLU, "moe_intermediate_size": 8},
        {**SWIGLU, "num_shared_experts": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("padded", [False, True])
def test_implementations_agree(fields, padded):
    tiny_clip()  # a dense model comes first
    model = tiny_model(**fields).train()
    batch = inputs(padded=padded)
    odd = fields.get("moe_intermediate_size") == 9
    models = {name: copy.deepcopy(model) for name in IMPLEMENTATIONS if not (odd and name == "grouped_mm")}
    outputs = {}
    for name, model in models.items():
        model.set_experts_implementation(name)
        assert model.vision_model.config._experts_implementation == name
        outputs[name] = model(**batch, return_loss=True, output_router_logits=True)
        outputs[name].loss.backward()
        torch.testing.assert_close(outputs[name].text_embeds, outputs["eager"].text_embeds)
        torch.testing.assert_close(outputs[name].loss, outputs["eager"].loss)
        assert_same_gradients(model, models["eager"], rtol=1e-4, atol=1e-4)


def test_the_experts_implementation_can_be_chosen(tmp_path):
    model = tiny_model()
    assert model.config._experts_implementation == "by_device"
    model.save_pretrained(tmp_path)
    for name in IMPLEMENTATIONS:
        loaded = CLIPMoEModel.from_pretrained(tmp_path, experts_implementation=name)
        assert loaded.text_model.encoder.layers[1].mlp.experts.config._experts_implementation == name
    with pytest.raises(ValueError, match="fastest"):
        model.set_experts_implementation("fastest")


@pytest.mark.parametrize("fields", [{}, SWIGLU], ids=["plain", "gated"])
def test_rows_that_no_product_computes_may_hold_anything(monkeypatch, fields):
    """As on a GPU, in values and in gradients."""
    block, grouped_mm = tiny_block(capacity_factor=0.75, **fields).train(), F.grouped_mm
    reference, hidden_states, mask = copy.deepcopy(block), torch.randn(4, 7, 16), torch.rand(4, 7) > 0.3

    def poisoned(rows, weight, offs):
        outputs = grouped_mm(rows, weight, offs=offs)
        if weight.ndim == 2:  # a gradient of weights
            return outputs
        return outputs.where((torch.arange(len(rows)) < offs[-1])[:, None], torch.nan)

    monkeypatch.setattr(modeling.F, "grouped_mm", poisoned)
    block.experts.config._experts_implementation = "grouped"
    outputs, inputs = [], [hidden_states.clone().requires_grad_() for _ in range(2)]
    for each, given in zip((block, reference), inputs, strict=True):
        outputs.append(each(given, mask))
        outputs[-1].square().sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    assert_same_gradients(block, reference)


@pytest.mark.parametrize(("trains", "products"), [("all", 6), ("inputs", 4), ("weights", 2)])
def test_frozen_experts_cost_no_products(monkeypatch, trains, products):
    """Two forward; backward one for each of the inputs and the activations, and two for the weights."""
    block, calls = tiny_block(), []
    experts, product = block.experts.requires_grad_(trains == "all"), F.grouped_mm
    experts.config._experts_implementation = "grouped"
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **options: calls.append(1) or product(*args, **options))
    inputs = torch.randn(7, 16, requires_grad=trains != "weights")
    weights = torch.rand(7, 2, requires_grad=True)
    experts(inputs, torch.randint(0, 4, (7, 2)), weights).square().sum().backward()
    assert len(calls) == products and weights.grad is not None


def test_an_activation_with_a_parameter_has_its_gradient():
    gradients = []
    for implementation in ("eager", "grouped"):
        torch.manual_seed(0)
        block = tiny_block(hidden_act="prelu")
        block.experts.config._experts_implementation = implementation
        block(torch.randn(2, 5, 16)).square().sum().backward()
        gradients.append(block.experts.act_fn.weight.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_without_tokens_there_are_gradients_but_no_outputs(name):
    block = tiny_block()
    block.experts.config._experts_implementation = name
    nothing = block.experts(torch.ones(0, 16), torch.ones(0, 2, dtype=torch.long), torch.ones(0, 2))
    assert nothing.shape == (0, 16)
    block(torch.randn(1, 3, 16), torch.zeros(1, 3)).sum().backward()  # all padding
    for parameter in block.parameters():
        assert parameter.grad is not None and (parameter.grad == 0).all()


MEASURED = {"frozen": None, "few": True, "dtype": torch.float32, "size": 16, "autocast": False}
# Where they have none: the last two are what grouped products refuse
OTHERS = [{"few": False}, {"frozen": "up_proj"}, {"autocast": True}, {"dtype": torch.float64}, {"size": 10}]


@pytest.mark.parametrize("changes", [{}, *OTHERS], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_experts_that_train_with_few_rows_have_grouped_products(monkeypatch, training, changes):
    frozen, few, dtype, size, autocast = (MEASURED | changes).values()
    called, forward = [], modeling.CLIPMoEExperts.forward
    loop = forward.__wrapped__
    monkeypatch.setattr(forward, "__wrapped__", lambda *args: called.append("loop") or loop(*args))
    experts = tiny_block(hidden_size=size).experts.to(dtype).train(training)
    experts.config._experts_implementation = "by_device"
    if frozen:
        getattr(experts, frozen).requires_grad_(False)
    tokens = modeling.FEW_ROWS * 4 // 2 - few
    choices = torch.rand(tokens, 4).topk(2)
    hidden_states = torch.randn(tokens, size, dtype=dtype)
    for gradients in (True, False):  # without them: the first pass of a batch in parts
        with torch.set_grad_enabled(gradients), torch.autocast("cpu", enabled=autocast):
            experts(hidden_states, choices.indices, choices.values)
    assert called == (["loop"] * 2 if changes or not training else [])
