"""conversion/files.py: one process in a folder at a time, nothing half-written, errors in one line."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from conversion.files import locked, new_folder

HOLD = """
import os, sys, time
from pathlib import Path
from conversion.files import locked
if len(sys.argv) > 2 and os.getuid() == 0:
    os.setuid(int(sys.argv[2]))  # root may write anywhere
with locked(Path(sys.argv[1])):
    print("holds it", flush=True)
    time.sleep(60)
"""


def hold(folder, *arguments):
    """A process that holds the lock of a folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "holds it\n"
    return process


def test_the_second_process_says_who_holds_the_folder(tmp_path):
    folder = tmp_path / "later" / "run"  # neither is there yet
    first = hold(folder)
    start = time.monotonic()
    pattern = rf"run is in use: process {first.pid} on \S+ has been writing there since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"
    for _ in range(2):  # the first who fails erases nothing
        with pytest.raises(ValueError, match=pattern), locked(folder):
            pytest.fail("two at once")
    with pytest.raises(ValueError, match=pattern), new_folder(folder):
        pytest.fail("two at once")
    with locked(tmp_path / "later" / "other"):
        pass
    assert time.monotonic() - start < 5
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert list(folder.parent.iterdir()) == [folder.parent / ".run.lock"]  # a stale lock is no obstacle
    with locked(folder), pytest.raises(ValueError, match=f"process {os.getpid()} "), locked(folder):
        pytest.fail("two at once")
    assert not list(folder.parent.iterdir())


def test_a_lock_is_found_through_links(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with locked(tmp_path / "run"), pytest.raises(ValueError, match="is in use"), locked(tmp_path / "link"):
        pytest.fail("two at once")


def test_a_lock_where_nothing_may_be_written_beside_the_folder():
    with tempfile.TemporaryDirectory() as parent:  # pytest's own are closed to other users
        folder = Path(parent) / "run"
        folder.mkdir()
        folder.chmod(0o777)
        Path(parent).chmod(0o555)
        first = hold(folder, "65534")
        second = [sys.executable, "-c", HOLD, folder, "65534"]
        error = subprocess.run(second, capture_output=True, text=True, check=False).stderr
        assert f"run is in use: process {first.pid} " in error
        assert list(folder.iterdir()) == [folder / ".lock"]
        first.kill()
        first.wait()
        Path(parent).chmod(0o755)
