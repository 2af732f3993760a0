"""Damaged sources and impossible outputs: every converter ends in one line, or in a whole result; never in a traceback.

`pytest tests/test_fuzz_conversion.py` prints the number of cases at its end (with `-s`).
"""

import collections
import functools
import itertools
import json
import os
import random
import shutil
import subprocess
import sys

import pytest
from converters import COMMANDS, run, sources
from safetensors.torch import load_file, save_file
from transformers import logging

pytestmark = pytest.mark.slow

# Each command's sources
FOLDERS = {
    "upcycle": ["dense"],
    "dense": ["sparse"],
    "average": ["dense"],
    "assemble": ["dense", "sparse"],
    "unify": ["dense"],
    "long_context": ["dense"],
    "llava": ["llava", "sparse"],
    "released_clip_moe --reverse": ["heads_of_64"],
}
ARCHIVES = {"openai": "openai.safetensors", "released_clip_moe": "released.safetensors"}
PROCESSORS = {**dict.fromkeys(("openai", "released_clip_moe"), ["dense"]), **FOLDERS}

NO_OBJECT = ["", "null", "[]", "3", '"text"', "{", "nonsense", "\0", "[" * 100_000, '{"a":' * 100_000]
SIZES = [0, -1, 3, 10**9, "2", 2.5, None, [], {}, True]
FIELDS = {
    "vision_config": ["hidden_size", "num_attention_heads", "num_hidden_layers", "patch_size", "image_size"],
    "text_config": ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "eos_token_id"],
}
cases = collections.Counter()
sources  # noqa: B018, a fixture


@pytest.fixture(scope="module", autouse=True)
def quiet():
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
    print(f"\n{sum(cases.values())} cases: {dict(cases)}")


@pytest.fixture
def check(sources, tmp_path):
    """Runs a command on sources one file of which is damaged, and mends it."""

    def checked(kind, command, file, damage, may_succeed=False):
        path, output = sources / file, tmp_path / "out"
        whole = path.read_bytes()
        try:
            if damage(path) is SKIP:
                return
            error = run(command, sources, output)
        finally:
            path.write_bytes(whole)
        cases[kind] += 1
        if error is None:
            assert may_succeed and output.exists(), (command, file)
            shutil.rmtree(output) if output.is_dir() else output.unlink()
        else:
            assert isinstance(error, str), (command, file, error)
            assert error.startswith("error: ") and "\n" not in error, (command, file)
            assert "Traceback" not in error and len(error) > len("error: ")
        assert not list(tmp_path.iterdir()), (command, file)

    return checked


SKIP = object()


def text(content, path):
    path.write_text(content)


def field(keys, value, path):
    """Sets or, for ..., removes what lies under keys, if it is there."""
    content = inner = json.loads(path.read_text())
    for key in keys[:-1]:
        inner = inner.get(key)
        if not isinstance(inner, dict):
            return SKIP
    if value is ...:
        if inner.pop(keys[-1], SKIP) is SKIP:
            return SKIP
    else:
        inner[keys[-1]] = value
    path.write_text(json.dumps(content))


def bytes_of(change, path):
    path.write_bytes(change(path.read_bytes()))


def tensors(change, path):
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


def some(damages, command, number=16):
    """All damages for one command, some for the others, which open sources by the same functions."""
    return damages if command == "upcycle" else random.Random(command).sample(damages, number)


CONFIGURATIONS = [functools.partial(text, content) for content in NO_OBJECT]
for tower, fields in FIELDS.items():
    for name, value in itertools.product(fields, SIZES):
        CONFIGURATIONS.append(functools.partial(field, (tower, name), value))
    for value in (None, 3, [], "text"):
        CONFIGURATIONS.append(functools.partial(field, (tower,), value))
    for value in ("nope", 3, None, [], ""):
        CONFIGURATIONS.append(functools.partial(field, (tower, "hidden_act"), value))
for value in (..., "nope", 3, None, [1], {}, "bert"):
    CONFIGURATIONS.append(functools.partial(field, ("model_type",), value))
for name, value in itertools.product(("dtype", "architectures", "quantization_config"), ("nope", 3, [], {})):
    CONFIGURATIONS.append(functools.partial(field, (name,), value))


@pytest.mark.parametrize("command", FOLDERS)
def test_configurations(check, command):
    for folder in FOLDERS[command]:
        for damage in some(CONFIGURATIONS, command):
            harmless = damage.func is field and damage.args[0] != ("model_type",)  # some values are as good
            check("configurations", command, f"{folder}/config.json", damage, may_succeed=harmless)


