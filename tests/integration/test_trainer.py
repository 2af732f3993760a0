"""transformers' Trainer: contrastive training and classification, checkpoints, and exact resumption."""

import pytest
import torch
from tiny_clip import assert_same_weights
from transformers import Trainer, TrainingArguments

from clip_moe.data.symbols import SYMBOLS
from modeling_clip_moe import CLIPMoEModel


@pytest.fixture(scope="module")
def data():
    return SYMBOLS.load("train", "detailed", 96), SYMBOLS.load("test", "detailed", 32)


@pytest.fixture(scope="module")
def collate(processor):
    def collate(rows):
        text, images = [row["caption"] for row in rows], [row["image"] for row in rows]
        batch = processor(text=text, images=images, padding=True, truncation=True, return_tensors="pt")
        return {**batch, "return_loss": True}

    return collate


def new_model(repository):
    model = CLIPMoEModel.from_pretrained(repository, output_router_logits=True)
    model.config.vision_config.router_jitter_noise = 0.1  # random numbers that resumption has to restore
    return model


def make_trainer(model, folder, data, collate):
    steps = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "logging_steps": 1}
    batches = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16, "remove_unused_columns": False}
    more = {"learning_rate": 1e-3, "use_cpu": True, "report_to": "none", "seed": 1}
    settings = TrainingArguments(output_dir=str(folder), **steps, **batches, **more)
    train, test = data
    return Trainer(model=model, args=settings, train_dataset=train, eval_dataset=test, data_collator=collate)


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.fixture(scope="module")
def uninterrupted(repository, data, collate, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    trainer = make_trainer(new_model(repository), folder, data, collate)
    trainer.train()
    return trainer, folder


def test_it_learns_and_evaluates(uninterrupted, repository, data, collate, tmp_path):
    trainer, _ = uninterrupted
    losses, evaluations = logged(trainer, "loss"), logged(trainer, "eval_loss")
    assert len(losses) == 6 and len(evaluations) == 2
    before = make_trainer(new_model(repository), tmp_path, data, collate).evaluate()["eval_loss"]
    assert evaluations[-1] < 0.9 * before

    # The evaluation is the mean of the batches' losses, router losses included
    model = trainer.model.eval()
    rows = list(data[1])
    with torch.no_grad():
        outputs = [model(**collate(rows[:16])), model(**collate(rows[16:]))]
    assert all(output.aux_loss > 0 for output in outputs)
    torch.testing.assert_close(evaluations[-1], sum(output.loss.item() for output in outputs) / 2)


def test_resumed_it_ends_in_the_same_weights(uninterrupted, repository, data, collate, tmp_path):
    expected, folder = uninterrupted
    assert_same_weights(CLIPMoEModel.from_pretrained(folder / "checkpoint-6"), expected.model)
    model = new_model(repository)
    with torch.no_grad():  # all of it has to come from the checkpoint
        for parameter in model.parameters():
            parameter.add_(1)
    resumed = make_trainer(model, tmp_path, data, collate)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert_same_weights(resumed.model, expected.model)
    assert logged(resumed, "loss")[3:] == logged(expected, "loss")[3:]
