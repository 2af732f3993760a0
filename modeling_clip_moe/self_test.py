"""
The self-test of a published folder: inputs, and what the model computed of them when it was published. A later version
of transformers may load all weights and compute something else.

This file imports nothing of ours: it tests dense models, too.
"""

import hashlib
import json
from collections.abc import Sequence

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoProcessor, PreTrainedModel, ProcessorMixin
from transformers.utils import cached_file

FILE = "selftest.safetensors"
TOLERANCE = 1e-4  # relative difference, in float32 on a CPU: only the order of sums may differ
WEIGHT_SUMS, SUM_TOLERANCE = "sums of embeddings and routers", 1e-9  # in float64
# The last one is padded, the others may be cut
TEXTS = ["A photo of 2 cats, a red car and Zoë's umbrella: déjà vu!", "snow " * 100, "a"]
# Settings of an image processor that decide how it brings a picture to the model's size
RESIZING = ("max_num_patches", "do_resize", "size", "resample", "do_center_crop", "crop_size")


def waves(length: int, number: int = 1) -> Tensor:
    """(length, number) of fixed values between -1 and 1, in float64."""
    return torch.outer(torch.arange(1, length + 1, dtype=torch.float64), torch.arange(1, number + 1).sqrt()).cos()


def features(model: PreTrainedModel, inputs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The embeddings (B, D) of texts and of images. `inputs`: one dictionary, or of a mixture one for each expert."""
    text_inputs = ("input_ids", "attention_mask")
    texts = [{name: tensor for name, tensor in part.items() if name in text_inputs} for part in inputs]
    images = [{name: tensor for name, tensor in part.items() if "pixel" in name or "shapes" in name} for part in inputs]
    texts, images = ({"expert_inputs": parts} if len(parts) > 1 else parts[0] for parts in (texts, images))
    return {
        "text features": model.get_text_features(**texts).pooler_output,
        "vision features": model.get_image_features(**images).pooler_output,
    }


def processed(processor: ProcessorMixin, picture: Tensor) -> dict[str, Tensor]:
    """Processor outputs for `TEXTS` and one picture (H, W, 3). The picture has the model's size, so that nothing is
    resized: torchvision and Pillow differ there in the last digits."""
    tokenizer, images, options = processor.tokenizer, processor.image_processor, {"return_tensors": "pt"}
    if getattr(images, "max_num_patches", None) is not None:
        options |= {"max_num_patches": images.max_num_patches, "patch_size": images.patch_size}
    padding = "max_length" if tokenizer.model_max_length < 10**6 else True  # larger: it has none
    pictures = [picture.numpy()] * len(TEXTS)
    return dict(processor(text=TEXTS, images=pictures, padding=padding, truncation=True, **options))


def resizing(processor: ProcessorMixin) -> Tensor:
    """(letters,) The settings that bring a picture to the model's size: its result differs between libraries."""
    values = {name: getattr(processor.image_processor, name, None) for name in RESIZING}
    unused = [] if values["do_resize"] else ["size", "resample"]
    unused += [] if values["do_center_crop"] else ["crop_size"]
    values |= dict.fromkeys(unused)
    values |= {name: sorted(dict(values[name] or {}).items()) for name in ("size", "crop_size")}
    return torch.tensor(list(json.dumps(values).encode()))


def every_expert(model: PreTrainedModel) -> Tensor:
    """(rows, 4): outputs of each expert of each sparse layer for one vector, whatever the router prefers."""
    rows = []
    for _, block in sorted(model.named_modules(), key=lambda module: module[0]):
        if hasattr(block, "router") and hasattr(block, "experts"):
            ids = torch.arange(block.num_experts)[:, None]
            inputs = waves(block.config.hidden_size).float().T.expand(len(ids), -1)
            outputs = block.experts(inputs, ids, torch.ones(ids.shape))
            rows.append(outputs.double() @ waves(outputs.shape[1], 4))
    return torch.cat(rows)


def weight_sums(model: PreTrainedModel) -> Tensor:
    """(tables, 1), sorted: sums of all rows of embeddings and routers; an input reaches few of them."""
    parts = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    parts += [module.router for module in model.modules() if hasattr(module, "router")]
    tensors = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers()) if tensor.ndim]
    tables = [tensor.double().reshape(len(tensor), -1) for tensor in tensors]
    sums = torch.cat([waves(len(table)).T @ table @ waves(table.shape[1]) for table in tables])
    return sums.sort(dim=0).values


