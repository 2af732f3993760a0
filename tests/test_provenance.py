"""records/provenance.py and what else reads no weights: nothing heavy is imported for it."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy")


OF_RECORDS = [f"records.{name}" for name in ("provenance", "files", "yaml_files", "messages", "markdown")]


@pytest.mark.parametrize("module", [*OF_RECORDS, "conversion.publishing.lineage", "conversion.presets"])
def test_is_imported_without_torch(module):
    program = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
