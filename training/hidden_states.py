"""What enters the first sparse layer of both towers, computed once for a whole dataset.

The layers below are frozen in CLIP-FMoE's stages: with their output on disk, no step has to compute them again.
"""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from safetensors import SafetensorError, safe_open
from torch.nn.utils.rnn import pad_sequence

from data.identity import OTHER_DATA
from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel
from records.files import read_record
from training.loader import PairLoader
from training.parts import INDEX, part_file, write_parts

BATCHES_PER_PART = 8
SEVERAL = "hidden states need caption_weights where images have several captions"


def frozen_weights_hash(model: CLIPMoEModel) -> str:
    """The hash of all weights below the first sparse layer of each tower.

    Raises:
        ValueError: a tower has no sparse layer.
    """
    digest = hashlib.sha256()
    for tower in ("text_model", "vision_model"):
        submodel = getattr(model, tower)
        if not submodel.config.moe_layers:
            raise ValueError(no_sparse_layer(tower))
        for name, tensor in sorted(submodel.state_dict().items()):
            parts = name.split(".")
            in_encoder = parts[:2] == ["encoder", "layers"]
            if (in_encoder and int(parts[2]) < min(submodel.config.moe_layers)) or parts[0] in (
                "embeddings",
                "pre_layrnorm",
            ):
                digest.update(f"{tower}.{name}".encode())
                digest.update(tensor.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def no_sparse_layer(tower: str) -> str:
    return f"{tower} has no sparse layer, so no layers below it whose output could be kept"


def captions_per_image(rows: datasets.Dataset, caption_weights: Sequence[float] | None) -> int:
    """How many captions of an image hidden states are of: all, or the only one.

    Raises:
        ValueError: images have several, of which each epoch would draw one.
    """
    if caption_weights is not None:
        return len(caption_weights)
    if not isinstance(rows[0]["caption"], str):
        raise ValueError(SEVERAL)
    return 1


def size_on_disk(config: CLIPMoEConfig, images: int, text_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the hidden states of images and of the tokens of all their texts."""
    text, vision = config.text_config, config.vision_config
    vision_tokens = images * ((vision.image_size // vision.patch_size) ** 2 + 1)
    return dtype.itemsize * (vision_tokens * vision.hidden_size + text_tokens * text.hidden_size)


def announce_size(
    accelerator: Accelerator, model: CLIPMoEModel, loader: PairLoader, dtype: torch.dtype, directory: Path
) -> None:
    """Say how much disk the hidden states of a loader's pairs take.

    Raises:
        OSError: there is not as much.
    """
    if not accelerator.is_main_process:
        return
    text_tokens = sum(loader.text_lengths())
    size = size_on_disk(model.config, len(loader.pairs), text_tokens, dtype)
    print(
        f"the hidden states of {len(loader.pairs)} images and {text_tokens} text tokens take {size / 1e6:,.2f} MB "
        f"in {directory}"
    )
    needed = size - sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(
            f"the hidden states take {needed / 1e6:,.2f} MB more, but only {free / 1e6:,.2f} MB are free in {directory}"
        )


def keep_hidden_states(
    accelerator: Accelerator, model: CLIPMoEModel, loader: PairLoader, dtype: torch.dtype, directory: Path
) -> int:
    """Write the hidden states of all pairs, see `write_parts`.

    Returns:
        The number of pairs in a part.

    Raises:
        ValueError: a part is damaged, missing or of another size.
    """
    model = model.to(accelerator.device).eval()
    first = {tower: min(getattr(model, tower).config.moe_layers) for tower in ("text_model", "vision_model")}
    part_size = loader.batch_size * BATCHES_PER_PART

    def compute(start: int, stop: int) -> dict[str, torch.Tensor]:
        images, texts, lengths = [], [], []
        for batch in loader.in_order(start, stop):
            mask = batch.pop("caption_mask", None)
            with torch.no_grad(), accelerator.autocast():
                outputs = model(
                    **send_to_device(batch, accelerator.device, non_blocking=True), output_hidden_states=True
                )
            images.append(outputs.vision_model_output.hidden_states[first["vision_model"]].to(dtype).cpu())
            states = outputs.text_model_output.hidden_states[first["text_model"]].to(dtype).cpu()
            of_texts = batch["attention_mask"].sum(dim=1)
            texts += [state[:length] for state, length in zip(states, of_texts.tolist(), strict=True)]
            mask = torch.ones(len(of_texts), 1, dtype=torch.bool) if mask is None else mask
            # (B, L) tokens of each caption, 0 for a missing one
            lengths.append(torch.zeros(mask.shape, dtype=torch.long).masked_scatter(mask, of_texts))
        lengths = torch.cat(lengths)
        ends = lengths.flatten().cumsum(0).view(lengths.shape)
        return {"vision": torch.cat(images), "text": torch.cat(texts), "starts": ends - lengths, "ends": ends}

    write_parts(accelerator, directory, "hidden states", len(loader.pairs), part_size, compute)
    return part_size


class HiddenStates:
    """Kept hidden states, by the number of a pair.

    Args:
        directory: of a hidden_states stage.
        model: the one that is to be trained on them.
        dataset_fingerprint: of the pairs, see `data.identity.data_fingerprint`.
        num_captions: of an image.

    Raises:
        FileNotFoundError: the folder holds none.
        ValueError: they are of another dataset, of another number of captions, or of a model with other weights below
            the first sparse layer. A changed configuration is not noticed; a train stage compares the processors.
    """

    def __init__(self, directory: Path, model: CLIPMoEModel, dataset_fingerprint: str, num_captions: int):
        if not (directory / INDEX).is_file():
            raise FileNotFoundError(f"{directory} is not the folder of a hidden_states stage: there is no {INDEX}")
        keys = {"part_size": int, "captions": int, "dataset_fingerprint": str, "weights": str}
        index = read_record(directory / INDEX, dict, keys)
        if index["dataset_fingerprint"] != dataset_fingerprint:
            raise ValueError(f"the hidden states in {directory} are of {OTHER_DATA}")
        if index["captions"] != num_captions:
            raise ValueError(
                f"the hidden states in {directory} are of {index['captions']} captions, not of {num_captions}"
            )
        if index["weights"] != frozen_weights_hash(model):
            raise ValueError(
                f"the hidden states in {directory} are of a model with other weights below the sparse layers"
            )
        self.directory, self.part_size = directory, index["part_size"]
        self.files: dict[int, safe_open] = {}

    def __call__(self, pairs: Sequence[int]) -> dict[str, torch.Tensor]:
        """`vision_sparse_inputs` (B, S, D) and `text_sparse_inputs` (captions, S, D) in float32, padded with zeros; the
        captions of a pair that are missing are left out."""
        images, texts = [], []
        for pair in pairs:
            start, row = pair // self.part_size * self.part_size, pair % self.part_size
            file = self._open(start)
            images.append(file.get_slice("vision")[row])
            states = file.get_slice("text")
            bounds = zip(file.get_slice("starts")[row].tolist(), file.get_slice("ends")[row].tolist(), strict=True)
            texts += [states[first:last] for first, last in bounds if last > first]
        return {
            "vision_sparse_inputs": torch.stack(images).float(),
            "text_sparse_inputs": pad_sequence(texts, batch_first=True).float(),
        }

    def _open(self, start: int) -> safe_open:
        if start not in self.files:
            path = part_file(self.directory, start)
            try:
                self.files[start] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} is damaged or gone; delete {self.directory} to make it anew: {error}"
                ) from error
        return self.files[start]
