"""Where a model meets a processor, and several processors meet: what does not fit is refused by every command."""

import itertools
import shutil

import converters
import pytest
import yaml
from tiny_clip import change_json, error_of, processor, saved, tiny_clip
from transformers import CLIPTokenizer

from conversion.commands import assemble, average, publish, unify, upcycle
from evaluation.commands import evaluate
from training.commands import train as train_command


def set_in(file, **changes):
    return lambda folder: change_json(folder / file, **changes)


NUMBER_OF = processor().tokenizer.get_vocab()


def token_above_the_end(folder):
    """The end token is not the highest one, at which 2 pools."""
    *letters, last, start, end = sorted(NUMBER_OF, key=NUMBER_OF.get)
    vocabulary = {token: number for number, token in enumerate([*letters, start, end, last])}
    CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=12).save_pretrained(folder)
    change_json(folder / "config.json", text_config={"eos_token_id": 2})


# What is wrong with a folder -> the setting or behaviour that the error names, and the way to make it so
FAULTS = {
    "another end token": ("eos_token_id is 5", set_in("config.json", text_config={"eos_token_id": 5})),
    "padded on the left": ("pads texts on the left", set_in("tokenizer_config.json", padding_side="left")),
    "a word above the end token": ("has 'u</w>' with the number 19, above its", token_above_the_end),
    "longer than the positions": (
        "model_max_length is 13 and max_position_embeddings is 12",
        set_in("tokenizer_config.json", model_max_length=13),
    ),
    "more words": ("has 41 tokens, but vocab_size is 40", set_in("tokenizer.json", model={"vocab": {"more</w>": 40}})),
    "larger images": (
        "makes images of 3 x 24 x 24",
        set_in("processor_config.json", image_processor={"crop_size": {"height": 24, "width": 24}}),
    ),
}
DATA = {"source": "symbols", "num_samples": 8}
STEPS = {"global_batch_size": 2, "max_steps": 1, "learning_rate": 1e-3}
STAGES = {
    "train": {"stage": "train", "model": "FOLDER", "data": DATA, **STEPS},
    "embed": {"stage": "embed", "model": "FOLDER", "data": DATA},
    "stage average": {"stage": "average", "models": ["FOLDER", "FOLDER"]},
    "embed_captions": {"stage": "embed_captions", "data": DATA, "encoder": "FOLDER"},
    "embed images": {"stage": "embed_captions", "data": DATA, "encoder": "FOLDER", "modality": "image"},
}
COMMANDS = {
    "evaluate": (evaluate, "--model FOLDER --tasks symbols_pairs --output-dir OUT"),
    "upcycle": (upcycle, "FOLDER OUT --preset clip_up"),
    "average": (average, "OUT --models FOLDER FOLDER"),
    "unify": (unify, "FOLDER OUT --experts FOLDER"),
    "assemble": (assemble, "OUT --experts FOLDER FOLDER"),
    "publish": (publish, "FOLDER user/name --dry-run OUT --license mit"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A dense and a sparse CLIP with the same processor."""
    folder = tmp_path_factory.mktemp("sound")
    dense = saved(folder / "dense", tiny_clip())
    upcycle.main([str(dense), str(folder / "sparse"), "--preset", "clip_up"])
    return folder


# All go through `require_fit`: one command meets every fault, and every command meets one, another one each
PAIRS = {(fault, "upcycle") for fault in FAULTS} | set(zip(itertools.cycle(FAULTS), [*COMMANDS, *STAGES], strict=False))


@pytest.mark.parametrize(("fault", "command"), sorted(PAIRS))
def test_a_processor_that_does_not_fit_its_model_is_refused(sound, tmp_path, fault, command):
    folder, recipe = shutil.copytree(sound / "dense", tmp_path / "model"), tmp_path / "recipe.yaml"
    message, break_it = FAULTS[fault]
    break_it(folder)
    if command in COMMANDS:
        module, line = COMMANDS[command]
        arguments = line.replace("FOLDER", str(folder)).replace("OUT", str(tmp_path / "out")).split()
        lines = [error_of(module.main, *arguments)]
    else:
        settings = {"output_dir": str(tmp_path / "out"), "stages": [{"name": "one"} | STAGES[command]]}
        recipe.write_text(yaml.safe_dump(settings).replace("FOLDER", str(folder)))
        lines = [error_of(train_command.main, "--config", recipe, *plan) for plan in ([], ["--plan"])]
    for line in lines:
        assert message in line and str(folder) in line, line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["openai", "released_clip_moe"])
def test_the_processor_that_a_converter_is_given_and_its_checkpoint_are_both_named(tmp_path, command):
    converters.make_sources(tmp_path)
    FAULTS["larger images"][1](tmp_path / "dense")
    line = converters.run(command, tmp_path, tmp_path / "out")
    checkpoint = tmp_path / f"{command.partition('_')[0]}.safetensors"
    assert f"image processor of {tmp_path / 'dense'} " in line and f" {checkpoint} takes" in line and "\n" not in line


SWAPPED = {"a": NUMBER_OF["a</w>"], "a</w>": NUMBER_OF["a"]}
OTHERWISE = [
    ("tokenizer", set_in("tokenizer.json", model={"vocab": SWAPPED})),
    ("tokenizer", set_in("tokenizer_config.json", model_max_length=8)),
    ("image processor", set_in("processor_config.json", image_processor={"image_mean": [0.5, 0.5, 0.5]})),
]


@pytest.mark.parametrize("half, change", OTHERWISE)
def test_models_that_read_otherwise_do_not_become_one(sound, tmp_path, half, change):
    one, other = sound / "dense", shutil.copytree(sound / "dense", tmp_path / "other")
    change(other)
    out = tmp_path / "out"
    for command, arguments in ((average, [out, "--models", one, other]), (unify, [one, out, "--experts", other])):
        error = error_of(command.main, *arguments)
        assert f"the {half} of {other} " in error and f"that of {one}," in error
    assert not (tmp_path / "out").exists()
