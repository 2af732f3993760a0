"""Kept embeddings: killed and resumed, by one and by two processes, and used by two evaluations at once."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_evaluation
import torch

from data import symbols
from evaluation import evaluate
from evaluation.embedder import Embedder
from evaluation.kept import ATTEMPTS, KeptEmbeddings
from evaluation.tasks import TASKS
from records.files import output_folder

ROOT = Path(__file__).parents[1]
dense, small_tasks = small_evaluation.dense, small_evaluation.small_tasks
ANGLES = np.arange(13, dtype=np.float32)
VALUES = np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)
DIGESTS = ["a", "b", "c", "d"]  # of batches of 4, 4, 4 and 1


def kept_in(folder, key="key"):
    return KeptEmbeddings(folder, key, 4)


@pytest.fixture
def parts(tmp_path):
    """Two parts, of which the second one is not what comes next: another process wrote it."""
    kept = kept_in(tmp_path)
    kept.add_part(["a", "d"], [VALUES[:4], VALUES[12:]])
    kept.add_part(["b", "c"], [VALUES[4:8], VALUES[8:12]])
    return kept


def test_parts_become_one_file(parts, tmp_path):
    assert parts.digests() == set(DIGESTS)
    assert np.array_equal(parts.read(DIGESTS), VALUES)
    assert np.array_equal(parts.read(["c", "b", "c"]), np.concatenate([VALUES[8:12], VALUES[4:8], VALUES[8:12]]))
    parts.join(DIGESTS, VALUES)
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".safetensors" and np.array_equal(parts.read(DIGESTS), VALUES)
    parts.join(DIGESTS, VALUES)
    assert list(tmp_path.iterdir()) == [file]


def test_parts_of_other_data_and_of_other_models_stay(parts, tmp_path):
    other = kept_in(tmp_path, "another model")
    assert other.digests() == set()
    other.add_part(["a"], [-VALUES[:4]])
    parts.add_part(["e"], [VALUES[:4]])
    parts.join(DIGESTS, VALUES)
    assert other.digests() == {"a"} and np.array_equal(other.read(["a"]), -VALUES[:4])
    assert parts.digests() == {*DIGESTS, "e"}


def test_parts_that_another_evaluation_joins_meanwhile_are_found(parts, monkeypatch):
    """They go between the look at the folder and the look into them."""
    load, calls = KeptEmbeddings._load, []

    def joined_first(kept, path):
        calls.append(path)
        if len(calls) == 1:
            kept_in(kept.folder).join(DIGESTS, VALUES)
        return load(kept, path)

    monkeypatch.setattr(KeptEmbeddings, "_load", joined_first)
    assert np.array_equal(parts.read(["b", "a"]), np.concatenate([VALUES[4:8], VALUES[:4]]))
    assert calls[0].suffix == ".part" and calls[-1].suffix == ".safetensors"


def test_embeddings_that_are_lost_are_an_error(parts, tmp_path):
    with pytest.raises(ValueError, match="lacks embeddings that were written there: do all processes see this folder"):
        parts.read(["a", "x"])
    assert ATTEMPTS < 10  # it ends soon


def test_a_damaged_part_is_named(parts, tmp_path):
    path = sorted(tmp_path.glob("*.part"))[0]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=f"{path.name} is damaged; delete it"):
        parts.digests()


def test_an_evaluation_that_fails_early_takes_no_folder_away(tmp_path):
    with pytest.raises(ValueError, match="fails"), output_folder(tmp_path / "kept"):
        kept = kept_in(tmp_path / "kept")
        assert kept.digests() == set()
        raise ValueError("fails")
    kept.add_part(["a"], [VALUES[:4]])
    assert np.array_equal(kept.read(["a"]), VALUES[:4])


def in_a_process(function):
    """Runs a function in a process of its own; returns how that ended."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(0)
    return pid


def killed_after(number, monkeypatch):
    """The process is killed while it writes this part: it is there, but has no name yet."""
    add_part, written = KeptEmbeddings.add_part, []

    def add(kept, *part):
        written.append(part)
        if len(written) == number:
            os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        add_part(kept, *part)

    monkeypatch.setattr(KeptEmbeddings, "add_part", add)


