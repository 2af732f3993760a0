"""Runs in rough hands: refused, locked out, interrupted, out of disk. One line each, and nothing is lost."""

import os
import shlex
import shutil

import pytest
import torch
import yaml
from local_hub import contents
from safetensors.torch import save_file
from tiny_clip import error_of
from tiny_runs import full_disk, recipe, recorded, same_weights, train, weights

from clip_moe.data.arguments import DataArguments
from clip_moe.data.symbols import SYMBOLS
from clip_moe.engine.files import locked
from clip_moe.engine.plan import plan
from clip_moe.engine.provenance import CHECKPOINTS, Record
from clip_moe.engine.recipe import load_recipe, read_stage
from clip_moe.engine.rehearsal import rehearse
from clip_moe.engine.runner import Runner, run_recipe, stage_errors
from clip_moe.training import commands


@pytest.fixture
def write(tmp_path):
    """A recipe's file, by default of its models before training alone."""

    def write(stages=2, **training):
        settings = recipe(**training)
        settings |= {"output_dir": str(tmp_path / "out"), "stages": settings["stages"][:stages]}
        settings |= {} if stages == 3 else {"defaults": {}}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(settings))
        return path

    return write


def failed(*arguments):
    return error_of(commands.run.main, *arguments)


def test_a_refused_run_writes_nothing(write):
    """Also where it is not the first stage that is refused, or what that reads is not there yet."""
    path = write()
    output = run_recipe(load_recipe(path))
    before, digest = contents(output), Record.read(output / "dense").digest
    for refused in ({"seed": 1}, {"sparse.changes.num_experts": 8}):
        with pytest.raises(ValueError, match="was made with other settings"):
            run_recipe(load_recipe(path, {**refused, "mixed_precision": "no"}))
    assert contents(output) == before
    shutil.rmtree(output / "dense")
    for only in (None, ["sparse"], ["dense"]):  # recipe.yaml would tell it of a stage that does not run, too
        with pytest.raises(ValueError, match="sparse was made with other settings .stage.changes.num_experts: 4 -> 8"):
            run_recipe(load_recipe(path, {"sparse.changes.num_experts": 8}), only)
    assert contents(output) == {name: content for name, content in before.items() if not name.startswith("dense/")}
    run_recipe(load_recipe(path))
    assert Record.read(output / "dense").digest == digest  # made again, it is the same
    (output / "other").mkdir()
    (output / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="other already exists: remove it or choose another output"):
        run_recipe(load_recipe(path, {"sparse.name": "other"}))
    assert (output / "other" / "notes.txt").read_text() == "mine"


def test_a_model_that_was_changed_after_its_stage_is_not_read(write, tmp_path, capsys):
    path = write()
    output = run_recipe(load_recipe(path))
    run_recipe(load_recipe(path))
    assert capsys.readouterr().out.count("done before, skipped") == 2
    loaded, tensors = load_recipe(path), weights(output / "dense")
    runner = Runner(loaded)
    runner.prepare(loaded.stages[1])
    tensors["visual_projection.weight"] += 1
    save_file(tensors, output / "dense" / "model.safetensors", {"format": "pt"})
    for run in (lambda: run_recipe(load_recipe(path)), lambda: runner.prepare(loaded.stages[1])):
        with pytest.raises(ValueError, match="dense was changed after its stage finished: delete the folder"):
            run()
    run_recipe(load_recipe(path), only=["dense"])  # nothing reads it
    # The way out
    shutil.copytree(output / "dense", tmp_path / "mine", ignore=shutil.ignore_patterns("manifest.json"))
    shutil.rmtree(output / "sparse")
    run_recipe(load_recipe(path, {"sparse.model": str(tmp_path / "mine")}), only=["sparse"])


def test_settings_that_are_not_compared():
    """Models may be called as they are. Workers of a stream settle its order."""
    models = {"evaluation": "a", "num_workers": "b"}
    stage = read_stage({"stage": "evaluate", "name": "a", "models": models, "tasks": ["names_256"], "num_workers": 2})
    assert stage.compared()["models"] == models and "num_workers" not in stage.compared()
    streamed, loaded = (DataArguments(source="a", streaming=streaming, num_workers=2) for streaming in (True, False))
    assert streamed.compared()["num_workers"] == 2 and "num_workers" not in loaded.compared()


