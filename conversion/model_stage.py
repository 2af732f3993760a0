"""A stage that makes a model. Importing it imports nothing heavy."""

from pathlib import Path
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Stage


def file_fault(name: str) -> str | None:
    """What is wrong with a setting that names a file of weights; None: nothing."""
    path = Path(name)
    if path.is_file() and path.stat().st_size:
        return None
    found = "is an empty file" if path.is_file() else "is a folder" if path.is_dir() else "does not exist"
    return f"{name} {found}: name a file of weights, saved with torch.save or as .safetensors"


@dataclass(config=STRICT, kw_only=True)
class ModelStage(Stage):
    """A stage whose folder is a model, which other stages may read as one."""

    kind: ClassVar[str] = "model"
    main_process_only: ClassVar[bool] = True

    def save(self, model: Any, source: str, directory: Path, length: int | None = None) -> None:
        """Saves a model, and the processor of its source, which cuts texts at `length` tokens (None: as it did)."""
        from clip_moe.conversion.processors import copy_processor
        from clip_moe.engine.files import save

        save(model, directory)
        copy_processor(source, directory, length)

    def complete(self, directory: Path) -> str:
        from clip_moe.conversion.verification import require_loadable
        from clip_moe.engine.provenance import weights_fingerprint

        require_loadable(directory)
        return weights_fingerprint(str(directory))

    def usage(self, directory: Path) -> str:
        from clip_moe.conversion.checkpoints import load_config

        config = load_config(directory)
        auto = "AutoModelForImageTextToText" if config.model_type == "llava" else "AutoModel"
        module = type(config).__module__  # of a model of one's own, what --import named
        is_ours = module.startswith("modeling_clip_moe.") or config.model_type == "llava"
        module = "modeling_clip_moe" if is_ours else module
        needed = "" if module.startswith("transformers.") else f"    import {module}\n"  # a dense CLIP needs none
        return (
            "\nLoad the model with\n\n"
            f"{needed}    from transformers import {auto}\n"
            f'    model = {auto}.from_pretrained("{directory}")\n'
        )

    def publish(self, directory: Path, repository: str) -> str:
        """Upload the folder to the Hub, and return its address."""
        from clip_moe.conversion.publishing.bundle import publish

        return publish(directory, repository)
