"""Checkpoints of training: they run no code, are refused when they are damaged, and lose no random number."""

import hashlib
import json
import os
import pickle
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.utils import DistributedType
from pydantic.dataclasses import dataclass
from safetensors.torch import load_file, save_file
from tiny_runs import losses, recipe, same_weights

from training import training_state
from training.contrastive_task import ContrastiveTask
from training.recipe import load_recipe
from training.runner import run_recipe
from training.settings import STRICT
from training.stages.train import TrainStage
from training.training_state import require_support


class Stop(Exception):
    pass


@pytest.fixture
def run(tmp_path):
    """Runs a recipe, perhaps up to an optimizer step of its training."""

    def run(output="out", stop=None, **training):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe(**training)))
        loaded = load_recipe(path, {"output_dir": str(tmp_path / output)})
        if stop is None:
            return run_recipe(loaded)
        count, original = iter(range(stop)), torch.optim.AdamW.step

        def step(self, *arguments, **options):
            if next(count, None) is None:
                raise Stop
            return original(self, *arguments, **options)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
            patch.setattr(torch.optim.AdamW, "step", step)
            run_recipe(loaded)
        return tmp_path / output

    return run


@pytest.fixture
def checkpoint(run):
    """Of step 4 of 6."""
    return run(stop=5) / "tuned.partial" / "checkpoints" / "step-00000004"


def rewrite(path, **changes):
    """Writes a record of a checkpoint as one of the run that says something else."""
    training_state._write(path, training_state._read(path) | changes)


def evil(marker):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    return Evil()


def test_a_planted_pickle_is_not_executed(run, checkpoint, tmp_path):
    """Whatever files Accelerate might unpickle."""
    marker, names = tmp_path / "executed", ["custom_checkpoint_0.pkl", "random_states_0.pkl", "optimizer.bin"]
    for name in [*names, "pytorch_model.bin", "scheduler.bin", "sampler.bin", "scaler.pt"]:
        (checkpoint / name).write_bytes(pickle.dumps(evil(marker)))
    run()
    assert not marker.exists()


def test_a_checkpoint_is_no_pickle(checkpoint):
    assert {path.suffix for path in checkpoint.iterdir()} == {".safetensors", ".json"}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "random_states_0.json"])
