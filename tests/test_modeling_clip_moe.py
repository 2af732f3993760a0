"""Router, losses, capacity, experts and models, each against an obvious computation; loading against its traps."""

import copy
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForZeroShotImageClassification,
    CLIPConfig,
    CLIPModel,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    PreTrainedModel,
)
from transformers.integrations import moe as transformers_moe
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import modeling_clip_moe.modeling_clip_moe as modeling
from modeling_clip_moe import (
    CLIPMoEConfig,
    CLIPMoEForImageClassification,
    CLIPMoEModel,
    CLIPMoETextModel,
    CLIPMoETextModelWithProjection,
    CLIPMoEVisionConfig,
    CLIPMoEVisionModel,
    CLIPMoEVisionModelWithProjection,
    expert_capacity_mask,
    global_entropy_loss,
    load_balancing_loss,
    local_entropy_loss,
    router_z_loss,
)
from modeling_clip_moe.modeling_clip_moe import CLIPMoEExperts, CLIPMoERouter, CLIPMoESparseMoeBlock

# `gradient_checkpointing_enable` is the only name that transformers 5.17 knows
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

EOS, PAD = 49, 0
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm", "by_device")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def tower_fields(**moe):
    return {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, **moe}


def tiny_config(moe_layers=(1, 2), *, text=None, vision=None, **moe):
    moe = {"num_experts": 4, "moe_layers": list(moe_layers), **moe}
    text_config = {
        **tower_fields(**moe),
        "vocab_size": 50,
        "max_position_embeddings": 12,
        "projection_dim": 8,
        "pad_token_id": PAD,
        "bos_token_id": 48,
        "eos_token_id": EOS,
        **(text or {}),
    }
    vision_config = {**tower_fields(**moe), "image_size": 16, "patch_size": 8, "projection_dim": 8, **(vision or {})}
    return CLIPMoEConfig(text_config=text_config, vision_config=vision_config, projection_dim=8)


def tiny_model(*args, std=0.3, **moe):
    """A model with weights large enough for experts and routers to matter."""
    model = CLIPMoEModel(tiny_config(*args, **moe))
    for name, parameter in model.named_parameters():
        if "mlp" in name:
            nn.init.normal_(parameter, std=std)
    return model.eval()


def tiny_block(std=0.3, **fields):
    config = CLIPMoEVisionConfig(**tower_fields(num_experts=4, **fields))
    config.moe_layers = [1]
    config._experts_implementation = "eager"
    block = CLIPMoESparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=std)
    return block


def inputs(batch_size=4, padded=True):
    """Captions of random lengths, padded to 10 tokens, and images."""
    input_ids = torch.randint(1, 48, (batch_size, 10))
    lengths = torch.randint(3, 11, (batch_size,)) if padded else torch.full((batch_size,), 10)
    positions = torch.arange(10)
    input_ids[positions == lengths[:, None] - 1] = EOS
    input_ids[positions >= lengths[:, None]] = PAD
    attention_mask = (positions < lengths[:, None]).long()
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "pixel_values": torch.randn(batch_size, 3, 16, 16),
    }


def gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same_gradients(actual, expected, **tolerance):
    actual, expected = gradients(actual), gradients(expected)
    assert any(gradient is not None and gradient.abs().max() > 1e-4 for gradient in expected.values())
    torch.testing.assert_close(actual, expected, **tolerance)


# ---------------------------------------------------------------------------------------------------------- losses

# Probabilities of three tokens over two experts: 0.8 / 0.2, 0.6 / 0.4, 0.5+ / 0.5-
TWO_EXPERTS = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9]]).log()


def test_load_balancing_loss_by_hand():
    # argmax: experts 0, 0, 1, so R = 2 * [2/3, 1/3]; P = [0.5, 0.5]
    torch.testing.assert_close(load_balancing_loss((TWO_EXPERTS,), top_k=1), torch.tensor(1.0))
    # of the first two tokens: R = 2 * [1, 0], P = [0.7, 0.3]
    mask = torch.tensor([1, 1, 0])
    torch.testing.assert_close(load_balancing_loss((TWO_EXPERTS,), top_k=1, mask=mask), torch.tensor(1.4))
    # both choices count: R = [1, 1] whatever the router says
    torch.testing.assert_close(load_balancing_loss((TWO_EXPERTS,), top_k=2, mask=mask), torch.tensor(1.0))


def test_load_balancing_loss_over_layers_by_hand():
    # First layer as above on two tokens: 1.4. Second layer: R = 2 * [0, 1], P = [0.2, 0.8]: 1.6
    logits = (TWO_EXPERTS[:2], torch.tensor([[0.1, 0.9], [0.3, 0.7]]).log())
    torch.testing.assert_close(load_balancing_loss(logits, top_k=1), torch.tensor((1.4 + 1.6) / 2))
    # Four tokens together: R = 2 * [1/2, 1/2], P = [0.45, 0.55]
    torch.testing.assert_close(load_balancing_loss((torch.cat(logits),), top_k=1), torch.tensor(1.0))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_load_balancing_loss_is_1_at_balance_where_that_of_transformers_is_k(top_k):
    # Each expert is once the first choice, once the second, ...
    logits = torch.stack([torch.arange(4.0).roll(shift) for shift in range(4)])
    torch.testing.assert_close(load_balancing_loss((logits, logits), top_k), torch.tensor(1.0))
    theirs = load_balancing_loss_func((logits, logits), num_experts=4, top_k=top_k)
    torch.testing.assert_close(theirs, torch.tensor(float(top_k)))


def test_router_z_loss_by_hand():
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0], [50.0, 50.0]])
    mask = torch.tensor([True, True, False])
    expected = (math.log(2) ** 2 + math.log(4) ** 2) / 2
    torch.testing.assert_close(router_z_loss((logits,), mask), torch.tensor(expected))


def test_entropy_losses_by_hand():
    probabilities = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    logits, mask = (probabilities.log(),), torch.tensor([1, 1, 0])
    torch.testing.assert_close(local_entropy_loss(logits, mask), torch.tensor(math.log(2) / 2))
    # Mean of the first two: 1/4, 1/4, 0, 1/2, of entropy 1.5 log 2
    torch.testing.assert_close(global_entropy_loss(logits, 4, mask), torch.tensor(0.5 * math.log(2)))
    assert global_entropy_loss(logits, 2, mask) == 0


