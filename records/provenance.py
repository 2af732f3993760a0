"""What a run records: the names of its files, what identifies a model, and what it was computed with.

Imports nothing heavy: commands that only read records start at once.
"""

import hashlib
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# In the folder of a stage, and of a run
MANIFEST, ATTEMPTS, RECIPE, ENVIRONMENT = "manifest.json", "attempts.json", "recipe.yaml", "environment.json"
LOG = "log.jsonl"  # of a stage that trains
LOGS = "logs"  # the folder of the trackers
SAMPLES = "samples.json"  # of a stage that trained: how many pairs its data had

EVERYTHING = ("**/*.bin", "**/*.json", "**/*.safetensors", "**/*.txt")
# What embeddings depend on: an expert's are the same in its own folder and in that of a mixture.
WEIGHTS = ("config.json", "*.bin", "*.safetensors", "*.index.json")
PROCESSOR = ("*token*.json", "vocab.json", "merges.txt", "*processor_config.json")


def model_fingerprint(model: str, patterns: Sequence[str] = EVERYTHING) -> str:
    """What a model is: the hash of its files for a folder, the commit for a hub repository.

    Args:
        patterns: of the files that count.

    Raises:
        FileNotFoundError: it is neither.
    """
    path = Path(model)
    if not path.is_dir():
        from transformers import AutoConfig

        try:
            return f"{model}@{AutoConfig.from_pretrained(model, trust_remote_code=False)._commit_hash}"
        except (OSError, ValueError) as error:
            raise FileNotFoundError(
                f"{model} is no folder, and no model that can be had from the Hub: {error}"
            ) from error
    digest = hashlib.sha256()
    for file in sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()}):
        digest.update(file.relative_to(path).as_posix().encode())
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def weights_fingerprint(model: str) -> str:
    """What a model computes with, by which scores know the model that they were measured of: see `model_fingerprint`.

    The processor counts, and of a mixture all experts and the encoder of metadata.
    """
    return model_fingerprint(model, tuple(f"**/{pattern}" for pattern in (*WEIGHTS, *PROCESSOR, "encoder.json")))


def manifest_fingerprint(folder: Path) -> str:
    """What a finished stage is to the stages that it is an input of."""
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def is_as_made(folder: Path, manifest: dict) -> bool:
    """Whether the model of a finished stage is what the stage wrote, as far as its manifest tells."""
    return manifest.get("weights") is None or manifest["weights"] == weights_fingerprint(str(folder))


def environment() -> dict:
    """The commit of this checkout, if it is one, and the versions of what numbers depend on."""
    import accelerate
    import numpy
    import torch
    import transformers

    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "numpy": numpy.__version__,
    }
    # Clusters and digits; the fonts of the symbols; pictures; the icons, and who draws them
    for name in ("scikit-learn", "matplotlib", "pillow", "mkdocs-material", "resvg-py"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {"commit": commit, "versions": versions}
