"""Settings of how a stage trains, against the plain computation: averaged weights, parts of a batch, precision."""

import pytest
import torch
from tiny_runs import losses, recipe, run_stages, same_weights, weights

from training import engine
from training.context import choose_precision, make_accelerator
from training.training_state import save_checkpoint


class Stop(Exception):
    pass


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a recipe whose training has these settings, perhaps up to a checkpoint."""

    def run(output="out", stop=None, **settings):
        changed = recipe(**settings)
        folder = tmp_path / output
        folder.mkdir(exist_ok=True)
        keys = {"defaults": changed["defaults"]}
        if stop is None:
            return run_stages(folder, changed["stages"], **keys)

        def save(accelerator, model, optimizer, checkpoints, step, *others):
            save_checkpoint(accelerator, model, optimizer, checkpoints, step, *others)
            if step == stop:
                raise Stop

        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(engine, "save_checkpoint", save)
            run_stages(folder, changed["stages"], **keys)
        return folder / "out"

    return run


def test_the_average_of_the_weights(run, monkeypatch):
    """Against a loop over the weights of each step."""
    steps, original = [], engine._take_step

    def take_step(optimizer, scheduler, model, *others):
        steps or steps.append({name: value.detach().clone() for name, value in model.named_parameters()})
        original(optimizer, scheduler, model, *others)
        steps.append({name: value.detach().clone() for name, value in model.named_parameters()})

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_take_step", take_step)
        averaged = weights(run(ema_decay=0.7) / "tuned")
    expected = dict(steps[0])
    for step in steps[1:]:
        expected = {name: 0.7 * expected[name] + 0.3 * step[name] for name in expected}
    assert len(steps) == 7
    for name, value in expected.items():
        torch.testing.assert_close(averaged[name], value.view(averaged[name].shape), rtol=1e-5, atol=1e-6)
        assert not torch.equal(value, steps[-1][name]), name
    assert same_weights(run("plain") / "tuned", run("again") / "tuned")


@pytest.mark.parametrize("settings", [{"ema_decay": 0.7}, {"mini_batch_size": 4}])
def test_an_interrupted_training_ends_in_the_same_bits(run, settings):
    stopped = run("resumed", stop=4, **settings)
    checkpoint = stopped / "tuned.partial" / "checkpoints" / "step-00000004"
    assert (checkpoint / "average.safetensors").is_file() == ("ema_decay" in settings)
    assert same_weights(run("resumed", **settings) / "tuned", run("whole", **settings) / "tuned")


def test_an_average_of_other_weights_is_refused(run):
    checkpoint = run(stop=4, ema_decay=0.7) / "tuned.partial" / "checkpoints" / "step-00000004"
    (checkpoint / "average.safetensors").unlink()
    with pytest.raises(ValueError, match="step-00000004: it has no average.safetensors"):
        run(ema_decay=0.7)
    (checkpoint / "average.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="average.safetensors is not what was written with its state.json"):
        run(ema_decay=0.7)


def test_parts_of_a_batch_train_as_the_whole(run):
    """Over all steps, up to rounding: capacity in groups of 4 of the 8 pairs."""
    whole, parts = run("whole") / "tuned", run("parts", mini_batch_size=4) / "tuned"
    torch.testing.assert_close(losses(parts), losses(whole), rtol=1e-4, atol=1e-5)
    assert not same_weights(parts, whole)  # so it was not the same computation


@pytest.mark.parametrize(
    "said, launched, has_bf16, chosen",
    [
        (None, "no", True, "bf16"),
        (None, "no", False, None),
        (None, "fp16", True, None),  # as it was launched
        ("no", "no", True, "no"),
        ("fp16", "bf16", True, "fp16"),
    ],
)
def test_precision(monkeypatch, said, launched, has_bf16, chosen):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert choose_precision(said) == chosen


def test_precision_of_a_cpu(tmp_path):
    assert make_accelerator(tmp_path).mixed_precision == "no"
