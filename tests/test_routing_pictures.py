"""Pictures of routing show their numbers."""

import matplotlib.image
import numpy as np
import small_evaluation
from matplotlib import cbook
from matplotlib.colors import to_hex

from evaluation.preferences import Caption, RoutedImages
from evaluation.routing_pictures import (
    draw_agreement,
    draw_captions,
    draw_coactivation,
    draw_dropped,
    draw_expert,
    draw_expert_patches,
    draw_gates,
    draw_patches,
    draw_shares,
    draw_words,
)

figures = small_evaluation.figures


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


def test_matrices_show_their_numbers(tmp_path, figures):
    coactivation = {"text": {3: [[0.5, 0.2], [0.2, 0.7]]}, "vision": {1: [[0.9, 0.4], [0.4, 0.5]]}}
    draw_coactivation(coactivation, tmp_path / "coactivation.png")
    agreement = {"images": {"a": {"a": 1.0, "b": None}, "b": {"a": None, "b": 1.0}}}
    draw_agreement(agreement, tmp_path / "agreement.png")
    pairs, cka = figures
    assert [[text.get_text() for text in axis.texts] for axis in pairs.axes] == [["20", "20"], ["40", "40"]]
    assert [axis.get_title() for axis in pairs.axes] == ["text tower, layer 3", "vision tower, layer 1"]
    assert [text.get_text() for text in cka.axes[0].texts] == ["1.00", "1.00"]
    assert [label.get_text() for label in cka.axes[0].get_yticklabels()] == ["a", "b"]


# Of 4 x 4 pixels: the left half goes to expert 0, the right to expert 1, and the class token to expert 1
HALVES = np.array([[[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4], [0.2, 0.8]]])
ROUTED = RoutedImages(5, HALVES, HALVES > 0.5, np.ones((1, 4, 4, 3)), 2)


def test_patches_have_the_color_of_their_expert(tmp_path, figures):
    draw_patches(ROUTED, tmp_path / "patches.png")
    (figure,) = figures
    above, below = figure.axes
    assert len(above.patches) == 0
    legend = {text.get_text(): patch.get_facecolor() for text, patch in legend_of(figure)}
    assert set(legend) == {"expert 0", "expert 1"}
    colors = {patch.get_xy(): to_hex(patch.get_facecolor()) for patch in below.patches}
    zero, one = (to_hex(legend[name]) for name in ("expert 0", "expert 1"))
    assert colors == {(-0.5, -0.5): zero, (1.5, -0.5): one, (-0.5, 1.5): zero, (1.5, 1.5): one}
    assert {to_hex(spine.get_edgecolor()) for spine in below.spines.values()} == {one}
    assert [text.get_text() for text in below.texts] == ["0", "1", "0", "1"]
    assert "layer 5" in figure._suptitle.get_text()


def legend_of(figure):
    (legend,) = figure.legends
    return zip(legend.get_texts(), legend.get_patches(), strict=True)


def test_the_patches_of_an_expert_are_framed(tmp_path, figures):
    draw_expert_patches(ROUTED, tmp_path / "patches.png")
    (figure,) = figures
    of_zero, of_one = figure.axes
    assert [axis.get_ylabel() for axis in (of_zero, of_one)] == ["expert 0", "expert 1"]
    assert [axis.get_title() for axis in (of_zero, of_one)] == ["80%", "80%"]
    assert {patch.get_xy() for patch in of_zero.patches} == {(-0.5, -0.5)}
    assert {patch.get_xy() for patch in of_one.patches} == {(1.5, 1.5)}


def test_words_stand_beside_their_shares(tmp_path, figures):
    words = [[("costs $x$", 1.0, 9), ("red", 0.25, 8)], []]
    draw_words(words, 3, tmp_path / "words.png")
    (figure,) = figures
    first, second = figure.axes
    assert [label.get_text() for label in first.get_yticklabels()] == [r"costs \$x\$ (9)", "red (8)"]
    assert [bar.get_width() for bar in first.patches] == [100, 25] and not second.patches
    assert "layer 3" in figure._suptitle.get_text()