@pytest.mark.parametrize(
    "loss",
    [
        lambda *args, **kwargs: load_balancing_loss(*args, top_k=2, **kwargs),
        lambda *args, **kwargs: load_balancing_loss(*args, top_k=1, **kwargs),
        router_z_loss,
        local_entropy_loss,
        lambda *args, **kwargs: global_entropy_loss(*args, min_experts=4, **kwargs),
    ],
)
def test_losses_of_two_processes_are_those_of_all_tokens(loss):
    logits = torch.randn(2, 6, 5, 4, requires_grad=True)  # (layers, B, S, E)
    mask = torch.rand(6, 5) > 0.3
    whole = loss(tuple(logits), mask=mask)
    whole.backward()

    # Each "process" sees two or four sequences; `reduce` adds what the other one has
    sums = {}
    parts = {"first": slice(0, 2), "second": slice(2, 6)}

    def collect(part):
        def reduce(vector):
            sums[part] = vector
            return vector

        return reduce

    split = logits.detach().clone().requires_grad_()
    for part, rows in parts.items():
        loss(tuple(split[:, rows]), mask=mask[rows], reduce=collect(part))
    for part, other in (("first", "second"), ("second", "first")):
        rows = parts[part]
        value = loss(tuple(split[:, rows]), mask=mask[rows], reduce=lambda vector, other=other: vector + sums[other])
        torch.testing.assert_close(value, whole)
    value.backward()
    torch.testing.assert_close(split.grad, logits.grad)


# ---------------------------------------------------------------------------------------------------------- router


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_router_by_hand(norm_topk_prob):
    config = CLIPMoEVisionConfig(num_experts=3, hidden_size=2, num_attention_heads=1, norm_topk_prob=norm_topk_prob)
    router = CLIPMoERouter(config)
    router.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    logits, weights, ids = router(torch.tensor([[[1.0, 2.0]]]))
    torch.testing.assert_close(logits, torch.tensor([[[1.0, 2.0, 3.0]]]))
    total = math.exp(1) + math.exp(2) + math.exp(3)
    expected = [math.exp(3) / total, math.exp(2) / total]
    if norm_topk_prob:
        expected = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))]
    assert ids.tolist() == [[[2, 1]]]
    torch.testing.assert_close(weights, torch.tensor([[expected]]))


def test_seeded_jitter_is_the_same_in_two_processes():
    """Two halves of a batch, the second with shorter padding, route as the whole does; each group has its own noise."""
    block = tiny_block(router_jitter_noise=0.5, capacity_group_size=2, max_position_embeddings=9).train()
    torch.manual_seed(0)
    hidden_states = torch.randn(8, 9, block.router.config.hidden_size)

    def logits(rows, process_index=0):
        block.router.noise_seed, block.router.process_index = 7, process_index
        return block.router(rows)[0]

    whole = logits(hidden_states)
    torch.testing.assert_close(logits(hidden_states[:4]), whole[:4])
    torch.testing.assert_close(logits(hidden_states[4:, :5], process_index=1), whole[4:, :5])
    same = logits(hidden_states[:2].repeat(4, 1, 1))
    assert not torch.equal(same[:2], same[2:4])
    assert torch.equal(whole, logits(hidden_states))
    block.router.noise_seed = 8
    assert not torch.equal(whole, block.router(hidden_states)[0])
    with pytest.raises(ValueError, match="capacity_group_size=2 does not divide the batch of 3 sequences"):
        logits(hidden_states[:3], process_index=1)  # whose groups would not be those of one process


