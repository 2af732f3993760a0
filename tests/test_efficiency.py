"""The papers' parameter counts and multiply-adds, on the meta device.

The papers' own numbers stand beside ours where they differ in the last digit; CLIP-FMoE's 128.22 G does not follow from
its description: base FFN, two experts and the gate are 114.1 G, and 128.2 G is one more expert.
"""

import dataclasses
import json
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_report import lines_of
from tiny_clip import error_of
from tiny_families import tiny_dense

from clip_moe.conversion.checkpoints import load_clip
from clip_moe.conversion.presets import PRESETS, sparse_layers
from clip_moe.conversion.upcycle import sparse_config
from clip_moe.evaluation import speed
from clip_moe.evaluation.commands import efficiency
from clip_moe.evaluation.costs import (
    ARCHITECTURES,
    SIZES,
    count_multiply_adds,
    count_parameters,
    meta_model,
    paper_config,
)
from clip_moe.training.optimizers import set_trainable
from modeling_clip_moe.families import FAMILIES, FAMILY_OF_TYPE

OTHER_SIZES = [size for size in SIZES if not size.startswith(("ViT", "ViE"))]


@cache
def counted(name):
    model = meta_model(paper_config(name))
    return count_parameters(model), count_multiply_adds(model)


def arithmetic(config, preset):
    """By hand: parameters in all; of each tower parameters, activated ones and multiply-adds; those of attention scores
    alone."""
    siglip, text, vision = config.model_type == "siglip", config.text_config, config.vision_config
    patch, projection = vision.patch_size, text.hidden_size if siglip else config.projection_dim
    patches, towers, all_scores = (vision.image_size // patch) ** 2, {}, 0
    for name, tower, tokens in (
        ("vision", vision, patches + (not siglip)),
        ("text", text, text.max_position_embeddings),
    ):
        width, inner, layers, idle = tower.hidden_size, tower.intermediate_size, tower.num_hidden_layers, 0
        ffn = 2 * width * inner + inner + width
        # positions, last norm
        parameters = layers * (4 * width**2 + 4 * width + 4 * width + ffn) + tokens * width + 2 * width
        products = tokens * layers * (4 * width**2 + 2 * width * inner)
        scores = layers * 2 * tokens**2 * width
        if preset and name in preset.towers:
            sparse, gate = len(sparse_layers(preset.sparse_layers, name, layers)), preset.fusion_gate
            number, chosen = preset.num_experts, preset.num_experts_per_tok
            hidden = inner // 4 if preset.moe_intermediate_size == "1/4" else inner
            expert, shared = 2 * width * hidden + hidden + width, preset.num_shared_experts
            added = (number + shared) * expert - (not gate) * ffn  # with a gate, the FFN stays
            parameters += sparse * (added + number * width + gate * width**2)
            computed = (chosen + shared) * hidden - (not gate) * inner
            products += tokens * sparse * (computed * 2 * width + number * width + gate * width**2)
            idle = sparse * (number - chosen) * expert
        if name == "text":
            parameters += text.vocab_size * width + width * projection + siglip * projection
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
        towers[name] = (parameters, parameters - idle, products + scores)
        all_scores += scores
    return 1 + siglip + sum(parameters for parameters, *_ in towers.values()), towers, all_scores  # 1: the temperature


@pytest.mark.parametrize("system", [None, *ARCHITECTURES])
@pytest.mark.parametrize("size", ["ViT-L/14", "SigLIP2-L/16", "MetaCLIP2-H/14"])
def test_counts_are_the_arithmetic(size, system):
    """Of four layers; the page of families and the papers have the costs of all."""
    config = paper_config(size)
    config.text_config.num_hidden_layers = config.vision_config.num_hidden_layers = 4
    total, towers, scores = arithmetic(config, ARCHITECTURES.get(system))
    model = meta_model(sparse_config(config, ARCHITECTURES[system]) if system else config)
    counts, costs = count_parameters(model), count_multiply_adds(model)
    assert counts["total"] == total
    for (tower, (parameters, activated, products)), of in zip(towers.items(), ("image", "text"), strict=True):
        assert (counts[tower], counts[f"{tower}_activated"], costs[of]) == (parameters, activated, products)
    assert costs["attention_scores"] == scores
    assert counts["total"] - counts["activated"] == sum(parts[0] - parts[1] for parts in towers.values())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_layers_and_attention_scores_are_counted_by_what_they_are(family):
    """Families differ in the names of both. Layers are alike, so that twice as many have twice the parameters."""
    model, larger = (meta_model(tiny_dense(family, layers=layers).config) for layers in (2, 4))
    layer_parameters = count_parameters(model)["layers"]
    assert 2 * layer_parameters == count_parameters(larger)["layers"]
    assert layer_parameters == count_parameters(larger)["total"] - count_parameters(model)["total"]
    text, vision = model.config.text_config, model.config.vision_config
    table = getattr(model.vision_model.embeddings, "position_embedding", None)  # MoE-ViE has none
    patches = table.num_embeddings if table else (vision.image_size // vision.patch_size) ** 2
    scores = sum(2 * 2 * length**2 * of.hidden_size for of, length in ((text, 8), (vision, patches)))
    pooling = 2 * patches * vision.hidden_size if family.sigmoid or table is None else 0  # by one query
    assert count_multiply_adds(model)["attention_scores"] == scores + pooling


def test_an_image_of_any_shape_costs_by_its_patches():
    """As much as a SigLIP's of as many patches, whose attention is that of the same layers."""
    siglip, naflex = (tiny_dense(FAMILY_OF_TYPE[name]).config for name in ("siglip", "siglip2"))
    siglip.vision_config.patch_size = 4
    for size, patches in ((24, 36), (16, None)):
        siglip.vision_config.image_size = size
        assert count_multiply_adds(meta_model(naflex), patches) == count_multiply_adds(meta_model(siglip))


def test_the_page_of_families_has_their_costs():
    """M parameters, those that a token meets, and G multiply-adds of an image and a text."""
    page = Path("docs/families.md").read_text().replace("`", "")
    rows = [line for line in lines_of(page) if line[0] in OTHER_SIZES]
    assert len(rows) == len(OTHER_SIZES) * (1 + len(PRESETS))
    for size, preset, *numbers in rows:
        total, towers, _ = arithmetic(paper_config(size), PRESETS.get(preset))
        (whole, activated, image), (text_parameters, activated_text, text) = towers.values()
        idle = whole - activated + text_parameters - activated_text
        found = (total / 1e6, (total - idle) / 1e6, image / 1e9, text / 1e9)
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
    counts, costs = counted(name)
    both = costs["image"] + costs["text"]
    found = (counts["total"] / 1e6, (both - costs["attention_scores"]) / 1e9, 2 * both / 1e9)
    for expected, value in zip((total, products, gflops), found, strict=True):
        assert expected is None or value == pytest.approx(expected, abs=0.06)


def test_activated_and_trainable_parameters():
    """CLIP-MoE activates 0.69 B. CLIP-FMoE, Table 5: 72.59 M an expert in stage 1, 8.09 M in stage 2; of the 5 experts
    64.53 M each, 0.04 M for the routers, and 322.69 M for all."""
    assert counted("ViT-L/14:clip_moe")[0]["activated"] / 1e6 == pytest.approx(685.87, abs=0.005)
    dense, _ = counted("ViT-L/14")
    assert dense["activated"] == dense["total"] and (dense["expert"], dense["routers"]) == (0, 0)

    def trainable(preset, pattern):
        model = meta_model(sparse_config(paper_config("ViT-L/14"), preset))
        set_trainable(model, pattern)
        return count_parameters(model) | {"trainable": sum(p.numel() for p in model.parameters() if p.requires_grad)}

    counts = trainable(PRESETS["clip_fmoe"], r"\.fusion_gate\.")
    assert counts["routers"] / 1e6 == pytest.approx(8.095, abs=5e-4)
    assert (counts["expert"] + counts["trainable"]) / 1e6 == pytest.approx(72.591, abs=5e-4)
    fused = dataclasses.replace(PRESETS["clip_fmoe"], num_experts=1, num_experts_per_tok=1)
    stage_1 = trainable(fused, r"\.(experts|fusion_gate)\.")
    assert stage_1["trainable"] == counts["expert"] + counts["trainable"]
    baseline = trainable(ARCHITECTURES["5_experts"], r"\.(router|experts)\.")
    found = [baseline[name] / 1e6 for name in ("expert", "routers", "trainable")]
    assert found == pytest.approx([64.53, 0.04, 322.69], abs=0.01)


# --- the command


def test_the_command_counts_and_measures(dense, sparse, tmp_path, monkeypatch):
    """The page shows numbers and their ratios to the baseline. The third model has no weights."""
    monkeypatch.setattr(speed, "SECONDS_OF_A_TURN", 0.01)
    (tmp_path / "config.json").write_bytes((sparse / "config.json").read_bytes())
    models, folder = [str(dense), str(sparse), str(tmp_path), "ViT-B/32:clip_up"], tmp_path / "out"
    options = ["--output_dir", str(folder), "--batch_size", "3", "--device", "cpu", "--baseline", str(sparse)]
    efficiency.main([*models, *options])
    assert "efficiency.json already exists" in error_of(efficiency.main, *models, *options)
    result, page = json.loads((folder / "efficiency.json").read_text()), (folder / "efficiency.md").read_text()
    of = result["models"]
    assert list(of) == models and result["baseline"] == models[1]
    for name in models[:2]:
        counts, measured = of[name]["parameters"], of[name]["measured"]
        assert counts["total"] == sum(parameter.numel() for parameter in load_clip(name).parameters())
        assert measured["images_per_second"] > 0 and measured["texts_per_second"] > 0
    assert not any("measured" in of[name] for name in models[2:])
    assert of[models[1]]["parameters"] == of[models[2]]["parameters"]
    lines = lines_of("\n".join(line for line in page.splitlines() if line.startswith("|")))
    counted, adds, measured = (lines[start : start + 4] for start in (2, 8, 14))
    total = [of[name]["parameters"]["total"] for name in models]
    assert counted[0][1] == f"{total[0] / 1e6:.3g} ({total[0] / total[1]:.2f})"
    assert counted[1][1] == f"{total[1] / 1e6:.3g}"  # the baseline
    assert counted[3][1].startswith("437.87 (") and adds[3][-1].startswith("19.55 (")
    speeds = [of[name]["measured"]["images_per_second"] for name in models[:2]]
    assert measured[0][1].endswith(f"({speeds[0] / speeds[1]:.2f})")


def test_models_are_timed_in_turn(monkeypatch):
    """The rate is that of a call's time by the clock."""
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


def test_mistakes_end_in_one_line():
    assert "unknown architecture 'clip_moo'" in error_of(efficiency.main, "ViT-L/14:clip_moo")
    unknown = error_of(efficiency.main, "ViT-B/16", "--baseline", "ViT-B/32")
    assert "the baseline 'ViT-B/32' is not one of the models" in unknown
