"""Recipes, their stages, and one training loop."""

import sys
from pathlib import Path

# First, since the user's own folder, where commands are started, may have a module `data` or `records`, too.
sys.path.insert(0, str(Path(__file__).parents[1]))
