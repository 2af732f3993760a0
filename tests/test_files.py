"""engine: one process in a folder at a time, nothing half-written, errors in one line, and nothing heavy imported."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from converters import run, sources
from documents import ROOT
from filelock import FileLock
from programs import run_program
from safetensors.torch import save_file
from tiny_clip import tiny_clip
from tiny_runs import full_disk

from clip_moe.engine.files import locked, new_file, new_folder, refuse_to_overwrite, respect_umask, write_text
from clip_moe.engine.program import INTERRUPTED, one_line_errors

HOLD = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background ignores it
from pathlib import Path
import filelock  # before the folder of packages may be closed to another user
from clip_moe.engine import files
from clip_moe.engine.program import one_line_errors
if len(sys.argv) > 3 and os.getuid() == 0:
    os.setuid(int(sys.argv[3]))  # root may write anywhere
with one_line_errors(), getattr(files, sys.argv[2])(Path(sys.argv[1])):
    print("holds it", flush=True)
    time.sleep(60)
"""
sources  # noqa: B018, a fixture
# What reads no weights
NAMES = ("provenance", "digests", "files", "yaml_files", "messages", "markdown")
LIGHT = [f"clip_moe.engine.{name}" for name in NAMES]
LIGHT += ["clip_moe.conversion.publishing.lineage", "clip_moe.conversion.presets"]
SIGNALS = pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        pytest.param(LIGHT, {"torch", "transformers", "numpy"}, id="what reads no weights"),
        pytest.param(
            ["clip_moe.engine.runner"], {"matplotlib", "sklearn", "scipy.stats"}, id="a run", marks=pytest.mark.slow
        ),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_used(modules, heavy):
    program = f"import sys, {', '.join(modules)}; print({heavy} & {{*sys.modules}})"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"


def test_the_package_shows_and_finds_its_functions_and_models():
    """Their import is light; a model's makes the Auto classes know it."""
    program = "import clip_moe, sys; print('torch' in sys.modules, dir(clip_moe) == sorted(clip_moe.__all__)); "
    program += "from clip_moe import *; from transformers import AutoModel; "
    program += f"print(type(AutoModel.from_pretrained({str(ROOT / 'training' / 'name_clip_moe')!r})) is CLIPMoEModel)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).split() == ["False", "True", "True"]


@pytest.fixture
def hold():
    """Starts a process that has a folder to itself, or is in the middle of writing it."""
    processes = []

    def hold(folder, how="locked", *user):
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        processes.append(subprocess.Popen([sys.executable, "-c", HOLD, folder, how, *user], **pipes, text=True))
        assert processes[-1].stdout.readline() == "holds it\n"
        return processes[-1]

    yield hold
    for process in processes:
        process.kill()
        process.communicate()


def test_the_second_process_says_who_holds_the_folder(tmp_path, hold):
    folder = tmp_path / "later" / "run"  # neither is there yet
    first = hold(folder)
    pattern = rf"run is in use: process {first.pid} on \S+ has been writing there since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"
    for _ in range(2):  # the first who fails erases nothing
        with pytest.raises(ValueError, match=pattern), locked(folder):
            pytest.fail("two at once")
    with pytest.raises(ValueError, match=pattern), new_folder(folder):
        pytest.fail("two at once")
    with locked(tmp_path / "later" / "other"):
        pass
    first.kill()
    first.wait()
    assert list(folder.parent.iterdir()) == [folder.parent / ".run.lock"]  # a stale lock is no obstacle
    with locked(folder), pytest.raises(ValueError, match=f"process {os.getpid()} "), locked(folder):
        pytest.fail("two at once")
    assert not list(folder.parent.iterdir())


def test_what_is_there_is_not_written_over(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".lock").touch()
    for free in ("empty", "nothing"):
        refuse_to_overwrite(tmp_path / free)
    for taken in (tmp_path / "empty" / ".lock", tmp_path):
        with pytest.raises(ValueError, match=f"^{taken} already exists: remove it or choose another output$"):
            refuse_to_overwrite(taken)


