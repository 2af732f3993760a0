"""Batches computed in parts have the loss and the gradient of the whole batch, in one process and in several; and
neither waits for a value on a GPU."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from several_processes import run_processes
from steps import LOSSES, assert_same_step, gradient_of, train_stage
from tiny_clip_moe import EOS, inputs, tiny_model, tower_fields
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from clip_moe.training.contrastive_task import ContrastiveTask
from clip_moe.training.gradient_cache import cached_gradient, split_batch
from clip_moe.training.keep import Keep
from clip_moe.training.loop import FirstFault
from modeling_clip_moe import SiglipMoEConfig, SiglipMoEModel

BATCH = 12
LIMIT = {"capacity_factor": 1.0, "capacity_group_size": 2}
# Fields of the towers, settings of the stage
CASES = {
    "no capacity": ({}, {}),
    "capacity": ({**LIMIT, "norm_topk_prob": True}, {"balance_mean": "layer", "balance_top_k": 1}),
    "mean of all tokens": (LIMIT, {"balance_mean": "token"}),
    "fusion gates": ({"fusion_gate": True}, {"balance_mean": "tower_token", "text_router_weight": 0.5}),
    "chunks": ({}, {"loss_chunk_size": 5, "label_smoothing": 0.1}),
    "captions": ({}, {"caption_weights": [0.1, 0.6, 0.3]}),
    "sigmoid": ({"family": "siglip"}, {"loss_chunk_size": 5, "loss": "sigmoid"}),
    "kept": ({}, {"keep": "dense", "keep_weight": 3.0, "caption_weights": [0.1, 0.6, 0.3]}),
    "kept similarities": ({}, {"keep": "dense", "keep_of": "similarities"}),
}
ON_PROCESSES = ("capacity", "mean of all tokens", "sigmoid", "kept", "kept similarities")


def whole_batch(settings):
    """A batch of `BATCH` images, with captions that are missing where there are several."""
    torch.manual_seed(1)
    batch = inputs(BATCH)
    if "caption_weights" in settings:
        mask = torch.rand(BATCH, 3) < 0.7
        mask[:, 1] = True
        batch |= {"input_ids": inputs(int(mask.sum()))["input_ids"], "caption_mask": mask}
        length = (batch["input_ids"] == EOS).int().argmax(dim=1)
        batch["attention_mask"] = (torch.arange(10) <= length[:, None]).long()
    if settings.get("loss") == "sigmoid":  # SigLIP's padding counts as tokens
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    # Three images and four texts, again and again
    return batch | {"image_keys": torch.arange(BATCH) % 3, "text_keys": torch.arange(len(batch["input_ids"])) % 4}


def siglip():
    """As `tiny_model`, with a scale and a bias that both matter."""
    moe = tower_fields(num_experts=4, moe_layers=[1, 2])
    text, vision = {"vocab_size": 50, "max_position_embeddings": 10}, {"image_size": 16, "patch_size": 8}
    model = SiglipMoEModel(SiglipMoEConfig(text_config=moe | text, vision_config=moe | vision))
    for name, parameter in model.named_parameters():
        if "mlp" in name or "logit" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.train()


def sparse(fields):
    torch.manual_seed(fields.get("seed", 0))
    model = siglip() if "family" in fields else tiny_model(**{k: v for k, v in fields.items() if k != "seed"}).train()
    model.config.router_aux_loss_coef, model.config.router_z_loss_coef = 0.5, 0.1
    return model


def computed(case, **more):
    """On as many processes as there are."""
    fields, settings = CASES[case]
    accelerator = Accelerator(cpu=True)
    share = split_batch(whole_batch(settings), BATCH // accelerator.num_processes)[accelerator.process_index]
    model, stage, keep = sparse(fields), train_stage(BATCH, **settings, **more), None
    if stage.keep is not None:
        keep = Keep(sparse({"seed": 2}), stage.keep_weight, stage.keep_of, len(share["pixel_values"]), True)
    return gradient_of(model, stage, share, accelerator, keep)


@pytest.mark.parametrize("size", [2, 6, 12])
@pytest.mark.parametrize("case", CASES)
def test_parts_have_the_gradient_of_the_whole(case, size):
    assert_same_step(computed(case, mini_batch_size=size), computed(case))


def test_dropout_is_the_same_both_times():
    """Were it not, the gradient would be none of the loss that was computed."""
    model, batch, accelerator = sparse({"attention_dropout": 0.3}), whole_batch({}), Accelerator(cpu=True)
    task = ContrastiveTask(model, train_stage(BATCH, mini_batch_size=4))
    seen = []
    model.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.image_embeds.detach()))
    cached_gradient(accelerator, task, batch, 4, 1.0, True)
    first, second = seen[:3], seen[3:]
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    assert torch.rand(1) != first[0].flatten()[0]
    images = [part["pixel_values"] for part in split_batch(batch, 4)]
    assert not torch.equal(model.get_image_features(images[0]).pooler_output, first[0])


def test_a_router_loss_of_a_part_alone_is_refused():
    settings = train_stage(BATCH, mini_batch_size=4)
    settings.router_loss = lambda config, outputs, batch, reduce: (outputs.vision_router_logits[0].square().mean(), {})
    model = sparse({})
    task = ContrastiveTask(model, settings)
    with pytest.raises(ValueError, match="mini_batch_size: the router loss of this stage differs between parts"):
        cached_gradient(Accelerator(cpu=True), task, whole_batch({}), 4, 1.0, True)


def worker(folder):
    results = {case: computed(case, mini_batch_size=2) for case in ON_PROCESSES}
    torch.save(results, folder / f"{Accelerator().process_index}.pt")
    Accelerator().end_training()


@pytest.mark.slow
def test_several_processes_have_the_gradient_of_one(tmp_path):
    run_processes(2, worker, tmp_path)
    for case in ON_PROCESSES:
        for rank in range(2):
            assert_same_step(torch.load(tmp_path / f"{rank}.pt")[case], computed(case))


@pytest.mark.parametrize("group", [None, 3])
def test_capacity_over_a_whole_batch_is_refused(group):
    model = sparse({"capacity_factor": 1.0, "capacity_group_size": group})
    problems = train_stage(BATCH, mini_batch_size=4).problems(model, BATCH)
    for tower, problem in zip(("text", "vision"), problems, strict=True):
        assert problem.startswith(f"mini_batch_size: {tower}_config.capacity_group_size is {group}, and 4 sequences")


@pytest.mark.parametrize(
    "system", [{"capacity_factor": 1.0, "capacity_group_size": 2}, {"fusion_gate": True, "norm_topk_prob": True}]
)
def test_forward_and_backward_read_no_value(system):
    """Fake tensors have none: whatever reads one, for which a GPU would be waited for, raises an error."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.autocast("cpu", torch.bfloat16):
        model = tiny_model(text={"intermediate_size": 32}, vision={"intermediate_size": 32}, **system).train()
        batch = {name: mode.from_tensor(value) for name, value in inputs(8).items()}
        finite = FirstFault("stage", Path("nowhere"))
        model.set_experts_implementation("grouped")
        loss, metrics = ContrastiveTask(model, LOSSES)(batch)
        finite.note("the loss", loss, 1)
        loss.backward()
        finite.note("the gradient", torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), 1)
        assert all(weight.grad is not None for weight in model.parameters())
        for read in (loss.item, batch["input_ids"].tolist, batch["input_ids"].nonzero, finite.require):
            with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                read()
