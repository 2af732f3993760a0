"""A frozen teacher's embeddings are kept: its loss against a loop, from a store, on other data, and after a kill."""

import pytest
import torch
from accelerate.state import AcceleratorState
from tiny_runs import DENSE, STEP, run_stages, same_weights, train

from clip_moe.engine.files import read_log
from clip_moe.training.keep import Keep, embeddings_loss, join, similarities_loss
from clip_moe.training.losses import Pairing

DATA = {"source": "symbols", "num_samples": 16, "in_memory": True}
OTHER = DATA | {"num_samples": 12, "split": "test"}
BASE = {"name": "base", "stage": "train", "model": "dense", "data": DATA, **STEP, "max_steps": 2}
KEPT = {"name": "kept", "stage": "train", "model": "base", "data": DATA, "keep": "base", **STEP, "max_steps": 4}
KEPT |= {"learning_rate": 1e-2, "logging_steps": 1, "global_batch_size": 8}
STORE = {"name": "store", "stage": "embed", "model": "base", "data": DATA}


def embeds(rows, seed, width=6):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return (values / values.norm(dim=1, keepdim=True)).requires_grad_()


def cosine_distance(ours, theirs):
    return 1 - (ours @ theirs) / (ours.norm() * theirs.norm())


def assert_same_value_and_gradient(loss, expected, leaves):
    torch.testing.assert_close(loss, expected)
    found, wanted = (torch.autograd.grad(value, leaves, retain_graph=True) for value in (loss, expected))
    assert wanted[0].abs().max() > 1e-3
    torch.testing.assert_close(found, wanted)


def test_embeddings_loss_is_that_of_a_loop():
    images, texts, kept_images, kept_texts = embeds(3, 0), embeds(5, 1), embeds(3, 2), embeds(5, 3)
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    captions = [[0, 1], [2], [3, 4]]  # the texts of each image
    expected = 0.0
    for image, numbers in enumerate(captions):
        expected = expected + cosine_distance(images[image], kept_images[image]) / 3
        for text in numbers:
            expected = expected + cosine_distance(texts[text], kept_texts[text]) / len(numbers) / 3
    loss = embeddings_loss(images, texts, kept_images, kept_texts, mask)
    assert_same_value_and_gradient(loss, expected / 2, (images, texts))
    assert embeddings_loss(images, texts, images, texts, mask).abs() < 1e-12


def test_similarities_loss_is_that_of_a_loop():
    """The teacher's embeddings may be of another width."""
    images, texts, kept_images, kept_texts = embeds(4, 0), embeds(4, 1), embeds(4, 2, width=9), embeds(4, 3, width=9)
    scale, expected = torch.tensor(7.0, dtype=torch.float64), 0.0
    for ours, theirs in (
        (images @ texts.T, kept_images @ kept_texts.T),
        (texts @ images.T, kept_texts @ kept_images.T),
    ):
        for our_row, their_row in zip(scale * ours, scale * theirs, strict=True):
            ps, qs = (row.exp() / row.exp().sum() for row in (their_row, our_row))
            expected = expected + sum(p * (p.log() - q.log()) for p, q in zip(ps, qs, strict=True)) / 4
    loss = similarities_loss(images, texts, kept_images, kept_texts, scale)
    assert_same_value_and_gradient(loss, expected / 2, (images, texts))
    assert similarities_loss(images, texts, images, texts, scale).abs() < 1e-12


def test_other_pairs_are_kept_and_not_learned():
    """The contrastive loss sees the first pairs alone, the teacher's the others alone, or all."""
    keys = {"image_keys": torch.arange(5), "text_keys": torch.arange(5)}
    pairing = Pairing(**keys, kept_images=embeds(5, 2), kept_texts=embeds(5, 3))
    images, texts, scale = embeds(5, 0), embeds(5, 1), torch.tensor([2.0])
    only_others, all_pairs = (Keep(None, 2.0, "embeddings", 3, keeps_new) for keeps_new in (False, True))
    (new_images, new_texts, _), new = only_others.new_pairs((images, texts, scale), pairing)
    assert torch.equal(new_images, images[:3]) and torch.equal(new_texts, texts[:3])
    assert new.image_keys.tolist() == new.text_keys.tolist() == [0, 1, 2]
    expected = 2 * embeddings_loss(images[3:], texts[3:], pairing.kept_images[3:], pairing.kept_texts[3:])
    torch.testing.assert_close(only_others.loss(images, texts, scale, pairing), expected)
    expected = 2 * embeddings_loss(images, texts, pairing.kept_images, pairing.kept_texts)
    torch.testing.assert_close(all_pairs.loss(images, texts, scale, pairing), expected)


