"""What experts know and which tokens they get: by hand, and on a small model."""

import json
import re
import shutil

import numpy as np
import pytest
import small_experts
import torch
from transformers import AutoModel, CLIPModel

from conversion.dense import extract
from conversion.dense import main as dense_main
from conversion.presets import PRESETS
from conversion.upcycle import upcycle
from data import symbols
from data.worlds import build_processor
from evaluation import experts
from evaluation.agreement import linear_cka
from evaluation.embedder import Embedder
from evaluation.experts import analyze_experts, main
from evaluation.measures import measure
from evaluation.page_folder import write_page
from evaluation.preferences import dropped_patches, route_images, route_texts, top_words
from evaluation.routing_pictures import draw_gates, draw_shares
from evaluation.tasks import Task
from records.files import locked

pytestmark = pytest.mark.slow
TASKS = {
    "pairs": Task("pairs", "pairs", "60 pairs", lambda: (symbols.load_minimal_pairs("test", 60), 0)),
    "retrieval": Task("retrieval", "retrieval", "40", lambda: (symbols.load("test", "detailed", 40), 0)),
}
sparse, unnormalized, gated = small_experts.sparse, small_experts.unnormalized, small_experts.gated
RETRIEVAL = {"retrieval": TASKS["retrieval"]}


def columns_of(beginning):
    """Of the table of scores."""
    (header,) = (line for line in beginning.splitlines() if line.startswith("| metric"))
    return [cell.strip() for cell in header.split("|")[1:-1]]


def test_every_expert_scores_as_its_dense_model(sparse, tmp_path):
    model, folder = sparse
    table = analyze_experts(folder, TASKS, tmp_path / "out")
    result = json.loads((tmp_path / "out" / "experts.json").read_text())
    for expert in range(4):
        extract(model, expert).save_pretrained(tmp_path / str(expert))
        build_processor("symbols", 64, 32).save_pretrained(tmp_path / str(expert))
        for name, task in TASKS.items():
            expected = measure(task, Embedder(tmp_path / str(expert), None, 64, torch.device("cpu")))["metrics"]
            assert result["metrics"][name][f"expert {expert}"] == pytest.approx(expected)
    expected = measure(TASKS["pairs"], Embedder(folder, None, 64, torch.device("cpu")))["metrics"]
    assert result["metrics"]["pairs"]["routed"] == pytest.approx(expected)
    averaged = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in averaged.named_parameters():
            if ".experts." in name:
                for expert in range(4):
                    parameter[expert] = torch.stack(list(model.get_parameter(name))).mean(dim=0)
    averaged.save_pretrained(tmp_path / "averaged")
    build_processor("symbols", 64, 32).save_pretrained(tmp_path / "averaged")
    expected = measure(TASKS["pairs"], Embedder(tmp_path / "averaged", None, 64, torch.device("cpu")))["metrics"]
    assert result["metrics"]["pairs"]["mean of experts"] == pytest.approx(expected)
    of_pairs = result["summary"]["collapse"][0]
    assert of_pairs["title"] == "pairs: group score" and of_pairs["mean"] == pytest.approx(expected["group"])
    assert of_pairs["routed"] == result["metrics"]["pairs"]["routed"]["group"] != of_pairs["mean"]
    assert result["summary"]["agreement"]["highest"] < 0.999
    scores = [result["metrics"]["pairs"][column]["image"] for column in ("expert 0", "expert 1", "routed")]
    assert len(set(scores)) > 1
    assert columns_of(table) == ["metric", "expert 0", "expert 1", "expert 2", "expert 3", "routed"]
    lines = table[table.index("| metric") :].splitlines()
    assert all("**" in line for line in lines[2:] if line.startswith("|"))
    assert any("group/texture" in line for line in lines)
    assert f"# Experts\n\n{table}\n" in (tmp_path / "out" / "experts.md").read_text()
    title = "% of the tokens computed by each expert: pairs, retrieval"
    draw_shares(result["shares"], result["output_shares"], tmp_path / "expected.png", title)
    assert (tmp_path / "out" / "routing.png").read_bytes() == (tmp_path / "expected.png").read_bytes()
    for layers in (*result["shares"].values(), *result["output_shares"].values()):
        assert all(sum(shares) == pytest.approx(2) for shares in layers.values())
    assert result["shares"] != result["output_shares"]
    page = (tmp_path / "out" / "experts.md").read_text()
    cells = {tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in page.splitlines()}
    for tokens, of in (("all", ""), ("end token", "output_")):
        shares, *entropies = (result[f"{of}{what}"]["text"]["1"] for what in ("shares", "share_entropy", "entropy"))
        row = [*(f"{share:.1%}" for share in shares), *(f"{entropy:.2f}" for entropy in entropies)]
        assert ("text", "1", tokens, *row) in cells
    assert result["scales"] == {} and "conversion.dense" not in (tmp_path / "out" / "experts.md").read_text()
    rows = [
        row for task in result["metrics"].values() for row in zip(*(of.values() for of in task.values()), strict=True)
    ]
    columns = list(result["metrics"]["pairs"])
    better = sum(
        row[columns.index("routed")] > max(v for v, c in zip(row, columns, strict=True) if c.startswith("expert"))
        for row in rows
    )
    assert f"better than every expert alone in {better} of {len(rows)} metrics" in table


