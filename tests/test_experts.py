"""What experts know and which tokens they get: by hand, and on a small model."""

import json

import matplotlib.image
import numpy as np
import pytest
import small_evaluation
import torch
from matplotlib import cbook
from transformers import CLIPModel

from conversion.dense import extract
from conversion.dense import main as dense_main
from conversion.presets import PRESETS
from conversion.upcycle import upcycle
from data import glyphs
from data.worlds import build_processor
from evaluation.embedder import Embedder
from evaluation.experts import analyze_experts, main
from evaluation.measures import measure
from evaluation.routing import RouterCounts, average_gates, chosen_experts, count_tokens, draw_gates, draw_shares
from evaluation.tasks import Task

TASKS = {
    "pairs": Task("pairs", "pairs", "60 pairs", lambda: (glyphs.load_minimal_pairs("test", 60), 0)),
    "retrieval": Task("retrieval", "retrieval", "40", lambda: (glyphs.load("test", "detailed", 40), 0)),
}
figures = small_evaluation.figures
RETRIEVAL = {"retrieval": TASKS["retrieval"]}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """The glyph CLIP with four different experts."""
    folder = tmp_path_factory.mktemp("sparse")
    model = upcycle(CLIPModel.from_pretrained("training/glyph_clip"), PRESETS["clip_moe"])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() / 3)
            elif ".router." in name:
                parameter.mul_(10)
    model.save_pretrained(folder)
    build_processor("glyphs", 64, 32).save_pretrained(folder)
    return model.eval(), folder


def test_counts_by_hand():
    counts = RouterCounts(3)
    # Two captions of two tokens, two choices each; the last token is padding, and one choice found no room.
    weights = torch.tensor([[[0.5, 0.25], [0.5, 0.0]], [[0.5, 0.125], [0.0, 0.0]]])
    counts.add(torch.tensor([[[0, 1], [0, 3]], [[2, 0], [3, 3]]]), weights, torch.tensor([[1, 1], [1, 0]]))
    assert (counts.computed.tolist(), counts.num_tokens) == ([3, 1, 1], 3)
    counts.add(torch.tensor([[[1, 2]]]), torch.tensor([[[0.5, 0.125]]]), None)
    np.testing.assert_allclose(counts.shares(), [3 / 4, 2 / 4, 2 / 4])
    assert counts.mean_weight() == (0.75 + 0.5 + 0.625 + 0.625) / 4
    for value in (RouterCounts.shares, RouterCounts.mean_weight):
        with pytest.raises(ValueError, match="has seen no token"):
            value(RouterCounts(3))


def test_counts_are_those_the_model_records(sparse):
    model, _ = sparse
    inputs = {
        "pixel_values": torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
        "input_ids": torch.randint(100, (3, 9), generator=torch.Generator().manual_seed(0)),
        "attention_mask": (torch.arange(9) < torch.tensor([9, 4, 6])[:, None]).long(),
    }
    with torch.no_grad(), count_tokens(model) as counts:
        outputs = model(**inputs, output_expert_ids=True)
    assert {tower: sorted(layers) for tower, layers in counts.items()} == {
        "text": [0, 1, 2, 3],
        "vision": [0, 1, 2, 3],
    }
    for tower, recorded, tokens in (
        ("text", outputs.text_model_output.expert_ids, 19),
        ("vision", outputs.vision_model_output.expert_ids, 3 * 17),
    ):
        for layer, ids in enumerate(recorded):
            shares = [(ids == expert).sum().item() / tokens for expert in range(4)]
            np.testing.assert_allclose(counts[tower][layer].shares(), shares)
            assert sum(shares) == pytest.approx(2)
    with torch.no_grad():
        model(**inputs)
    assert counts["text"][0].num_tokens == 19  # outside of the block nothing counts


