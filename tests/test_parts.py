"""Parts: written once by one or several processes, kept when a run ends in the middle, checked, read in order."""

import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator
from safetensors.numpy import load_file

from training.arrays import join_rows, open_arrays, save_arrays
from training.parts import PARTS, part_file, read_parts, require_parts, sample_rows, write_parts

TABLE = np.arange(250)[:, None] * np.ones(3)
SECOND = "000000000100.safetensors"


def table(start, stop):
    return {"rows": TABLE[start:stop]}


def write(folder, compute=table, num_rows=250, part_size=100):
    write_parts(Accelerator(cpu=True), folder, "rows", num_rows, part_size, compute)


@pytest.fixture
def folder(tmp_path):
    """Three parts of 100, 100 and 50 rows."""
    write(tmp_path / PARTS)
    return tmp_path / PARTS


def test_parts_are_read_in_order(folder):
    assert sorted(path.name for path in folder.iterdir()) == [f"{start:012d}.safetensors" for start in (0, 100, 200)]
    parts = list(read_parts(folder, "rows", 250))
    assert [start for start, _ in parts] == [0, 100, 200]
    assert np.array_equal(np.concatenate([part for _, part in parts]), TABLE)
    ((start, second),) = read_parts(folder, "rows", 200, 100)
    assert start == 100 and np.array_equal(second, TABLE[100:200])
    with pytest.raises(ValueError, match="ends with row 250, not 240: delete"):
        list(read_parts(folder, "rows", 240, 200))


def test_rows_are_sampled_from_all_parts(folder):
    chosen = sample_rows(read_parts(folder, "rows", 250), 250, 60, seed=0)
    assert chosen.shape == (60, 3) and len(set(chosen[:, 0])) == 60
    assert {int(row) // 100 for row in chosen[:, 0]} == {0, 1, 2}
    assert np.array_equal(sample_rows(read_parts(folder, "rows", 250), 250, 999, seed=0), TABLE)


def test_parts_that_are_there_are_kept(folder):
    def other(start, stop):
        calls.append((start, stop))
        return {"rows": -TABLE[start:stop]}

    calls = []
    write(folder, other)
    assert calls == []
    part_file(folder, 100).unlink()
    write(folder, other)
    assert calls == [(100, 200)]
    assert [part[1, 0] for _, part in read_parts(folder, "rows", 250)] == [1, -101, 201]


def test_a_run_that_ends_in_the_middle_leaves_whole_parts(tmp_path, monkeypatch):
    """Within the second part: once while it is computed, once when it is written but has no name yet."""

    def interrupted(start, stop):
        if start == 100:
            raise KeyboardInterrupt
        return table(start, stop)

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, interrupted)
    first = part_file(tmp_path, 0)
    assert list(tmp_path.iterdir()) == [first]
    written = first.stat().st_mtime_ns
    pid = os.fork()
    if pid == 0:  # a process that cannot clean up
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        write(tmp_path)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".partial", ".safetensors"]
    write(tmp_path)
    assert first.stat().st_mtime_ns == written
    assert np.array_equal(np.concatenate([part for _, part in read_parts(tmp_path, "rows", 250)]), TABLE)


def cut(path):
    path.write_bytes(path.read_bytes()[:90])