def test_jitter_is_for_the_router_in_training_alone():
    block = tiny_block(router_jitter_noise=0.5)
    hidden_states = torch.randn(2, 5, 16)
    before = hidden_states.clone()
    clean = block.eval().router(hidden_states)[0]
    torch.testing.assert_close(block.router(hidden_states)[0], clean)
    noisy = block.train().router(hidden_states)[0]
    assert (noisy - clean).abs().max() > 0.1
    torch.testing.assert_close(hidden_states, before, rtol=0, atol=0)
    torch.manual_seed(3)
    first = block.router(hidden_states)[0]
    torch.manual_seed(3)
    torch.testing.assert_close(block.router(hidden_states)[0], first, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_router_computes_in_float32(dtype):
    block = tiny_block()
    hidden_states = torch.randn(2, 5, 16).to(dtype)
    expected = F.linear(hidden_states.float(), block.router.weight.to(dtype).float())
    torch.testing.assert_close(block.to(dtype).router(hidden_states)[0], expected)
    block.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, weights, _ = block.router(hidden_states)
    assert logits.dtype == weights.dtype == torch.float32
    torch.testing.assert_close(logits, F.linear(hidden_states.float(), block.router.weight))


# -------------------------------------------------------------------------------------------------------- capacity


def plain_block(block, hidden_states, mask, capacity_factor, group_size):
    """The sparse block as a loop over tokens, and its number of dropped choices."""
    config, experts = block.router.config, block.experts
    probabilities = (hidden_states @ block.router.weight.T).softmax(dim=-1)
    output, num_dropped = torch.zeros_like(hidden_states), 0
    for start in range(0, len(hidden_states), group_size):
        tokens = [(b, s) for b in range(start, start + group_size) for s in range(mask.shape[1]) if mask[b, s]]
        capacity = math.inf
        if capacity_factor is not None:
            capacity = math.ceil(len(tokens) * capacity_factor / config.num_experts)
        load, kept = [0] * config.num_experts, {token: [] for token in tokens}
        for choice in range(config.num_experts_per_tok):
            for token in tokens:
                expert = probabilities[token].argsort(descending=True)[choice].item()
                if load[expert] < capacity:
                    load[expert] += 1
                    kept[token].append(expert)
                else:
                    num_dropped += 1
        for token, chosen in kept.items():
            total = sum(probabilities[token][expert] for expert in chosen) if config.norm_topk_prob else 1
            for expert in chosen:
                hidden = experts.up_proj[expert] @ hidden_states[token] + experts.up_proj_bias[expert]
                hidden = experts.down_proj[expert] @ experts.act_fn(hidden) + experts.down_proj_bias[expert]
                output[token] = output[token] + probabilities[token][expert] / total * hidden
    return output, num_dropped


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize(("capacity_factor", "group_size"), [(None, 6), (0.75, 6), (1.25, 2), (2, 3), (1.5, 1)])
def test_block_equals_a_loop_over_tokens(capacity_factor, group_size, norm_topk_prob, padded):
    block = tiny_block(
        norm_topk_prob=norm_topk_prob, capacity_factor=capacity_factor, capacity_group_size=group_size
    ).train()
    mask = torch.rand(6, 7) > 0.3 if padded else torch.ones(6, 7, dtype=torch.bool)
    hidden_states = torch.randn(6, 7, 16, requires_grad=True)
    expected, num_dropped = plain_block(block, hidden_states, mask, capacity_factor, group_size)
    assert (num_dropped > 0) == (capacity_factor is not None)
    direction = torch.randn_like(expected)
    (expected_gradient,) = torch.autograd.grad((expected * direction).sum(), hidden_states, retain_graph=True)
    (expected * direction).sum().backward()
    reference = copy.deepcopy(block)
    for parameter, original in zip(reference.parameters(), block.parameters(), strict=True):
        parameter.grad, original.grad = original.grad, None
    hidden_states.grad = None

    actual = block(hidden_states, mask if padded else None)
    torch.testing.assert_close(actual, expected)
    (actual * direction).sum().backward()
    torch.testing.assert_close(hidden_states.grad, expected_gradient)
    assert_same_gradients(block, reference)

    _, weights, ids = block.router(hidden_states, mask)
    assert ((ids == 4) & mask[..., None]).sum() == num_dropped  # how dropped choices are counted
    assert (weights[ids == 4] == 0).all()


def test_capacity_serves_first_choices_before_second_ones():
    # Expert 0 is the second choice of token 0 and the first of tokens 1 and 2; two fit
    top_k_index = torch.tensor([[[1, 0], [0, 1], [0, 2]]])
    kept = expert_capacity_mask(top_k_index, num_experts=3, capacity_factor=2)
    assert kept.tolist() == [[[True, False], [True, True], [True, True]]]
    # Without token 1, ceil(2 / 3 * 1) = 1 fits: its place is free for token 2, and it has none itself
    mask = torch.tensor([[1, 0, 1]])
    kept = expert_capacity_mask(top_k_index, num_experts=3, capacity_factor=1, mask=mask)
    assert kept.tolist() == [[[True, False], [False, False], [True, True]]]


def test_capacity_of_perfect_balance_drops_nothing():
    top_k_index = torch.stack([torch.arange(8), torch.arange(8).roll(1)], dim=-1).repeat(3, 1, 1)
    assert expert_capacity_mask(top_k_index, num_experts=8, capacity_factor=2.0).all()


def test_capacity_is_for_training_and_its_evaluation_factor_for_evaluation():
    hidden_states = torch.randn(4, 7, 16)
    block = tiny_block(capacity_factor=0.5)
    assert (block.train().router(hidden_states)[2] == 4).any()
    assert not (block.eval().router(hidden_states)[2] == 4).any()
    block = tiny_block(eval_capacity_factor=0.5)
    assert not (block.train().router(hidden_states)[2] == 4).any()
    assert (block.eval().router(hidden_states)[2] == 4).any()


def test_groups_make_capacity_independent_of_the_batch():
    block = tiny_block(capacity_factor=0.75, capacity_group_size=2).train()
    hidden_states, mask = torch.randn(8, 7, 16), torch.rand(8, 7) > 0.3
    whole = block(hidden_states, mask)
    for size in (2, 4):
        parts = [block(hidden_states[i : i + size], mask[i : i + size]) for i in range(0, 8, size)]
        torch.testing.assert_close(torch.cat(parts), whole)
    block.router.config.capacity_group_size = None
    assert (block(hidden_states, mask) - whole).abs().max() > 1e-3


def test_group_size_that_does_not_divide_the_batch_is_refused():
    block = tiny_block(capacity_factor=1, capacity_group_size=3).train()
    with pytest.raises(ValueError, match="capacity_group_size=3 does not divide the batch of 4"):
        block(torch.randn(4, 7, 16))
    block.eval()(torch.randn(4, 7, 16))  # no capacity, no groups


# --------------------------------------------------------------------------------------------------------- experts


def stack_dense(block, dense_layers):
    """Copies CLIP's FFNs into the experts of a block."""
    for expert, dense in enumerate(dense_layers):
        block.experts.up_proj.data[expert] = dense.fc1.weight
        block.experts.up_proj_bias.data[expert] = dense.fc1.bias
        block.experts.down_proj.data[expert] = dense.fc2.weight
        block.experts.down_proj_bias.data[expert] = dense.fc2.bias


def dense_layers(block, number):
    layers = [CLIPMLP(block.router.config) for _ in range(number)]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3)
    return layers


def test_one_expert_is_the_dense_layer():
    config = CLIPMoEVisionConfig(**tower_fields(num_experts=1, num_experts_per_tok=1))
    config._experts_implementation = "eager"
    block = CLIPMoESparseMoeBlock(config)
    nn.init.normal_(block.router.weight)
    (dense,) = dense_layers(block, 1)
    stack_dense(block, [dense])
    hidden_states = torch.randn(2, 5, 16)
    expected = dense(hidden_states)
    actual = block(hidden_states)
    torch.testing.assert_close(actual, expected)
    expected.square().sum().backward()
    actual.square().sum().backward()
    assert dense.fc1.weight.grad.abs().max() > 1e-3
    torch.testing.assert_close(block.experts.up_proj.grad[0], dense.fc1.weight.grad)
    torch.testing.assert_close(block.experts.up_proj_bias.grad[0], dense.fc1.bias.grad)
    torch.testing.assert_close(block.experts.down_proj.grad[0], dense.fc2.weight.grad)
    torch.testing.assert_close(block.experts.down_proj_bias.grad[0], dense.fc2.bias.grad)


def test_equal_experts_with_normalized_weights_are_the_dense_layer():
    block = tiny_block()
    (dense,) = dense_layers(block, 1)
    stack_dense(block, [dense] * 4)
    hidden_states = torch.randn(2, 5, 16)
    torch.testing.assert_close(block(hidden_states), dense(hidden_states))


def test_all_experts_chosen_are_the_weighted_sum_of_dense_layers():
    block = tiny_block(num_experts_per_tok=4, norm_topk_prob=False)
    layers = dense_layers(block, 4)
    stack_dense(block, layers)
    hidden_states = torch.randn(2, 5, 16)
    weights = F.linear(hidden_states, block.router.weight).softmax(dim=-1)
    expected = sum(weights[..., [expert]] * layer(hidden_states) for expert, layer in enumerate(layers))
    torch.testing.assert_close(block(hidden_states), expected)


