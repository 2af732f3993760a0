"""Every family: a dense model becomes sparse, computes the same, is saved, loaded, trained, and made dense again."""

import inspect
from dataclasses import replace
from typing import get_type_hints

import pytest
import torch
from converters import tiny_llava
from programs import WITHOUT_PACKAGE, run_program
from tiny_clip import EXACT_PRESETS, command, moved
from tiny_families import saved, tiny_dense, tiny_processor
from transformers import AutoModel, AutoModelForZeroShotImageClassification, CLIPImageProcessorPil

from clip_moe.conversion.average import average
from clip_moe.conversion.checkpoints import load_clip, load_dense
from clip_moe.conversion.dense import extract, force_expert
from clip_moe.conversion.llava import SAME_FEATURES, expected_outputs, likeness, load_tower, swap, verify
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.processors import load_processor
from clip_moe.conversion.unify import unify
from clip_moe.conversion.upcycle import upcycle
from clip_moe.conversion.verification import model_outputs, sample_inputs
from modeling_clip_moe import load_balancing_loss
from modeling_clip_moe.families import FAMILIES, FAMILY_OF_TYPE, IMAGE_TOWERS

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)


def inputs_of(model):
    """Two texts and two images; the first text is padded."""
    inputs = sample_inputs(model.config)
    inputs["input_ids"][0, 5] = inputs["input_ids"][0, -1]
    return inputs | {"attention_mask": (torch.arange(8) < torch.tensor([[6], [8]])).long()}


def assert_same(outputs, expected):
    for name in ("text_embeds", "image_embeds", "logits_per_image", "logits_per_text"):
        torch.testing.assert_close(outputs[name], expected[name], atol=5e-6, rtol=1e-5)


def assert_checkpointing_keeps_gradients(model, loss):
    gradients = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)  # one for both: jitter must be drawn again as it was
        loss().backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.is_gradient_checkpointing
    torch.testing.assert_close(*gradients)


@families
@pytest.mark.parametrize("preset", EXACT_PRESETS)
@torch.no_grad()
def test_a_sparse_model_computes_what_the_dense_one_does_and_goes_back_to_it(family, preset):
    dense = tiny_dense(family)
    sparse = upcycle(dense, EXACT_PRESETS[preset])
    for tower in (sparse.config.text_config, sparse.config.vision_config):
        tower.norm_topk_prob = True
    unpadded, inputs = sample_inputs(dense.config), inputs_of(dense)
    assert_same(sparse(**unpadded), dense(**unpadded))
    assert_same(sparse(**inputs), dense(**inputs))
    back = extract(sparse, 1)
    assert type(back) is family.dense
    torch.testing.assert_close(back.state_dict(), dense.state_dict(), atol=0, rtol=0)
    assert_same(back(**inputs), dense(**inputs))


@families
def test_a_folder_is_saved_again_towers_load_alone_and_dense_classes_refuse_it(family, tmp_path):
    sparse = upcycle(tiny_dense(family), PRESETS["clip_fmoe"])
    sparse.save_pretrained(tmp_path / "sparse")
    loaded = AutoModel.from_pretrained(tmp_path / "sparse")
    assert type(loaded) is family.sparse
    torch.testing.assert_close(loaded.state_dict(), sparse.state_dict(), atol=0, rtol=0)
    loaded.save_pretrained(tmp_path / "again")
    AutoModel.from_pretrained(tmp_path / "again").save_pretrained(tmp_path / "and again")
    for file in (tmp_path / "again").iterdir():
        assert file.read_bytes() == (tmp_path / "and again" / file.name).read_bytes(), file.name
    assert type(AutoModelForZeroShotImageClassification.from_pretrained(tmp_path / "sparse")) is family.sparse
    for tower in (sparse.text_model, sparse.vision_model):
        alone = type(tower).from_pretrained(tmp_path / "sparse")
        alone.save_pretrained(tmp_path / tower.config.base_config_key)
        for loaded in (alone, AutoModel.from_pretrained(tmp_path / tower.config.base_config_key)):
            torch.testing.assert_close(loaded.state_dict(), tower.state_dict(), atol=0, rtol=0)
    with pytest.raises((RuntimeError, ValueError), match="ignore_mismatched_sizes|moe_layers must be empty"):
        family.dense.from_pretrained(tmp_path / "sparse")


