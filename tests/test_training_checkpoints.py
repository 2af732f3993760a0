"""Checkpoints of training: no code in them is run, and what is damaged, not finite or not whole is not gone on from."""

import json
import os
import pickle
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from tiny_runs import losses, same_weights, train

from clip_moe.engine.digests import file_digest
from clip_moe.training import training_state
from clip_moe.training.contrastive_task import ContrastiveTask
from clip_moe.training.loop import require_processes
from clip_moe.training.stages.train import TrainStage
from clip_moe.training.training_state import latest_checkpoint, random_states, save_checkpoint, set_random_states

KEPT = {"save_total_limit": 2}
WEIGHT = "model.visual_projection.weight"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that ended after step 5 of 6, with checkpoints of steps 2 and 4."""
    return train(tmp_path_factory.mktemp("stopped"), stop=5, **KEPT).parents[1]


@pytest.fixture
def checkpoint(stopped, tmp_path):
    """Of step 4, of a copy of that run."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    return tmp_path / "out" / "tuned.partial" / "checkpoints" / "step-00000004"


def test_all_generators_draw_the_same_again():
    states, draws = json.loads(json.dumps(random_states(torch.device("cpu")))), []
    for _ in range(2):
        set_random_states(states, torch.device("cpu"))
        draws.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert draws[0] == draws[1]


def evil(marker):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    return pickle.dumps(Evil())


def tensors(change):
    return lambda path: save_file(change(load_file(path)), path)


DAMAGES = {
    "gone": Path.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "a pickle": lambda path: path.write_bytes(evil(path.parents[4] / "executed")),
    "another": lambda path: (
        path.write_text('["another"]') if path.suffix == ".json" else save_file({"another": torch.zeros(2)}, path)
    ),
    "of another step": lambda path: shutil.copy(path.parent.with_name("step-00000002") / path.name, path),
    "one tensor less": tensors(lambda good: dict(sorted(good.items())[1:])),
    "another shape": tensors(lambda good: good | {min(good): torch.zeros(1, 7)}),
}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "random_states_0.json"])
def test_a_damaged_checkpoint_is_refused(checkpoint, tmp_path, name):
    """An optimizer that lost something, say, would go on with moments that are zero."""
    path = checkpoint / name
    whole = path.read_bytes()
    for damage, do in DAMAGES.items():
        if path.suffix == ".json" and ("tensor" in damage or "shape" in damage or name.startswith("random")):
            continue
        do(path)
        with pytest.raises(ValueError, match=f"cannot resume from the checkpoint .*{checkpoint.name}: .*Delete it"):
            train(tmp_path, **KEPT)
        path.write_bytes(whole)
    assert not (tmp_path / "executed").exists()


def test_what_a_checkpoint_says_of_itself_has_to_fit(checkpoint, tmp_path, capsys):
    """Of what else lies there, nothing is unpickled."""
    path, state = checkpoint / "model.safetensors", checkpoint / "state.json"
    good, said = load_file(path), training_state._read(state)
    save_file({name: good[name] for name in good if name != WEIGHT}, path)
    training_state._write(state, said | {"sha256": said["sha256"] | {path.name: file_digest(path)}})
    with pytest.raises(ValueError, match=f"is of another model or optimizer: {WEIGHT}"):
        train(tmp_path, **KEPT)
    save_file(good, path)
    digests = said["sha256"] | {path.name: file_digest(path)}
    training_state._write(state, said | {"sha256": digests, "num_processes": 2})
    assert {file.suffix for file in checkpoint.iterdir()} == {".safetensors", ".json"}
    for name in "custom_checkpoint_0.pkl random_states_0.pkl optimizer.bin pytorch_model.bin scheduler.bin".split():
        (checkpoint / name).write_bytes(evil(tmp_path / "executed"))
    with (checkpoint.parents[1] / "log.jsonl").open("a") as log:
        log.write('{"step": 4, ')  # the line that was being written when the run was killed
    assert len(losses(train(tmp_path, **KEPT))) == 6
    assert "is from 2 processes, but there are now 1" in capsys.readouterr().out
    assert not (tmp_path / "executed").exists()


def test_without_the_last_checkpoint_it_goes_on_from_the_one_before(whole, checkpoint, tmp_path):
    shutil.rmtree(checkpoint)
    assert same_weights(train(tmp_path, **KEPT), whole(**KEPT))


def steep(recipe):
    recipe["stages"][1]["changes"]["router_z_loss_coef"] = 1e17


def test_a_lower_learning_rate_follows_one_that_diverges(whole, tmp_path):
    """Without a checkpoint there is nothing to go on from, whatever was logged."""
    settings = {"change": steep, "save_steps": None}
    with pytest.raises(FloatingPointError, match="No checkpoint was written before it. Lower the learning rate"):
        train(tmp_path, learning_rate=1, **settings)
    assert same_weights(train(tmp_path, **settings), whole(**settings))


def test_a_loss_that_is_not_finite_stops_the_run(whole, tmp_path, monkeypatch):
    original, calls = TrainStage.contrastive_loss, iter(range(100))

    def overflow(*args, **kwargs):
        return original(*args, **kwargs) * (float("nan") if next(calls) == 5 else 1)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStage, "contrastive_loss", overflow)
        with pytest.raises(FloatingPointError, match=r"stage tuned, step 5: the loss is nan\. Lower the") as error:
            train(tmp_path)
    partial, kept = re.search("delete ([^,]+), or .* would resume from (.+)$", str(error.value)).groups()
    assert Path(partial).name == "tuned.partial" and Path(kept).name == "step-00000004" and Path(kept).is_dir()
    assert same_weights(train(tmp_path), whole())  # it can go on from there


@pytest.mark.parametrize(("last", "left"), [(5, ["step-00000004"]), (3, ["step-00000002"])])
def test_weights_that_overflow_are_no_result_and_no_checkpoint(tmp_path, monkeypatch, last, left):
    """Loss and gradient are finite: only the weights tell."""
    count = iter(range(100))

    def after_step(task, accelerator):
        if next(count) == last:
            next(task.model.text_model.encoder.parameters()).data.view(-1)[0] = float("inf")

    monkeypatch.setattr(ContrastiveTask, "after_step", after_step)
    with pytest.raises(FloatingPointError, match=f"step {last + 1}: .* is not finite after the step"):
        train(tmp_path)
    checkpoints = tmp_path / "out" / "tuned.partial" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == left and not (tmp_path / "out" / "tuned").exists()


def test_a_kill_while_saving_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch):
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 2)
    prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    first = save_checkpoint(accelerator, *prepared, tmp_path, 2, limit=1)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)  # all is written, but not yet under its name
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(accelerator, *prepared, tmp_path, 4, limit=1)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000002", "step-00000004.partial"}
    assert latest_checkpoint(tmp_path) == first
    monkeypatch.undo()
    last = save_checkpoint(accelerator, *prepared, tmp_path, 4, limit=1)
    assert list(tmp_path.iterdir()) == [last]


def test_checkpoints_that_would_be_pickles_are_refused():
    stage, task = (
        SimpleNamespace(save_steps=1),
        SimpleNamespace(model=SimpleNamespace(config=None), auxiliary_losses=[], mini_batch_size=None),
    )
    for distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        with pytest.raises(ValueError, match="save_steps: FSDP version 1 and DeepSpeed save checkpoints as pickles"):
            require_processes(stage, task, SimpleNamespace(distributed_type=distributed_type, is_fsdp2=False))
    require_processes(stage, task, SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=True))
    require_processes(stage, task, SimpleNamespace(distributed_type=DistributedType.NO, is_fsdp2=False))
