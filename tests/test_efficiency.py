"""The papers' parameter counts and multiply-adds, on the meta device.

The papers' own numbers stand beside ours where they differ in the last digit; CLIP-FMoE's 128.22 G does not follow from
its description: base FFN, two experts and the gate are 114.1 G, and 128.2 G is one more expert.
"""

import dataclasses
import json
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import small_evaluation
import torch
from test_report import lines_of
from tiny_clip import error_of
from tiny_families import tiny_dense

from conversion.checkpoints import load_clip
from conversion.presets import PRESETS, sparse_layers
from conversion.upcycle import sparse_config
from evaluation import speed
from evaluation.commands import efficiency
from evaluation.costs import (
    ARCHITECTURES,
    SIZES,
    count_multiply_adds,
    count_parameters,
    meta_model,
    paper_config,
)
from modeling_clip_moe.families import FAMILY_OF_TYPE

dense, sparse = small_evaluation.dense, small_evaluation.sparse

OTHER_SIZES = [size for size in SIZES if not size.startswith("ViT")]


def build(name):
    return meta_model(paper_config(name))


@cache
def counted(name):
    model = build(name)
    return count_parameters(model), count_multiply_adds(model)


def arithmetic(config, preset):
    """By hand: parameters in all; of each tower parameters, activated ones and multiply-adds without attention scores;
    multiply-adds of attention scores."""
    siglip = config.model_type == "siglip"
    patch, projection = (
        config.vision_config.patch_size,
        config.text_config.hidden_size if siglip else config.projection_dim,
    )
    patches = (config.vision_config.image_size // patch) ** 2
    towers, scores = {}, 0
    for name, tower, tokens in (
        ("vision", config.vision_config, patches + (not siglip)),
        ("text", config.text_config, config.text_config.max_position_embeddings),
    ):
        width, inner, layers = tower.hidden_size, tower.intermediate_size, tower.num_hidden_layers
        ffn = 2 * width * inner + inner + width
        sparse = 0 if preset is None else len(sparse_layers(preset.sparse_layers, "text", layers))
        parameters = layers * (4 * width**2 + 4 * width + 4 * width) + (layers - sparse) * ffn
        products = tokens * (layers * 4 * width**2 + (layers - sparse) * 2 * width * inner)
        scores += layers * 2 * tokens**2 * width
        idle = 0
        if sparse:
            gate = width**2 if preset.fusion_gate else 0
            base = ffn if preset.fusion_gate else 0
            parameters += sparse * (preset.num_experts * (ffn + width) + base + gate)
            idle = sparse * (preset.num_experts - preset.num_experts_per_tok) * ffn
            active = (preset.num_experts_per_tok + preset.fusion_gate) * 2 * width * inner + preset.num_experts * width
            products += tokens * sparse * (active + (width**2 if preset.fusion_gate else 0))
        parameters += tokens * width + 2 * width  # positions, last norm
        if name == "text":
            parameters += config.text_config.vocab_size * width + width * projection + siglip * projection
            products += width * projection
        else:
            parameters += width * 3 * patch**2
            products += patches * 3 * patch**2 * width
            if siglip:  # bias of the patches; probe, attention, norm and FFN of the pooling
                parameters += width + width + 4 * width**2 + 4 * width + 2 * width + ffn
                products += 2 * width**2 + 2 * tokens * width**2 + 2 * width * inner
                scores += 2 * tokens * width
            else:  # class token, first norm, projection
                parameters += width + 2 * width + width * projection
                products += width * projection
        towers[name] = (parameters, parameters - idle, products)
    return 1 + siglip + sum(parameters for parameters, *_ in towers.values()), towers, scores  # 1: the temperature


@pytest.mark.parametrize("system", [None, *ARCHITECTURES])
@pytest.mark.parametrize("size", SIZES)
def test_counts_are_the_arithmetic(size, system):
    counts, costs = counted(f"{size}:{system}" if system else size)
    total, towers, scores = arithmetic(paper_config(size), ARCHITECTURES.get(system))
    assert counts["total"] == total
    for tower, (parameters, activated, _) in towers.items():
        assert (counts[tower], counts[f"{tower}_activated"]) == (parameters, activated)
    assert costs["attention_scores"] == scores
    assert costs["image"] + costs["text"] - scores == sum(products for *_, products in towers.values())
    assert counts["total"] - counts["activated"] == sum(parts[0] - parts[1] for parts in towers.values())


def test_an_altclips_images_cost_as_a_clips_and_its_texts_as_a_roberta():
    clip, altclip = (
        sparse_config(tiny_dense(FAMILY_OF_TYPE[name]).config, PRESETS["clip_up"]) for name in ("clip", "altclip")
    )
    clip.projection_dim = altclip.projection_dim
    (counts, costs), (of_clip, costs_of_clip) = (
        (count_parameters(model), count_multiply_adds(model)) for model in map(meta_model, (altclip, clip))
    )
    assert all(counts[name] == of_clip[name] for name in ("vision", "vision_activated"))
    assert (counts["text"], costs["image"]) == (counts["text_activated"], costs_of_clip["image"])
    text = altclip.text_config
    layers, width, inner = text.num_hidden_layers, text.hidden_size, text.intermediate_size
    products = 8 * (layers * (4 * width**2 + 2 * width * inner + 2 * 8 * width) + width * text.project_dim)
    assert costs["text"] == products + text.project_dim * altclip.projection_dim


def test_an_image_of_any_shape_costs_by_its_patches():
    """As much as a SigLIP's of as many patches, whose attention is that of the same layers."""
    siglip, naflex = (tiny_dense(FAMILY_OF_TYPE[name]).config for name in ("siglip", "siglip2"))
    siglip.vision_config.image_size, siglip.vision_config.patch_size = 24, 4
    expected = count_multiply_adds(meta_model(siglip))
    assert count_multiply_adds(meta_model(naflex), 36) == expected
    siglip.vision_config.image_size = 16
    expected = count_multiply_adds(meta_model(siglip))
    assert count_multiply_adds(meta_model(naflex)) == expected


def test_the_page_of_families_has_their_costs():
    """M parameters, those that a token meets, and G multiply-adds of an image and a text."""
    page = Path("docs/families.md").read_text().replace("`", "")
    rows = [line for line in lines_of(page) if line[0] in OTHER_SIZES]
    assert len(rows) == len(OTHER_SIZES) * (1 + len(PRESETS))
    for size, preset, *numbers in rows:
        counts, costs = counted(f"{size}:{preset}" if preset else size)
        found = (counts["total"] / 1e6, counts["activated"] / 1e6, costs["image"] / 1e9, costs["text"] / 1e9)
        assert [float(number) for number in numbers] == [round(value, 1) for value in found]


@pytest.mark.parametrize(
    ("name", "total", "products", "gflops"),
    [
        ("ViT-L/14", 427.62, 84.31, 175.33),  # papers: 84.38, and 175.5
        ("ViT-L/14:5_experts", 685.78, 112.37, None),  # 112.44
        ("ViT-L/14:clip_fmoe", 693.83, 114.1, None),  # 693.83 and 128.22, see above
        ("ViT-L/14:clip_moe", 1202.1, None, None),
        ("ViT-B/32", None, None, 14.78),  # CLIP-UP, Table 2: 14.8, 41.2; with experts 19.6, 54.3 and 231.7
        ("ViT-B/16", None, None, 41.09),
        ("ViT-B/32:clip_up", None, None, 19.55),
        ("ViT-B/16:clip_up", None, None, 54.20),
        ("ViT-L/14:clip_up", None, None, 231.5),
    ],
)
def test_costs_that_papers_tell(name, total, products, gflops):
    """M parameters, G multiply-adds without attention scores, and GFLOPs."""
    model = build(name)
    costs = count_multiply_adds(model)
    both, tolerance = costs["image"] + costs["text"], 0.06
    for expected, found in (
        (products, (both - costs["attention_scores"]) / 1e9),
        (gflops, 2 * both / 1e9),
        (total, count_parameters(model)["total"] / 1e6),
    ):
        assert expected is None or found == pytest.approx(expected, abs=tolerance)


def test_activated_and_trainable_parameters():
    """CLIP-MoE activates 0.69 B. CLIP-FMoE, Table 5: 72.59 M an expert in stage 1, 8.09 M in stage 2; of the 5 experts
    64.53 M each, 0.04 M for the routers, and 322.69 M for all."""
    assert count_parameters(build("ViT-L/14:clip_moe"))["activated"] / 1e6 == pytest.approx(685.87, abs=0.005)
    dense = count_parameters(build("ViT-L/14"))
    assert dense["activated"] == dense["total"] and (dense["expert"], dense["routers"]) == (0, 0)
    counts = count_parameters(build("ViT-L/14:clip_fmoe"), r"\.fusion_gate\.")
    assert counts["routers"] / 1e6 == pytest.approx(8.095, abs=5e-4)
    assert (counts["expert"] + counts["trainable"]) / 1e6 == pytest.approx(72.591, abs=5e-4)
    fused = dataclasses.replace(PRESETS["clip_fmoe"], num_experts=1, num_experts_per_tok=1)
    stage_1 = count_parameters(meta_model(sparse_config(paper_config("ViT-L/14"), fused)), r"\.(experts|fusion_gate)\.")
    assert stage_1["trainable"] == counts["expert"] + counts["trainable"]
    baseline = count_parameters(build("ViT-L/14:5_experts"), r"\.(router|experts)\.")
    found = [baseline[name] / 1e6 for name in ("expert", "routers", "trainable")]
    assert found == pytest.approx([64.53, 0.04, 322.69], abs=0.01)


# --- the command


@pytest.fixture(scope="module")
def report(dense, sparse, tmp_path_factory):
    """A dense and a sparse model, one that is a configuration alone, and a paper's."""
    folder = tmp_path_factory.mktemp("efficiency")
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text((sparse / "config.json").read_text())
    models = [str(dense), str(sparse), str(folder / "config"), "ViT-B/32:clip_up"]
    arguments = ["--output-dir", str(folder / "out"), "--batch-size", "3", "--device", "cpu", "--baseline", str(sparse)]
    ballast = np.ones(2**27)  # 1 GiB, which is no model's
    efficiency.main([*models, *arguments])
    del ballast
    return models, folder / "out"


def test_the_command_counts_and_measures(report):
    """The page shows numbers and their ratios to the baseline."""
    models, folder = report
    result, page = json.loads((folder / "efficiency.json").read_text()), (folder / "efficiency.md").read_text()
    of = result["models"]
    assert list(of) == models and result["baseline"] == models[1]
    for name in models[:2]:
        counts, measured = of[name]["parameters"], of[name]["measured"]
        assert counts["total"] == sum(parameter.numel() for parameter in load_clip(name).parameters())
        assert measured["images_per_second"] > 0 and measured["texts_per_second"] > 0
        assert 4 * counts["total"] < measured["peak_memory"] - measured["memory_before"]
        assert measured["peak_memory"] < 2**30  # without the ballast
    assert not any("measured" in of[name] for name in models[2:])
    assert of[models[1]]["parameters"] == of[models[2]]["parameters"]
    assert (result["device"], result["dtype"], result["batch_size"]) == ("cpu", "float32", 3)
    assert {path.name for path in folder.iterdir()} == {f"efficiency.{kind}" for kind in ("html", "json", "md")}
    lines = lines_of("\n".join(line for line in page.splitlines() if line.startswith("|")))
    counted, adds, measured = (lines[start : start + 4] for start in (2, 8, 14))
    assert [row[0] for row in counted] == [row[0] for row in adds] == models
    total = [of[name]["parameters"]["total"] for name in models]
    assert counted[0][1] == f"{total[0] / 1e6:.3g} ({total[0] / total[1]:.2f})"
    assert counted[1][1] == f"{total[1] / 1e6:.3g}"  # the baseline
    assert not any(cell.startswith("0.000 ") for row in adds for cell in row)
    assert counted[3][1].startswith("437.87 (") and adds[3][-1].startswith("19.55 (")
    speeds = [of[name]["measured"]["images_per_second"] for name in models[:2]]
    assert [row[0] for row in measured] == models[:2] and measured[0][1].endswith(f"({speeds[0] / speeds[1]:.2f})")


def test_models_are_timed_in_turn(monkeypatch):
    """What a call takes by the clock is what the rate says."""
    order, takes, clock = [], {("a", 0): 0.01, ("a", 1): 0.02, ("b", 0): 0.03, ("b", 1): 0.04}, [0.0]

    def call(name, unit):
        order.append((name, unit))
        clock[0] += takes[name, unit]

    monkeypatch.setattr(speed, "_calls", lambda name, *_: [partial(call, name, unit) for unit in (0, 1)])
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(speed, "SECONDS_OF_A_TURN", 0.025)
    rates = speed.measure_speed(["a", "b"], 6, torch.device("cpu"), torch.float32)
    turns = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    repeated = [turn for turn, times in zip(turns, (3, 2, 1, 1), strict=True) for _ in range(times)]
    assert order == [turn for turn in turns for _ in range(2)] + speed.ROUNDS * repeated
    assert rates["a"]["images_per_second"] == pytest.approx(6 / 0.01)
    assert rates["b"]["texts_per_second"] == pytest.approx(6 / 0.04)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ViT-L/14:clip_moo"], "there is no architecture 'clip_moo'"),
        (["ViT-B/16", "--baseline", "ViT-B/32"], "the baseline 'ViT-B/32' is none of the models"),
    ],
)
def test_mistakes_end_in_one_line(arguments, message):
    assert message in error_of(efficiency.main, *arguments)