@pytest.mark.parametrize("family", [*FAMILIES, *IMAGE_TOWERS], ids=lambda family: family.model_type)
def test_a_dense_folder_is_refused_with_the_way_out(family, tmp_path):
    dense = tiny_dense(family, layers=1)
    dense.save_pretrained(tmp_path)
    has_dense_towers = family in FAMILIES and not family.has_own_dense
    towers = (family.sparse.text_model_class, family.sparse.vision_model_class) if has_dense_towers else ()
    for model_class in (family.sparse, *towers):
        refusal = f"is dense .*{family.model_type[:4]}.* no experts for {model_class.__name__}: `clip-moe upcycle`"
        with pytest.raises(ValueError, match=refusal):
            model_class.from_pretrained(tmp_path)


LOAD_AND_SAVE = """
import torch
from transformers import AutoModel
for folder in sys.argv[1:]:
    model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules")
    model.save_pretrained(f"{folder}_again")
    with torch.no_grad():
        outputs = model(**torch.load(f"{folder}/inputs.pt"))
    torch.save({name: tensor for name, tensor in outputs.items() if torch.is_tensor(tensor)}, f"{folder}/outputs.pt")
"""


@pytest.mark.slow
@torch.no_grad()
def test_saved_code_loads_without_the_package_and_saves_the_same(tmp_path):
    expected = {}
    for family in (*FAMILIES, *IMAGE_TOWERS):
        sparse = moved(upcycle(tiny_dense(family), PRESETS["clip_fmoe"]), ("experts", "router", "gate"), seed=1)
        folder = tmp_path / family.model_type
        inputs = inputs_of(sparse) if family in FAMILIES else sample_inputs(sparse.config)
        sparse.save_pretrained(tmp_path / "first")
        AutoModel.from_pretrained(tmp_path / "first").save_pretrained(folder)
        torch.save(inputs, folder / "inputs.pt")
        expected[folder] = {name: tensor for name, tensor in sparse(**inputs).items() if torch.is_tensor(tensor)}
    run_program(tmp_path, "-c", WITHOUT_PACKAGE + LOAD_AND_SAVE, *expected)
    for folder, outputs in expected.items():
        torch.testing.assert_close(torch.load(folder / "outputs.pt"), outputs, atol=1e-6, rtol=1e-6)
        again = folder.with_name(f"{folder.name}_again")
        for file in again.iterdir():
            assert file.read_bytes() == (folder / file.name).read_bytes(), file
        assert any(again.glob("modeling_*.py"))
    # From within the folder, none of whose files hides a package
    load = "from transformers import AutoModel; AutoModel.from_pretrained('.', trust_remote_code=True)"
    run_program(folder, "-c", WITHOUT_PACKAGE + load)


@families
@torch.no_grad()
def test_hidden_states_and_attentions_are_the_dense_models(family, tmp_path):
    dense = tiny_dense(family)
    upcycle(dense, PRESETS["clip_moe"]).save_pretrained(tmp_path)
    inputs = inputs_of(dense)
    dense.set_attn_implementation("eager")
    expected = dense(**inputs, output_hidden_states=True, output_attentions=True)
    # Padding goes to no expert: only there, where nothing reads it, is it another one
    masks = {"text_model_output": inputs["attention_mask"].bool() | family.sigmoid, "vision_model_output": slice(None)}
    if family.naflex:
        masks["vision_model_output"] = inputs["pixel_attention_mask"].bool()

    def tokens(outputs, tower):
        layers = [*outputs[tower].hidden_states, *(layer.transpose(1, 2) for layer in outputs[tower].attentions)]
        return [layer_tokens[masks[tower]] for layer_tokens in layers]

    sparse = family.sparse.from_pretrained(tmp_path, attn_implementation="eager")
    outputs = sparse(**inputs, output_hidden_states=True, output_attentions=True)
    torch.testing.assert_close(outputs.logits_per_image, expected.logits_per_image, atol=1e-5, rtol=1e-5)
    for tower in masks:
        torch.testing.assert_close(tokens(outputs, tower), tokens(expected, tower), atol=1e-5, rtol=1e-5)
    tuples = sparse(**inputs, return_dict=False)
    torch.testing.assert_close(tuples[0], outputs.logits_per_image)