def test_a_kill_just_after_a_stage_has_its_name_changes_no_record(write, monkeypatch, capsys):
    """Stages that read it are not refused later."""
    path = write()

    def killed(final):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("clip_moe.engine.runner._tidy", killed)
        run_recipe(load_recipe(path), only=["dense"])
    run_recipe(load_recipe(path), only=["sparse"])
    run_recipe(load_recipe(path))
    assert capsys.readouterr().out.count("done before, skipped") == 2


def test_what_a_killed_run_left(tmp_path):
    """Damaged records are named, and leftovers are no part of the stage."""
    left = train(tmp_path, stop=3)
    for record in (left.with_name("dense") / "manifest.json", left / "manifest.json"):
        whole = record.read_bytes()
        for damage in (whole[:-10], b"5"):
            record.write_bytes(damage)
            assert f"{record} is damaged" in failed("--config", tmp_path / "recipe.yaml")
        record.write_bytes(whole)
    (left / "model.safetensors.123.partial").write_text("half a model")
    (left / "encoder.partial").mkdir()
    (left / "encoder.partial" / "config.json").write_text("{}")
    assert not list(train(tmp_path).rglob("*.partial"))


def test_a_second_run_in_a_folder_is_told_who_holds_it(write, tmp_path):
    path = write()
    with locked(tmp_path / "out"):
        assert f"out is in use: process {os.getpid()} on " in failed("--config", path)
        run_recipe(load_recipe(path, {"output_dir": str(tmp_path / "other")}))


@pytest.mark.slow
def test_full_disks_end_in_one_line_and_lose_nothing(write, tmp_path, monkeypatch):
    """No file may be longer than a few bytes, from a stage's own work on. Each run goes on from what is there."""
    path = write(3, save_steps=None)
    settings = yaml.safe_load(path.read_text())
    data = {"source": "symbols", "num_samples": 8}
    settings["stages"].append({"name": "features", "stage": "embed", "model": "dense", "data": data})
    settings["stages"].append({"name": "words", "stage": "tokenizer", "data": data})
    path.write_text(yaml.safe_dump(settings))
    kinds = {stage.name: type(stage) for stage in load_recipe(path).stages}
    full_disks = [("dense", 0), ("dense", 3000), ("sparse", 3000), ("tuned", 30_000), ("features", 0), ("words", 3000)]
    for stage, size in full_disks:

        def run(*arguments, original=kinds[stage].run, size=size):
            with full_disk(size):
                return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(kinds[stage], "run", run)
            error = failed("--config", path)
        assert error.startswith(f"error: {stage}: ") and "run the same command again to go on" in error
        assert not (tmp_path / "out" / stage).exists()
    resumed = run_recipe(load_recipe(path))
    whole = run_recipe(load_recipe(path, {"output_dir": str(tmp_path / "whole")}))
    assert same_weights(resumed / "tuned", whole / "tuned")
    for name in ("features", "words"):
        assert contents(resumed / name).keys() == contents(whole / name).keys()


def test_every_model_says_how_to_load_it_and_every_error_names_its_stage(write, tmp_path, capsys):
    path, dense = write(), tmp_path / "out" / "dense"
    with pytest.raises(ValueError, match="a fault: sparse.model: .*nowhere"):
        run_recipe(load_recipe(path, {"sparse.model": "nowhere/"}))
    commands.run.main(["--config", str(path), "--stages", " dense "])
    assert f'AutoModel.from_pretrained("{dense}")' in capsys.readouterr().out
    (dense / "model.safetensors").unlink()
    recorded(dense)
    with pytest.raises(OSError, match="^sparse: "):
        run_recipe(load_recipe(path))
    with pytest.raises(FloatingPointError, match="^tuned: .*tensor"):
        with stage_errors(load_recipe(write(3)).stages[2]):
            raise FloatingPointError("a tensor is not finite")