UNNORMALIZED = {"norm_topk_prob": False}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"eval_capacity_factor": 0.5},
        {"fusion_gate": True},
        UNNORMALIZED,
        UNNORMALIZED | {"num_experts_per_tok": 1, "eval_capacity_factor": 0.5},
        UNNORMALIZED | {"fusion_gate": True},
    ],
)
def test_a_forced_expert_computes_every_token(fields):
    """With the weight that a token's experts have together: as the routed model if all experts were that one."""
    model = tiny_model(num_experts=3, **fields).eval()
    batch = inputs()
    with torch.no_grad():
        routed = model(**batch)
        for expert in range(3):
            with model.force_expert(expert):
                forced = model(**batch, output_expert_ids=True)
            other = copy.deepcopy(model)
            for config in (other.config.text_config, other.config.vision_config):
                config.eval_capacity_factor = None
            for module in other.modules():
                if isinstance(module, CLIPMoEExperts):  # all experts are that one
                    for parameter in module.parameters():
                        parameter.copy_(parameter[expert].expand_as(parameter).clone())
            expected = other(**batch)
            torch.testing.assert_close(forced.image_embeds, expected.image_embeds)
            torch.testing.assert_close(forced.text_embeds, expected.text_embeds)
            mask = batch["attention_mask"].bool()
            for ids in forced.text_model_output.expert_ids:
                assert set(ids[mask].flatten().tolist()) == {expert} and set(ids[~mask].flatten().tolist()) <= {3}
        after = model(**batch)
    assert torch.equal(after.logits_per_image, routed.logits_per_image)
    assert not torch.allclose(forced.logits_per_image, routed.logits_per_image)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_a_forced_expert_takes_a_given_scale(norm_topk_prob):
    """One for each sparse layer, text tower first, does what it does in the expert's last layer."""
    model = tiny_model(num_experts=3, norm_topk_prob=norm_topk_prob)
    batch, scale = inputs(), [0.3, 0.5, 0.7, 1.2]
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        experts = [module for module in scaled.modules() if isinstance(module, CLIPMoEExperts)]
        for module, of_layer in zip(experts, scale, strict=True):
            module.down_proj[1] *= of_layer
            module.down_proj_bias[1] *= of_layer
        with model.force_expert(1, scale), scaled.force_expert(1, 1.0):
            forced, expected = model(**batch), scaled(**batch)
        for field in ("image_embeds", "text_embeds"):
            torch.testing.assert_close(forced[field], expected[field])
        with model.vision_model.force_expert(1, scale[2:]):
            assert torch.equal(model(**batch).image_embeds, forced.image_embeds)
    with pytest.raises(ValueError, match="scale has 3 numbers, but the model has 4 sparse layers"):
        with model.force_expert(1, scale[:3]):
            pass


def test_forcing_an_expert_ends_with_the_block_and_knows_its_number():
    model = tiny_model(num_experts=3)
    for expert in (-1, 3):
        with pytest.raises(ValueError, match=f"expert={expert}, but the model has experts 0 to 2"):
            with model.force_expert(expert):
                pass
    with pytest.raises(ValueError, match="expert=0, but the model has no sparse layer"):
        with tiny_model(moe_layers=()).force_expert(0):
            pass
    with pytest.raises(KeyError), model.force_expert(2):
        with model.vision_model.force_expert(1):
            raise KeyError
    routers = [module for module in model.modules() if isinstance(module, CLIPMoERouter)]
    assert {(router.forced_expert, router.forced_scale) for router in routers} == {(None, None)}


def test_fusion_gate_mixes_base_and_experts():
    block = tiny_block(moe_layers=[1], fusion_gate=True)
    hidden_states, mask = torch.randn(2, 5, 16), torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    gate = F.linear(hidden_states, block.fusion_gate.proj.weight, block.fusion_gate.proj.bias).sigmoid()
    moe, _ = plain_block(block, hidden_states, mask, None, 2)
    torch.testing.assert_close(block(hidden_states, mask), gate * block.base(hidden_states) + (1 - gate) * moe)


@pytest.mark.parametrize("fields", [{}, {"capacity_factor": 0.75}, {"norm_topk_prob": False, "capacity_factor": 0.5}])
@pytest.mark.parametrize("padded", [False, True])
def test_implementations_agree(fields, padded):
    CLIPModel(CLIPConfig(text_config=tower_fields(), vision_config=tower_fields()))  # a dense model comes first
    model = tiny_model(**fields).train()
    batch = inputs(padded=padded)
    outputs, models = {}, {}
    for name in IMPLEMENTATIONS:
        models[name] = copy.deepcopy(model)
        models[name].set_experts_implementation(name)
        assert models[name].vision_model.config._experts_implementation == name
        outputs[name] = models[name](**batch, return_loss=True, output_router_logits=True)
        outputs[name].loss.backward()
    for name in IMPLEMENTATIONS[1:]:
        torch.testing.assert_close(outputs[name].text_embeds, outputs["eager"].text_embeds)
        torch.testing.assert_close(outputs[name].loss, outputs["eager"].loss)
        assert_same_gradients(models[name], models["eager"], rtol=1e-4, atol=1e-4)


def test_the_experts_implementation_can_be_chosen(tmp_path):
    model = tiny_model()
    assert model.config._experts_implementation == "by_device"
    model.save_pretrained(tmp_path)
    for name in IMPLEMENTATIONS:
        loaded = CLIPMoEModel.from_pretrained(tmp_path, experts_implementation=name)
        assert loaded.text_model.encoder.layers[1].mlp.experts.config._experts_implementation == name
    with pytest.raises(ValueError, match="fastest"):
        model.set_experts_implementation("fastest")


def test_dropped_choices_and_padding_cost_no_expert_compute(monkeypatch):
    rows = {"eager": 0, "grouped_mm": 0}
    block = tiny_block(capacity_factor=0.75).train()
    hidden_states, mask = torch.randn(4, 7, 16), torch.rand(4, 7) > 0.3
    num_kept = (block.router(hidden_states, mask)[2] < 4).sum().item()
    assert num_kept < mask.sum() * 2

    linear = F.linear

    def counting_linear(input, weight, bias=None):
        if weight.shape == (24, 16):  # an expert's up projection
            rows["eager"] += len(input)
        return linear(input, weight, bias)

    grouped_mm = transformers_moe._grouped_mm

    def counting_grouped_mm(input, weight, offs):
        if weight.shape[-1] == 24:
            rows["grouped_mm"] += offs[-1].item()
        return grouped_mm(input, weight, offs)

    monkeypatch.setattr(modeling.F, "linear", counting_linear)
    monkeypatch.setattr(transformers_moe, "_grouped_mm", counting_grouped_mm)
    for name in rows:
        block.experts.config._experts_implementation = name
        block(hidden_states, mask)
    assert rows == {"eager": num_kept, "grouped_mm": num_kept}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_expert_has_a_gradient_even_without_tokens(name):
    block = tiny_block()
    block.experts.config._experts_implementation = name
    hidden_states = torch.randn(1, 3, 16)
    block(hidden_states, torch.zeros(1, 3)).sum().backward()  # all padding
    for parameter in block.parameters():
        assert parameter.grad is not None and (parameter.grad == 0).all()