@pytest.mark.parametrize("eos_token_id", [90, 2])
def test_counts_at_the_tokens_that_reach_the_output(sparse, eos_token_id, monkeypatch):
    """The class token, and the token that the text tower pools at: by both of CLIP's rules."""
    model, _ = sparse
    monkeypatch.setattr(model.text_model.config, "eos_token_id", eos_token_id)
    input_ids = torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(0))
    input_ids[:, -1] = 89
    input_ids[[0, 1], [4, 6]] = 90
    ends = [4, 6, 0] if eos_token_id == 90 else [4, 6, input_ids[2].argmax().item()]
    inputs = {
        "pixel_values": torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
        "input_ids": input_ids,
        "attention_mask": (torch.arange(9) <= torch.tensor([4, 6, 8])[:, None]).long(),
    }
    with torch.no_grad(), count_tokens(model, at_output=True) as counts:
        outputs = model(**inputs, output_expert_ids=True)
        texts = model.get_text_features(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    pooled = outputs.text_model_output.last_hidden_state[range(3), ends]
    assert torch.equal(model.text_projection(pooled), texts.pooler_output)  # so these are the pooled tokens
    for tower, recorded, positions, calls in (
        ("text", outputs.text_model_output.expert_ids, ends, 2),
        ("vision", outputs.vision_model_output.expert_ids, [0, 0, 0], 1),
    ):
        for layer, ids in enumerate(recorded):
            ids = ids[range(3), positions]
            assert counts[tower][layer].num_tokens == 3 * calls
            assert counts[tower][layer].computed.tolist() == [calls * (ids == e).sum().item() for e in range(4)]
            assert counts[tower][layer].mean_weight() == pytest.approx(1)
    with torch.no_grad():
        model(**inputs)
    assert counts["text"][0].num_tokens == 6 and not model.text_model._forward_pre_hooks


def test_a_dense_model_has_no_routing():
    with (
        pytest.raises(ValueError, match="no sparse layer"),
        count_tokens(CLIPModel.from_pretrained("training/glyph_clip")),
    ):
        pass


def test_every_expert_scores_as_its_dense_model(sparse, tmp_path):
    model, folder = sparse
    table = analyze_experts(folder, TASKS, tmp_path / "out")
    result = json.loads((tmp_path / "out" / "experts.json").read_text())
    for expert in range(4):
        extract(model, expert).save_pretrained(tmp_path / str(expert))
        build_processor("glyphs", 64, 32).save_pretrained(tmp_path / str(expert))
        for name, task in TASKS.items():
            expected = measure(task, Embedder(tmp_path / str(expert), None, 64, torch.device("cpu")))["metrics"]
            assert result["metrics"][name][f"expert {expert}"] == pytest.approx(expected)
    expected = measure(TASKS["pairs"], Embedder(folder, None, 64, torch.device("cpu")))["metrics"]
    assert result["metrics"]["pairs"]["routed"] == pytest.approx(expected)
    scores = [result["metrics"]["pairs"][column]["image"] for column in ("expert 0", "expert 1", "routed")]
    assert len(set(scores)) > 1
    lines = table.splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == [
        "metric", "expert 0", "expert 1", "expert 2", "expert 3", "routed"
    ]  # fmt: skip
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
    for tokens, shares in (("all", "shares"), ("end token", "output_shares")):
        assert ("text", "1", tokens, *(f"{share:.1%}" for share in result[shares]["text"]["1"])) in cells
    assert result["scales"] == {} and "conversion.dense" not in (tmp_path / "out" / "experts.md").read_text()
    rows = [
        row for task in result["metrics"].values() for row in zip(*(of.values() for of in task.values()), strict=True)
    ]
    columns = list(result["metrics"]["pairs"])
    better = sum(
        row[columns.index("routed")] > max(v for v, c in zip(row, columns, strict=True) if c != "routed")
        for row in rows
    )
    assert f"better than every expert alone in {better} of {len(rows)} metrics" in table


@pytest.fixture(scope="module")
def unnormalized(tmp_path_factory):
    """A CLIP-UP of the glyph CLIP with sharp routers, whose experts are all equal."""
    folder = tmp_path_factory.mktemp("unnormalized")
    model = upcycle(CLIPModel.from_pretrained("training/glyph_clip"), PRESETS["clip_up"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".router." in name:
                parameter.mul_(3)
    model.save_pretrained(folder)
    build_processor("glyphs", 64, 32).save_pretrained(folder)
    return model.eval(), folder


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


def test_scales_are_what_dense_takes(unnormalized, tmp_path):
    """The mean over tokens of the sum of a token's weights, in every layer."""
    model, folder = unnormalized
    analyze_experts(folder, RETRIEVAL, tmp_path)
    scales = json.loads((tmp_path / "experts.json").read_text())["scales"]
    sums, hooks = {}, []
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


def test_heat_map_shows_the_shares(tmp_path):
    def draw(name, share, output_share):
        shares = ({"vision": {3: [value, 1 - value]}} for value in (share, output_share))
        draw_shares(*shares, tmp_path / f"{name}.png", "shares")
        return matplotlib.image.imread(tmp_path / f"{name}.png")

    full, other, output = draw("full", 1.0, 1.0), draw("other", 0.0, 1.0), draw("output", 1.0, 0.0)
    assert full.shape == other.shape == output.shape
    half = len(full) // 2  # above are all tokens, below those that reach the output
    assert (full != other)[:half].any() and (full != output)[half:].any()


def test_a_title_with_dollars_is_no_formula(tmp_path, figures):
    shares = {"vision": {3: [0.5, 0.5]}}
    draw_shares(shares, shares, tmp_path / "dollars.png", r"costs $\frac$ a token")
    (figure,) = figures
    title = figure._suptitle
    assert title.get_text() == r"costs \$\frac\$ a token" and not cbook.is_math_text(title.get_text())


def test_heat_map_names_its_numbers(tmp_path, figures):
    """A row of pictures for all tokens and one for those at the output; in each, a line a layer, a column an expert."""
    shares = {"text": {0: [0.1, 0.9], 2: [0.2, 0.8]}, "vision": {1: [0.3, 0.7]}}
    output_shares = {"text": {0: [0.4, 0.6], 2: [0.5, 0.5]}, "vision": {1: [1.0, 0.0]}}
    draw_shares(shares, output_shares, tmp_path / "shares.png", "shares")
    (figure,) = figures
    assert [[text.get_text() for text in axis.texts] for axis in figure.axes] == [
        ["10", "90", "20", "80"], ["30", "70"], ["40", "60", "50", "50"], ["100", "0"]
    ]  # fmt: skip
    assert [[label.get_text() for label in axis.get_yticklabels()] for axis in figure.axes] == [["0", "2"], ["1"]] * 2
    assert [axis.get_title() for axis in figure.axes] == [
        "text tower, all tokens", "vision tower, all tokens", "text tower, end token", "vision tower, class token"
    ]  # fmt: skip


def test_bars_of_gates_are_their_means(tmp_path, figures):
    gates, output_gates = {"text": {3: 0.25}, "vision": {3: 0.5}}, {"text": {3: 0.75}, "vision": {3: 1.0}}
    draw_gates(gates, output_gates, tmp_path / "gates.png")
    (figure,) = figures
    widths = {bars.get_label(): [bar.get_width() for bar in bars] for bars in figure.axes[0].containers}
    assert widths == {"all tokens": [25, 50], "class and end tokens": [75, 100]}
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["text 3", "vision 3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "training/glyph_clip", "--tasks", "glyphs_pairs"], "is a dense CLIP: it has no experts"),
        (["--model", "training/glyph_clip", "--tasks", "nope"], "unknown task nope"),
        (["--model", "nowhere/", "--tasks", "glyphs_pairs"], "nowhere"),
    ],
)
def test_mistakes_end_in_one_line(arguments, message, tmp_path):
    with pytest.raises(SystemExit) as exit:
        main([*arguments, "--output-dir", str(tmp_path)])
    assert exit.value.code.startswith("error: ") and message in exit.value.code


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """The glyph CLIP with fusion gates of any opening."""
    folder = tmp_path_factory.mktemp("gated")
    model = upcycle(CLIPModel.from_pretrained("training/glyph_clip"), PRESETS["clip_fmoe"])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".fusion_gate." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif ".experts." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std())
    model.save_pretrained(folder)
    build_processor("glyphs", 64, 32).save_pretrained(folder)
    return model.eval(), folder


def test_gates_by_hand(gated):
    """Means over the tokens that are no padding, of what the last layer's gate makes of its input."""
    model, _ = gated
    inputs = {
        "pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
        "input_ids": torch.randint(100, (2, 9), generator=torch.Generator().manual_seed(0)),
        "attention_mask": torch.tensor([[1] * 9, [1] * 4 + [0] * 5]),
    }
    seen = {}
    layers = {"text": model.text_model.encoder.layers[3], "vision": model.vision_model.encoder.layers[3]}
    for tower, layer in layers.items():
        layer.mlp.router.register_forward_pre_hook(lambda _, args, tower=tower: seen.update({tower: args[0]}))
    with torch.no_grad(), average_gates(model) as gates, average_gates(model, at_output=True) as output_gates:
        model(**inputs)
        model(**inputs)
    tokens = {"text": seen["text"][inputs["attention_mask"].bool()], "vision": seen["vision"].flatten(0, 1)}
    ends = model.text_model.pooled_positions(inputs["input_ids"])
    pooled = {"text": seen["text"][[0, 1], ends], "vision": seen["vision"][:, 0]}
    for found, of_tokens in ((gates, tokens), (output_gates, pooled)):
        assert {tower: list(layers) for tower, layers in found.items()} == {"text": [3], "vision": [3]}
        for tower, layer in layers.items():
            expected = layer.mlp.fusion_gate.proj(of_tokens[tower]).sigmoid().mean().item()
            assert found[tower][3].mean() == pytest.approx(expected, abs=1e-6)
            assert 0 < expected < 1 and abs(expected - 0.5) > 1e-3  # which it is without a gate
    assert abs(gates["vision"][3].mean() - output_gates["vision"][3].mean()) > 1e-3


def test_analysis_of_gates_and_of_other_numbers_of_experts(gated, tmp_path):
    model, folder = gated
    table = analyze_experts(folder, RETRIEVAL, tmp_path, num_experts_per_tok=[1, 4])
    columns = [cell.strip() for cell in table.splitlines()[0].split("|")[1:-1]]
    assert columns == ["metric", *(f"expert {number}" for number in range(4)), "K = 1", "K = 4", "routed"]
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
    build_processor("glyphs", 64, 32).save_pretrained(tmp_path / "four")
    expected = measure(TASKS["retrieval"], Embedder(tmp_path / "four", None, 64, torch.device("cpu")))["metrics"]
    assert result["metrics"]["retrieval"]["K = 4"] == pytest.approx(expected)
    assert result["metrics"]["retrieval"]["K = 1"] != result["metrics"]["retrieval"]["K = 4"]
    assert "share of the base FFN" in (tmp_path / "experts.md").read_text()


def test_more_experts_than_there_are(gated):
    model, _ = gated
    for number in (0, 5):
        with pytest.raises(ValueError, match=f"num_experts_per_tok={number} must be between 1 and num_experts=4"):
            with chosen_experts(model, number):
                pass
    with pytest.raises(KeyError), chosen_experts(model, 3):
        raise KeyError
    assert model.config.vision_config.num_experts_per_tok == 2


def test_tasks_without_texts_are_refused_before_the_work(sparse, tmp_path):
    task = Task("linear_probe", "probe", "none", lambda: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="probe: no text of these tasks reaches the sparse text tower"):
        analyze_experts(sparse[1], {"probe": task}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
