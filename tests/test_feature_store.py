"""Features on disk: written once by one or several processes, resumed after a kill, checked, read as an array."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tiny_runs import full_disk

from clip_moe.evaluation.feature_store import INDEX, FeatureStore, open_arrays, save_arrays

TABLE = np.arange(250, dtype=np.float32)[:, None] * np.ones(3, np.float32)
SECOND = "000000000100.safetensors"


def table(shards):
    return ({"rows": TABLE[rows.start : rows.stop]} for rows in shards)


def written(folder, compute=table, num_rows=250):
    store = FeatureStore(folder, num_rows, 100, {"of": "numbers"})
    store.write(None, "rows", compute)
    return store


def test_rows_are_those_of_an_array(tmp_path):
    rows = written(tmp_path)["rows"]
    assert (rows.shape, rows.dtype, len(rows)) == (TABLE.shape, TABLE.dtype, 250)
    some = np.array([3, 99, 100, 249])
    for chosen in (slice(None), slice(90, 210), slice(249, 400), slice(5, 5), some, some[1:2], some[:0]):
        assert np.array_equal(rows[chosen], TABLE[chosen])
    assert np.array_equal(np.asarray(rows), TABLE)
    sample = rows.sample(60, seed=0)
    assert len(set(sample[:, 0])) == 60 and {int(row) // 100 for row in sample[:, 0]} == {0, 1, 2}
    assert np.array_equal(rows.sample(999, seed=0), TABLE)
    again = FeatureStore.open(tmp_path, "this test", {"of": str})
    assert (again.num_rows, again.shard_size, again.about) == (250, 100, {"of": "numbers"})
    with pytest.raises(FileNotFoundError, match="is not the folder of this test"):
        FeatureStore.open(tmp_path / "other", "this test")
    # There may be more rows than in the shard, as of the hidden states of tokens; tensors are as good as arrays
    arrays = {"pairs": torch.ones(100, dtype=torch.bfloat16), "tokens": torch.ones(700, 2)}
    written(tmp_path / "tokens", lambda shards: [arrays], num_rows=100)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", *(json.dumps({"shard_size": n}) for n in ("8", True, 8.0, 0))])
def test_a_damaged_index_is_named(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path}/{INDEX} is damaged .* or delete {tmp_path} to make it again"):
        FeatureStore.open(tmp_path, "a stage", {"of": str})


def test_a_killed_run_goes_on_where_it_stopped(tmp_path):
    """It is killed when the second shard is written but has no name yet."""

    def killed(shards):
        for number, arrays in enumerate(table(shards)):
            if number == 1:
                os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            yield arrays

    pid = os.fork()
    if pid == 0:
        written(tmp_path, killed)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".partial", ".safetensors"]
    asked = []
    store = written(tmp_path, lambda shards: (asked.extend(shards), table(shards))[1])
    assert asked == store.shards()[1:] and np.array_equal(store["rows"][:], TABLE)
    written(tmp_path, lambda shards: pytest.fail("computed again"))


def cut(path):
    path.write_bytes(path.read_bytes()[:90])


def saved(rows):
    return lambda path: save_arrays(path, {"rows": rows})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, r"is not there \(do all processes see this folder"),
        (cut, "is damaged"),
        (lambda path: save_arrays(path, {}), "is damaged"),
        (saved(TABLE[100:190]), r"has rows \(90, 3\), not of 100 rows"),
        (saved(torch.ones(())), r"has rows \(\), not of 100 rows"),
        (saved(torch.ones(100, 3, dtype=torch.bfloat16)), "has rows of torch.bfloat16"),
        (saved(torch.ones(100, 3, dtype=torch.int64)), "has rows of torch.int64"),
        (saved(torch.ones(100, 3, dtype=torch.complex64)), "has rows of torch.complex64"),
        (saved(torch.ones(100, 4)), r"has rows float32 \(4,\), not float32 \(3,\)"),
        (saved(torch.full((100, 3), torch.nan)), "has rows that are not finite"),
    ],
)
def test_a_damaged_shard_is_named_with_the_folder_to_delete(tmp_path, damage, message):
    store = written(tmp_path / "stage")
    damage(store.path(100))
    with pytest.raises(ValueError, match=f"{SECOND} {message}.*[Dd]elete {tmp_path / 'stage'} to make it again"):
        store["rows"][150:]


def test_arrays_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "arrays.safetensors"
    arrays = {"a": np.arange(6, dtype=np.float16).reshape(2, 3).T, "b": np.array([1, -1])}
    save_arrays(path, arrays, {"of": "what"})
    assert all(np.array_equal(found, arrays[name]) for name, found in load_file(path).items())
    with open_arrays(path, "this test") as file:
        assert file.metadata() == {"of": "what"} and file.get_tensor("a").dtype == np.float16
    before = path.read_bytes()
    with full_disk(1000), pytest.raises(OSError, match="cannot write .*arrays.safetensors: .*File too large"):
        save_arrays(path, {"a": np.zeros(1000)})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