# ---------------------------------------------------------------------------------------------------------- models


def test_dense_model_is_clip():
    config = tiny_config(moe_layers=())
    fields = config.to_dict()
    for tower in (fields["text_config"], fields["vision_config"]):
        tower.pop("model_type"), tower.pop("auto_map")
    stock = CLIPModel(
        CLIPConfig(text_config=fields["text_config"], vision_config=fields["vision_config"], projection_dim=8)
    ).eval()
    model = CLIPMoEModel(config).eval()
    weights = stock.state_dict()
    weights["logit_scale"] = weights["logit_scale"].view(1)
    model.load_state_dict(weights)
    batch = inputs()
    with torch.no_grad():
        expected = stock(**batch, return_loss=True, output_hidden_states=True, output_attentions=True)
        actual = model(**batch, return_loss=True, output_hidden_states=True, output_attentions=True)
    for name in ("loss", "logits_per_image", "logits_per_text", "text_embeds", "image_embeds"):
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0)
    for tower in ("text_model_output", "vision_model_output"):
        for name in ("last_hidden_state", "pooler_output", "hidden_states", "attentions"):
            torch.testing.assert_close(actual[tower][name], expected[tower][name], rtol=0, atol=0)


def test_initialization_is_that_of_clip():
    fields = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = CLIPMoEModel(CLIPMoEConfig(text_config={**fields, "moe_layers": [1]}, vision_config=fields))
    stock = CLIPModel(CLIPConfig(text_config=fields, vision_config=fields))
    for name, expected in stock.named_parameters():
        if not name.startswith("text_model.encoder.layers.1.mlp") and name != "logit_scale":
            actual = model.get_parameter(name)
            if name.endswith("bias") or "norm" in name:
                torch.testing.assert_close(actual, expected, rtol=0, atol=0)
            else:
                assert actual.std().item() == pytest.approx(expected.std().item(), rel=0.4)
    layers = model.text_model.encoder.layers
    dense, experts = layers[0].mlp, layers[1].mlp.experts
    assert experts.up_proj.std().item() == pytest.approx(dense.fc1.weight.std().item(), rel=0.05)
    assert experts.down_proj.std().item() == pytest.approx(dense.fc2.weight.std().item(), rel=0.05)
    assert (experts.up_proj_bias == 0).all() and (experts.down_proj_bias == 0).all()
    assert layers[1].mlp.router.weight.std().item() == pytest.approx(64**-0.5, rel=0.2)
    assert model.logit_scale.shape == (1,) and model.logit_scale.item() == pytest.approx(2.6592)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_outputs():
    model, batch = tiny_model(), inputs()
    output = model(**batch, return_loss=True, output_router_logits=True, output_expert_ids=True)
    assert list(output.keys()) == [
        "loss",
        "logits_per_image",
        "logits_per_text",
        "text_embeds",
        "image_embeds",
        "text_model_output",
        "vision_model_output",
        "aux_loss",
        "text_router_logits",
        "vision_router_logits",
    ]
    assert [logits.shape for logits in output.text_router_logits] == [(4, 10, 4)] * 2
    assert [logits.shape for logits in output.vision_router_logits] == [(4, 5, 4)] * 2
    assert [ids.shape for ids in output.text_model_output.expert_ids] == [(4, 10, 2)] * 2
    padding = batch["attention_mask"] == 0
    assert padding.any()
    for ids in output.text_model_output.expert_ids:
        torch.testing.assert_close((ids == 4).all(dim=-1), padding)
        torch.testing.assert_close((ids == 4).any(dim=-1), padding)

    quiet = model(**batch, return_loss=True)
    assert list(quiet.keys()) == list(output.keys())[:7]
    assert quiet.vision_model_output.router_logits is None


def test_aux_loss_is_the_weighted_sum_over_towers():
    model, batch = tiny_model(), inputs()
    model.config.router_aux_loss_coef, model.config.router_z_loss_coef = 0.3, 0.02
    output = model(**batch, return_loss=True, output_router_logits=True)
    mask = batch["attention_mask"]
    expected = 0.3 * (
        load_balancing_loss(output.text_router_logits, 2, mask) + load_balancing_loss(output.vision_router_logits, 2)
    ) + 0.02 * (router_z_loss(output.text_router_logits, mask) + router_z_loss(output.vision_router_logits))
    torch.testing.assert_close(output.aux_loss, expected)
    torch.testing.assert_close(output.loss, model(**batch, return_loss=True).loss + expected)

    model.config.output_router_logits = True
    torch.testing.assert_close(model(**batch, return_loss=True).loss, output.loss)


def test_aux_loss_reaches_the_routers_and_what_comes_before():
    model = tiny_model()
    model(**inputs(), output_router_logits=True).aux_loss.backward()
    for tower in (model.text_model, model.vision_model):
        assert tower.encoder.layers[2].mlp.router.weight.grad.abs().max() > 1e-5
        assert tower.encoder.layers[1].mlp.experts.up_proj.grad.abs().max() > 1e-8


def test_router_outputs_of_dense_towers_are_none():
    model = tiny_model(text={"moe_layers": []})
    output = model(**inputs(), return_loss=True, output_router_logits=True)
    assert output.text_router_logits is None
    torch.testing.assert_close(output.aux_loss, 0.01 * load_balancing_loss(output.vision_router_logits, 2))
    output = tiny_model(moe_layers=())(**inputs(), return_loss=True, output_router_logits=True)
    assert output.aux_loss is None and output.vision_router_logits is None and output.loss.isfinite()


def test_features_and_embeddings():
    model, batch = tiny_model(), inputs()
    text = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    text_features, image_features = model.get_text_features(**text), model.get_image_features(batch["pixel_values"])
    assert isinstance(text_features, BaseModelOutputWithPooling)
    assert isinstance(image_features, BaseModelOutputWithPooling)
    torch.testing.assert_close(model.encode_text(**text), text_features.pooler_output, rtol=0, atol=0)
    torch.testing.assert_close(model.encode_image(batch["pixel_values"]), image_features.pooler_output, rtol=0, atol=0)
    output = model(**batch)
    torch.testing.assert_close(F.normalize(model.encode_text(**text)), output.text_embeds)
    torch.testing.assert_close(F.normalize(model.encode_image(batch["pixel_values"])), output.image_embeds)
    as_tuple = model(**batch, return_dict=False)
    torch.testing.assert_close(as_tuple[0], output.logits_per_image, rtol=0, atol=0)


