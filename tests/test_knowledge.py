"""Bits of knowledge against parameters, by hand."""

import json

import pytest
from test_report import result
from transformers import CLIPConfig

from conversion.presets import PRESETS
from conversion.upcycle import sparse_config
from evaluation.knowledge import Knowledge, equal_dense, read_knowledge, write_knowledge

WIDTH, LAYERS = 8, 2


@pytest.fixture
def folder(tmp_path):
    """Results of a dense model, twice, and of a sparse one, with their configurations."""
    tower = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    tower |= {"num_attention_heads": 1}
    dense = CLIPConfig(text_config=tower, vision_config=tower | {"image_size": 16, "patch_size": 8})
    sparse = sparse_config(dense, PRESETS["clip_up"])
    folders = []
    for run, share in enumerate((0.5, 0.7)):
        for name, config, told in (("dense", dense, share), ("sparse", sparse, 0.9)):
            config.save_pretrained(tmp_path / name)
            content = result(name, "names_256") | {"num_samples": 256, "source": str(tmp_path / name)}
            content["metrics"] = {"image_to_text_information": told - 0.1, "text_to_image_information": told + 0.1}
            content["primary"] = dict.fromkeys(content["metrics"], "information")
            path = tmp_path / f"run {run}" / f"names_256--{name}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content))
        folders.append(tmp_path / f"run {run}")
    return folders


def test_bits_and_parameters(folder):
    dense, sparse = read_knowledge(folder)
    of_layer = 4 * (WIDTH * WIDTH + WIDTH) + 2 * 2 * WIDTH
    of_ffn = 2 * 4 * WIDTH * WIDTH + 5 * WIDTH
    router = 8 * WIDTH  # CLIP-UP's have no bias
    assert (dense.model, dense.experts, dense.runs) == ("dense", 0, 2)
    assert dense.parameters == dense.activated == 2 * LAYERS * (of_layer + of_ffn)
    assert dense.share == pytest.approx(0.6) and dense.bits == pytest.approx(256 * (0.6 * 8 - 3))  # without the country
    # Every second layer of both towers is sparse
    assert sparse.experts == 8
    assert sparse.parameters == dense.parameters + 2 * (7 * of_ffn + router)
    assert sparse.activated == sparse.parameters - 2 * 6 * of_ffn


def test_dense_model_that_remembers_as_much():
    curve = [
        Knowledge("dense", "names_256", 256, 0, size, size, share, 1) for size, share in ((100, 0.5), (1600, 0.875))
    ]
    sparse = Knowledge("sparse", "names_256", 256, 8, 4000, 1000, 0.625, 1)
    assert equal_dense(sparse, curve) == pytest.approx(400)  # 1, 2 and 4 bits: half way, of the logarithms
    worse = Knowledge("dense", "names_256", 256, 0, 1600, 1600, 0.4, 1)  # as large, with another learning rate
    other = Knowledge("dense", "names_1024", 1024, 0, 200, 200, 0.2, 1)
    nothing = Knowledge("dense", "names_256", 256, 0, 50, 50, 0.0, 1)
    assert equal_dense(sparse, [*curve, worse, other, nothing]) == pytest.approx(400)
    beyond = Knowledge("sparse", "names_256", 256, 8, 4000, 1000, 0.9, 1)
    assert equal_dense(beyond, curve) is None


def test_page(folder, tmp_path):
    table = write_knowledge(folder, tmp_path / "page")
    assert table in (tmp_path / "page" / "knowledge.md").read_text()
    rows = json.loads((tmp_path / "page" / "knowledge.json").read_text())
    assert [row["share"] for row in rows] == [pytest.approx(0.6), pytest.approx(0.9)]
    assert f"{256 * 5 / rows[0]['parameters']:.2f}" in table


def test_results_without_information(folder):
    for path in folder[0].glob("*.json"):
        content = json.loads(path.read_text())
        content |= {"metrics": {"recall": 0.5}, "primary": {"recall": "recall"}}
        path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="no results of a task that tells information"):
        read_knowledge(folder)


def test_a_run_that_is_there_twice(folder):
    with pytest.raises(ValueError, match="one is there twice"):
        read_knowledge([folder[0], folder[0]])
