"""Several sources in one: how often each is drawn, and that its pairs stay what they are."""

from collections import Counter

import datasets
import pytest
import torch
from tiny_runs import DENSE, TUNED, run_stages, same_weights
from tiny_sources import CAPTIONS, image_folder, images_and_texts, parquet, png, sharegpt4v, webdataset, write_shard

from data.identity import data_fingerprint, identity
from data.images import decode_image
from data.pairs import load_pairs
from data.sources import DataArguments

SEVERAL = [[f"{caption}, first", f"{caption}, second"] for caption in CAPTIONS]


def mixture(sources, weights, **settings):
    return {"name": "mixed", "stage": "mixture", "sources": sources, "weights": weights} | settings


def pairs(folder, **settings):
    return load_pairs(DataArguments(source=str(folder / "mixed"), **settings))


def drawn(rows):
    return Counter(tuple(caption) if isinstance(caption, list) else caption for caption in rows["caption"])


def test_pairs_of_every_kind_of_source_stay_what_they_are(tmp_path):
    sources = [kind(tmp_path) for kind in (image_folder, parquet, sharegpt4v)]
    sources.append(webdataset(tmp_path) | {"indexed": True})
    rows = pairs(run_stages(tmp_path, [mixture(sources, [1, 1, 1, 1])]))
    assert drawn(rows).keys() == set(CAPTIONS) and len(rows) >= 4 * len(CAPTIONS)
    for row in rows:
        expected = decode_image({"bytes": png(CAPTIONS.index(row["caption"]))})
        assert decode_image(row["image"]).tobytes() == expected.tobytes()
    # Only those of parquet files have no place of their own
    assert {row["image"]["path"] is None for row in rows if row["image"]["bytes"] is None} == {False}
    assert sum(row["image"]["bytes"] is not None for row in rows) < len(rows) / 2


def test_weights_are_shares(tmp_path):
    names = "abcdefgh"
    for folder in names[:2]:
        captions = [f"{folder} {number}" for number in range(400)]
        datasets.Dataset.from_dict({"image": [{"bytes": png(), "path": None}] * 400, "caption": captions}).cast_column(
            "image", datasets.Image()
        ).save_to_disk(tmp_path / folder)
    sources = [{"source": str(tmp_path / folder)} for folder in names[:2]]
    rows = pairs(run_stages(tmp_path, [mixture(sources, [3, 1])]))
    times = drawn(rows)
    assert len(times) == 800  # an epoch has each pair of both
    share = sum(count for caption, count in times.items() if caption[0] == "a") / len(rows)
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / len(rows)) ** 0.5
    assert min(times.values()) == 1 and max(times.values()) > 2

    (tmp_path / "short").mkdir()
    short = pairs(run_stages(tmp_path / "short", [mixture(sources, [3, 1], stopping_strategy="first_exhausted")]))
    times = drawn(short)
    assert sum(caption[0] == "a" for caption in times) == 400 and set(times.values()) == {1}


def test_one_caption_beside_several(tmp_path):
    several = datasets.Dataset.from_dict({"image": [{"bytes": png(), "path": None}] * 8, "caption": SEVERAL})
    several.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "several")
    sources = [{"source": str(tmp_path / "several")}, image_folder(tmp_path)]
    rows = pairs(run_stages(tmp_path, [mixture(sources, [1, 1])]))
    assert drawn(rows).keys() == {tuple(captions) for captions in SEVERAL} | {(caption,) for caption in CAPTIONS}


def test_models_train_on_it_with_and_without_a_look_at_all_images(tmp_path):
    sources = [webdataset(tmp_path) | {"indexed": True}, sharegpt4v(tmp_path)]
    tuned = TUNED | {"model": "dense", "data": {"source": "mixed"}, "global_batch_size": 4, "max_steps": 3}
    stages = [mixture(sources, [1, 2]), DENSE, tuned, tuned | {"name": "indexed"}]
    out = run_stages(tmp_path, stages, {"indexed.data.indexed": True})
    assert same_weights(out / "tuned", out / "indexed")


def test_the_same_seed_draws_the_same(tmp_path):
    sources = [image_folder(tmp_path), sharegpt4v(tmp_path)]
    orders = []
    for number, seed in enumerate((0, 0, 1)):
        (tmp_path / str(number)).mkdir()
        rows = pairs(run_stages(tmp_path / str(number), [mixture(sources, [1, 1])], seed=seed))
        orders.append([row["image"]["path"] for row in rows])
    assert orders[0] == orders[1] != orders[2]


def test_another_source_makes_it_anew(tmp_path):
    sources = [image_folder(tmp_path), sharegpt4v(tmp_path)]
    run_stages(tmp_path, [mixture(sources, [1, 1])])
    run_stages(tmp_path, [mixture(sources, [1, 1])])
    (tmp_path / "images" / "0.png").write_bytes(png(5))
    with pytest.raises(ValueError, match=r"inputs\.sources\.1: '.{12}' -> '.{12}'"):
        run_stages(tmp_path, [mixture(sources, [1, 1])])


def test_changed_shards_are_other_data(tmp_path):
    """Also where the mixture itself is as it was."""
    sources = [webdataset(tmp_path) | {"indexed": True}, sharegpt4v(tmp_path)]
    folder = run_stages(tmp_path, [mixture(sources, [1, 1])])
    data = DataArguments(source=str(folder / "mixed"), indexed=True)
    before = data_fingerprint(load_pairs(data)), identity(data)
    assert (data_fingerprint(load_pairs(data)), identity(data)) == before and before[1] is not None
    shard = tmp_path / "shard-0.tar"
    shard.write_bytes(shard.read_bytes().replace(b"picture number one", b"picture number ONE"))
    after = data_fingerprint(load_pairs(data)), identity(data)
    assert after[0] != before[0] and after[1] != before[1]


def test_pairs_without_an_image_are_left_out(tmp_path):
    write_shard(tmp_path / "0.tar", [*images_and_texts(range(300)), ("300.txt", b"no image")])
    shards = {"source": str(tmp_path / "0.tar"), "image_column": "png", "caption_column": "txt", "indexed": True}
    folder = run_stages(tmp_path, [mixture([shards, image_folder(tmp_path)], [300, 8])])
    rows = pairs(folder, indexed=True, max_unreadable=0.02)
    assert len(rows) >= 300 and "no image" not in list(rows["caption"])
    assert len(data_fingerprint(rows)) == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": [1, 0]}, "mixed.weights.1"),
        ({"sources": [{"source": "nowhere/"}, {"source": "gone.json"}]}, r"mixed\.sources\.1\.source: .*gone\.json"),
        ({"sources": [{"source": "symbols", "num_samples": 4}, {"source": "a.json", "streaming": True}]}, "sources.1"),
        ({"sources": [{"source": "later"}, {"source": "symbols", "num_samples": 4}]}, r"mixed\.sources\.0\.source"),
    ],
)
def test_faults_name_the_source(changes, message, tmp_path):
    two = [{"source": "symbols", "num_samples": 4}, {"source": "symbols", "num_samples": 4}]
    stages = [mixture(two, [1, 1]) | changes, mixture(two, [1, 1], name="later")]
    with pytest.raises(ValueError, match=message):
        run_stages(tmp_path, stages)


def test_built_in_worlds_can_be_mixed(tmp_path):
    two = [{"source": "symbols", "num_samples": 6}, {"source": "names", "num_samples": 6}]
    rows = pairs(run_stages(tmp_path, [mixture(two, [1, 1])]))
    assert len(drawn(rows)) == 12
    assert all(torch.tensor(decode_image(row["image"]).size).min() > 8 for row in rows)
