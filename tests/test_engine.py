"""How processes reduce gradients."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from training.engine import mean_of_each


def a_bucket():
    buffer = torch.tensor([1.0, 2.0, 3.0])
    return SimpleNamespace(gradients=lambda: [buffer[:1], buffer[1:]], buffer=lambda: buffer)


def reduce_by(monkeypatch, all_reduce):
    """Two processes, of which the other one's part is what `all_reduce` makes of ours."""

    def reduced(tensor, async_op):
        assert async_op
        future = torch.futures.Future()
        try:
            all_reduce(tensor)
            future.set_result([tensor])
        except RuntimeError as error:
            future.set_exception(error)
        return SimpleNamespace(get_future=lambda: future)

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", reduced)


def test_gradients_are_means_over_the_processes(monkeypatch):
    reduce_by(monkeypatch, lambda tensor: tensor.add_(2.0))  # the other process has 4
    assert mean_of_each(None, a_bucket()).wait().tolist() == [2.5, 3.0, 3.5]


def test_a_reduction_that_failed_is_an_error(monkeypatch):
    def fail(tensor):
        raise RuntimeError("the other process is gone")

    reduce_by(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="the other process is gone"):
        mean_of_each(None, a_bucket()).wait()
