"""The scores of each expert of a sparse model, and the tokens that it gets."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from transformers import CLIPConfig

from clip_moe.conversion.dense import force_expert
from clip_moe.conversion.upcycle import counted_as_one
from clip_moe.data.images import decode_image
from clip_moe.engine.own_modules import code_of_models
from clip_moe.engine.provenance import environment, weights_fingerprint
from clip_moe.evaluation.batches import Batches
from clip_moe.evaluation.embedder import Embedder, usable_device
from clip_moe.evaluation.experts_page import EXPERT, MEAN, ROUTED, agreement, page_beginning, page_of, summarize
from clip_moe.evaluation.measures import measure
from clip_moe.evaluation.page import write_page
from clip_moe.evaluation.progress import progress
from clip_moe.evaluation.routing import averaged_experts, count_tokens
from clip_moe.evaluation.routing_pictures import NUM_SHOWN, draw_patches, draw_shares, route_images
from clip_moe.evaluation.task import Task
from modeling_clip_moe import CLIPMoEConfig
from modeling_clip_moe.configuration_clip_moe import CLIPMoETowerConfig
from modeling_clip_moe.families import family_of, sparse_towers

EXPERT_PROTOCOL = (
    "An expert alone has the weight that the experts of a token have together in the routed model: for each token and "
    "layer, the sum of the weights that the router gives, which is `routed_scaling_factor` where they are normalized."
)
# Beside it, where experts are `number` parts of an FFN
OF_PARTS = " Expert N is an FFN, the {number} from {number} N on of those that the router and the pictures tell apart."
# Images, and texts, by which the agreement of experts is computed
MOST_EMBEDDINGS = 10_000
# Name of a task -> what `clip_moe.evaluation.measures.measure` gives
ByTask = dict[str, dict[str, Any]]


class _Witness(Embedder):
    """An embedder that remembers what it embedded, and the embeddings."""

    def __init__(self, model: str | Path, batch_size: int, device: torch.device):
        super().__init__(model, None, batch_size, device)
        self.forget()

    def forget(self) -> None:
        self.seen: dict[str, list[tuple[Batches, np.ndarray]]] = {"image": [], "text": []}

    def _kept(self, name: str, batches: Batches) -> np.ndarray:
        embeds = super()._kept(name, batches)
        self.seen[name].append((batches, embeds))
        return embeds

    def embeds(self) -> dict[str, np.ndarray]:
        """Embeddings (rows, D) of `images` and of `texts`, if there are some, from all parts of what was seen."""
        whole = {name: np.concatenate([embeds for _, embeds in parts]) for name, parts in self.seen.items() if parts}
        return {f"{name}s": embeds[_spread(range(len(embeds)), MOST_EMBEDDINGS)] for name, embeds in whole.items()}

    def some_images(self) -> list:
        """From all parts of what was seen."""
        places = [(batches, row) for batches, _ in self.seen["image"] for row in range(len(batches.items))]
        return [decode_image(batches.items[row][batches.column]) for batches, row in _spread(places, NUM_SHOWN)]


def _spread(items: Sequence[Any], number: int) -> list[Any]:
    """So many of the items, or all, at equal distances."""
    return [items[index] for index in np.linspace(0, len(items) - 1, min(number, len(items))).astype(int)]


def _analyzable_towers(
    model: str | Path, config: CLIPConfig | CLIPMoEConfig, kinds: Collection[str]
) -> dict[str, CLIPMoETowerConfig]:
    """Tower -> its configuration, of the sparse ones. Raises a ValueError if the model or these kinds of tasks cannot
    be analyzed."""
    sparse = sparse_towers(config)
    if not sparse:
        fault = "a dense CLIP has no experts to analyze"
    elif family_of(config).sigmoid:
        fault = "a SigLIP has no class token, which the pictures of experts need"
    elif len({(config.num_experts, counted_as_one(config)) for config in sparse.values()}) > 1:
        fault = "its towers have different numbers of experts"
    elif "text" in sparse and set(kinds) == {"linear_probe"}:
        fault = "a linear probe does not reach the sparse text tower: add a task such as retrieval"
    else:
        return sparse
    raise ValueError(f"{model}: {fault}")


def analyze_experts(model: str | Path, tasks: Mapping[str, Task], output_dir: str | Path, batch_size: int = 64) -> str:
    """Measure every expert alone and the routed model, and count where the routers send the tokens of all tasks.

    Returns:
        How the page begins: whether the experts do anything, and the scores of every expert.
    """
    set_seed(0)
    embedder = _Witness(model, batch_size, usable_device(None))
    sparse = _analyzable_towers(model, embedder.model.config, {task.kind for task in tasks.values()})
    config = next(iter(sparse.values()))
    num_experts = config.num_experts
    num_parts = counted_as_one(config)
    num_alone = num_experts // num_parts  # narrow experts of an FFN count as one
    bar = progress(f"measuring {num_alone} experts", num_alone + 2)

    def measured() -> ByTask:
        by_task = {name: measure(task, embedder) for name, task in tasks.items()}
        bar.update()
        return by_task

    results: dict[str, ByTask] = {}
    embeds: dict[str, dict[str, np.ndarray]] = {}
    for number in range(num_alone):
        embedder.forget()
        with force_expert(embedder.model, number):  # which gets all tokens
            results[f"{EXPERT} {number}"] = measured()
        embeds[f"{EXPERT} {number}"] = embedder.embeds()
    with averaged_experts(embedder.model):
        results[MEAN] = measured()
    embedder.forget()
    with count_tokens(embedder.model) as counts:
        results[ROUTED] = measured()
    bar.close()
    embeds[ROUTED] = embedder.embeds()
    routing = {tower: {layer: count.means() for layer, count in layers.items()} for tower, layers in counts.items()}
    agreements = {kind: agreement({name: arrays[kind] for name, arrays in embeds.items()}) for kind in embeds[ROUTED]}
    summary = summarize(tasks, results[ROUTED], results[MEAN], routing, agreements, num_experts)
    title = f"% of the tokens computed by each expert: {', '.join(tasks)}"
    pictures = {"routing.png": lambda file: draw_shares(routing, file, title)}
    layer = None
    if "vision" in sparse and embedder.seen["image"]:
        layer = max(sparse["vision"].moe_layers)
        routed = route_images(embedder, embedder.some_images(), layer)
        pictures["patches.png"] = lambda file: draw_patches(routed, file)
    result = {
        "source": str(model),
        "weights": weights_fingerprint(model),
        "protocols": {name: task.protocol for name, task in tasks.items()},
        "data": {name: task.data for name, task in tasks.items()},
        "layer": layer,
        "batch_size": batch_size,
        "summary": summary.model_dump(),
        "expert_protocol": EXPERT_PROTOCOL + OF_PARTS.format(number=num_parts) * (num_parts > 1),
        "metrics": {task: {name: scores[task]["metrics"] for name, scores in results.items()} for task in tasks},
        "routing": routing,
        "scales": {
            tower: {layer: means["weight"] for layer, means in layers.items()}
            for tower, layers in routing.items()
            if not sparse[tower].norm_topk_prob
        },
        "agreement": agreements,
        "num_embeddings": {kind: len(array) for kind, array in embeds[ROUTED].items()},
        "code": code_of_models(),
        **environment(),
    }
    write_page(Path(output_dir) / "experts", page_of(result), pictures, result)
    return page_beginning(result)
