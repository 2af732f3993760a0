"""Linear CKA: by hand, and against its form with the Gram matrices."""

import numpy as np
import pytest

from evaluation.agreement import agreement, linear_cka


def test_cka_by_hand():
    first = np.array([[1.0, 0], [-1, 0], [0, 2], [0, -2]]) + 5  # centered: X'X = diag(2, 8)
    second = np.array([[1.0], [-1], [1], [-1]]) - 3  # Y'Y = 4, X'Y = (2, 4)'
    assert linear_cka(first, second) == pytest.approx((2**2 + 4**2) / (np.sqrt(2**2 + 8**2) * 4))


def test_cka_is_that_of_the_gram_matrices():
    """Kornblith et al., equations 1 and 2: HSIC of linear kernels."""
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(30, 5)), rng.normal(size=(30, 3)) ** 3
    center = np.eye(30) - 1 / 30

    def hsic(x, y):
        return np.trace(center @ x @ x.T @ center @ y @ y.T)

    expected = hsic(first, second) / np.sqrt(hsic(first, first) * hsic(second, second))
    assert linear_cka(first, second) == pytest.approx(expected)


def test_rotation_and_scale_change_nothing():
    rng = np.random.default_rng(0)
    embeds = rng.normal(size=(50, 4)).astype(np.float32)
    rotation = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    assert linear_cka(embeds, -7 * embeds @ rotation + 2) == pytest.approx(1, abs=1e-6)
    assert linear_cka(embeds, embeds * [1, 1, 9, 9]) < 0.95


def test_agreement_of_every_two():
    rng = np.random.default_rng(0)
    embeds = {"a": rng.normal(size=(9, 2)), "b": rng.normal(size=(9, 2)), "constant": np.ones((9, 2))}
    found = agreement(embeds)
    assert found["a"]["a"] == pytest.approx(1) and found["a"]["b"] == found["b"]["a"] < 1
    assert [row["constant"] for row in found.values()] == [None] * 3