def test_a_lock_is_found_through_links(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with locked(tmp_path / "run"), pytest.raises(ValueError, match="is in use"), locked(tmp_path / "link"):
        pytest.fail("two at once")


def test_a_lock_where_nothing_may_be_written_beside_the_folder(hold):
    with tempfile.TemporaryDirectory() as parent:  # pytest's own are closed to other users
        folder = Path(parent) / "run"
        folder.mkdir()
        folder.chmod(0o777)
        Path(parent).chmod(0o555)
        first = hold(folder, "locked", "65534")
        second = [sys.executable, "-c", HOLD, folder, "locked", "65534"]
        error = subprocess.run(second, capture_output=True, text=True, check=False).stderr
        assert f"run is in use: process {first.pid} " in error
        assert list(folder.iterdir()) == [folder / ".lock"]
        first.kill()
        first.wait()
        Path(parent).chmod(0o755)


def test_a_command_waits_for_no_other_with_its_output(hold, sources, tmp_path):
    other = hold(tmp_path / "out", "new_folder")
    assert f"{tmp_path}/out is in use: process {other.pid} on " in run("upcycle", sources, tmp_path / "out")
    assert other.poll() is None and (tmp_path / ".out.tmp").is_dir()
    other.kill()
    other.wait()
    with new_folder(tmp_path / "out") as folder:  # what the killed one left is no obstacle, and is gone
        assert not list(folder.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@SIGNALS
def test_a_process_that_is_told_to_end_leaves_nothing(hold, tmp_path, number, status):
    process = hold(tmp_path / "out", "new_folder")
    process.send_signal(number)
    assert process.communicate()[1] == (f"{INTERRUPTED}\n" if number == signal.SIGINT else "")
    assert process.returncode == status and not list(tmp_path.iterdir())


@pytest.mark.parametrize("function", [(Path, "mkdir"), (FileLock, "acquire")])
def test_a_signal_as_soon_as_a_file_is_there_leaves_nothing(tmp_path, monkeypatch, function):
    original = getattr(*function)

    def and_a_signal(self, *arguments, **options):
        original(self, *arguments, **options)
        if "out" in str(getattr(self, "name", "out")):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(*function, and_a_signal)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests in the background ignore
    with pytest.raises(SystemExit), one_line_errors(), new_folder(tmp_path / "out"):
        pytest.fail("it went on")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [0, 500, 30_000], ids=["not even the lock", "no configuration", "no weights"])
@pytest.mark.parametrize("command", ["upcycle", "export-released"])
def test_on_a_full_disk_a_command_ends_in_one_line_and_leaves_nothing(sources, tmp_path, capsys, command, size):
    with full_disk(size):  # what is printed goes to no file
        error = run(command, sources, tmp_path / "out")
    assert error.startswith("error: ") and "\n" not in error and "File too large" in error
    assert not (tmp_path / "out").exists() and not list(tmp_path.rglob("*.safetensors"))


def test_a_text_on_a_full_disk_is_named_and_errors_do_not_steer_the_terminal(tmp_path):
    with full_disk(10), pytest.raises(OSError, match="cannot write .*page.md: .*File too large"):
        write_text(tmp_path / "page.md", "text " * 10)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match=r"^error: \\x1b\[31mред 星 \\udc80$"), one_line_errors():
        raise ValueError("\x1b[31mред\n星 \udc80")
    code = "from clip_moe.engine.program import end; end(lambda: 'image→text', True)"
    assert run_program(tmp_path, "-c", code, PYTHONIOENCODING="latin-1") == "image\\u2192text\n"
    with pytest.raises(SystemExit, match="^error: OutOfMemoryError: CUDA out of memory"), one_line_errors():
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 GiB")


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask, mode", [(0o077, 0o600), (0o002, 0o664)])
def test_files_are_readable_as_the_umask_says(sources, tmp_path, umask, mask, mode):
    umask(mask)
    assert run("assemble", sources, tmp_path / "out") is None
    with new_file(tmp_path / "tensors") as partial:
        save_file({"a": torch.zeros(1)}, partial)
    tiny_clip(1, 1).save_pretrained(tmp_path / "saved")
    respect_umask(tmp_path / "saved")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10 and [path for path in files if path.stat().st_mode & 0o777 != mode] == []


def test_a_pipe_is_written_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        write_text(pipe, "table")
        assert reader.communicate(timeout=30)[0].decode().strip() == "table"
    assert pipe.is_fifo()


def test_an_output_that_no_folder_can_be(sources, tmp_path):
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "out"):
        assert run("upcycle", sources, output).startswith("error: ")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
