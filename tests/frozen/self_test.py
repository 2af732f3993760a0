"""
The self-test of a published folder: an input, and what the model computed of it when it was published.

The code beside published weights also runs under versions of transformers that came later, which may load all weights
and compute something else. This file imports nothing of ours: it tests dense models, too.
"""

from collections.abc import Sequence

import torch
import transformers
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import cached_file

FILE = "selftest.safetensors"
TOLERANCE = 1e-4  # relative difference, in float32 on a CPU: only the order of sums may differ


@torch.no_grad()
def features(model: PreTrainedModel, inputs: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """
    The embeddings (B, D) of texts and of images, and the logits, but of a mixture, whose logits depend on a task.

    Args:
        inputs: one dictionary, or of a mixture one for each expert.
    """
    texts = [{"input_ids": part["input_ids"]} for part in inputs]
    images = [{name: tensor for name, tensor in part.items() if name != "input_ids"} for part in inputs]
    texts, images = ({"expert_inputs": parts} if len(parts) > 1 else parts[0] for parts in (texts, images))
    was_training = model.training
    model.eval()
    computed = {
        "text features": model.get_text_features(**texts).pooler_output,
        "vision features": model.get_image_features(**images).pooler_output,
    }
    if hasattr(model, "logit_scale"):
        computed["logits"] = model(**inputs[0]).logits_per_image
    model.train(was_training)
    return {name: tensor.contiguous() for name, tensor in computed.items()}


def self_test(model: PreTrainedModel, source: str | None = None, revision: str | None = None) -> dict[str, float]:
    """
    Compares what a model computes with `selftest.safetensors`.

    Args:
        model: in float32 on a CPU.
        source: folder or Hub name of that file. None: what the model was loaded from.
        revision: branch, tag or commit on the Hub that the model was loaded from. None: main.

    Returns:
        the relative differences of each tower's features, and of the logits.

    Raises:
        ValueError: one is above 1e-4, or the model is not in float32 on a CPU.
        OSError: there is no such file.
    """
    source, made_on = str(source or model.name_or_path), (model.dtype, model.device.type)
    if made_on != (torch.float32, "cpu"):
        raise ValueError(f"the self-test needs {source} in float32 on a CPU, not in {made_on[0]} on {made_on[1]}")
    inputs: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(cached_file(source, FILE, revision=revision), "pt") as file:
        made_with = file.metadata()
        for key in file.keys():
            part, _, name = key.partition(".")
            inputs.setdefault(part, {})[name] = file.get_tensor(key)
    expected = inputs.pop("expected")
    for part, tensors in inputs.items():
        side = int(made_with[f"{part}.side"])  # each stored pixel is a square of so many, to keep the file small
        if side > 1:
            tensors["pixel_values"] = tensors["pixel_values"].repeat_interleave(side, -1).repeat_interleave(side, -2)
    computed = features(model, [inputs[part] for part in sorted(inputs, key=int)])
    differences = {
        name: ((tensor - expected[name]).norm() / expected[name].norm()).item() for name, tensor in computed.items()
    }
    for name, difference in differences.items():
        if not difference <= TOLERANCE:  # also NaN
            raise ValueError(
                f"{source} failed its self-test: the {name} differ by {difference:.2g} (at most {TOLERANCE:g}). They "
                f"were made with transformers {made_with['transformers']} and torch {made_with['torch']}, here are "
                f"transformers {transformers.__version__} and torch {torch.__version__}: if the weights are as "
                "published, install those versions"
            )
    return differences
