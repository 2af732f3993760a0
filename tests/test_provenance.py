"""conversion/provenance.py and what else reads no weights: nothing heavy is imported for it."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy")


@pytest.mark.parametrize("module", ["provenance", "files", "lineage", "presets", "recipe_yaml", "messages", "markdown"])
def test_is_imported_without_torch(module):
    program = f"import sys, conversion.{module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