@families
@torch.no_grad()
def test_half_precision_and_more_words(family, tmp_path):
    sparse = upcycle(tiny_dense(family), PRESETS["clip_moe"])
    sparse.save_pretrained(tmp_path)
    inputs = inputs_of(sparse)
    expected = sparse(**inputs)
    half = family.sparse.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    half_outputs = half(**inputs | {"pixel_values": inputs["pixel_values"].bfloat16()})
    for name in ("image_embeds", "text_embeds"):
        assert torch.cosine_similarity(half_outputs[name].float(), expected[name]).min() > 0.99
    sparse.resize_token_embeddings(50)
    assert sparse.config.text_config.vocab_size == len(sparse.get_input_embeddings().weight) == 50
    assert_same(sparse(**inputs), expected)


@torch.no_grad()
def test_a_compiled_siglip():  # a CLIP: test_modeling_execution.py
    torch.compiler.reset()
    sparse = upcycle(tiny_dense(FAMILY_OF_TYPE["siglip"], layers=1), PRESETS["clip_moe"])
    inputs = inputs_of(sparse)
    assert_same(torch.compile(sparse, fullgraph=True, backend="eager")(**inputs), sparse(**inputs))


@pytest.mark.parametrize(("weights", "configuration", "is_sparse"), [(0, 2, False), (1, 3, True), (0, 4, True)])
def test_weights_under_another_familys_configuration_are_refused(weights, configuration, is_sparse, tmp_path):
    for name, number in (("weights", weights), ("configuration", configuration)):
        model = tiny_dense(FAMILIES[number])
        model = upcycle(model, PRESETS["clip_moe"]) if is_sparse else model
        model.save_pretrained(tmp_path / name)
    (tmp_path / "configuration" / "config.json").replace(tmp_path / "weights" / "config.json")
    with pytest.raises(ValueError, match="missing: |Missing: |of the wrong shape: ") as error:
        load_clip(tmp_path / "weights")
    assert str(tmp_path / "weights") in str(error.value) and "\n" not in str(error.value)


@families
def test_router_losses_join_the_models_own_and_checkpointing_keeps_every_gradient(family):
    preset = replace(PRESETS["clip_moe"], capacity_factor=1.0, router_aux_loss_coef=1.0)
    noise = {f"{tower}_config": {"router_jitter_noise": 0.2} for tower in family.towers}
    sparse = moved(upcycle(tiny_dense(family), preset, routing=noise), "experts", seed=1).train()
    inputs = inputs_of(sparse) | {"return_loss": True}
    # Which a Trainer and sentence-transformers read
    assert inputs.keys() <= inspect.signature(sparse.forward).parameters.keys()
    arguments = inspect.signature(sparse.forward).parameters.keys() - {"kwargs"}
    assert all(name in inspect.getdoc(sparse.forward) for name in arguments)
    assert get_type_hints(sparse.forward)["return"] is type(sparse(**inputs))
    assert_checkpointing_keeps_gradients(sparse, lambda: sparse(**inputs, output_router_logits=True).loss)
    sparse.eval()
    plain, outputs = sparse(**inputs), sparse(**inputs, output_router_logits=True)
    assert {tower for tower in ("text", "vision") if f"{tower}_router_logits" in outputs} == {*family.towers}
    assert len(outputs.vision_router_logits) == 4 and plain.aux_loss is None
    torch.testing.assert_close(outputs.loss, plain.loss + outputs.aux_loss)


