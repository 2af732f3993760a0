"""Results of training do not depend on interruptions, processes, parts of batches, checkpointing or compilation.

Each is compared with the plain run of the same settings, which `whole` does once a session.
"""

import functools
import math
import re
import shutil

import pytest
import torch
from accelerate.state import AcceleratorState
from pydantic.dataclasses import dataclass
from safetensors.torch import load_file, save_file
from several_processes import kill_at_a_checkpoint, run_processes, train_recipe
from tiny_runs import as_stage, losses, read_log, same_weights, set_towers, train, weights

from clip_moe.engine.context import choose_precision, make_accelerator
from clip_moe.engine.provenance import Record
from clip_moe.engine.settings import STRICT
from clip_moe.training import loop
from clip_moe.training.contrastive_task import ContrastiveTask
from clip_moe.training.stages.train import TrainStage


class BalancedTask(ContrastiveTask):
    """Buffers, in the task and in the model, change with each batch, and the loss with them."""

    def __init__(self, model, settings):
        super().__init__(model, settings)
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("seen", model.text_projection.weight.detach()[:, :2])
        model.text_projection.register_buffer("usage", torch.zeros(16))
        model.text_projection.register_buffer("least", torch.tensor(float("inf")))

    def forward(self, batch, **options):
        loss, metrics = super().forward(batch, **options)
        usage = self.model.text_projection.usage
        with torch.no_grad():
            self.batches += 1
            usage.mul_(0.9).add_(loss)
        loss = loss * (1 + usage.mean() + self.batches + self.seen.sum())
        return loss, metrics | {"total_loss": loss.detach()}


@dataclass(config=STRICT, kw_only=True)
class BalancedStage(TrainStage):
    def task(self, model, inputs):
        return BalancedTask(model, self)

    def train_model(self, task, processor, loader, accelerator, context, directory, evaluation=None):
        """At the end the model's buffer is added to a weight: its class has none."""
        super().train_model(task, processor, loader, accelerator, context, directory, evaluation)
        weights = load_file(directory / "model.safetensors")
        weights["text_projection.weight"] += weights.pop("text_projection.usage")
        assert weights.pop("text_projection.least").isinf()
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


BIASED = {"change": set_towers(use_expert_bias=True)}
UPDATES = [BIASED, BIASED | {"expert_bias_update": "z_score"}]
BALANCED = as_stage(f"{__name__}:BalancedStage")
NOISE = set_towers(router_jitter_noise=0.1, attention_dropout=0.1)
# 24 pairs: an epoch of three steps, so that a new DataLoader begins
EPOCHS = [{"data": {"source": "symbols", "num_samples": 24, "in_memory": in_memory}} for in_memory in (True, False)]
RESUMED = {
    "before a checkpoint": (1, {}),
    "noise, in memory": (3, {"change": NOISE} | EPOCHS[0]),
    "noise": (5, {"change": NOISE} | EPOCHS[1]),
    "parts of batches": (4, {"mini_batch_size": 4}),
    "biases of experts": (5, BIASED),
    "z-scores of loads": (5, UPDATES[1]),
    "buffers": (5, {"change": BALANCED}),
}


@pytest.mark.parametrize(("stop", "settings"), RESUMED.values(), ids=RESUMED)
def test_resumed_is_the_same_to_the_bit(whole, tmp_path, stop, settings):
    left = train(tmp_path, stop, **settings)
    checkpoints = [path.name for path in (left / "checkpoints").glob("step-*")]
    assert checkpoints == ([f"step-{stop // 2 * 2:08d}"] if stop >= 2 else [])
    if settings.get("change") is BALANCED:
        # Those of a loss stay out of the file of the model: a view of a weight, ...
        kept = load_file(left / "checkpoints/step-00000004/model.safetensors")
        assert kept["model.text_projection.least"].isinf() and kept["model.text_projection.usage"].any()
        assert kept["batches"].item() == 4 and "scratch" not in kept
        assert torch.equal(kept["seen"], kept["model.text_projection.weight"][:, :2])
    resumed = train(tmp_path, **settings)
    assert losses(resumed) == losses(whole(**settings)) and same_weights(resumed, whole(**settings))


def test_what_is_frozen_does_not_move(tmp_path):
    """Of the routers of images, that train alone, the weights and the biases move."""
    tuned = weights(train(tmp_path, change=set_towers(use_expert_bias=True), trainable="vision_model.*router"))
    before = weights(tmp_path / "out" / "sparse")
    moved = {name for name, value in before.items() if not torch.equal(value, tuned[name])}
    assert moved == {f"vision_model.encoder.layers.1.mlp.router.{name}" for name in ("weight", "expert_bias")}


def test_the_seed_and_noise_decide(whole):
    assert same_weights(whole(), whole(overrides={}))  # two runs
    assert not same_weights(whole(), whole(overrides={"seed": 1}))
    assert not same_weights(whole(change=NOISE, **EPOCHS[0]), whole(**EPOCHS[0]))