def test_padding_does_not_change_an_embedding():
    model = tiny_model()
    short = {"input_ids": torch.tensor([[48, 5, 7, EOS]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    expected = model.encode_text(**short)
    for padding in (PAD, 17):
        input_ids = F.pad(short["input_ids"], (0, 6), value=padding).repeat(3, 1)
        input_ids[1:, 1] = torch.tensor([9, 11])
        attention_mask = F.pad(short["attention_mask"], (0, 6)).repeat(3, 1)
        torch.testing.assert_close(model.encode_text(input_ids, attention_mask)[:1], expected)


def test_legacy_end_token_pools_at_the_highest_id():
    model = tiny_model()
    batch = inputs()
    expected = model.encode_text(batch["input_ids"])  # EOS is the highest id
    model.text_model.config.eos_token_id = 2
    torch.testing.assert_close(model.encode_text(batch["input_ids"]), expected, rtol=0, atol=0)


def test_attention_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask must have the shape of input_ids, \(4, 10\), got \(4, 9\)"):
        batch = inputs()
        tiny_model().encode_text(batch["input_ids"], batch["attention_mask"][:, 1:])


def test_attention_implementations_agree():
    model, batch = tiny_model(), inputs()
    expected = model(**batch)
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        assert model.vision_model.encoder.layers[1].self_attn.config._attn_implementation == name
        torch.testing.assert_close(model(**batch).logits_per_text, expected.logits_per_text)


def test_hidden_states_and_interpolation():
    tower = tiny_model().vision_model
    pixel_values = torch.randn(2, 3, 24, 32)
    with pytest.raises(ValueError, match=r"24\*32"):
        tower(pixel_values)
    output = tower(pixel_values, interpolate_pos_encoding=True, output_hidden_states=True)
    assert len(output.hidden_states) == 4
    assert output.last_hidden_state.shape == (2, 1 + 3 * 4, 16)
    torch.testing.assert_close(output.hidden_states[-1], output.last_hidden_state, rtol=0, atol=0)


def test_input_embeddings():
    model = tiny_model()
    embeddings = model.text_model.embeddings.token_embedding
    assert model.get_input_embeddings() is embeddings
    assert CLIPMoETextModelWithProjection(model.config.text_config).get_input_embeddings().weight.shape == (50, 16)
    for tower in (
        model.vision_model,
        CLIPMoEVisionModelWithProjection(model.config.vision_config),
        CLIPMoEForImageClassification(model.config),
    ):
        assert isinstance(tower.get_input_embeddings(), nn.Conv2d)
    model.resize_token_embeddings(60)
    assert model.text_model.embeddings.token_embedding.weight.shape == (60, 16)


def test_image_classification():
    config = tiny_config()
    config.num_labels = 5
    model = CLIPMoEForImageClassification(config)
    pixel_values, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 4])
    output = model(pixel_values, labels)
    pooled = model.vision_model(pixel_values).last_hidden_state[:, 1:].mean(dim=1)
    torch.testing.assert_close(output.logits, model.classifier(pooled))
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))
    with_router = model(pixel_values, labels, output_router_logits=True)
    torch.testing.assert_close(with_router.aux_loss, 0.01 * load_balancing_loss(with_router.router_logits, 2))
    torch.testing.assert_close(with_router.loss, output.loss + with_router.aux_loss)
    config.num_labels = 0
    assert CLIPMoEForImageClassification(config)(pixel_values).logits.shape == (4, 16)


# ------------------------------------------------------------------------------------- precision, memory, compilation


@pytest.mark.parametrize("name", IMPLEMENTATIONS[:3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, name):
    model = tiny_model(fusion_gate=True, capacity_factor=1.0)
    batch = inputs()
    expected = model(**batch)
    half = copy.deepcopy(model).to(dtype)
    half.set_experts_implementation(name)
    half_batch = {**batch, "pixel_values": batch["pixel_values"].to(dtype)}
    torch.testing.assert_close(half(**half_batch).image_embeds.float(), expected.image_embeds, rtol=0.05, atol=0.05)
    output = half.train()(**half_batch, return_loss=True, output_router_logits=True)
    output.loss.backward()
    assert all(logits.dtype == torch.float32 for logits in output.text_router_logits)
    assert all(parameter.grad.isfinite().all() for parameter in half.parameters())


@pytest.mark.parametrize("name", IMPLEMENTATIONS[:3])
def test_autocast(name):
    model = tiny_model()
    model.set_experts_implementation(name)
    batch = inputs()
    expected = model(**batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**batch, return_loss=True, output_router_logits=True)
    output.loss.backward()
    torch.testing.assert_close(output.image_embeds.float(), expected.image_embeds, rtol=0.05, atol=0.05)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    # The losses of the same logits are computed in float32
    balance = load_balancing_loss(output.text_router_logits, 2, batch["attention_mask"])
    balance = balance + load_balancing_loss(output.vision_router_logits, 2)
    torch.testing.assert_close(output.aux_loss, 0.01 * balance)


def test_gradient_checkpointing_changes_nothing():
    # One seed for both: jitter must be drawn again as it was
    model = tiny_model(capacity_factor=1.0, router_jitter_noise=0.2).train()
    model.config.router_aux_loss_coef = 1.0
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable()
    assert checkpointed.is_gradient_checkpointing
    batch = inputs()
    outputs = []
    for candidate in (model, checkpointed):
        torch.manual_seed(1)
        outputs.append(candidate(**batch, return_loss=True, output_router_logits=True))
        outputs[-1].loss.backward()
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss)
    assert_same_gradients(checkpointed, model)

    without_aux = copy.deepcopy(model)
    without_aux.zero_grad()
    torch.manual_seed(1)
    without_aux(**batch, return_loss=True).loss.backward()
    router = "vision_model.encoder.layers.2.mlp.router.weight"
    assert (gradients(model)[router] - gradients(without_aux)[router]).abs().max() > 1e-3