def test_joined_batches_are_padded_to_the_longest_text():
    def batch(pairs, length):
        values = {"pixel_values": torch.ones(pairs, 3, 2, 2), "input_ids": torch.ones(pairs, length, dtype=torch.long)}
        return values | {"attention_mask": torch.ones(pairs, length, dtype=torch.long)}

    joined = join(batch(2, 3) | {"image_keys": torch.ones(2)}, batch(1, 5), {"input_ids": 7})
    assert joined["pixel_values"].shape == (3, 3, 2, 2) and joined["image_keys"].tolist() == [1, 1, 0]
    assert joined["input_ids"].tolist() == [[1, 1, 1, 7, 7]] * 2 + [[1] * 5]
    assert joined["attention_mask"].tolist() == [[1, 1, 1, 0, 0]] * 2 + [[1] * 5]


def losses(folder, name="keep_loss"):
    return [line[name] for line in read_log(folder / "log.jsonl") if name in line]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One stage that keeps by a teacher that runs, one by its embeddings, and one that keeps nothing."""
    free = {name: value for name, value in KEPT.items() if name != "keep"} | {"name": "free"}
    stages = [DENSE, BASE, STORE, KEPT, KEPT | {"name": "stored", "keep": "store"}, free]
    others = KEPT | {"name": "others", "keep_data": OTHER, "keep_new": False, "keep_of": "similarities"}
    return run_stages(tmp_path_factory.mktemp("keep"), [*stages, others | {"mini_batch_size": 2}])


def test_a_teacher_holds_the_embeddings(out):
    """In the first step they are its own; then the loss pulls, since a model trained without it ends elsewhere."""
    assert losses(out / "kept")[0] == pytest.approx(0, abs=1e-6) and losses(out / "kept")[-1] > 1e-4
    assert not same_weights(out / "kept", out / "free") and not losses(out / "free")
    assert len(losses(out / "others")) == 4


def test_a_stored_teacher_is_the_one_that_runs(out):
    assert losses(out / "stored") == pytest.approx(losses(out / "kept"), abs=1e-6)
    assert losses(out / "stored", "loss") == pytest.approx(losses(out / "kept", "loss"), rel=1e-4)


def test_in_mixed_precision_the_loss_is_that_of_single_precision(tmp_path):
    keep = {"keep": "dense", "max_steps": 4, "logging_steps": 1, "learning_rate": 1e-2}
    single = losses(train(tmp_path / "single", **keep))
    AcceleratorState._reset_state(reset_partial_state=True)  # a process has one precision for all its life
    mixed = losses(train(tmp_path / "mixed", overrides={"mixed_precision": "bf16"}, **keep))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert mixed == pytest.approx(single, rel=0.1) and mixed != single and min(single) > 0.01


def test_resumed_is_the_same_to_the_bit(tmp_path):
    keep = {"keep": "dense", "keep_data": OTHER, "max_steps": 4}
    whole = train(tmp_path / "whole", **keep)
    train(tmp_path / "killed", stop=3, **keep)
    assert same_weights(train(tmp_path / "killed", only=["tuned"], **keep), whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": None, "keep_weight": 2.0}, "keep_weight, keep_of, keep_data and keep_new go with keep"),
        ({"keep_new": False}, "keep_new: false needs other pairs: set keep_data"),
        ({"keep_of": "similarities", "caption_weights": [1.0]}, "caption_weights go with a keep of embeddings"),
        ({"keep": "wide"}, "kept.keep: its embeddings have 12 numbers, the model's 16: keep_of: similarities"),
        ({"keep": "other_words"}, "kept.keep: .* have different tokenizers"),
        ({"keep": "store", "keep_data": OTHER}, "kept.keep: embeddings of an embed stage go without keep_data"),
        ({"keep": "store", "data": OTHER}, "kept.keep: .* has embeddings of other pairs than this stage learns"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path, changes, message):
    wide = DENSE | {"name": "wide", "projection_dim": 12}
    words = {"name": "words", "stage": "tokenizer", "vocab_size": 400, "max_length": 16, "data": DATA}
    other_words = DENSE | {"name": "other_words", "processor": "symbols", "tokenizer": "words"}
    stages = [DENSE, BASE, STORE, wide]
    if changes.get("keep") == "other_words":
        stages += [words, other_words]
    with pytest.raises(ValueError, match=message):
        run_stages(tmp_path, [*stages, KEPT | changes])