def test_equal_experts_score_as_the_routed_model(unnormalized, tmp_path):
    """An expert alone has the weight that a token's experts have together, where that is not 1."""
    model, folder = unnormalized
    table = analyze_experts(folder, RETRIEVAL, tmp_path)
    result = json.loads((tmp_path / "experts.json").read_text())
    scores = result["metrics"]["retrieval"]
    for expert in range(8):
        assert scores[f"expert {expert}"] == pytest.approx(scores["routed"])
    with model.force_expert(0, 1.0):  # which is not what weight 1 gives
        other = Embedder(folder, None, 64, torch.device("cpu"))
        other.model = model
        assert measure(TASKS["retrieval"], other)["metrics"] != pytest.approx(scores["routed"])
    assert "better than every expert alone in 0 of" in table
    summary = result["summary"]
    for score in summary["collapse"]:
        assert score["mean"] == score["routed"]
    assert list(summary["agreement"].values()) == pytest.approx([1, 1, 1], abs=1e-6) and summary["most_entropy"] == 3
    assert f"{scores['routed']['image_to_text_recall@1']:.1%} with the mean of the experts: +0.0 ±" in table
    assert "CKA 1.000 (pairs: 1.000 to 1.000)" in table


def test_scales_are_what_dense_takes(unnormalized, tmp_path):
    """The mean over tokens of the sum of a token's weights, in every layer."""
    model, folder = unnormalized
    analyze_experts(folder, RETRIEVAL, tmp_path)
    result = json.loads((tmp_path / "experts.json").read_text())
    assert list(result["dropped_patches"]) == ["2.0", "4.0"] and (tmp_path / "dropped.png").exists()
    scales, sums, hooks = result["scales"], {}, []
    for tower, layers in scales.items():
        for layer in layers:
            router = model.get_submodule(f"{tower}_model.encoder.layers.{layer}.mlp.router")

            def collect(router, inputs, outputs, key=(tower, layer)):
                total = outputs[0].softmax(dim=-1).topk(2).values.sum(dim=-1)
                sums.setdefault(key, []).append(total.flatten() if inputs[1] is None else total[inputs[1].bool()])

            hooks.append(router.register_forward_hook(collect))
    embedder = Embedder(folder, None, 64, torch.device("cpu"))
    embedder.model = model
    measure(TASKS["retrieval"], embedder)
    for hook in hooks:
        hook.remove()
    assert {tower: set(layers) for tower, layers in scales.items()} == {"text": {"1", "3"}, "vision": {"1", "3"}}
    for (tower, layer), totals in sums.items():
        assert scales[tower][layer] == pytest.approx(torch.cat(totals).mean().item(), rel=1e-5)
        assert 0.26 < scales[tower][layer] < 0.9
    assert f"{scales['text']['1']:.3f}" in (tmp_path / "experts.md").read_text()
    dense_main([str(folder), str(tmp_path / "dense"), "--expert", "3", "--scale", str(tmp_path / "experts.json")])
    with pytest.raises(SystemExit, match="give --scale experts.json"):
        dense_main([str(folder), str(tmp_path / "none"), "--expert", "3"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "training/symbol_clip", "--tasks", "symbols_pairs"], "is a dense CLIP: it has no experts"),
        (["--model", "training/symbol_clip", "--tasks", "nope"], "unknown task nope"),
        (["--model", "nowhere/", "--tasks", "symbols_pairs"], "nowhere"),
    ],
)
def test_mistakes_end_in_one_line(arguments, message, tmp_path):
    with pytest.raises(SystemExit) as exit:
        main([*arguments, "--output-dir", str(tmp_path)])
    assert exit.value.code.startswith("error: ") and message in exit.value.code