ARGUMENTS = {
    "nowhere.yaml": "--config takes one value",
    "--seed": "--seed needs a value",
    "--config nowhere.yaml": "--config takes one value",
    "--sede 1": "'sede' is not an option",
    "--seed [": "--seed is not valid YAML",
    "--stages.0.name x": "'stages' is a list: give all of it",
    "--stages nope": "the recipe has no stage nope",
    "--experts 1,,2": "--experts is not valid YAML",
    "--experts '7, 8 '": "the recipe has no expert 7, 8; it has none",
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_that_make_no_sense_end_in_one_line(write, tmp_path, arguments):
    assert ARGUMENTS[arguments] in failed("--config", write(), *shlex.split(arguments))
    assert not (tmp_path / "out").exists()


def test_a_folder_with_stages_of_another_recipe_is_refused(write):
    output = run_recipe(load_recipe(write()))
    before = contents(output)
    other = write().with_name("other.yaml")
    other.write_text(write().read_text(encoding="utf-8").replace("name: sparse", "name: another"))
    with pytest.raises(ValueError, match="has stages of another recipe .sparse"):
        run_recipe(load_recipe(other))
    assert contents(output) == before


def test_a_recipe_in_its_own_output_folder_is_not_replaced(write):
    path, output = write(), write().parent / "out"
    output.mkdir()
    path = path.rename(output / "recipe.yaml")
    text = path.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="recipe.yaml would be overwritten by the recipe with all its settings"):
        run_recipe(load_recipe(path))
    assert path.read_text(encoding="utf-8") == text
    run_recipe(load_recipe(path.rename(output / "mine.yaml")))
    run_recipe(load_recipe(output / "recipe.yaml"))  # which the run wrote


def test_what_only_stages_that_do_not_run_now_have_read_may_change(write, tmp_path, capsys):
    """Also what a kill left of a finished stage goes, although it is skipped."""
    SYMBOLS.load("train", "web", 8).save_to_disk(tmp_path / "data")
    path = write(3, data={"source": str(tmp_path / "data")}, max_steps=1)
    output = run_recipe(load_recipe(path))
    shutil.rmtree(tmp_path / "data")
    SYMBOLS.load("train", "web", 8, seed=1).save_to_disk(tmp_path / "data")
    (output / "sparse" / CHECKPOINTS / "step-1").mkdir(parents=True)
    run_recipe(load_recipe(path), ["dense", "sparse"])
    assert capsys.readouterr().out.count("done before, skipped") == 2
    assert not (output / "sparse" / CHECKPOINTS).exists()
    with pytest.raises(ValueError, match="tuned was made with other data"):
        run_recipe(load_recipe(path))


def test_a_stage_alone_waits_for_the_run_that_writes_its_folder(write, tmp_path):
    recipe = load_recipe(write())
    with locked(tmp_path / "out" / "sparse"), pytest.raises(ValueError, match="out/sparse is in use: process"):
        run_recipe(recipe)
    assert (tmp_path / "out" / "dense").is_dir()


@pytest.mark.parametrize("kind", ["link", "file", "finished"])
def test_what_is_no_leftover_of_a_stage_is_not_deleted(kind, write, tmp_path):
    output = run_recipe(load_recipe(write()), ["dense"])
    partial = output / "sparse.partial"
    if kind == "link":
        (tmp_path / "disk").mkdir()
        (output / "sparse").symlink_to(tmp_path / "disk")
    elif kind == "finished":
        shutil.copytree(output / "dense", partial)
    else:
        partial.mkdir()
        (partial / "thesis.txt").write_text("precious")
    before = contents(output)
    message = {"link": "sparse is a link to .*disk", "file": "holds something else", "finished": "holds something else"}
    with pytest.raises(ValueError, match=message[kind]):
        run_recipe(load_recipe(write()))
    assert contents(output) == before


def test_a_plan_and_a_rehearsal_refuse_folders_of_other_settings(write):
    run_recipe(load_recipe(write()))
    other = load_recipe(write(), {"sparse.changes.num_experts": 8})
    for look in (plan, rehearse):
        with pytest.raises(ValueError, match="out/sparse was made with other settings .*num_experts: 4 -> 8"):
            look(other, other.stages)


def test_a_gpu_that_is_full_is_one_line(write):
    (stage, _) = load_recipe(write()).stages
    with pytest.raises(ValueError, match="^dense: out of memory: CUDA out of memory. lower mini_batch_size"):
        with stage_errors(stage):
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore")
