"""Settings of how a stage trains, against the plain computation: averaged weights, parts of a batch, precision."""

import pytest
import torch
from tiny_runs import losses, recipe, run_recipe_until, same_weights, weights
from torch._dynamo.utils import counters

from training import engine
from training.context import choose_precision, make_accelerator


@pytest.fixture
def run(tmp_path):
    """Runs a recipe whose training has these settings, perhaps up to a checkpoint."""
    return lambda output="out", stop=None, **settings: run_recipe_until(tmp_path / output, recipe(**settings), stop)


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


@pytest.mark.slow  # inductor compiles kernels for a minute
def test_compiled_towers_train_as_plain_ones(run):
    plain = run("plain", max_steps=2) / "tuned"
    counters.clear()
    faster = run("faster", max_steps=2, torch_compile=True) / "tuned"
    assert counters["stats"]["unique_graphs"] >= 2 and not counters["graph_break"]
    torch.testing.assert_close(losses(faster), losses(plain), rtol=1e-4, atol=1e-5)
    assert weights(faster).keys() == weights(plain).keys()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"ema_decay": 0.9, "lora": {"r": 2}}, "ema_decay: the average of an adapter's factors is not that of weights"),
        ({"torch_compile": True}, "tuned.torch_compile: the model has router_jitter_noise"),
        (
            {"mini_batch_size": 4, "caption_weights": [0.5, 0.5]},
            "tuned.mini_batch_size: an image may lack captions, so that parts would have other groups",
        ),
    ],
)
def test_settings_that_do_not_go_together(tmp_path, settings, message):
    noisy = recipe(**settings)
    noisy["stages"][1]["text_config"]["router_jitter_noise"] = 0.1
    with pytest.raises(ValueError, match=message):
        run_recipe_until(tmp_path, noisy)


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