@families
@torch.no_grad()
def test_trained_ffns_become_experts_and_models_are_averaged(family, tmp_path):
    dense, ffns = tiny_dense(family), [f".layers.{layer}.mlp." for layer in range(4)]
    experts = [moved(tiny_dense(family), ffns, seed) for seed in (1, 2)]
    unified, inputs = unify(dense, experts), sample_inputs(dense.config)
    for number, model in enumerate((dense, *experts)):
        with force_expert(unified, number):
            # Hidden states of several units are sums in another order
            outputs = model_outputs(unified, inputs), model_outputs(model, inputs)
            torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    for number, model in enumerate((dense, experts[0])):
        model.save_pretrained(tmp_path / str(number))
    mean = average([tmp_path / "0", tmp_path / "1"])
    name = next(name for name, _ in dense.named_parameters() if name.startswith("vision_model.encoder.layers.0.mlp."))
    halves = (dense.get_parameter(name) + experts[0].get_parameter(name)) / 2
    torch.testing.assert_close(mean.get_parameter(name), halves)


def test_an_image_tower_alone_routes_as_it_is_told():
    dense = tiny_dense(IMAGE_TOWERS[0])
    routing = {"capacity_factor": 2.0, "routed_scaling_factor": 3.0}
    config = upcycle(dense, PRESETS["dense_price"], routing={"vision_config": routing}).config
    assert (config.capacity_factor, config.routed_scaling_factor) == (2.0, 3.0)
    with pytest.raises(ValueError, match="text_config: the model has an image tower alone"):
        upcycle(dense, PRESETS["dense_price"], routing={"text_config": routing})


@pytest.mark.parametrize("preset", ["clip_up", "clip_fmoe"])
def test_an_image_tower_alone_becomes_sparse_and_goes_into_a_llava(preset, tmp_path):
    (family,) = IMAGE_TOWERS
    dense = tiny_dense(family)
    dense.save_pretrained(tmp_path / "dense")
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16).save_pretrained(tmp_path / "dense")
    command("upcycle", tmp_path / "sparse", "--model", tmp_path / "dense", "--preset", preset)  # compares the two
    sparse = AutoModel.from_pretrained(tmp_path / "sparse")
    sparse.config.norm_topk_prob = True
    assert type(sparse) is family.sparse
    command("dense", tmp_path / "expert", "--model", tmp_path / "sparse", "--take", 1, "--scale", 1)
    torch.testing.assert_close(load_dense(tmp_path / "expert").state_dict(), dense.state_dict(), atol=0, rtol=0)
    trained, images = moved(sparse, "experts", seed=1).train(), sample_inputs(dense.config)

    def loss():
        outputs = trained(**images, output_router_logits=True)
        return outputs.pooler_output.sum() + load_balancing_loss(outputs.router_logits, 2)

    assert_checkpointing_keeps_gradients(trained, loss)
    llava, tower = tiny_llava(dense.config, 40, 39), load_tower(tmp_path / "sparse")
    llava.model.vision_tower.load_state_dict(dense.state_dict())
    # Without normalized weights, a sparse tower has other features from the start
    assert (likeness(llava, tower) > SAME_FEATURES) == (preset != "clip_up")
    with torch.no_grad():  # as after training within the LLaVA
        name = next(name for name, _ in dense.named_parameters() if name.endswith("q_proj.weight"))
        llava.model.vision_tower.get_parameter(name).add_(0.5)
    assert likeness(llava, tower) < SAME_FEATURES
    swap(llava, tower)
    llava.save_pretrained(tmp_path / "llava")
    verify(tmp_path / "llava", expected_outputs(llava, tower))
    with pytest.raises(ValueError, match="expected a model of type 'clip', got 'mlcd_moe_vision_model'"):
        load_clip(tmp_path / "sparse")


def test_patches_of_images_of_any_shape_have_the_models_size(tmp_path):
    *_, siglip, naflex = FAMILIES[:4]
    saved(naflex, tiny_dense(naflex), tmp_path)
    tiny_processor(siglip).save_pretrained(tmp_path)
    error = r"makes patches of 16 x 16, but by num_channels and patch_size .* takes 48: take the image processor"
    with pytest.raises(ValueError, match=error):
        load_processor(tmp_path)