@torch.no_grad()
def compute(
    model: PreTrainedModel, inputs: Sequence[dict[str, Tensor]], processors: Sequence[ProcessorMixin]
) -> dict[str, Tensor]:
    """All that the self-test compares. `inputs`: see `features`, each with a `picture` for its processor."""
    was_training, pictures = model.training, [part["picture"] for part in inputs]
    inputs = [{name: tensor for name, tensor in part.items() if name != "picture"} for part in inputs]
    model.eval()
    computed = features(model, inputs)
    if hasattr(model, "logit_scale"):  # the logits of a mixture depend on a task
        computed["logits"] = model(**inputs[0]).logits_per_image
    tokenized = [processed(processor, picture) for processor, picture in zip(processors, pictures, strict=True)]
    for number, processor in enumerate(processors):
        tokens = "\n".join(map(str, processor.tokenizer.convert_ids_to_tokens(range(len(processor.tokenizer)))))
        computed[f"vocabulary {number}"] = torch.tensor(list(hashlib.sha256(tokens.encode()).digest()))
        computed[f"tokens {number}"] = tokenized[number]["input_ids"]
        computed[f"resizing {number}"] = resizing(processor)
    computed |= {f"{name} through the processor": tensor for name, tensor in features(model, tokenized).items()}
    if any(hasattr(module, "router") for module in model.modules()):
        computed["outputs of every expert"] = every_expert(model)
    computed[WEIGHT_SUMS] = weight_sums(model)
    model.train(was_training)
    return {name: tensor.contiguous() for name, tensor in computed.items()}


def self_test(model: PreTrainedModel, revision: str | None = None) -> dict[str, float]:
    """
    Compares what a model, in float32 on a CPU, and its processor compute with `selftest.safetensors`, in the folder or
    repository that it was loaded from.

    Args:
        revision: branch, tag or commit on the Hub that the model was loaded from. None: main.

    Returns:
        the largest relative difference of a row of each: features of both towers, logits, outputs of experts, ...

    Raises:
        ValueError: one is above 1e-4, or the model is not in float32 on a CPU.
        OSError: there is no such file.
    """
    source, made_on = str(model.name_or_path), (model.dtype, model.device.type)
    if made_on != (torch.float32, "cpu"):
        raise ValueError(f"the self-test needs {source} in float32 on a CPU, not in {made_on[0]} on {made_on[1]}")
    inputs: dict[str, dict[str, Tensor]] = {}
    with safe_open(cached_file(source, FILE, revision=revision), "pt") as file:
        made_with = file.metadata()
        for key in file.keys():
            part, _, name = key.partition(".")
            inputs.setdefault(part, {})[name] = file.get_tensor(key)
    expected = inputs.pop("expected")
    parts = [enlarged(inputs[part], int(made_with[f"{part}.side"])) for part in sorted(inputs, key=int)]
    folders = model.config.experts if getattr(model.config, "own_processors", False) else [""]
    trusted = type(model).__module__.startswith("transformers_modules.")  # the model's own code came from there
    options = {"revision": revision, "trust_remote_code": trusted}
    processors = [AutoProcessor.from_pretrained(source, subfolder=folder, **options) for folder in folders]
    differences = {}
    for name, tensor in compute(model, parts, processors).items():
        if name not in expected:
            raise ValueError(f"{source} has a self-test of another version, without the {name}: publish it again")
        wanted, most = expected[name], SUM_TOLERANCE if name == WEIGHT_SUMS else TOLERANCE
        if tensor.shape != wanted.shape or not tensor.is_floating_point():
            difference = float(not torch.equal(tensor, wanted))
        else:
            norms = wanted.norm(dim=-1).clamp(min=torch.finfo(wanted.dtype).tiny)  # 0: of biases that never moved
            difference = ((tensor - wanted).norm(dim=-1) / norms).max().item()
        if not difference <= most:  # also NaN
            raise ValueError(
                f"{source} failed its self-test: the {name} differ by {difference:.2g} (at most {most:g}). They "
                f"were made with transformers {made_with['transformers']} and torch {made_with['torch']}, here are "
                f"transformers {transformers.__version__} and torch {torch.__version__}: if the weights are as "
                "published, install those versions"
            )
        differences[name] = difference
    return differences


def enlarged(part: dict[str, Tensor], side: int) -> dict[str, Tensor]:
    """Inputs with squares of `side` pixels in place of each stored one, which keep the file small."""
    axes = {"picture": (0, 1)} | ({"pixel_values": (2, 3)} if part["pixel_values"].ndim == 4 else {})  # else patches
    return part | {n: part[n].repeat_interleave(side, a).repeat_interleave(side, b) for n, (a, b) in axes.items()}
