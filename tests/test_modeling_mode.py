"""CLIPMoDEModel: routing weights and ensembles, against obvious computations."""

import pytest
import torch
from tiny_clip_mode import dense, mixture, sparse, texts_and_images, unit

from modeling_clip_moe import CLIPMoDEConfig, CLIPMoDEModel, routing_weights

INPUTS = texts_and_images()


def test_several_tasks_are_routed_one_by_one():
    centers, expert_of_center = unit(20, 6), torch.arange(20) % 3
    tasks = unit(3000, 3, 6, seed=5)  # more than are computed at a time, and a task on the border
    together = routing_weights(tasks, centers, expert_of_center, 3)
    assert together.shape == (3000, 3)
    for number in (0, 2729, 2730, 2731, 2999):
        alone = routing_weights(tasks[number], centers, expert_of_center, 3)
        torch.testing.assert_close(together[number], alone)


def test_texts_that_the_encoder_does_not_know_route_nothing():
    centers, expert_of_center, metadata = unit(20, 6), torch.arange(20) % 3, unit(12, 6, seed=5)
    known = torch.cat([metadata, metadata.new_zeros(3, 6)])  # 12 and 15 are of one rule of appendix E
    expected = routing_weights(metadata, centers, expert_of_center, 3)
    torch.testing.assert_close(routing_weights(known, centers, expert_of_center, 3), expected)
    equal = routing_weights(metadata.new_zeros(1, 6), centers, expert_of_center, 3)
    torch.testing.assert_close(equal, torch.full((3,), 1 / 3))


def test_logits_are_the_weighted_sum():
    """Of one task, and where each text, or each image, is a task of its own."""
    model, queries = mixture(), unit(3, 1, 6, seed=3)
    task_weights = model.set_task(unit(5, 6, seed=3))
    text_weights = torch.stack([model.route(query) for query in queries])
    image_weights = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]])
    assert task_weights.shape == (4,) and task_weights.min() > 0
    torch.testing.assert_close(model.route(queries), text_weights)
    alone = torch.stack([model.expert(i)(**INPUTS).logits_per_image for i in range(4)], dim=-1)
    for weights, by_pair in (
        (None, task_weights),
        (text_weights, text_weights),
        (image_weights[:, None], image_weights[:, None]),
    ):
        outputs = model(**INPUTS, routing_weights=weights)
        torch.testing.assert_close(outputs.logits_per_image, (alone * by_pair).sum(dim=-1))
        torch.testing.assert_close(outputs.logits_per_text, outputs.logits_per_image.t())
        assert weights is not None or torch.equal(outputs.routing_weights, task_weights)


def test_features_give_the_logits_side_by_side_and_are_summed_where_the_configuration_says_so(tmp_path):
    """Summed: MoDE appendix D."""
    model = mixture(3)
    weights, pixels, texts = model.set_equal_weights(), INPUTS["pixel_values"], [*INPUTS.values()][:2]
    features = [model.encode_image(pixels).view(2, 3, 8), model.encode_text(*texts).view(3, 3, 8)]
    torch.testing.assert_close(features[0].norm(dim=-1), torch.ones(2, 3))
    scales = torch.stack([model.expert(i).logit_scale.exp() for i in range(3)])
    expected = torch.einsum("ind,tnd,n->it", *features, weights * scales)
    torch.testing.assert_close(model(**INPUTS).logits_per_image, expected)
    model.config.feature_ensemble = "sum"
    model.save_pretrained(tmp_path)
    summed = CLIPMoDEModel.from_pretrained(tmp_path)
    found = [summed.encode_image(pixels), summed.encode_text(*texts)]
    torch.testing.assert_close(found, [parts.sum(dim=1) for parts in features])


def test_an_expert_without_weight_is_not_computed():
    model = mixture(3)
    outputs = model(**INPUTS, routing_weights=torch.tensor([0.0, 1.0, 0.0]))
    assert [output is None for output in outputs.expert_outputs] == [True, False, True]
    torch.testing.assert_close(outputs.logits_per_image, model.expert(1)(**INPUTS).logits_per_image)


def test_training_arguments_reach_the_experts():
    model = mixture(2, sparse)
    model.set_equal_weights()
    model.train()
    inputs = INPUTS | {"pixel_values": INPUTS["pixel_values"][[0, 1, 1]]}
    gradients = []
    for _ in range(2):
        model.zero_grad()
        outputs = model(**inputs, return_loss=True, output_hidden_states=True, output_router_logits=True)
        for output in outputs.expert_outputs:
            assert len(output.text_model_output.hidden_states) == 3 and output.aux_loss > 0
        outputs.loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.gradient_checkpointing_enable()
    assert all(model.expert(i).is_gradient_checkpointing for i in range(2)) and len(gradients[0]) > 100
    torch.testing.assert_close(*gradients)


def test_compiles_without_graph_breaks():
    model = mixture(1)
    model.set_equal_weights()
    found = torch.compile(model, fullgraph=True, backend="eager")(**INPUTS).logits_per_image
    torch.testing.assert_close(found, model(**INPUTS).logits_per_image)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model(**INPUTS), "no task to route"),
        (lambda model: model.set_task(unit(3, 5)), r"got \(3, 5\), but d is 6"),
        (lambda model: model.set_task(unit(3, 6), "other"), "'tfidf', the metadata with 'other'"),
        (lambda model: model(**INPUTS, routing_weights=torch.ones(5)), r"\(2, 1, 2\), got \(5,\)"),
        (lambda model: model.add_expert(dense(3, projection_dim=4), unit(1, 6)), "size 4, the other experts of 8"),
        (
            lambda model: model.add_expert(dense(3), unit(1, 6), name="expert_0"),
            "experts must be different names of folders",
        ),
        (lambda model: model.set_centers(unit(3, 6), torch.zeros(3, dtype=torch.long), "tfidf"), r"see \[1\]"),
        (lambda model: CLIPMoDEModel.from_experts([model]), "not clip_mode"),
        (lambda _: CLIPMoDEConfig(experts=["../other"]), "names of folders"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(mixture(2))
