"""MoE-ViE and its dense model against a plain implementation on the released names, and at the released sizes."""

from dataclasses import replace

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from plain_moe_vie import RELEASED, TINY, encode_image, encode_text, random_weights

from clip_moe.conversion.released_moe_vie import loading_rules
from clip_moe.conversion.rules import apply_rules
from clip_moe.evaluation.costs import count_multiply_adds, count_parameters, meta_model, paper_config
from modeling_clip_moe.configuration_moe_vie import MoEViEConfig, ViEConfig
from modeling_clip_moe.families import model_class

DENSE = replace(TINY, experts=0)


def config_of(sizes):
    """Its configuration, in which every layer but the first is sparse; that of the dense model with no experts."""
    whole = {"projection_dim": sizes.embedding}
    text = {
        "hidden_size": sizes.text_width,
        "intermediate_size": sizes.text_ffn,
        "num_attention_heads": sizes.text_heads,
    }
    text |= {"num_hidden_layers": sizes.text_layers, "vocab_size": sizes.vocabulary}
    text |= {"max_position_embeddings": sizes.length, "eos_token_id": sizes.vocabulary - 1}
    vision = {"hidden_size": sizes.width, "intermediate_size": sizes.ffn, "num_attention_heads": sizes.heads}
    vision |= {"num_hidden_layers": sizes.layers, "num_pooling_heads": sizes.pooling_heads}
    vision |= {"image_size": sizes.image, "patch_size": sizes.patch}
    if not sizes.experts:
        return ViEConfig(text_config=text, vision_config=vision, **whole)
    vision |= {"num_experts": sizes.experts, "num_experts_per_tok": sizes.top_k, "num_shared_experts": 1}
    vision |= {"moe_layers": list(range(1, sizes.layers)), "moe_intermediate_size": sizes.expert, "moe_mlp_bias": False}
    vision |= {"scoring_func": "sigmoid", "use_expert_bias": True}
    return MoEViEConfig(text_config=text, vision_config=vision, **whole)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("sizes", [DENSE, TINY], ids=["dense", "sparse"])
@torch.no_grad()
def test_layers_embeddings_and_chosen_experts_are_those_of_a_plain_implementation(sizes, attention):
    """On images of 2 rows and 3 columns, and the other way around."""
    released = random_weights(sizes)
    model = model_class(config := config_of(sizes))._from_config(config, attn_implementation=attention)
    model.double().eval().load_state_dict(apply_rules(released, None, loading_rules(config)))
    generator = torch.Generator().manual_seed(1)
    for size in ((8, 12), (12, 8)):
        images = torch.randn(2, 3, *size, generator=generator, dtype=torch.float64)
        outputs = model.get_image_features(images, output_hidden_states=True, output_expert_ids=True)
        for number, image in enumerate(images):
            embedding, states, experts = encode_image(released, image, sizes)
            hidden_states = torch.stack([layer[number] for layer in outputs.hidden_states])
            torch.testing.assert_close(hidden_states, torch.stack(states), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(outputs.pooler_output[number], embedding, rtol=1e-5, atol=1e-5)
            assert [layer[number].tolist() for layer in outputs.expert_ids or ()] == experts
    texts = torch.randint(39, (2, 8), generator=generator)
    texts[0, 4] = texts[1, 7] = 39
    outputs = model.get_text_features(texts, output_hidden_states=True)
    for number, text in enumerate(texts):
        embedding, states = encode_text(released, text, sizes)
        hidden_states = torch.stack([layer[number] for layer in outputs.hidden_states])
        torch.testing.assert_close(hidden_states, torch.stack(states), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(outputs.pooler_output[number], embedding, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "total", "vision", "activated"),
    [("B/16", 811.2, 457.1, 93.7), ("L/16", 2025.5, 1671.0, 317.7), ("H/14", 4379.9, 3499.3, 1059.4)],
)
def test_released_sizes_have_the_papers_parameters_and_the_multiply_adds_of_their_parts(size, total, vision, activated):
    sizes = RELEASED[size]
    counts = count_parameters(model := meta_model(config_of(sizes)))
    width, patches, sparse = sizes.width, (sizes.image // sizes.patch) ** 2, sizes.layers - 1
    attention, first, one = 4 * width**2 + 2 * patches * width, 3 * width * sizes.ffn, 3 * width * sizes.expert
    layers = sizes.layers * attention + first + sparse * ((sizes.top_k + 1) * one + width * sizes.experts)
    pooling = 2 * patches * width**2 + 2 * width**2 + 2 * patches * width + 8 * width**2
    image = patches * (3 * sizes.patch**2 * width + layers) + pooling + width * sizes.embedding
    assert count_multiply_adds(model)["image"] == image
    dense = count_parameters(meta_model(config_of(replace(sizes, experts=0))))
    assert count_parameters(meta_model(paper_config(f"ViE-{size}"))) == dense
    found = [round(counts[name] / 1e6, 1) for name in ("total", "vision", "vision_activated")]
    assert found == [total, vision, activated]


def test_inputs_that_do_not_fit_are_refused():
    model = model_class(config := config_of(TINY))(config)
    with pytest.raises(ValueError, match="images of 8 x 10 pixels are not whole patches of 4 x 4: resize or crop them"):
        model.encode_image(torch.zeros(1, 3, 8, 10))
    with pytest.raises(ValueError, match="got `sequence length`: 9 and max_position_embeddings: 8"):
        model.encode_text(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(StrictDataclassError, match=r"of num_pooling_heads \(4\) and of 4 times .*\(16\), .*; got 32"):
        config_of(replace(TINY, heads=16))