DAMAGES = {
    "missing": (Path.unlink, f"{SECOND} is not there: do all processes see this folder"),
    "cut": (cut, f"{SECOND} is damaged"),
    "too few rows": (lambda path: save_arrays(path, table(100, 190)), f"{SECOND} has 90 rows, not 100"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_wrong_part_is_named_with_the_folder_to_delete(folder, name):
    damage, message = DAMAGES[name]
    damage(folder / SECOND)
    with pytest.raises(ValueError, match=f"{message}.*[Dd]elete {folder.parent} to have it made anew"):
        require_parts(folder, 250, 100)
    if name != "missing":  # a part that is there is kept, so that writing cannot mend it
        with pytest.raises(ValueError, match=message):
            write(folder)
    message = {"too few rows": "000000000190.safetensors is not there"}.get(name, message)
    with pytest.raises(ValueError, match=f"{message}.*[Dd]elete {folder.parent} to have it made anew"):
        list(read_parts(folder, "rows", 250))


@pytest.mark.parametrize(
    ("num_rows", "part_size", "message"),
    [
        (250, 125, "000000000000.safetensors has 100 rows, not 125"),
        (250, 50, "000000000000.safetensors has 100 rows, not 50"),
        (240, 100, "000000000200.safetensors has 50 rows, not 40"),
        (200, 100, "000000000200.safetensors is no part of 200 rows, 100 a part"),
    ],
)
def test_parts_of_another_size_are_refused(folder, num_rows, part_size, message):
    with pytest.raises(ValueError, match=message):
        write(folder, num_rows=num_rows, part_size=part_size)


def test_arrays_may_have_more_rows_than_the_part(tmp_path):
    """As the hidden states of tokens do; tensors are as good as arrays."""

    def states(start, stop):
        return {"pairs": torch.ones(stop - start, dtype=torch.bfloat16), "tokens": torch.ones(7 * (stop - start), 2)}

    write(tmp_path, states)
    with pytest.raises(ValueError, match="has 40 rows, not 100"):
        save_arrays(part_file(tmp_path, 0), states(0, 40))
        write(tmp_path, states)


def process(rank, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "unused"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    write_parts(
        accelerator, folder / PARTS, "rows", 250, 100, lambda a, b: table(a, b) | {"rank": np.full(b - a, rank)}
    )
    assert len(list((folder / PARTS).iterdir())) == 3  # also those of the other process
    dist.destroy_process_group()


def test_two_processes_share_the_parts(tmp_path):
    mp.spawn(process, (tmp_path,), nprocs=2)
    assert np.array_equal(np.concatenate([part for _, part in read_parts(tmp_path / PARTS, "rows", 250)]), TABLE)
    assert [int(rank[0]) for _, rank in read_parts(tmp_path / PARTS, "rank", 250)] == [0, 1, 0]


def test_arrays_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "arrays.safetensors"
    arrays = {"a": np.arange(6, dtype=np.float16).reshape(2, 3).T, "b": np.array([1, -1])}
    save_arrays(path, arrays, {"of": "what"})
    assert all(np.array_equal(found, arrays[name]) for name, found in load_file(path).items())
    with open_arrays(path, "this test") as file:
        assert file.metadata() == {"of": "what"} and file.get_tensor("a").dtype == np.float16
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as a full disk
    try:
        with pytest.raises(OSError, match="cannot write .*arrays.safetensors: .*File too large"):
            save_arrays(path, {"a": np.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match=f"arrays.safetensors is damaged; delete {tmp_path} to have it made anew"):
        with open_arrays(path, "this test") as file:
            file.get_tensor("c")
    with pytest.raises(FileNotFoundError, match="other is not there: .* is not the folder of this test"):
        with open_arrays(tmp_path / "other", "this test"):
            pass


def test_rows_that_are_joined_make_the_file_of_whole_arrays(folder, tmp_path):
    whole = {"image": TABLE.astype(np.float32), "text": np.ones((250, 2), np.float32)}
    parts = {name: iter(np.array_split(array, 4)) for name, array in whole.items()}
    metadata = {"data": '{"source": "é"}'}
    join_rows(tmp_path / "joined.safetensors", parts, 250, metadata)
    save_arrays(tmp_path / "whole.safetensors", whole, metadata)
    assert (tmp_path / "joined.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_arrays_are_mapped_where_they_are_large(tmp_path):
    path = tmp_path / "arrays.safetensors"
    save_arrays(path, {"rows": TABLE})
    with open_arrays(path, "this test", framework="pt") as file:
        rows = file.get_tensor("rows").numpy()
    assert np.array_equal(rows, TABLE)
    (line,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    start, stop = (int(end, 16) for end in line.split()[0].split("-"))
    assert start <= rows.ctypes.data < stop