def test_dropped_patches_are_red_with_their_share(tmp_path, figures):
    """Two images of 2 x 2 patches: the first loses none, the second with factor 1 the upper right and the lower left
    one."""
    routed = RoutedImages(5, np.ones((3, 5, 2)), np.ones((3, 5, 2), bool), np.ones((3, 4, 4, 3)), 2)
    lost = np.array([[False] * 4, [False, True, True, False]])
    draw_dropped(routed, {1.0: lost, 2.5: np.zeros_like(lost)}, tmp_path / "dropped.png")
    (figure,) = figures
    one, two = figure.subfigs
    assert one.get_suptitle() == "capacity factor 1: 25.0% of the patches dropped"
    assert two.get_suptitle() == "capacity factor 2.5: 0.0% of the patches dropped"
    assert [{patch.get_xy() for patch in axis.patches} for axis in one.axes] == [set(), {(1.5, -0.5), (-0.5, 1.5)}]
    assert all(to_hex(patch.get_facecolor()) == "#ff0000" for axis in one.axes for patch in axis.patches)
    assert not any(axis.patches for axis in two.axes)
    assert [axis.get_xlabel() for axis in one.axes] == ["image 1: 0%", "image 2: 50%"]
    assert "layer 5" in figure.get_suptitle() and "2 images share the capacity" in figure.get_suptitle()


def caption(text, marks):
    return Caption(text, np.array([mark != "_" for mark in marks]))


def written(axis):
    """The lines of what is written there, each with _ in the place of what is not in a frame."""
    frames = {(patch.get_x() + place, round(patch.get_y() + 0.42, 2))
              for patch in axis.patches for place in range(int(patch.get_width()))}  # fmt: skip
    lines = {}
    for text in axis.texts:
        left, middle = text.get_position()
        line = lines.setdefault(middle, ["", ""])
        assert left == len(line[0])
        line[0] += text.get_text()
        line[1] += "".join(
            character if (left + place, middle) in frames else "_" for place, character in enumerate(text.get_text())
        )
    return [tuple(line) for line in lines.values()]


def test_captions_are_written_with_what_an_expert_computes_in_frames(tmp_path, figures):
    captions = [[caption("a $red$ star", "__$red$_____"), caption("a disc", "______")], []]
    draw_captions(captions, 3, tmp_path / "captions.png")
    (figure,) = figures
    first, second = figure.axes
    assert written(first) == [("a $red$ star", "__$red$_____"), ("a disc", "______")]
    assert [axis.get_title(loc="left") for axis in (first, second)] == ["expert 0", "expert 1: none"]
    assert not written(second) and "layer 3" in figure.get_suptitle()
    assert not any(text.get_parse_math() for text in first.texts)


def test_long_captions_are_broken_between_words(tmp_path, figures):
    text = "word " * 30 + "x" * 120
    draw_captions([[caption(text, text)]], 3, tmp_path / "captions.png")
    (axis,) = figures[0].axes
    lines = ["word " * 22, "word " * 8, "x" * 110, "x" * 10]
    assert written(axis) == [(line, line) for line in lines]


def test_one_expert_is_drawn_with_all_that_it_computes(tmp_path, figures):
    draw_expert(0, ROUTED, (2, [caption("a star", "__star")]), tmp_path / "expert.png")
    draw_expert(0, ROUTED, None, tmp_path / "image.png")
    draw_expert(0, None, (2, []), tmp_path / "text.png")
    both, image, text = figures
    for figure in (both, image):
        framed = {patch.get_xy() for patch in figure.axes[0].patches if not patch.get_fill()}
        assert framed == {(-0.5, -0.5), (-0.5, 1.5)}
        assert [part.get_text() for part in figure.texts if "tower" in part.get_text()] == ["vision tower, layer 5"]
    assert written(both.axes[1]) == [("a star", "__star")] and len(image.axes) == 1
    assert [figure.axes[-1].get_title(loc="left") for figure in (both, text)] == [
        "text tower, layer 2", "text tower, layer 2: none"
    ]  # fmt: skip