@pytest.mark.slow
def test_too_little_memory_is_one_line(dense):
    for measure, models in ((speed.measure_memory, str(dense)), (speed.measure_speed, [str(dense)])):
        message = f"{dense} cannot embed 1000000000 at a time in float32 on cpu, for want of memory"
        with pytest.raises(ValueError, match=message):
            measure(models, 10**9, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("captions", "verdict"),
    [(10**6, "has nothing to gain"), (5 * 10**6, "cannot be told"), (2 * 10**7, "should pay"), (10**8, "is too much")],
)
def test_every_number_of_captions_has_a_verdict(capsys, captions, verdict):
    """Of the dense model: what follows from 0.2, 0.9, 3.9 and 21.6 bits for each parameter of its layers."""
    efficiency.main(["ViT-B/32:clip_up", "ViT-B/32", "--captions", str(captions)])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if " bits: " in line)
    assert line.startswith("ViT-B/32, ") and verdict in line


def test_what_there_is_to_remember(capsys):
    efficiency.main(["ViT-B/32", "ViT-B/32:clip_up", "--captions", "1024"])
    page = capsys.readouterr().out
    assert "= 10,240 bits" in page
    rows = lines_of("\n".join(line for line in page.splitlines() if "| ViT" in line))
    layers = [count_parameters(build(name))["layers"] for name in ("ViT-B/32", "ViT-B/32:clip_up")]
    vision, text = 12 * (12 * 768**2 + 13 * 768), 12 * (12 * 512**2 + 13 * 512)
    assert layers[0] == vision + text
    assert [row[1] for row in rows[-2:]] == [f"{number / 1e6:.2f}" for number in layers]