@pytest.mark.parametrize("damage", ["gone", "cut", "pickle", "another"])
def test_a_damaged_checkpoint_is_refused(run, checkpoint, tmp_path, name, damage):
    path, marker = checkpoint / name, tmp_path / "executed"
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "pickle":
        path.write_bytes(pickle.dumps(evil(marker)))
    elif name.endswith(".json"):
        path.write_text('["another"]')
    else:
        save_file({"another": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=f"cannot go on from the checkpoint .*{checkpoint.name}: .*Delete it"):
        run()
    assert not marker.exists()


def test_weights_of_another_shape_or_type_are_refused(run, checkpoint):
    path = checkpoint / "model.safetensors"
    good = load_file(path)
    name = "model.visual_projection.weight"
    for bad, found in ((good[name][:3], r"\(3, 16\)"), (good[name].to(torch.int8), "torch.int8")):
        save_file(good | {name: bad}, path)
        digests = json.loads((checkpoint / "state.json").read_text())["sha256"]
        digests["model.safetensors"] = hashlib.sha256(path.read_bytes()).hexdigest()
        rewrite(checkpoint / "state.json", sha256=digests)
        with pytest.raises(ValueError, match=f"{name} is .*{found}"):
            run()


@pytest.mark.parametrize("damage", ["empty", "one less", "another shape", "of another step"])
def test_an_optimizer_that_lost_something_is_refused(run, tmp_path, damage):
    """It would go on with moments that are zero, or of another time."""
    output = run(stop=5, save_total_limit=2)
    checkpoint = output / "tuned.partial" / "checkpoints" / "step-00000004"
    path, name = checkpoint / "optimizer.safetensors", "model.visual_projection.weight.exp_avg"
    good = load_file(path)
    assert name in good
    if damage == "of another step":
        shutil.copy(checkpoint.with_name("step-00000002") / "model.safetensors", checkpoint)
    else:
        bad = {"empty": {}, "one less": {k: v for k, v in good.items() if k != name}}
        save_file(bad.get(damage, good | {name: torch.zeros(3)}), path)
    with pytest.raises(ValueError, match="cannot go on from the checkpoint"):
        run(save_total_limit=2)


@pytest.mark.parametrize("line", ["5", "{}", '{"step": "x"}'])
def test_a_damaged_log_is_begun_anew(run, line):
    log = run(stop=5) / "tuned.partial" / "log.jsonl"
    log.write_text(f"{line}\n")
    assert len(losses(run() / "tuned")) == 2  # of steps 5 and 6


def test_a_checkpoint_beyond_the_end_is_refused(run, checkpoint):
    rewrite(checkpoint / "state.json", step=99)
    checkpoint.rename(checkpoint.with_name("step-00000099"))
    with pytest.raises(ValueError, match="it has 99 steps, of 6"):
        run()


def test_without_the_last_checkpoint_it_goes_on_from_the_one_before(run):
    output = run(stop=5, save_total_limit=2)
    shutil.rmtree(output / "tuned.partial" / "checkpoints" / "step-00000004")
    assert same_weights(run(save_total_limit=2) / "tuned", run(output="whole") / "tuned")


NOISE = {"router_jitter_noise": 0.1, "attention_dropout": 0.1}


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("stop", [3, 5])
def test_resumed_with_jitter_and_dropout_is_the_same(run, monkeypatch, stop, in_memory):
    """Over the end of an epoch, where a new DataLoader begins."""
    original = recipe

    def with_noise(**training):
        changed = original(**training)
        for tower in ("text_config", "vision_config"):
            changed["stages"][1][tower] = {"capacity_group_size": 4, **NOISE}
        return changed

    monkeypatch.setitem(globals(), "recipe", with_noise)
    data = {"source": "symbols", "num_samples": 24, "in_memory": in_memory}
    resumed = run(stop=stop, data=data)
    run(data=data)
    whole = run(output="whole", data=data)
    assert losses(resumed / "tuned") == losses(whole / "tuned")
    assert same_weights(resumed / "tuned", whole / "tuned")
    monkeypatch.undo()
    assert not same_weights(whole / "tuned", run(output="without", data=data) / "tuned")


class BalancedTask(ContrastiveTask):
    """Buffers, in the task and in the model, change with each batch, and the loss with them."""

    def __init__(self, model, settings):
        super().__init__(model, settings)
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("is_odd", torch.tensor(False))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("seen", model.text_projection.weight.detach()[:, :2])
        self.register_buffer("wide", torch.zeros(1).expand(3))
        model.text_projection.register_buffer("usage", torch.zeros(16))
        model.text_projection.register_buffer("least", torch.tensor(float("inf")))

    def forward(self, batch, **options):
        loss, metrics = super().forward(batch, **options)
        usage = self.model.text_projection.usage
        with torch.no_grad():
            self.batches += 1
            self.wide[:1] += 1
            self.is_odd.logical_not_()
            usage.mul_(0.9).add_(loss)
        loss = loss * (1 + usage.mean() + self.batches + self.is_odd + self.wide.sum() + self.seen.sum())
        return loss, metrics | {"loss": loss.detach()}


@dataclass(config=STRICT, kw_only=True)
class BalancedStage(TrainStage):
    def task(self, model):
        return BalancedTask(model, self)

    def train_model(self, model, processor, loader, accelerator, context, directory, evaluation=None):
        """At the end the model's buffer is added to a weight: its class has none."""
        super().train_model(model, processor, loader, accelerator, context, directory, evaluation)
        weights = load_file(directory / "model.safetensors")
        weights["text_projection.weight"] += weights.pop("text_projection.usage")
        assert weights.pop("text_projection.least").isinf()
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("ema_decay", [None, 0.5])
def test_resumed_with_buffers_is_the_same(run, monkeypatch, ema_decay):
    """Whole numbers, true or false, real numbers, a view of a weight, an expanded one; those of a loss stay out of the
    file of the model."""
    original = recipe

    def balanced(**training):
        changed = original(**training)
        changed["stages"][2]["stage"] = f"{__name__}:BalancedStage"
        return changed

    monkeypatch.setitem(globals(), "recipe", balanced)
    resumed = run(stop=5, ema_decay=ema_decay)
    kept = load_file(resumed / "tuned.partial/checkpoints/step-00000004/model.safetensors")
    assert kept["model.text_projection.least"].isinf()
    assert (kept["batches"].item(), kept["is_odd"].item(), "scratch" in kept) == (4, False, False)
    assert kept["model.text_projection.usage"].any() and kept["wide"].tolist() == [4, 4, 4]
    assert torch.equal(kept["seen"], kept["model.text_projection.weight"][:, :2])
    run(ema_decay=ema_decay)
    whole = run(output="whole", ema_decay=ema_decay)
    assert losses(resumed / "tuned") == losses(whole / "tuned")
    assert same_weights(resumed / "tuned", whole / "tuned")


def test_a_task_keeps_its_model_where_it_is_saved_from(run, monkeypatch):
    def task(self, model):
        made = ContrastiveTask(model, self)
        made.network = made._modules.pop("model")
        return made

    monkeypatch.setattr(TrainStage, "task", task)
    with pytest.raises(ValueError, match="tuned: ContrastiveTask has another `model` than the one that it is given"):
        run()


MEASURED = {"tasks": ["symbols_pairs"], "every_steps": 100, "at_start": True}


@pytest.mark.parametrize("evaluation", [None, MEASURED, MEASURED | {"keep_best": "symbols_pairs/group"}])
def test_a_lower_learning_rate_follows_one_that_diverges(run, monkeypatch, evaluation):
    """Without a checkpoint there is nothing to go on from, whatever was logged and measured."""
    original = recipe

    def steep(**training):
        changed = original(**training)
        changed["stages"][1]["changes"]["router_z_loss_coef"] = 1e17
        return changed

    monkeypatch.setitem(globals(), "recipe", steep)
    settings = {"save_steps": None, "evaluation": evaluation}
    with pytest.raises(FloatingPointError, match="No checkpoint was written before it. Lower the learning rate"):
        run(learning_rate=1, **settings)
    lower = run(**settings)
    assert same_weights(lower / "tuned", run(output="whole", **settings) / "tuned")


def test_weights_that_overflow_in_the_last_step_are_no_result(run, tmp_path, monkeypatch):
    """Its loss and gradient are finite: only the weights tell."""
    original = torch.optim.AdamW.step

    def overflow(last):
        count = iter(range(100))

        def step(self, *arguments, **options):
            result = original(self, *arguments, **options)
            if next(count) == last:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].view(-1)[0] = float("inf")
            return result

        return step

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", overflow(5))
        with pytest.raises(FloatingPointError, match="stage tuned, step 6: .* is not finite after the step"):
            run()
    assert not (tmp_path / "out" / "tuned").exists()
    run()  # goes on from step 4

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", overflow(3))
        with pytest.raises(FloatingPointError, match="step 4: .* is not finite after the step"):
            run(output="other")
    checkpoints = tmp_path / "other" / "tuned.partial" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]


def test_another_number_of_processes_is_said(run, checkpoint, capsys):
    rewrite(checkpoint / "state.json", num_processes=2)
    run()
    assert "is of 2 processes, and there are 1 now" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("distributed_type", "is_fsdp2", "name"),
    [(DistributedType.DEEPSPEED, False, "DeepSpeed"), (DistributedType.FSDP, False, "FSDP version 1")],
)
def test_checkpoints_that_would_be_pickles_are_refused(distributed_type, is_fsdp2, name):
    with pytest.raises(ValueError, match=f"save_steps: {name} keeps checkpoints as pickles"):
        require_support(SimpleNamespace(distributed_type=distributed_type, is_fsdp2=is_fsdp2))
    require_support(SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=True))
    require_support(SimpleNamespace(distributed_type=DistributedType.NO, is_fsdp2=False))
