"""Where a model meets a processor, and several processors meet: what does not fit is refused by every command."""

import itertools
import shutil

import pytest
from tiny_clip import change_json, error_of, processor, saved, tiny_clip
from transformers import CLIPTokenizer

import clip_moe


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
DATA = "--data.source symbols --data.num_samples 8"
COMMANDS = {
    "evaluate": "evaluate OUT --models.a FOLDER --tasks symbols_pairs",
    "upcycle": "upcycle OUT --model FOLDER --preset clip_up",
    "average": "average OUT --models FOLDER FOLDER",
    "unify": "unify OUT --model FOLDER --experts FOLDER",
    "assemble": "assemble OUT --experts FOLDER FOLDER",
    "train": f"train OUT --model FOLDER {DATA} --global_batch_size 2 --max_steps 1 --learning_rate 1e-3",
    "embed": f"embed OUT --model FOLDER {DATA}",
    "embed captions": f"embed OUT --model FOLDER {DATA} --what captions",
    "embed images": f"embed OUT --model FOLDER {DATA} --what images",
    "publish": "publish FOLDER user/name --dry_run OUT --license mit",
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("sound") / "dense", tiny_clip())


# All go through `require_fit`: one command meets every fault, and every command meets one, another one each
PAIRS = {(fault, "upcycle") for fault in FAULTS} | set(zip(itertools.cycle(FAULTS), COMMANDS, strict=False))


@pytest.mark.parametrize(("fault", "name"), sorted(PAIRS))
def test_a_processor_that_does_not_fit_its_model_is_refused(dense, tmp_path, fault, name):
    folder = shutil.copytree(dense, tmp_path / "model")
    message, break_it = FAULTS[fault]
    break_it(folder)
    words = {"FOLDER": folder, "OUT": tmp_path / "out"}
    line = error_of(clip_moe.main, *(words.get(word, word) for word in COMMANDS[name].split()))
    assert message in line and str(folder) in line, line
    assert not (tmp_path / "out").exists()


SWAPPED = {"a": NUMBER_OF["a</w>"], "a</w>": NUMBER_OF["a"]}
OTHERWISE = [
    ("tokenizer", set_in("tokenizer.json", model={"vocab": SWAPPED})),
    ("tokenizer", set_in("tokenizer_config.json", model_max_length=8)),
    ("image processor", set_in("processor_config.json", image_processor={"image_mean": [0.5, 0.5, 0.5]})),
]


@pytest.mark.parametrize("half, change", OTHERWISE)
def test_models_that_read_otherwise_do_not_become_one(dense, tmp_path, half, change):
    one, other = dense, shutil.copytree(dense, tmp_path / "other")
    change(other)
    for command, *options in (("average", "--models", one, other), ("unify", "--model", one, "--experts", other)):
        error = error_of(clip_moe.main, command, tmp_path / "out", *options)
        assert f"{other} and {one} have different {half}s: use models" in error
    assert not (tmp_path / "out").exists()
