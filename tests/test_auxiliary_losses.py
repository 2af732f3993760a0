"""The loss of routers with ReLU."""

import pytest
import torch
from several_processes import run_processes, train_recipe
from test_invariants import relu
from tiny_runs import losses, read_log, train


@pytest.mark.slow
def test_the_weight_of_relu_routers_follows_their_number_of_experts(tmp_path):
    log = read_log(train(tmp_path, change=relu, max_steps=100, learning_rate=3e-3))
    for tower in ("text", "vision"):
        weights = [entry[f"{tower}_sparsity_weight"] for entry in log]
        assert weights[0] == pytest.approx(1e-8)
        above = [entry[f"{tower}_experts_per_token"] > 2 for entry in log]
        assert set(above) == {True, False}
        for before, after, is_above in zip(weights, weights[1:], above, strict=False):
            assert after == pytest.approx(before * 1.2 if is_above else before / 1.2, rel=1e-5)


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(whole, tmp_path):
    train(tmp_path, only=["dense", "sparse"], change=relu)
    run_processes(2, train_recipe, "--config", tmp_path / "recipe.yaml")
    torch.testing.assert_close(losses(tmp_path / "out" / "tuned"), losses(whole(change=relu)), atol=1e-4, rtol=0)