WEIGHTS = {
    "empty": functools.partial(bytes_of, lambda content: b""),
    "header cut": functools.partial(bytes_of, lambda content: content[:100]),
    "cut": functools.partial(bytes_of, lambda content: content[:-4]),
    "longer": functools.partial(bytes_of, lambda content: content + b"1234"),
    "text": functools.partial(bytes_of, lambda content: b"<html>not found</html>"),
    "huge header": functools.partial(bytes_of, lambda content: b"\xff" * 8 + content[8:]),
    "no tensors": functools.partial(tensors, lambda state: state.clear()),
    "one less": functools.partial(tensors, lambda state: state.pop(sorted(state)[5])),
    "one more": functools.partial(tensors, lambda state: state.update(more=next(iter(state.values())).clone())),
    "flat": functools.partial(
        tensors,
        lambda state: state.update({key: tensor.flatten() for key, tensor in state.items() if tensor.dim() > 1}),
    ),
    "no rows": functools.partial(
        tensors, lambda state: state.update({key: tensor[:0] for key, tensor in state.items() if tensor.dim() > 1})
    ),
    **{
        kind: functools.partial(
            tensors, lambda state, kind=kind: state.update({key: getattr(t, kind)() for key, t in state.items()})
        )
        for kind in ("char", "bool", "long")
    },
    "not finite": functools.partial(
        tensors, lambda state: [t for _, t in sorted(state.items()) if t.is_floating_point()][-1].fill_(float("nan"))
    ),
}
# Of the text tower, which LLaVA does not take
UNUSED = ("one less", "one more")


@pytest.mark.parametrize("command", COMMANDS)
def test_weights(check, command):
    files = [ARCHIVES[command]] if command in ARCHIVES else [f"{f}/model.safetensors" for f in FOLDERS[command]]
    for file, (name, damage) in itertools.product(files, WEIGHTS.items()):
        unused = file == "sparse/model.safetensors" and command == "llava" and name in UNUSED
        check("weights", command, file, damage, may_succeed=unused)


@pytest.mark.parametrize("command", COMMANDS)
def test_random_bytes(check, command):
    """Cut and flipped anywhere; a number that changes is no damage that can be seen."""
    generator = random.Random(command)
    folders = FOLDERS.get(command) or PROCESSORS[command]
    files = [
        f"{folder}/{name}" for folder in folders for name in ("config.json", "tokenizer.json", "model.safetensors")
    ]
    files = [file for file in files if "heads_of_64/tok" not in file]
    files += [ARCHIVES[command]] * 3 if command in ARCHIVES else []

    def flip(content):
        changed = bytearray(content)
        for _ in range(generator.choice((1, 8))):
            changed[generator.randrange(min(len(changed), 4000))] = generator.randrange(256)
        return bytes(changed)

    for file in files:
        for _ in range(4):
            check("bytes", command, file, functools.partial(bytes_of, flip), may_succeed=True)
            cut = functools.partial(bytes_of, lambda content: content[: generator.randrange(len(content))])
            unused = command in ARCHIVES and file.endswith(("config.json", "model.safetensors"))
            check("bytes", command, file, cut, may_succeed=unused)


TOKENIZERS = {
    "tokenizer.json": [("model",), ("model", "vocab"), ("model", "merges"), ("added_tokens",), ("normalizer",)],
    "tokenizer_config.json": [("tokenizer_class",), ("model_max_length",), ("bos_token",), ("pad_token",)],
    "processor_config.json": [
        ("image_processor",),
        ("processor_class",),
        ("image_processor", "size"),
        ("image_processor", "crop_size"),
        ("image_processor", "image_std"),
        ("image_processor", "resample"),
        ("image_processor", "image_processor_type"),
    ],
}


HALVES = []
for file, paths in TOKENIZERS.items():
    HALVES += [(file, functools.partial(text, content)) for content in NO_OBJECT]
    for keys, value in itertools.product(paths, (..., None, 3, -1, [], {}, "nope", 10**30)):
        HALVES.append((file, functools.partial(field, keys, value)))


@pytest.mark.parametrize("command", sorted(set(PROCESSORS) - {"released_clip_moe --reverse"}))
def test_processors(check, command):
    for file, damage in some(HALVES, command):
        harmless = damage.func is field
        check("processors", command, f"{PROCESSORS[command][0]}/{file}", damage, may_succeed=harmless)


def test_in_processes_of_their_own(sources, tmp_path):
    """The same through the shell: one line on stderr, a status that is not 0, nothing left."""
    damages = {
        "upcycle": ("dense/config.json", functools.partial(text, "null")),
        "dense": ("sparse/model.safetensors", WEIGHTS["cut"]),
        "openai": ("openai.safetensors", WEIGHTS["not finite"]),
        "average": ("dense/tokenizer.json", functools.partial(text, "[]")),
    }
    for command, (file, damage) in damages.items():
        whole = (sources / file).read_bytes()
        damage(sources / file)
        _, arguments = COMMANDS[command]
        line = [sys.executable, "-m", f"conversion.{command}", *map(str, arguments(sources, tmp_path / "out"))]
        result = subprocess.run(
            line, capture_output=True, text=True, env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        )
        (sources / file).write_bytes(whole)
        assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith("error: cannot load ")
        assert "Traceback" not in result.stderr and not list(tmp_path.iterdir())
        cases["processes"] += 1
