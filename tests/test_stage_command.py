"""Commands that are stages: what they read, what they leave, what they say."""

import contextlib
import re
import shlex
from itertools import pairwise

import pytest
from documents import ROOT
from tiny_runs import run_stages

import clip_moe
from clip_moe.engine.command_line import read_stage_command, run_stage
from clip_moe.engine.kinds import KINDS, stage_of_kind
from clip_moe.engine.provenance import Record
from clip_moe.engine.setting_help import docstring, settings_of

MODEL = str(ROOT / "training" / "symbol_clip")


def upcycle(output, *more):
    clip_moe.main(["upcycle", str(output), "--model", MODEL, "--preset", "clip_up", *more])


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_has_help(kind):
    text = run_stage(kind, ["--help"])
    for setting in settings_of(stage_of_kind(kind)):
        assert setting.name in ("name", "stage") or setting.meaning, setting.name
        assert setting.name in ("name", "stage") or re.search(rf"^  --{setting.name}  \S", text, re.M), setting.name
    usage = text.partition("\n\n")[0].replace("\n", " ")
    required = {one.name for one in settings_of(stage_of_kind(kind)) if one.default is None} - {"name", "stage"}
    assert set(re.findall(r" --(\w+) ", usage)) == required


@pytest.mark.parametrize("command", ["", "run", "finetune", "efficiency", "app", "upcycle", "train-data-expert"])
@pytest.mark.parametrize("width", [60, 80, 140])
def test_help_is_broken_once_at_the_width_of_the_terminal(command, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    with contextlib.suppress(SystemExit):
        clip_moe.main([*command.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    for line, following in pairwise(lines):
        assert len(line) <= width and line == line.rstrip(), line
        indents = [len(text) - len(text.lstrip()) for text in (line, following)]
        goes_on = (
            indents[0] == indents[1]
            and re.match(" *[a-z](?!.*: )", following)
            and not re.search(r"[.:]$|clip-moe", line)
        )
        assert not goes_on or len(line) + 1 + len(following.split()[0]) > width, (line, following)
    assert not command or "    clip-moe " in "\n".join(lines)


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_a_kind_is_one(kind):
    """All of its settings exist, and folders of this checkout are there."""
    code = [text for text in docstring(stage_of_kind(kind)).split("\n\n") if text.startswith("    clip-moe")]
    commands = [shlex.split(line) for text in code for line in text.replace("\\\n", "").splitlines()]
    assert commands
    for _, command_kind, *arguments in (command for command in commands if command[0] == "clip-moe"):
        assert command_kind.replace("-", "_") == kind
        read_stage_command(stage_of_kind(kind), arguments)
        assert all((ROOT / word).is_dir() for word in arguments if word.startswith("training/"))


def test_a_command_makes_what_a_recipe_makes(tmp_path):
    """The same weights and record, but for the name."""
    upcycle(tmp_path / "alone.v2", "--changes.num_experts", "4", "--changes.sparse_layers", "0", "1", "--seed", "3")
    settings = {"model": MODEL, "preset": "clip_up", "changes": {"num_experts": 4, "sparse_layers": [0, 1]}}
    whole = run_stages(tmp_path, [{"name": "sparse", "stage": "upcycle", **settings}], seed=3)
    one, other = Record.read(tmp_path / "alone.v2"), Record.read(whole / "sparse")
    assert one.weights == other.weights and one.inputs == other.inputs and one.seed == other.seed == 3
    assert one.stage | {"name": "sparse"} == other.stage
    assert {path.name for path in tmp_path.iterdir()} == {"alone.v2", "out", "recipe.yaml"}


def test_a_folder_is_made_once_and_never_overwritten(tmp_path, capsys):
    upcycle(tmp_path / "sparse")
    assert f'AutoModel.from_pretrained("{tmp_path / "sparse"}")' in capsys.readouterr().out
    upcycle(tmp_path / "sparse")
    assert "done before, skipped" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="was made with other settings .*num_experts"):
        upcycle(tmp_path / "sparse", "--changes.num_experts", "2")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(SystemExit, match="mine .*"):
        upcycle(tmp_path / "mine")
    with pytest.raises(SystemExit, match="num_experts_per_tok must be between"):
        upcycle(tmp_path / "new", "--changes.num_experts_per_tok", "9")
    assert {path.name for path in tmp_path.iterdir()} == {"sparse", "mine"}


def test_a_command_is_rehearsed(tmp_path, capsys):
    upcycle(tmp_path / "sparse", "--rehearse")
    assert re.search(r"^sparse +[\d.]+ s ", capsys.readouterr().out, re.M) and not [*tmp_path.iterdir()]


def test_values_are_those_of_a_recipe():
    flags = "out/tuned --model x --data.source symbols --data.num-samples=64 --learning-rate 1e-3 --seed 4 "
    flags += "--max-steps 2 --global_batch_size 8 --evaluation.every_steps 1 --gradient-checkpointing "
    flags += "--mini_batch_size 4 --lora.target_modules q_proj --lora.r 2 --lora.target_modules v_proj"
    tasks = ["symbols_pairs", "{task: retrieval, dataset: symbols, num_samples: 9}"]
    made, _ = read_stage_command(stage_of_kind("train"), [*flags.split(), "--evaluation.tasks", *tasks])
    (stage,) = made.stages
    assert (made.output_dir, stage.name, made.seed, stage.data.seed) == ("out", "tuned", 4, 4)
    assert (stage.data.num_samples, stage.learning_rate, stage.gradient_checkpointing) == (64, 1e-3, True)
    assert stage.evaluation.tasks[0] == "symbols_pairs" and stage.evaluation.tasks[1].task == "retrieval"
    assert stage.lora.target_modules == ["q_proj", "v_proj"]


@pytest.mark.parametrize("source", ["my/photos #2", "*.csv", "{000..003}.tar"])
def test_texts_that_yaml_reads_otherwise_are_taken_whole(source):
    made, _ = read_stage_command(stage_of_kind("embed"), ["out", "--model", "mod #2", "--data.source", source])
    assert (made.stages[0].model, made.stages[0].data.source) == ("mod #2", source)


WRONG = {
    "no output": (["--model", "x"], "the first argument is the folder to make, got '--model'"),
    "no key": (["out", "--modle", "x"], "modle: unknown key: did you mean 'model'"),
    "no key within": (["out", "--model", "x", "--data.sorce", "y"], "data.sorce: unknown key.*'source'"),
    "name": (["out", "--model", "x", "--name", "y"], "--name cannot be set: the folder names the stage"),
    "no value": (["out", "--model"], "--model needs a value"),
    "no flag": (["out", "x"], "unexpected argument 'x': settings are written --SETTING VALUE"),
    "two values": (["out", "--model", "x", "y"], "--model takes one value, got x y"),
    "missing": (["out", "--model", "x"], "data: is required: set it, as by --data$"),
    "octal": (["out", "--model", "x", "--seed", "010"], "--seed .*YAML reads 010 as a different number"),
    "base 60": (["out", "--model", "x", "--seed", "1:30"], "--seed .*YAML reads 1:30 as a different number"),
    "two spellings": (["out", "--batch-size", "2", "--batch_size", "3"], "--batch_size takes one value, got 2 3"),
    "empty": (["out", "--model", "x", "--rehearse="], "--rehearse is empty: remove it, or set it to null"),
    "keys and value": (["out", "--data.source", "x", "--data", "{}"], "--data: given both whole and in parts"),
    "value and keys": (["out", "--data", "x", "--data.source", "y"], "--data.source: data has a value already"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_end_in_one_line(arguments, message):
    with pytest.raises(SystemExit, match=message):
        clip_moe.main(["embed", *arguments])


def test_an_argument_is_not_given_as_an_option_too():
    with pytest.raises(SystemExit, match="--source is already given as an argument, a"):
        clip_moe.main(["publish", "a", "user/x", "--source", "b"])


def test_a_command_that_fails_at_once_leaves_nothing(tmp_path):
    with pytest.raises(SystemExit, match="trainable"):
        clip_moe.main(["train", str(tmp_path / "tuned"), *SETTINGS, "--trainable", "nothing"])
    assert not [*tmp_path.iterdir()]
    clip_moe.main(["train", str(tmp_path / "tuned"), *SETTINGS])
    assert (tmp_path / "tuned" / "model.safetensors").is_file()


SETTINGS = ["--model", MODEL, "--data.source", "symbols", "--data.num_samples", "16", "--global_batch_size", "8"]
SETTINGS += ["--max_steps", "1", "--learning_rate", "1e-4"]