@pytest.mark.parametrize("arguments", [{"use_reentrant": True}, {}])
def test_reentrant_checkpointing_is_refused(arguments):
    for model in (tiny_model(), tiny_model().text_model):
        with pytest.raises(ValueError, match="use_reentrant"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.gradient_checkpointing_disable()
        assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("part", ["text_model", "vision_model", "whole"])
@pytest.mark.parametrize("name", ["by_device", "grouped_mm"])
def test_compiles_without_graph_breaks(part, name):
    model = tiny_model(moe_layers=(1,), fusion_gate=True, eval_capacity_factor=1.5)
    model.set_experts_implementation(name)
    batch = inputs()
    arguments = {
        "text_model": {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]},
        "vision_model": {"pixel_values": batch["pixel_values"], "output_router_logits": True},
        "whole": {**batch, "return_loss": True, "output_router_logits": True},
    }[part]
    module = model if part == "whole" else getattr(model, part)
    torch.compiler.reset()
    with torch.no_grad():
        expected = module(**arguments)
        actual = torch.compile(module, fullgraph=True, backend="eager")(**arguments)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(actual[key], value)
        elif key == "router_logits":
            torch.testing.assert_close(actual[key], value)


def test_exports_with_a_dynamic_batch():
    tower = tiny_model(moe_layers=(1,)).vision_model
    pixel_values = torch.randn(3, 3, 16, 16)
    batch = torch.export.Dim("batch", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(
            tower, (), {"pixel_values": pixel_values}, dynamic_shapes={"pixel_values": {0: batch}}
        )
        other = torch.randn(5, 3, 16, 16)
        torch.testing.assert_close(
            program.module()(pixel_values=other).last_hidden_state, tower(other).last_hidden_state
        )


def test_runs_on_the_meta_device():
    with torch.device("meta"):
        model = CLIPMoEModel(tiny_config())
    model.set_experts_implementation("batched_mm")
    batch = inputs()
    # No attention mask: transformers would look at its values
    output = model(batch["input_ids"].to("meta"), batch["pixel_values"].to("meta"))
    assert output.logits_per_text.shape == (4, 4)


# --------------------------------------------------------------------------------------------------------- loading


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved")
    model = tiny_model(fusion_gate=True)
    model.save_pretrained(folder)
    return model, folder


def assert_same_weights(actual, expected):
    torch.testing.assert_close(dict(actual.state_dict()), dict(expected.state_dict()), rtol=0, atol=0)


def test_loads_what_was_saved(saved):
    model, folder = saved
    loaded, info = CLIPMoEModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same_weights(loaded, model)
    batch = inputs()
    torch.testing.assert_close(loaded(**batch).logits_per_text, model(**batch).logits_per_text, rtol=0, atol=0)
    for auto_class in (AutoModel, AutoModelForZeroShotImageClassification):
        assert type(auto_class.from_pretrained(folder)) is CLIPMoEModel
    assert type(AutoModelForImageClassification.from_pretrained(folder)) is CLIPMoEForImageClassification
    assert CLIPMoEModel.from_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_device_map(saved):
    model, folder = saved
    loaded = CLIPMoEModel.from_pretrained(folder, device_map="auto")
    batch = inputs()
    torch.testing.assert_close(loaded(**batch).logits_per_text, model(**batch).logits_per_text, rtol=0, atol=0)


def test_logit_scale_is_a_scalar_on_disk(saved, tmp_path):
    model, folder = saved
    weights = load_file(folder / "model.safetensors")
    assert weights["logit_scale"].shape == () and model.logit_scale.shape == (1,)
    loaded = CLIPMoEModel.from_pretrained(folder)
    assert loaded.logit_scale.shape == (1,)
    loaded.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["logit_scale"].shape == ()


class MyVisionModel(CLIPMoEVisionModel):
    """A user's subclass."""


class MyModel(CLIPMoEModel):
    """A user's subclass."""


def test_towers_load_out_of_the_whole(saved, tmp_path):
    model, folder = saved
    for cls in (
        CLIPMoETextModel,
        CLIPMoETextModelWithProjection,
        CLIPMoEVisionModel,
        CLIPMoEVisionModelWithProjection,
        MyVisionModel,
    ):
        tower, info = cls.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        whole = dict(model.state_dict())
        prefix = "" if "Projection" in cls.__name__ else "text_model." if "Text" in cls.__name__ else "vision_model."
        expected = {name: whole[prefix + name] for name in tower.state_dict()}
        torch.testing.assert_close(dict(tower.state_dict()), expected, rtol=0, atol=0)

        alone = tmp_path / cls.__name__
        tower.save_pretrained(alone)
        assert_same_weights(cls.from_pretrained(alone), tower)
    assert_same_weights(MyModel.from_pretrained(folder), model)


def test_towers_with_projection_of_a_config_that_contradicts_itself(tmp_path):
    """CLIP's own files may say 512 in the towers and something else above them, which is what counts."""
    config = CLIPMoEConfig(
        text_config={**tower_fields(), "vocab_size": 50, "projection_dim": 512},
        vision_config={**tower_fields(), "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    model = CLIPMoEModel(config)
    model.save_pretrained(tmp_path)
    text = CLIPMoETextModelWithProjection.from_pretrained(tmp_path)
    vision = CLIPMoEVisionModelWithProjection.from_pretrained(tmp_path)
    assert torch.equal(text.text_projection.weight, model.text_projection.weight)
    assert torch.equal(vision.visual_projection.weight, model.visual_projection.weight)


def test_a_tower_built_alone_saves_and_loads(saved, tmp_path):
    model, _ = saved
    model.vision_model.save_pretrained(tmp_path)
    assert "embeddings.class_embedding" in load_file(tmp_path / "model.safetensors")
    tower = AutoModel.from_pretrained(tmp_path)
    assert type(tower) is CLIPMoEVisionModel
    assert_same_weights(tower, model.vision_model)


def test_the_classifier_may_be_new_but_nothing_else(saved, tmp_path):
    model, folder = saved
    classifier, info = CLIPMoEForImageClassification.from_pretrained(folder, num_labels=7, output_loading_info=True)
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert_same_weights(classifier.vision_model, model.vision_model)
    classifier.save_pretrained(tmp_path)
    assert_same_weights(CLIPMoEForImageClassification.from_pretrained(tmp_path), classifier)
    with pytest.raises(ValueError, match=r"Missing: .*text_model\."):
        CLIPMoEModel.from_pretrained(tmp_path)


def test_incomplete_and_foreign_checkpoints_are_refused(saved, tmp_path):
    model, folder = saved
    model.config.save_pretrained(tmp_path)
    weights = load_file(folder / "model.safetensors")

    def write(change):
        changed = dict(weights)
        change(changed)
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})

    for name in (
        "vision_model.encoder.layers.1.mlp.experts.up_proj",
        "text_model.encoder.layers.2.mlp.router.weight",
        "text_model.encoder.layers.2.mlp.fusion_gate.proj.bias",
        "text_projection.weight",
        "logit_scale",
    ):
        write(lambda changed, name=name: changed.pop(name))
        with pytest.raises(ValueError, match=rf"CLIPMoEModel. Missing: {name}. Left over: none."):
            CLIPMoEModel.from_pretrained(tmp_path)
    write(lambda changed: changed.update({"blocks.0.gate": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"Missing: none. Left over: blocks.0.gate."):
        CLIPMoEModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"CLIPMoEVisionModel. Missing: none. Left over: blocks.0.gate."):
        CLIPMoEVisionModel.from_pretrained(tmp_path)
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"Missing: .* more\). Left over: weight."):
        CLIPMoEModel.from_pretrained(tmp_path)

    content = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="truncated or not safetensors"):
        CLIPMoEModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "dense_class",
    [CLIPModel, CLIPTextModel, CLIPTextModelWithProjection, CLIPVisionModel, CLIPVisionModelWithProjection],
)
def test_classes_of_clip_refuse_sparse_checkpoints(saved, tmp_path, dense_class):
    model, folder = saved
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        dense_class.from_pretrained(folder)
    if dense_class in (CLIPTextModel, CLIPVisionModel):
        getattr(model, "text_model" if dense_class is CLIPTextModel else "vision_model").save_pretrained(tmp_path)
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            dense_class.from_pretrained(tmp_path)