def test_analysis_of_gates_and_of_other_numbers_of_experts(gated, tmp_path):
    model, folder = gated
    table = analyze_experts(folder, RETRIEVAL, tmp_path, num_experts_per_tok=[1, 4])
    assert columns_of(table) == ["metric", *(f"expert {number}" for number in range(4)), "K = 1", "K = 4", "routed"]
    result = json.loads((tmp_path / "experts.json").read_text())
    for gates in (result["gates"], result["output_gates"]):
        assert set(gates["vision"]) == {"3"} and 0 < gates["vision"]["3"] < 1
    assert f"{result['output_gates']['vision']['3']:.1%}" in (tmp_path / "experts.md").read_text()
    assert result["gates"] != result["output_gates"]
    draw_gates(result["gates"], result["output_gates"], tmp_path / "expected.png")
    assert (tmp_path / "gates.png").read_bytes() == (tmp_path / "expected.png").read_bytes()
    assert "gates.png" in (tmp_path / "experts.md").read_text()
    model.config.text_config.num_experts_per_tok = model.config.vision_config.num_experts_per_tok = 4
    model.save_pretrained(tmp_path / "four")
    model.config.text_config.num_experts_per_tok = model.config.vision_config.num_experts_per_tok = 2
    build_processor("symbols", 64, 32).save_pretrained(tmp_path / "four")
    expected = measure(TASKS["retrieval"], Embedder(tmp_path / "four", None, 64, torch.device("cpu")))["metrics"]
    assert result["metrics"]["retrieval"]["K = 4"] == pytest.approx(expected)
    assert result["metrics"]["retrieval"]["K = 1"] != result["metrics"]["retrieval"]["K = 4"]
    page = (tmp_path / "experts.md").read_text()
    assert "share of the base FFN" in page and "the vision tower has no capacity factor" in page


def test_tasks_without_texts_are_refused_before_the_work(sparse, tmp_path):
    task = Task("linear_probe", "probe", "none", lambda: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="probe: no text of these tasks reaches the sparse text tower"):
        analyze_experts(sparse[1], {"probe": task}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_agreement_is_that_of_the_experts_taken_out(sparse, tmp_path):
    model, folder = sparse
    analyze_experts(folder, RETRIEVAL, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "experts.json").read_text())["agreement"]
    rows, embeds = RETRIEVAL["retrieval"].load()[0], {"images": [], "texts": []}
    for expert in (0, 1):
        extract(model, expert).save_pretrained(tmp_path / str(expert))
        build_processor("symbols", 64, 32).save_pretrained(tmp_path / str(expert))
        alone = Embedder(tmp_path / str(expert), None, 64, torch.device("cpu"))
        embeds["images"].append(alone.images(rows))
        embeds["texts"].append(alone.texts(rows["caption"]))
    for what, of_experts in embeds.items():
        assert found[what]["expert 0"]["expert 1"] == pytest.approx(linear_cka(*of_experts), abs=1e-4)
        assert 0 < found[what]["expert 0"]["expert 1"] < 0.999
        assert list(found[what]) == ["expert 0", "expert 1", "expert 2", "expert 3", "routed"]


def test_agreement_of_many_is_that_of_some_from_all_parts(sparse, tmp_path, monkeypatch):
    monkeypatch.setattr(experts, "MOST_EMBEDDINGS", 4)
    analyze_experts(sparse[1], RETRIEVAL, tmp_path)
    result, page = json.loads((tmp_path / "experts.json").read_text()), (tmp_path / "experts.md").read_text()
    embedder, rows = Embedder(sparse[1], None, 64, torch.device("cpu")), RETRIEVAL["retrieval"].load()[0]
    embeds = []
    for expert in (0, 1):
        with embedder.model.force_expert(expert):
            embeds.append(embedder.images(rows)[[0, 13, 26, 39]])
    assert result["agreement"]["images"]["expert 0"]["expert 1"] == pytest.approx(linear_cka(*embeds), abs=1e-4)
    assert result["num_embeddings"] == {"images": 4, "texts": 4} and "| 4 images" in page


PICTURES = {
    *("routing", "agreement", "coactivation", "patches", "expert_patches", "expert_words", "expert_captions"),
    *("dropped", "expert"),
}