def test_a_killed_embedder_goes_on_where_it_stopped(dense, tmp_path, monkeypatch):
    rows = symbols.load("test", "web", 39)  # 20 batches in three parts

    def embedder(folder):
        return Embedder(dense, folder, 2, torch.device("cpu"))

    with monkeypatch.context() as patch:
        killed_after(3, patch)
        pid = in_a_process(lambda: embedder(tmp_path / "killed").images(rows))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert sorted(path.suffix for path in (tmp_path / "killed").iterdir()) == [".part", ".part", ".partial"]
    resumed, sizes = embedder(tmp_path / "killed"), []
    method = resumed.model.get_image_features
    monkeypatch.setattr(resumed.model, "get_image_features", lambda x: (sizes.append(len(x)), method(x))[1])
    assert np.array_equal(resumed.images(rows), embedder(tmp_path / "whole").images(rows))
    assert sizes == [2, 2, 2, 1]
    assert sorted(path.suffix for path in (tmp_path / "killed").iterdir()) == [".partial", ".safetensors"]


def test_two_evaluations_at_once_get_the_same(dense, tmp_path):
    rows = symbols.load("test", "web", 40)
    expected = Embedder(dense, None, 2, torch.device("cpu")).images(rows)

    def embed(number):
        embeds = Embedder(dense, tmp_path / "kept", 2, torch.device("cpu")).images(rows)
        np.save(tmp_path / f"{number}.npy", embeds)

    pids = [in_a_process(lambda number=number: embed(number)) for number in range(3)]
    for number, pid in enumerate(pids):
        os.waitpid(pid, 0)
        assert np.array_equal(np.load(tmp_path / f"{number}.npy"), expected)
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".safetensors"]


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {root!r})
from data import symbols
from evaluation import evaluate, kept, processes
from evaluation.built_in_tasks import symbol_tasks
from evaluation.tasks import TASKS

if __name__ == "__main__":
    processes.launch_cpu_processes("few_symbols.py", sys.argv)
    TASKS.update(symbol_tasks(number=40, retrieval=40, pairs=12, train=40))
    add_part = kept.KeptEmbeddings.add_part

    def add(*part):
        add_part(*part)
        print("wrote", len(part[1]), "batches", flush=True)
        if os.environ["RANK"] == "1" and "KILL" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)

    kept.KeptEmbeddings.add_part = add
    evaluate.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_evaluation_by_two_processes_goes_on_and_scores_as_one(dense, tmp_path):
    """The second process is killed after its first part. Then both go on, and embed what is left alone."""
    script = tmp_path / "few_symbols.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    arguments = ["--model", str(dense), "--tasks", "symbols_retrieval", "--batch-size", "2"]
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", "--quiet", "--cpu", "--num_processes", "2"]
    command += [str(script), *arguments, "--output-dir", str(tmp_path / "two")]

    def launch(**variables):
        environment = os.environ | {"OMP_NUM_THREADS": "1", **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    killed = launch(KILL="1")
    assert killed.returncode != 0 and not list((tmp_path / "two").glob("*.json"))
    before = list((tmp_path / "two" / "embeddings").glob("*.part"))
    assert before
    resumed = launch()
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count("symbols_retrieval (40 samples") == 1
    again = sum(int(line.split()[1]) for line in resumed.stdout.splitlines() if line.startswith("wrote"))
    assert again <= 40 - 8  # 20 batches of images and as many of texts
    small = {"symbols_retrieval": TASKS["symbols_retrieval"]}
    (result,) = evaluate.evaluate_model(dense, small, tmp_path / "one", batch_size=2, device="cpu")
    found = json.loads((tmp_path / "two" / "symbols_retrieval--dense.json").read_text())
    assert found["metrics"] == result["metrics"] and 0 < found["metrics"]["image_to_text_recall@10"] < 1
    embeds = [sorted((tmp_path / name / "embeddings").iterdir()) for name in ("one", "two")]
    assert [[path.name for path in of] for of in embeds][0] == [path.name for path in embeds[1]]
    assert all(one.read_bytes() == two.read_bytes() for one, two in zip(*embeds, strict=True))
