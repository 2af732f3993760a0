"""The laboratory: README.md says which question each part answers."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def recipe_file(name: str) -> Path:
    """A recipe of the laboratory, or else of the library."""
    own = ROOT / "lab" / "recipes" / f"{name}.yaml"
    return own if own.is_file() else ROOT / "training" / "recipes" / own.name