def test_the_page_shows_all_pictures_and_the_chosen_layers(sparse, tmp_path):
    (tmp_path / "gates.png").write_text("of another model")
    options = {"capacity_factors": [0.5, 4], "expert": 0, "batch_size": 16}
    analyze_experts(sparse[1], RETRIEVAL, tmp_path, layers={"vision": 1, "text": 2}, **options)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"experts.md", "experts.json", *(f"{name}.png" for name in PICTURES)}
    page, result = (tmp_path / "experts.md").read_text(), json.loads((tmp_path / "experts.json").read_text())
    assert set(re.findall(r"\]\((\w+)\.png\)", page)) == PICTURES
    assert result["layers"] == {"vision": 1, "text": 2} and "in layer 2 of the text tower" in page
    captions = RETRIEVAL["retrieval"].load()[0]["caption"]
    embedder = Embedder(sparse[1], None, 64, torch.device("cpu"))
    words = top_words(route_texts(embedder, list(dict.fromkeys(captions)), 2), embedder.processor.tokenizer)
    assert result["words"] == [[list(word) for word in of_expert] for of_expert in words]
    pairs = np.array(result["coactivation"]["vision"]["3"])
    assert np.array_equal(pairs, pairs.T) and pairs.diagonal().tolist() == result["shares"]["vision"]["3"]
    assert f"{result['entropy']['vision']['3']:.2f}" in page
    routed = route_images(embedder, list(RETRIEVAL["retrieval"].load()[0]["image"]), 1)
    dropped = {factor: dropped_patches(routed, 16, 2, factor).mean() for factor in (0.5, 4)}
    assert result["dropped_patches"] == {"0.5": pytest.approx(dropped[0.5]), "4": dropped[4]}
    assert f"| {dropped[0.5]:.1%} " in page and dropped[0.5] > dropped[4] == 0
    assert 1 < result["output_share_entropy"]["text"]["0"] <= 2


def test_what_a_model_lacks_is_not_drawn(tmp_path):
    """A sparse text tower alone, with one expert a token, which drops some choices in training, in groups of 32."""
    model = upcycle(CLIPModel.from_pretrained("training/symbol_clip"), PRESETS["clip_up"], towers=["text"])
    model.config.text_config.num_experts_per_tok, model.config.text_config.capacity_group_size = 1, 32
    model.save_pretrained(tmp_path / "model")
    build_processor("symbols", 64, 32).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="the vision tower is dense and drops no patch"):
        analyze_experts(tmp_path / "model", RETRIEVAL, tmp_path / "out", capacity_factors=[2])
    analyze_experts(tmp_path / "model", RETRIEVAL, tmp_path / "out")
    pictures = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert pictures == {"routing", "agreement", "expert_words", "expert_captions"}
    page, result = ((tmp_path / "out" / f"experts.{kind}").read_text() for kind in ("md", "json"))
    dropped = json.loads(result)["overflowing"]["text"]["1"]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    assert ["text", "1", "0.0%", f"{dropped:.1%}", "32"] in lines and dropped > 0


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--vision-layer", "2"], "layer 2 of the vision tower cannot be drawn: its sparse layers are 3"),
        (["--expert", "4"], "expert 4 cannot be drawn: there are 4, counted from 0"),
        (["--capacity-factors", "2", "0"], "capacity_factors: 0.0 must be a number above 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_the_work(option, message, gated, tmp_path):
    command = ["--model", str(gated[1]), "--tasks", "symbols_pairs", "--output-dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as exit:
        main([*command, *option])
    assert exit.value.code == f"error: {message}"
    assert not (tmp_path / "out").exists()


def test_another_page_is_not_overwritten(sparse, gated, tmp_path, monkeypatch):
    model, out = shutil.copytree(sparse[1], tmp_path / "model"), tmp_path / "out"
    analyze_experts(model, RETRIEVAL, out)
    before = {path: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(experts, "_measure_alone", lambda *_: pytest.fail("work"))
    shutil.copytree(gated[1], tmp_path / "other")
    for source, tasks, options, message in (
        (tmp_path / "other", RETRIEVAL, {}, f"source is '{model}' and not '{tmp_path / 'other'}'"),
        (model, {"pairs": TASKS["pairs"]}, {}, "protocols is {'retrieval': '40'} and not {'pairs': '60 pairs'}"),
        (model, RETRIEVAL, {"num_experts_per_tok": [1]}, "num_experts_per_tok is None and not [1]"),
        (model, RETRIEVAL, {"layers": {"text": 0}}, "layers is {'text': 3} and not {'text': 0}"),
        (model, RETRIEVAL, {"batch_size": 8}, "batch_size is 64 and not 8"),
        (model, RETRIEVAL, {"capacity_factors": [1.5]}, "capacity_factors is None and not [1.5]"),
        (model, RETRIEVAL, {"expert": 0}, "drawn_experts is None and not [0]"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"{out}/experts.json holds another result, whose {message}: ")):
            analyze_experts(source, tasks, out, **options)
    (tmp_path / "model" / "config.json").write_bytes((sparse[1] / "config.json").read_bytes() + b"\n")
    with pytest.raises(ValueError, match="holds another result, whose weights is"):
        analyze_experts(model, RETRIEVAL, out)
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_a_page_has_one_writer(tmp_path):
    with locked(tmp_path / "out"), pytest.raises(ValueError, match="is in use"):
        write_page(tmp_path / "out", "experts", "", {}, {})
    assert not (tmp_path / "out").exists()