@pytest.mark.slow
@pytest.mark.parametrize("update", UPDATES, ids=["sign", "z_score"])
def test_two_processes_train_as_one(whole, tmp_path, update):
    """Killed and started again, they end in the bits of two that were not. Biases of experts move as one, too."""
    settings = {"global_batch_size": 16, "max_steps": 12, **update}
    train(tmp_path, only=["dense", "sparse"], **settings)
    two, killed = tmp_path / "out" / "tuned", tmp_path / "killed"
    shutil.copytree(tmp_path / "out", killed)
    assert run_processes(2, train_recipe, "--config", tmp_path / "recipe.yaml").count("on 2 x cpu") == 1
    again = "--config", tmp_path / "recipe.yaml", "--output_dir", killed
    kill_at_a_checkpoint(killed, 2, train_recipe, *again)
    run_processes(2, train_recipe, *again)
    assert same_weights(two, killed / "tuned")
    torch.testing.assert_close(losses(two), losses(whole(**settings)), atol=1e-4, rtol=0)
    assert read_log(two)[0]["chance"] == pytest.approx(math.log(16)) and Record.read(two).training.batch_size == 16
    found, expected = weights(two), weights(whole(**settings))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    biases = [name for name in expected if name.endswith("expert_bias")]
    assert len(biases) == 2
    for name in biases:
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"mini_batch_size": 4}], ids=str)
def test_what_saves_memory_changes_nothing(whole, settings):
    """But the last digits; capacity is in groups of 4 of the 8 pairs."""
    torch.testing.assert_close(losses(whole(**settings)), losses(whole()), rtol=1e-4, atol=1e-5)
    if "mini_batch_size" in settings:
        assert not same_weights(whole(**settings), whole())  # so it was not the same computation


@pytest.mark.parametrize("settings", [{}, *UPDATES], ids=["", "sign", "z_score"])
def test_accumulation_averages_gradients(whole, tmp_path, monkeypatch, settings):
    """Twice the same batch, accumulated, is that batch's own step."""
    plain, original = whole(global_batch_size=4, **settings), loop.train

    def repeat(accelerator, model, batches, *rest):
        def twice(start):
            for batch in batches(start // 2):
                yield from (batch, batch)

        return original(accelerator, model, twice, *rest)

    monkeypatch.setattr(loop, "train", repeat)
    accumulated = train(tmp_path, gradient_accumulation_steps=2, **settings)
    torch.testing.assert_close(losses(accumulated), losses(plain), atol=1e-5, rtol=0)
    for name, values in weights(plain).items():
        if name.endswith("expert_bias"):
            torch.testing.assert_close(weights(accumulated)[name], values)


def train_compiled(recipe):
    """Traced forward and backward, but no kernels are generated, which takes a minute."""
    from torch._dynamo.utils import counters

    torch.compiler.set_default_backend("aot_eager")
    train_recipe("--config", recipe)
    print(counters["stats"]["unique_graphs"], "graphs,", counters["graph_break"].total(), "breaks")


@pytest.mark.slow
def test_compiled_models_train_the_same_and_are_saved_by_their_own_names(whole, tmp_path):
    """In a process of its own: one keeps what it compiled, and what it gave up to compile."""
    train(tmp_path, only=["dense", "sparse"], max_steps=2, torch_compile=True)
    printed = run_processes(1, train_compiled, tmp_path / "recipe.yaml")
    assert re.search(r"(\d+) graphs, (\d+) breaks", printed).groups() == ("4", "0")
    compiled = tmp_path / "out" / "tuned"
    torch.testing.assert_close(losses(compiled), losses(whole(max_steps=2)), rtol=1e-4, atol=1e-5)
    assert weights(compiled).keys() == weights(whole(max_steps=2)).keys()


def test_mixed_precision_trains_weights_in_float32(whole, tmp_path):
    """So far as Accelerate is concerned, a process has one precision for all its life."""
    plain, forget = whole(), functools.partial(AcceleratorState._reset_state, reset_partial_state=True)
    forget()
    mixed = train(tmp_path, overrides={"mixed_precision": "bf16"})
    forget()
    assert all(tensor.dtype == torch.float32 for tensor in weights(mixed).values()) and losses(mixed) != losses(plain)
    assert losses(mixed)[0] == pytest.approx(losses(plain)[0], abs=0.05)


def test_precision(monkeypatch, tmp_path):
    assert make_accelerator(tmp_path).mixed_precision == "no"  # on a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for has_bf16, launched, chosen in (
        (True, "no", {None: "bf16", "no": "no"}),
        (False, "no", {None: None}),
        (True, "fp16", {None: None}),  # as it was launched
        (True, "bf16", {"fp16": "fp16"}),
    ):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has_bf16: has)
        assert {said: choose_precision(said) for said in chosen} == chosen
