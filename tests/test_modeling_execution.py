"""Half precision, gradient checkpointing, compilation and export change no result."""

import copy
from functools import partial
from unittest.mock import patch

import pytest
import torch
from tiny_clip_moe import IMPLEMENTATIONS, SWIGLU, gradients, inputs, tiny_block, tiny_model
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from modeling_clip_moe import CLIPMoDEModel, experts

# `gradient_checkpointing_enable` is the only name that transformers 5.17 knows
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


@pytest.mark.parametrize("fields", [{}, SWIGLU], ids=["plain", "gated"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS[:4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, name, fields):
    fields = fields | {"moe_intermediate_size": 8} if name == "grouped_mm" else fields
    model = tiny_model(fusion_gate=True, capacity_factor=1.0, **fields)
    batch = inputs()
    expected = model(**batch)
    half = copy.deepcopy(model).to(dtype)
    half.set_experts_implementation(name)
    batch["pixel_values"] = batch["pixel_values"].to(dtype)
    torch.testing.assert_close(half(**batch).image_embeds.float(), expected.image_embeds, rtol=0.05, atol=0.05)
    output = half.train()(**batch, return_loss=True, output_router_logits=True)
    output.loss.backward()
    assert all(logits.dtype == torch.float32 for logits in output.text_router_logits)
    assert all(parameter.grad.isfinite().all() for parameter in half.parameters())


def test_grouped_products_under_autocast():
    """In autocast's precision, with gradients of the weights as they are."""
    models, embeds = {"eager": tiny_model(fusion_gate=True)}, {}
    models["grouped"], batch = copy.deepcopy(models["eager"]), inputs()
    for name, model in models.items():
        model.set_experts_implementation(name)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(**batch, return_loss=True)
        output.loss.backward()
        embeds[name] = output.image_embeds
    assert embeds["grouped"].dtype == torch.bfloat16
    torch.testing.assert_close(embeds["grouped"], embeds["eager"], rtol=0.05, atol=0.02)
    expected = gradients(models["eager"])
    for name, gradient in gradients(models["grouped"]).items():
        assert gradient.dtype == torch.float32, name
        similarity = torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0)
        assert similarity > 0.99 or gradient.norm() < 1e-2, name  # where it is rounding


@pytest.mark.parametrize("arguments", [{"use_reentrant": True}, {}])
def test_reentrant_checkpointing_is_refused(arguments):
    for model in (tiny_model(), tiny_model().text_model):
        with pytest.raises(ValueError, match="use_reentrant"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.gradient_checkpointing_disable()
        assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("fields", [{}, SWIGLU], ids=["plain", "gated"])
def test_compiles_without_graph_breaks(fields):
    model = tiny_model([1], num_hidden_layers=2, fusion_gate=True, eval_capacity_factor=1.5, **fields)
    batch = {**inputs(), "return_loss": True, "output_router_logits": True}
    torch.compiler.reset()
    with torch.no_grad():
        expected = model(**batch)
        actual = torch.compile(model, fullgraph=True, backend="eager")(**batch)
    for key in ("loss", "logits_per_image", "text_embeds", "image_embeds", "aux_loss", "vision_router_logits"):
        torch.testing.assert_close(actual[key], expected[key])


class _Embeds(torch.nn.Module):
    """Both embeddings of a model. Of texts without a mask, whose values transformers would look at."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, pixel_values):
        return self.model.encode_text(input_ids), self.model.encode_image(pixel_values)


def _examples(size=8):
    batch = inputs(size)
    return batch["input_ids"], batch["pixel_values"]


def _one_by_one(module, *example):
    return torch.func.vmap(lambda *each: tuple(part[0] for part in module(*(value[None] for value in each))))


# What makes a program of a module and an example, by which another batch is computed
RECORDERS = {
    "jit.trace": lambda module, *example: torch.jit.trace(module, example, check_trace=False),
    "make_fx": lambda module, *example: make_fx(module)(*example),
    "export": lambda module, *example: torch.export.export(module, example).module(),
    "vmap": _one_by_one,
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, "by_device") for name in RECORDERS),
        *(("jit.trace", name) for name in ("eager", "grouped", "grouped_mm")),
    ],
)
def test_a_recorded_program_follows_its_data(name, implementation):
    """Its experts have other numbers of tokens than in the example, and drop others."""
    torch.manual_seed(0)
    # Each sample by itself would have capacities of its own
    module = _Embeds(tiny_model([1], num_hidden_layers=2, eval_capacity_factor=None if name == "vmap" else 1.5))
    module.model.set_experts_implementation(implementation)
    example, other = _examples(), _examples()
    with torch.no_grad():
        expected, example_outputs = module(*other), module(*example)
        assert (expected[1] - example_outputs[1]).abs().max() > 0.1
        torch.testing.assert_close(RECORDERS[name](module, *example)(*other), expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_recorded_mixture_follows_its_weights():
    """Also to experts that have none in the example."""
    mixture = CLIPMoDEModel.from_experts([tiny_model() for _ in range(3)]).eval().requires_grad_(False)
    batch = inputs()

    def logits(weights):
        return mixture(batch["input_ids"], batch["pixel_values"], routing_weights=weights).logits_per_image

    with torch.no_grad():
        program = torch.jit.trace(logits, torch.tensor([1.0, 0, 0]), check_trace=False)
        other = torch.tensor([0.2, 0.3, 0.5])
        torch.testing.assert_close(program(other), logits(other))


@pytest.mark.parametrize("fields", [{}, SWIGLU], ids=["plain", "gated"])
@pytest.mark.parametrize("drops", [False, True])
def test_all_experts_have_the_loops_gradients(drops, fields):
    torch.manual_seed(0)
    block = tiny_block(fusion_gate=True, capacity_factor=1.0 if drops else None, **fields).train()
    recorded, hidden_states = copy.deepcopy(block), torch.randn(4, 5, 16)
    recorded.experts.config._experts_implementation = "by_device"
    expected = block(hidden_states)
    actual = torch.func.functional_call(recorded, {}, (hidden_states,))
    expected.square().sum().backward()

    def loss(parameters):
        return torch.func.functional_call(recorded, parameters, (hidden_states,)).square().sum()

    found = torch.func.grad(loss)(dict(recorded.named_parameters()))  # a transform, for which all experts compute
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(found, gradients(block))


def test_shapes_need_no_data():
    module = _Embeds(tiny_model())
    on_meta = copy.deepcopy(module).to("meta")(*(value.to("meta") for value in _examples(4)))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = module(*map(mode.from_tensor, _examples(4)))
    assert [embeds.shape for embeds in (*on_meta, *fake)] == [(4, 8)] * 4


@pytest.mark.parametrize(("fields", "size"), [({}, 2 * 24), (SWIGLU, 3 * 9)], ids=["plain", "gated"])
@pytest.mark.parametrize("implementation", ["by_device", "grouped", "eager", "batched_mm"])
@pytest.mark.parametrize("mask", [None, [[1] * 5] * 2 + [[1, 1, 1, 0, 0]] * 2], ids=["whole", "padded"])
def test_flops_are_those_of_the_chosen_experts(implementation, mask, fields, size):
    """In a sparse block: the products of each token's K experts and of the router, in training as in use; backward
    takes twice as many."""
    block, hidden_states = tiny_block(**fields), torch.randn(4, 5, 16, requires_grad=True)
    block.experts.config._experts_implementation = implementation
    mask = None if mask is None else torch.tensor(mask)
    tokens = 20 if mask is None or implementation == "batched_mm" else int(mask.sum())  # which computes padding
    forward = 2 * (tokens * 2 * 16 * size + 20 * 4 * 16)
    for training in (False, True):
        with FlopCounterMode(display=False) as counter:
            output = block.train(training)(hidden_states, mask)
            assert counter.get_total_flops() == forward
            output.sum().backward()
        assert counter.get_total_flops() == 3 * forward
    if implementation == "by_device" and mask is None:
        with FlopCounterMode(display=False) as counter:
            block.to("meta")(hidden_states.to("meta"))
        assert counter.get_total_flops() == forward


def test_what_only_watches_a_run_changes_no_implementation():
    """Selective checkpointing keeps some results and computes the rest again. No program is made."""
    block, hidden_states = tiny_block(), torch.randn(4, 5, 16)
    block.experts.config._experts_implementation = "by_device"
    watch = partial(create_selective_checkpoint_contexts, [torch.ops.aten.softmax.int])
    with patch.object(experts, "experts_forward_all", side_effect=AssertionError):
        kept = checkpoint(block, hidden_states, use_reentrant=False, context_fn=watch)
        kept.sum().backward()
    assert torch.equal(kept, block(hidden_states))


@pytest.mark.parametrize("fields", [{}, SWIGLU], ids=["plain", "gated"])
@pytest.mark.parametrize("trains", ["all", "hidden_states"])
def test_a_second_gradient_is_the_loops(trains, fields):
    block, hidden_states, second = tiny_block(capacity_factor=1.0, **fields).train(), torch.randn(4, 5, 16), {}
    block.requires_grad_(trains == "all")
    for name in ("eager", "grouped"):
        block.experts.config._experts_implementation = name
        leaves = [hidden_states.clone().requires_grad_(), *(p for p in block.parameters() if p.requires_grad)]
        first = torch.autograd.grad(block(leaves[0]).square().sum(), leaves, create_graph=True)
        second[name] = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), leaves)
    largest = max(gradient.abs().max().item() for gradient in second["eager"])
    assert largest > 1
    torch.testing.assert_close(second["grouped"], second["eager"], rtol=1e-4, atol=1e-5 * largest)


def test_a_gradient_that_is_kept_for_a_second_one_is_the_loops():
    """Also where the weights of experts come from their inputs, as a router's do."""
    block, found = tiny_block().experts, {}
    hidden_states, directions = torch.randn(20, 16), torch.randn(16, 4)
    for name in ("loop", "grouped"):
        leaf = hidden_states.clone().requires_grad_()
        weights, ids = (leaf @ directions).softmax(dim=-1).topk(2)
        outputs = (block if name == "loop" else partial(experts.experts_forward_grouped, block))(leaf, ids, weights)
        found[name] = torch.autograd.grad(outputs.square().sum(), leaf, create_graph=True)[0]
    torch.testing.assert_close(found["grouped"], found["loop"], rtol=1e-4, atol=1e-4)


def test_grouped_products_in_bfloat16_round_as_the_loop():
    """Values and gradients, with biases that are large beside the products, and sums over many rows."""
    block, hidden_states = tiny_block(), torch.randn(2000, 16).bfloat16()
    layer, choices, errors = block.experts.bfloat16(), torch.rand(2000, 4).topk(2), {}
    with torch.no_grad():
        layer.up_proj_bias.mul_(10)
        layer.down_proj_bias.mul_(50)
    exact, upstream = copy.deepcopy(layer).double(), torch.randn(2000, 16).bfloat16() + 1

    def computed(experts, dtype):
        rows = hidden_states.to(dtype, copy=True).requires_grad_()
        output = experts(rows, choices.indices, choices.values)
        output.backward(upstream.to(dtype))
        return [part.double() for part in (output, rows.grad, *gradients(experts).values())]

    expected = computed(exact, torch.float64)
    for name in ("eager", "grouped"):
        layer.config._experts_implementation = name
        found = computed(copy.deepcopy(layer), torch.bfloat16)
        errors[name] = [(part - right).norm() / right.norm() for part, right in zip(found, expected, strict=True)]
    for grouped, loop in zip(errors["grouped"], errors["eager"], strict=True):
        assert grouped < 1.05 * loop
