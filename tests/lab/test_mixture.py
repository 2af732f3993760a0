"""Several sources in one: how often each is drawn, and that its pairs stay what they are."""

from collections import Counter
from types import SimpleNamespace

import pytest
from tiny_runs import run_stages
from tiny_sources import CAPTIONS, SOURCES, image_folder, png, saved_pairs, sharegpt4v, webdataset

from clip_moe.data.arguments import DataArguments
from clip_moe.data.identity import data_fingerprint, identity
from clip_moe.data.images import decode_image
from clip_moe.data.pairs import load_pairs
from lab.mixture import MixtureStage

SYMBOLS = {"source": "symbols", "num_samples": 6}
SEVERAL = [[f"{caption}, first", f"{caption}, second"] for caption in CAPTIONS]


def mixture(sources, weights, **settings):
    return {"name": "mixed", "stage": "lab.mixture:MixtureStage", "sources": sources, "weights": weights} | settings


def mixed(folder, sources, weights=(1, 1), seed=0, **settings):
    """The pairs of a mixture that its stage makes in a folder."""
    (folder / "mixed").mkdir(parents=True)
    stage = MixtureStage(**mixture(sources, list(weights), **settings))
    stage.run(SimpleNamespace(sources=stage.sources), SimpleNamespace(seed=seed), folder / "mixed")
    return load_pairs(DataArguments(source=str(folder / "mixed")))


def drawn(rows):
    return Counter(tuple(caption) if isinstance(caption, list) else caption for caption in rows["caption"])


def test_pairs_of_every_kind_of_source_stay_what_they_are(tmp_path):
    sources = {kind: kind(tmp_path) for kind in SOURCES}
    sources[webdataset]["indexed"] = True
    rows = mixed(tmp_path, list(sources.values()), [1] * len(SOURCES))
    assert drawn(rows).keys() == set(CAPTIONS) and len(rows) >= len(SOURCES) * len(CAPTIONS)
    for row in rows:
        expected = decode_image({"bytes": png(CAPTIONS.index(row["caption"]))})
        assert decode_image(row["image"]).tobytes() == expected.tobytes()
    # Those of tables have no place of their own
    assert {row["image"]["path"] is None for row in rows if row["image"]["bytes"] is None} == {False}
    assert sum(row["image"]["bytes"] is not None for row in rows) < len(rows) / 2


def test_weights_are_shares(tmp_path):
    sources = [saved_pairs(tmp_path / name, [f"{name} {number}" for number in range(400)]) for name in "ab"]
    times = drawn(mixed(tmp_path, sources, [3, 1]))
    assert len(times) == 800  # an epoch has each pair of both
    number, first_source = times.total(), sum(count for caption, count in times.items() if caption[0] == "a")
    assert abs(first_source / number - 0.75) < 4 * (0.75 * 0.25 / number) ** 0.5
    assert min(times.values()) == 1 and max(times.values()) > 2
    times = drawn(mixed(tmp_path / "short", sources, [3, 1], stopping_strategy="first_exhausted"))
    assert sum(caption[0] == "a" for caption in times) == 400 and set(times.values()) == {1}


def test_one_caption_beside_several_and_beside_a_built_in_world(tmp_path):
    sources = [saved_pairs(tmp_path / "several", SEVERAL), image_folder(tmp_path), SYMBOLS]
    times = drawn(mixed(tmp_path, sources, [1] * 3))
    assert times.keys() > {tuple(captions) for captions in SEVERAL} | {(caption,) for caption in CAPTIONS}
    assert len(times) == 2 * len(CAPTIONS) + 6


def test_the_seed_draws_and_another_source_makes_it_anew(tmp_path):
    sources = [image_folder(tmp_path), sharegpt4v(tmp_path)]
    runs = [mixed(tmp_path / name, sources, seed=seed) for name, seed in {"one": 0, "same": 0, "other": 1}.items()]
    one, same, other = (rows["caption"] for rows in runs)
    assert one == same != other
    run_stages(tmp_path, [mixture(sources, [1, 1])])
    (tmp_path / "images" / "0.png").write_bytes(png(5))
    with pytest.raises(ValueError, match=r"inputs\.sources\.1: '.{12}' -> '.{12}'"):
        run_stages(tmp_path, [mixture(sources, [1, 1])])


def test_changed_shards_are_other_data(tmp_path):
    mixed(tmp_path, [webdataset(tmp_path) | {"indexed": True}, sharegpt4v(tmp_path)])
    data = DataArguments(source=str(tmp_path / "mixed"), indexed=True)
    before = data_fingerprint(load_pairs(data)), identity(data)
    assert (data_fingerprint(load_pairs(data)), identity(data)) == before and before[1] is not None
    shard = tmp_path / "shard-0.tar"
    shard.write_bytes(shard.read_bytes().replace(b"picture number one", b"picture number ONE"))
    after = data_fingerprint(load_pairs(data)), identity(data)
    assert after[0] != before[0] and after[1] != before[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": [1, 0]}, "mixed.weights.1"),
        ({"weights": [1, 1, 1]}, "mixed: weights: 3 of them for 2 sources"),
        ({"sources": [SYMBOLS, {"source": "a.json", "streaming": True}]}, "sources.1"),
        ({"sources": [{"source": "later"}, SYMBOLS]}, r"mixed\.sources\.0\.source"),
    ],
)
def test_faults_name_the_source(changes, message, tmp_path):
    two = mixture([SYMBOLS, SYMBOLS], [1, 1])
    with pytest.raises(ValueError, match=message):
        run_stages(tmp_path, [two | changes, two | {"name": "later"}])