@pytest.mark.parametrize("tower", [CLIPMoEVisionModel, CLIPMoETextModel])
def test_marks_have_the_names_that_transformers_4_looks_for(saved, tmp_path, tower):
    # Of the weights themselves, it finds none where a tower was never part of a whole file
    model, folder = saved
    prefix = tower._tower_prefix
    towers = [getattr(model, prefix[:-1]), tower.from_pretrained(folder)]
    towers[0].save_pretrained(tmp_path / "0")
    towers.append(tower.from_pretrained(tmp_path / "0"))
    for number, source in enumerate(towers):
        source.save_pretrained(tmp_path / str(number))
        weights = load_file(tmp_path / str(number) / "model.safetensors")
        marks = {name for name, tensor in weights.items() if tensor.numel() == 0}
        assert marks == {f"{prefix}encoder.layers.{layer}.mlp.fc1.weight" for layer in (1, 2)}
        again = tower.from_pretrained(tmp_path / str(number))
        assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in towers[0].state_dict().items())


def test_a_file_loads_into_a_model_that_is_there(saved):
    model, folder = saved
    other = CLIPMoEModel(model.config)
    other.load_state_dict(load_file(folder / "model.safetensors"))
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_a_dense_ffn_beside_the_experts_is_refused(saved, tmp_path):
    model, folder = saved
    weights = load_file(folder / "model.safetensors")
    weights |= {f"vision_model.encoder.layers.1.mlp.fc1.{kind}": torch.ones(3) for kind in ("weight", "bias")}
    model.config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="Left over: vision_model.encoder.layers.1.mlp.fc1.bias"):
        CLIPMoEModel.from_pretrained(tmp_path)


def test_a_model_out_of_a_pickle_saves_as_any_other(saved, tmp_path):
    model, folder = saved
    torch.save(model, tmp_path / "model.pt")
    code = "import sys, torch; torch.load(sys.argv[1], weights_only=False).save_pretrained(sys.argv[2])"
    subprocess.run([sys.executable, "-c", code, tmp_path / "model.pt", tmp_path / "saved"], check=True)
    expected, found = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "saved"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_checkpoints_without_what_makes_clip_refuse_them_load(saved, tmp_path):
    model, folder = saved
    weights = load_file(folder / "model.safetensors")
    weights = {name: tensor for name, tensor in weights.items() if tensor.numel() > 0}
    model.config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = CLIPMoEModel.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_the_module_holds_what_diffusers_looks_up():
    assert modeling.PreTrainedModel is PreTrainedModel
    assert CLIPMoEModel._no_split_modules == ["CLIPTextEmbeddings", "CLIPVisionEmbeddings", "CLIPMoEEncoderLayer"]


ATTENTION_KEYS = [
    f"self_attn.{projection}.{kind}"
    for projection in ("k_proj", "v_proj", "q_proj", "out_proj")
    for kind in ("weight", "bias")
]
NORM_KEYS = [f"layer_norm{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")]
DENSE_KEYS = [f"mlp.{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")]
SPARSE_KEYS = [
    "mlp.fc1.weight",  # empty: CLIP's own classes refuse it
    "mlp.router.weight",
    "mlp.experts.up_proj",
    "mlp.experts.up_proj_bias",
    "mlp.experts.down_proj",
    "mlp.experts.down_proj_bias",
    "mlp.base.fc1.weight",
    "mlp.base.fc1.bias",
    "mlp.base.fc2.weight",
    "mlp.base.fc2.bias",
    "mlp.fusion_gate.proj.weight",
    "mlp.fusion_gate.proj.bias",
]


def test_names_of_weights_are_a_file_format(saved):
    _, folder = saved
    expected = [
        "logit_scale",
        "text_projection.weight",
        "visual_projection.weight",
        "text_model.embeddings.token_embedding.weight",
        "text_model.embeddings.position_embedding.weight",
        "text_model.final_layer_norm.weight",
        "text_model.final_layer_norm.bias",
        "vision_model.embeddings.class_embedding",
        "vision_model.embeddings.patch_embedding.weight",
        "vision_model.embeddings.position_embedding.weight",
        "vision_model.pre_layrnorm.weight",
        "vision_model.pre_layrnorm.bias",
        "vision_model.post_layernorm.weight",
        "vision_model.post_layernorm.bias",
    ]
    for tower in ("text_model", "vision_model"):
        for layer, mlp_keys in enumerate([DENSE_KEYS, SPARSE_KEYS, SPARSE_KEYS]):
            expected += [f"{tower}.encoder.layers.{layer}.{key}" for key in ATTENTION_KEYS + NORM_KEYS + mlp_keys]
    weights = load_file(folder / "model.safetensors")
    assert sorted(weights) == sorted(expected)
    layer = "text_model.encoder.layers.1.mlp"
    shapes = {key: tuple(weights[f"{layer}.{key}"].shape) for key in ("router.weight", "experts.up_proj")}
    assert shapes == {"router.weight": (4, 16), "experts.up_proj": (4, 24, 16)}
    assert weights[f"{layer}.experts.up_proj_bias"].shape == (4, 24)
    assert weights[f"{layer}.experts.down_proj"].shape == (4, 16, 24)
    assert weights[f"{layer}.experts.down_proj_bias"].shape == (4, 16)
    assert CLIPMoEExperts.__name__ == "CLIPMoEExperts"
