"""Global batches, of all samples and of one cluster: every property for any sizes. Pairs with the same text or image:
how they are found, and that no batch has two of them where that can be."""

import collections
import itertools
import math
import re

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import DENSE, TUNED, losses, run_stages
from tiny_sources import saved_pairs

from clip_moe.data.tokenizer import tokenize
from clip_moe.engine.provenance import Record
from clip_moe.training import duplicates as duplicates_module
from clip_moe.training.duplicates import Duplicates, streamed_image_key, text_keys, token_keys
from clip_moe.training.losses import Pairing
from clip_moe.training.samplers import ClusterBatchSampler, GlobalBatchSampler, Share, merge_small_clusters


def apart(sampler, num_samples):
    """Samplers that know of triplets with the same text and of pairs with the same image."""
    sampler.duplicates = Duplicates(np.arange(num_samples) // 2 % 50, np.arange(num_samples) // 3)
    return sampler


SAMPLERS = {
    "all": lambda labels, share: GlobalBatchSampler(len(labels), share),
    "clusters": ClusterBatchSampler,
    "round robin": lambda labels, share: ClusterBatchSampler(labels, share, "round_robin"),
    "all, apart": lambda labels, share: apart(GlobalBatchSampler(len(labels), share), len(labels)),
    "clusters, apart": lambda labels, share: apart(ClusterBatchSampler(labels, share), len(labels)),
}
EVERY = pytest.mark.parametrize("kind", SAMPLERS)


@st.composite
def clustered(draw):
    """Labels of samples in clusters of any sizes, at least one of which fills a global batch; sizes, seed and epoch."""
    batch_size, world_size = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    cluster_sizes = draw(st.lists(st.integers(0, 50), min_size=1, max_size=8))
    cluster_sizes.append(draw(st.integers(batch_size * world_size, 60)))
    labels = np.repeat(np.arange(len(cluster_sizes)), cluster_sizes)
    seed, epoch = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return np.random.default_rng(draw(st.integers(0, 9))).permutation(labels), batch_size, world_size, seed, epoch


def epoch_of(kind, labels, batch_size, world_size, seed, epoch, start_batch=0):
    """Batches of all ranks: [rank][batch]."""
    ranks = []
    for rank in range(world_size):
        sampler = SAMPLERS[kind](labels, Share(batch_size, rank, world_size, seed))
        ranks.append(list(sampler.epoch_batches(epoch, start_batch)))
        assert start_batch or len(ranks[-1]) == len(sampler)
    return ranks


@EVERY
@given(case=clustered())
@settings(deadline=None)
def test_batches_use_what_fits_once(kind, case):
    """And are of one cluster over all processes."""
    labels, batch_size, world_size, *_ = case
    sample_clusters = np.zeros_like(labels) if kind.startswith("all") else labels
    sizes, size, used = np.bincount(sample_clusters), batch_size * world_size, []
    ranks = epoch_of(kind, *case)
    for parts in zip(*ranks, strict=True):
        assert {len(part) for part in parts} == {batch_size}
        batch = [sample for part in parts for sample in part]
        assert len(set(sample_clusters[batch])) == 1
        used += batch
    assert len(used) == len(set(used)) == len(ranks[0]) * size
    assert (np.bincount(sample_clusters[used], minlength=len(sizes)) == sizes // size * size).all()


@EVERY
@given(case=clustered(), start_batch=st.integers(0, 60))
@settings(deadline=None)
def test_ranks_share_the_batches_of_one_process_and_go_on_anywhere(kind, case, start_batch):
    labels, batch_size, world_size, seed, epoch = case
    ranks = epoch_of(kind, *case)
    (alone,) = epoch_of(kind, labels, batch_size * world_size, 1, seed, epoch)
    assert alone == [[sample for part in parts for sample in part] for parts in zip(*ranks, strict=True)]
    assert epoch_of(kind, *case, start_batch=start_batch) == [batches[start_batch:] for batches in ranks]


@EVERY
def test_every_seed_and_epoch_has_its_own_order(kind):
    labels = np.arange(100) % 3
    orders = [epoch_of(kind, labels, 10, 1, seed, epoch)[0] for seed in range(4) for epoch in range(4)]
    assert len({str(order) for order in orders}) == 16
    if kind.startswith("clusters"):
        assert len({labels[order[0][0]] for order in orders}) == 3  # clusters come in another order, too


@given(clustered())
@settings(deadline=None)
def test_round_robin_is_the_constrained_sampler(case):
    """CLIP-FMoE appendix C, step by step on what is left of each cluster."""
    labels, batch_size, world_size, seed, epoch = case
    size = batch_size * world_size
    (batches,), (shuffled,) = (epoch_of(kind, labels, size, 1, seed, epoch) for kind in ("round robin", "clusters"))
    left = {cluster: count // size for cluster, count in enumerate(np.bincount(labels)) if count}
    expected = []
    while any(left.values()):
        for cluster, number in left.items():
            if number:
                expected.append(cluster)
                left[cluster] -= 1
    assert [labels[batch[0]] for batch in batches] == expected
    assert sorted(map(sorted, batches)) == sorted(map(sorted, shuffled))  # the same batches in another order


def test_samples_without_a_cluster_are_left_alone():
    batches = list(ClusterBatchSampler(np.array([0, -1] * 10), Share(5)).epoch_batches(0))
    assert sorted(sample for batch in batches for sample in batch) == list(range(0, 20, 2))


def test_too_few_samples():
    with pytest.raises(ValueError, match="7 samples do not fill a batch of 8: lower global_batch_size to 7 or less"):
        GlobalBatchSampler(7, Share(4, world_size=2))
    with pytest.raises(
        ValueError, match=r"none of the 2 clusters fills a batch of 8: lower global_batch_size to 6 or less"
    ):
        ClusterBatchSampler(np.array([0] * 5 + [1] * 6), Share(4, world_size=2))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 20), st.integers(0, 9))
@settings(deadline=None)
def test_merged_clusters_are_large_enough_and_whole(sizes, smallest, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    merged = merge_small_clusters(labels, np.random.default_rng(seed).normal(size=(len(sizes), 3)), smallest)
    assert len(merged) == len(labels)
    counts = np.unique(merged, return_counts=True)[1]
    assert all(counts >= smallest) or len(counts) <= 1
    for cluster in set(labels):
        assert len(set(merged[labels == cluster])) == 1  # nobody is torn apart
        if sizes[cluster] >= smallest:
            assert (merged[labels == cluster] == cluster).all() or len(counts) == 1


def test_a_small_cluster_goes_to_the_nearest():
    labels, centers = np.array([0] * 5 + [1] * 2 + [2] * 5 + [3]), np.array([[0.0], [1.0], [10.0], [1.6]])
    # 3 (one sample) goes to 1; together they are three at 1.2, still too few, and go to 0.
    assert merge_small_clusters(labels, centers, 4).tolist() == [0] * 7 + [2] * 5 + [0]
    assert merge_small_clusters(labels, centers, 3).tolist() == [0] * 5 + [1] * 2 + [2] * 5 + [1]
    assert merge_small_clusters(labels, centers, 1).tolist() == labels.tolist()


# --- pairs with the same text or image

RNG = np.random.default_rng(0)


def keys_of(images, texts, pair_of=None):
    """The keys of each pair, as sets."""
    keys = [{("image", key)} for key in images]
    for text, pair in zip(texts, range(len(texts)) if pair_of is None else pair_of, strict=True):
        keys[pair].add(("text", text))
    return keys


def num_with_duplicate(batch, keys):
    counts = collections.Counter(itertools.chain(*(keys[pair] for pair in batch)))
    return sum(any(counts[key] > 1 for key in keys[pair]) for pair in batch)


def sampler_of(size, *data, labels=None):
    sampler = (
        GlobalBatchSampler(len(data[0]), Share(size)) if labels is None else ClusterBatchSampler(labels, Share(size))
    )
    sampler.duplicates = Duplicates(*data)
    return sampler


ALONE = np.arange(2000)
WORLDS = {  # images, texts, and the pairs of the texts
    "every text 20 times": (ALONE, RNG.permutation(ALONE // 20)),
    "nearly as few texts as a batch has": (ALONE, RNG.permutation(ALONE % 65)),
    "some texts often": (ALONE, np.where(RNG.random(2000) < 0.3, RNG.integers(0, 50, 2000), ALONE + 100)),
    "the same pairs again": (ALONE // 4, ALONE // 4),
}
# Texts of several images that have several texts
CROSSING = {
    "five texts an image, some of several images": (
        ALONE // 5,
        np.where(RNG.random(2000) < 0.3, RNG.integers(0, 50, 2000), ALONE + 100),
    ),
    "three captions an image": (ALONE, RNG.integers(0, 3000, 6000), np.repeat(ALONE, 3)),
}


@pytest.mark.parametrize("clusters", [1, 3])
@pytest.mark.parametrize("world", WORLDS | CROSSING)
def test_epochs_without_duplicates(world, clusters):
    """And none of a cluster is left out of two epochs more than another. Where texts and images cross, some meet."""
    data, labels = (WORLDS | CROSSING)[world], ALONE % clusters
    keys, uses = keys_of(*data), np.zeros(2000, int)
    sampler = sampler_of(64 // clusters, *data, labels=None if clusters == 1 else labels)
    for epoch in range(100):
        batches = list(sampler.epoch_batches(epoch))
        uses[np.concatenate(batches)] += 1
        met = sum(num_with_duplicate(batch, keys) for batch in batches)
        assert met == 0 if world in WORLDS else met < 0.15 * 2000
    assert all(0 <= np.ptp(uses[labels == cluster]) <= 1 for cluster in range(clusters))


def test_a_text_comes_in_even_distances():
    """A text that is there 16 times in 64 batches: every fourth on average, and never long apart."""
    texts = np.repeat(np.arange(256), 16)
    sampler = sampler_of(64, np.arange(4096), texts)
    for epoch in range(3):
        batch_of = np.empty(4096, int)
        for number, batch in enumerate(sampler.epoch_batches(epoch)):
            batch_of[batch] = number
        distances = np.diff(np.sort(batch_of.reshape(256, 16), axis=1), axis=1)
        assert distances.min() >= 2 and distances.max() <= 7


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 12), st.integers(0, 9))
@settings(deadline=None)
def test_a_group_is_shared_evenly_by_the_batches(sizes, size, seed):
    texts = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    size = min(size, len(texts))
    sampler = sampler_of(size, np.arange(len(texts)), texts)
    counts = np.array([np.bincount(texts[batch], minlength=len(sizes)) for batch in sampler.epoch_batches(0)])
    assert (np.ptp(counts, axis=0) <= 1).all()


@given(st.integers(2, 60), st.integers(1, 60), st.integers(1, 30), st.integers(0, 9))
@settings(deadline=None)
def test_shares_are_those_of_a_count(number, different, size, seed):
    rng = np.random.default_rng(seed)
    images, texts = rng.integers(0, 2 * different, number), rng.integers(0, different, 2 * number)
    pair_of, size = np.repeat(np.arange(number), 2), min(size, number)
    duplicates, keys = Duplicates(images, texts, pair_of), keys_of(images, texts, pair_of)
    batches = rng.permutation(number)[: number // size * size].reshape(-1, size)
    met = sum(num_with_duplicate(batch, keys) for batch in batches)
    assert duplicates.share_in(batches) == pytest.approx(met / batches.size)


def test_texts_are_equal_if_the_tokenizer_reads_them_alike(tokenizer):
    long = "a snowman " * 40
    texts = ["A  Snowman", "a snowman ", "a snowman.", long, long + "and an anchor", "an anchor"]
    numbers = [[0, 0, 1, 2, 2, 3], [0, 0, 1, 2, 3, 4]]
    inputs = tokenize(tokenizer, texts)
    padded = {name: torch.nn.functional.pad(value, (0, 3)) for name, value in inputs.items()}
    end = tokenizer.eos_token_id
    ours = [text_keys(texts, tokenizer), token_keys(**inputs, end=end).numpy()]
    for found, expected in [*((keys, numbers[0]) for keys in ours), (text_keys(texts, None), numbers[1])]:
        assert list(map(found.tolist().index, found.tolist())) == list(map(expected.index, expected))
    assert torch.equal(token_keys(**padded, end=end), token_keys(**inputs, end=end))
    inputs = tokenize(tokenizer, ["a snowman<|endoftext|> one", "a snowman<|endoftext|> two", "a snowman"])
    assert len(set(token_keys(**inputs, end=end).tolist())) == 1


def test_images_are_equal_by_their_content(tmp_path, tokenizer):
    for number, color in enumerate(["red", "red", "blue"]):
        PIL.Image.new("RGB", (16, 16), color).save(tmp_path / f"{number}.png")
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    captions = [["one", "two"], ["three", None], ["two", "four"]]
    rows = datasets.Dataset.from_dict({"image": paths, "caption": captions})
    in_rows = rows.cast_column("image", datasets.Image())
    for duplicates in (Duplicates.of(rows, tokenizer), Duplicates.of(in_rows, tokenizer)):
        met = {pairs for pairs in itertools.combinations(range(3), 2) if duplicates.share_in([np.array(pairs)])}
        assert met == {(0, 1), (0, 2)}
    contents = [{"path": path, "bytes": open(path, "rb").read()} for path in paths]
    assert streamed_image_key(contents[0]) == streamed_image_key(contents[1]) != streamed_image_key(contents[2])
    assert streamed_image_key(paths[0]) == streamed_image_key({"path": paths[0], "bytes": None})


# A stage


def trained(folder, data, **changes):
    stage = TUNED | {"data": data, "global_batch_size": 8, "max_steps": 2, "logging_steps": 1} | changes
    return run_stages(folder, [DENSE, stage]) / "tuned"


DIFFERENT = [f"number {number}" for number in range(32)]
TWO = ["a", "b"] * 16


def says(capsys, line):
    return re.search(f"^tuned: {line}$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("captions", "line"),
    [
        (DIFFERENT, "no two pairs of a batch have the same text or image"),
        (DIFFERENT[:16] * 2, r"in shuffled batches, \d+.\d% of the .* text or image: kept apart"),
    ],
)
def test_a_stage_keeps_duplicates_apart(tmp_path, capsys, captions, line):
    folder = trained(tmp_path / "run", saved_pairs(tmp_path / "pictures", captions))
    assert says(capsys, line) and Record.read(folder).duplicates["left"] == 0


def test_duplicates_that_meet_are_right_unless_negative(tmp_path, capsys):
    """Two texts in batches of eight: a right answer stands among four wrong ones, not among seven."""
    data = saved_pairs(tmp_path / "pictures", TWO)
    right = trained(tmp_path / "right", data, duplicates="positive")
    assert says(capsys, "in .*, 100.0% .*: positives of each other")
    wrong = trained(tmp_path / "wrong", data, duplicates="negative")
    assert says(capsys, "in .*, 100.0% of the pairs share a text: negatives of each other")
    assert [Record.read(folder).duplicates["left"] for folder in (right, wrong)] == [1, 1]
    assert math.log(4) < losses(right)[0] < losses(wrong)[0] - 0.1


def test_duplicates_of_a_stream_are_positives(tmp_path, capsys, monkeypatch):
    seen, original = [], Pairing.take
    monkeypatch.setattr(Pairing, "take", lambda batch: seen.append(original(batch)) or seen[-1])
    data = saved_pairs(tmp_path / "pictures", TWO)
    trained(tmp_path / "run", data | {"streaming": True, "in_memory": False}, global_batch_size=32, max_steps=1)
    assert "tuned: a stream: pairs of a batch with the same text or image are positives" in capsys.readouterr().out
    assert len(seen[0].text_keys.unique()) == 2 and len(seen[0].image_keys.unique()) == 32


def test_one_text_for_all_is_an_error(tmp_path):
    data = saved_pairs(tmp_path / "pictures", ["the same"] * 32)
    with pytest.raises(ValueError, match=r"tuned.data: in every batch, all pairs have the same text or image, so"):
        trained(tmp_path / "run", data)


def test_texts_that_were_not_tokenized_may_be_duplicates(tokenizer, monkeypatch):
    """Too many by the first row, which has most: compared word by word, the tokenizer may still read two as one."""
    rows = datasets.Dataset.from_dict({"caption": [["a star", "a moon", "a dot"], ["a ring"], ["a cat"], ["a dog"]]})
    assert not Duplicates.of(rows, tokenizer).may_be_there
    monkeypatch.setattr(duplicates_module, "TOKENIZED", 8)
    assert Duplicates.of(rows, tokenizer).may_be_there
