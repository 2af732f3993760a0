"""Stages that train: kinds of training differ in pairs, batches and loss.

Another kind is a subclass of `TrainStage`. It overrides a method for each thing that it does otherwise: `choose_pairs`,
`batch_sampler`, `contrastive_loss` or `router_loss`.
"""

import contextlib
import copy
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin

from conversion.checkpoints import is_sparse, load_clip
from conversion.processors import load_processor
from data.augmentation import Augmentation
from data.pairs import load_pairs
from data.sources import Rows, reading
from data.worlds import WORLDS
from evaluation.costs import count_activations, count_largest_layer
from modeling_clip_moe import CLIPMoEConfig
from modeling_clip_moe.configuration_clip_moe import embedding_size
from modeling_clip_moe.families import family_of
from modeling_clip_moe.sparse_moe import CLIPMoERouter, CLIPMoESparseMoeBlock
from records.files import save
from records.messages import join_names, warn_once
from records.provenance import CHECKPOINTS, LOG, duplicates_line
from training.clusters import FeatureClusters, load_clusters
from training.context import Context
from training.contrastive_task import ContrastiveTask, drop_activations, drop_patches, patches_kept
from training.duplicates import Duplicates
from training.engine import LoopSettings, train
from training.estimates import (
    AtMost,
    Expected,
    Unknown,
    bytes_of_images,
    bytes_of_rows,
    most_patches,
    text_length,
    weightless_model,
)
from training.loader import PairLoader
from training.lora import LoraSettings, adapted_names, add_adapters
from training.losses import Pairing, contrastive_loss, multi_positive_loss
from training.optimizers import set_trainable
from training.router_settings import BalanceMean, RouterSettings
from training.samplers import (
    ClusterBatchSampler,
    DistributedBatchSampler,
    GlobalBatchSampler,
    Share,
    merge_small_clusters,
)
from training.scores import Evaluation, Scores
from training.settings import STRICT, Reads
from training.stages.base import Data, Model, NumberedData, Stage, Trained, inherited, named_errors

# Pairs whose texts are all compared for --plan
COUNTED = 100_000

logger = logging.getLogger(__name__)


@dataclass(config=STRICT, kw_only=True)
class StepsStage(LoopSettings, Stage):
    """A stage that trains with the loop of `training.engine`. A kind of it has `trainable`, `task` and `run`."""

    makes_model: ClassVar[bool] = True
    # What its data are made of, as it is printed
    samples: ClassVar[str] = "samples"

    # An earlier stage, a folder or a hub name.
    model: Model
    # The pairs that it trains on.
    data: Data

    # Steps of the optimizer. Either this or num_epochs is set.
    max_steps: int | None = Field(default=None, gt=0)
    # Passes through the data.
    num_epochs: int | None = Field(default=None, gt=0)

    # Seed of the order of the data; None: the recipe's. Models that differ in nothing else make an ensemble.
    seed: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _check_steps(self):
        if (self.max_steps is None) == (self.num_epochs is None):
            raise ValueError(
                f"exactly one of max_steps ({self.max_steps}) and num_epochs ({self.num_epochs}) must be set"
            )
        if self.num_epochs is not None and self.data.streaming:
            raise ValueError("a streamed dataset has no known length: set max_steps instead of num_epochs")
        return self

    def train_model(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin,
        loader: Any,
        accelerator: Accelerator,
        context: Context,
        directory: Path,
        evaluation: Evaluation | None = None,
    ) -> None:
        """Train a model whose parameters require a gradient or not, and save it with its processor.

        Args:
            loader: has batches as `training.loader.PairLoader` does.
            accelerator: a fresh one.
            evaluation: what is measured meanwhile.
        """
        scores = evaluation and Scores(evaluation, model, processor, accelerator, directory / CHECKPOINTS)
        total_steps = self._total_steps(loader)
        training = [parameter.requires_grad for parameter in model.parameters()]
        accelerator.on_main_process(print)(
            f"{self.name}: {total_steps} steps of {self.global_batch_size} {self.samples} on "
            f"{accelerator.num_processes} x {accelerator.device.type}, {sum(training)} weight tensors train, "
            f"{len(training) - sum(training)} are frozen; its log is {directory / LOG}"
        )
        # Whatever was drawn on the way here, such as by a cache that had to be filled
        set_seed(context.seed, device_specific=True)
        state_dict = train(accelerator, model, loader.batches, self, total_steps, directory, scores)
        if accelerator.is_main_process:
            save(model, directory, state_dict=state_dict)
            save(processor, directory)
            if scores is not None and scores.best() is not None:
                shutil.copytree(scores.best(), directory, dirs_exist_ok=True)

    def trained_config(self, inputs: SimpleNamespace) -> PreTrainedConfig:
        """The configuration of the trained model. Raises Unknown, or ValueError where it cannot be trained."""

    def set_trainable(self, model: PreTrainedModel, seed: int = 0) -> None:
        """Let what trains require a gradient, and nothing else. Raises ValueError where that cannot be."""
        set_trainable(model, self.trainable)

    def trained_model(self, inputs: SimpleNamespace) -> PreTrainedModel:
        """The model without its weights; parameters that train require a gradient. Raises Unknown, ValueError."""
        model = weightless_model(self.trained_config(inputs))
        self.set_trainable(model)
        return model

    def trained_names(self, inputs: SimpleNamespace) -> list[str]:
        """The names of the parameters that differ in the trained model. Raises Unknown, ValueError."""
        return [name for name, parameter in self.trained_model(inputs).named_parameters() if parameter.requires_grad]

    def output_config(self, inputs: SimpleNamespace) -> Expected:
        before, names = inputs.model.weights, frozenset(self.trained_names(inputs))
        weights = (*before, (self.name, names)) if before else ()
        return replace(inherited(self, inputs), configs=(self.trained_config(inputs),), weights=weights)

    def problems(self, inputs: SimpleNamespace) -> Iterator[tuple[str, str]]:
        batch, accumulation, processes = self.global_batch_size, self.gradient_accumulation_steps, inputs.num_processes
        if batch % (processes * accumulation):
            shares = f"{processes} processes x {accumulation} accumulation steps"
            yield "global_batch_size", f"{batch} cannot be shared by {shares}"
        yield "optimizer", self.missing_optimizer()
        with contextlib.suppress(Unknown):
            least = batch if self.max_steps is None else batch // accumulation
            if inputs.data.known_pairs < least:
                yield (
                    "global_batch_size",
                    f"a dataset of {inputs.data.known_pairs} samples does not fill a global batch of {least}: lower it",
                )

    def steps(self, inputs: SimpleNamespace) -> int:
        """Optimizer steps in all. Raises Unknown."""
        if self.max_steps is not None:
            return self.max_steps
        return self.num_epochs * (inputs.data.known_pairs // self.global_batch_size)

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        """Memory for the weights, their gradients, AdamW's two moments, averaged weights, and the three numbers that
        AdamW computes at a time for each of the largest weight; disk also for checkpoints, one more than
        `save_total_limit` while the newest is written."""
        cost = super().cost(inputs)

        def sizes() -> list[int]:
            return [weight.numel() for weight in self.trained_model(inputs).parameters() if weight.requires_grad]

        def memory() -> int:
            weights = 4 * self.trained_model(inputs).num_parameters()
            return weights + (4 + self.bytes_of_states) * sum(sizes()) + 12 * max(sizes())

        def most() -> int:
            weights = cost["disk"]()
            if self.save_steps is None:
                return weights
            try:
                steps = self.steps(inputs)
            except Unknown:
                steps = AtMost(self.save_steps * (self.save_total_limit + 2))
            # AdamW counts its steps of each weight
            checkpoint = weights + self.bytes_of_states * sum(sizes()) + 4 * len(sizes())
            written = (steps - 1) // self.save_steps
            kept, at_once = min(written, self.save_total_limit), min(written, self.save_total_limit + 1)
            return type(steps)(max(weights + kept * checkpoint, at_once * checkpoint))

        return cost | {
            "trainable": lambda: sum(sizes()),
            "steps": lambda: self.steps(inputs),
            "samples": lambda: self.steps(inputs) * self.global_batch_size,
            "memory": memory,
            "disk at most": most,
        }

    def _share(self, accelerator: Accelerator, context: Context) -> Share:
        rank, world_size = accelerator.process_index, accelerator.num_processes
        batch_size = self.global_batch_size // (world_size * self.gradient_accumulation_steps)
        return Share(batch_size, rank, world_size, context.seed if self.seed is None else self.seed)

    def _total_steps(self, loader: Any) -> int:
        total_steps = self.max_steps or self.num_epochs * (len(loader) // self.gradient_accumulation_steps)
        if total_steps == 0:
            raise ValueError(
                f"an epoch of {len(loader)} batches has no step of {self.gradient_accumulation_steps} "
                "accumulation steps: lower gradient_accumulation_steps, or set max_steps"
            )
        return total_steps


@dataclass(config=STRICT, kw_only=True)
class TrainStage(RouterSettings, StepsStage):
    """Contrastive training of a dense or a sparse CLIP."""

    kind: ClassVar[str] = "train"
    samples: ClassVar[str] = "pairs"

    # Regular expression, matched anywhere in a parameter's name; everything else is frozen.
    trainable: str = "."
    # Adapters train, in place of weights; the trained model has them added to its weights. Not with ema_decay. None:
    # weights train.
    lora: LoraSettings | None = None

    # Random crops; None: images are resized and cropped in their center.
    augmentation: Augmentation | None = None

    # What happens to duplicates, pairs with the same text or image. "separate": they are kept out of the same batch
    # where possible, and those left count as positives; of a stream all are left. "positive": batches are shuffled,
    # and duplicates count as positives. "negative": they count as negatives, as in the papers.
    duplicates: Literal["separate", "positive", "negative"] = "separate"

    # The contrastive loss: "softmax" is CLIP's, "sigmoid" SigLIP's (arXiv:2303.15343), which needs a model with a
    # logit_bias. None: sigmoid for a model that has one.
    loss: Literal["softmax", "sigmoid"] | None = None
    # Share of the contrastive loss's target that is spread over all pairs.
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)

    # The weights of the losses of the L captions that every image has, as the captions stage makes them: gamma in
    # CLIP-FMoE eq. 4, which sum to 1. None: one caption an image, drawn anew each epoch where there are more.
    caption_weights: list[Annotated[float, Field(ge=0)]] | None = Field(default=None, min_length=1)
    # Pairs of a process's batch that are embedded at a time (GradCache, arXiv:2101.06983): memory is that of so many,
    # loss and gradient are those of the whole batch, and a step computes 4/3 as much. Not by DeepSpeed, nor with
    # several captions an image where texts have a capacity. None: all at once.
    mini_batch_size: int | None = Field(default=None, gt=0)
    # A process's batch is in the order of its texts' lengths, so that a part of mini_batch_size has little padding.
    # Only with mini_batch_size.
    group_by_length: bool = False
    # Rows of the similarity matrix held at a time; None holds the whole matrix.
    loss_chunk_size: int | None = Field(default=None, gt=0)
    # Share of the activations within experts that are 0 in each step of training, the others being scaled up; which
    # these are depends on the number of processes. None: none.
    expert_dropout: float | None = Field(default=None, gt=0, lt=1)

    # Share of an image's patches that each step leaves out, drawn anew (FLIP, arXiv:2212.00794). Follow it with a short
    # stage without, which brings the model back to whole images. None: all patches are seen.
    patch_dropout: float | None = Field(default=None, gt=0, lt=1)

    # Scores while it trains; None: none.
    evaluation: Evaluation | None = None

    @model_validator(mode="after")
    def _check(self):
        if self.lora is not None and self.trainable != ".":
            raise ValueError(f"trainable {self.trainable!r}: with lora, lora.trainable says what trains besides")
        if self.lora is not None and self.ema_decay is not None:
            raise ValueError("ema_decay: the average of an adapter's factors is not that of weights: leave out one")
        if self.caption_weights is not None and abs(sum(self.caption_weights) - 1) > 1e-6:
            raise ValueError(f"caption_weights {self.caption_weights} sum to {sum(self.caption_weights):g}, not to 1")
        if self.caption_weights is not None and self.data.streaming:
            raise ValueError("data.streaming: caption_weights need samples with numbers")
        if self.group_by_length and self.mini_batch_size is None:
            raise ValueError("group_by_length: it shortens the parts of mini_batch_size. Set that, or leave this out")
        if self.augmentation is not None and self.data.in_memory:
            raise ValueError(
                "augmentation changes images in every epoch, but data.in_memory keeps what they were: drop one"
            )
        return self

    def load_pairs(self, inputs: SimpleNamespace, context: Context) -> Rows:
        """The pairs to train on, whose images can be read."""
        return self.choose_pairs(context.pairs(inputs.data), inputs, context)

    def choose_pairs(self, rows: Rows, inputs: SimpleNamespace, context: Context) -> Rows:
        """The pairs to train on, of all that the data have: here all."""
        return rows

    def batch_sampler(
        self, rows: Rows, share: Share, inputs: SimpleNamespace, context: Context
    ) -> DistributedBatchSampler:
        """Which pairs make a batch: by default all pairs, shuffled. A stream is not asked.

        Args:
            rows: of `choose_pairs`; a sampler gives positions in them.
            share: how large the batches are and which part of them is this process's.
            inputs, context: see `Stage.run`.
        """
        return GlobalBatchSampler(len(rows), *share)

    def contrastive_loss(
        self,
        image_embeds: torch.Tensor,
        text_embeds: torch.Tensor,
        logit_scale: torch.Tensor,
        pairing: Pairing,
        logit_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss of the global batch, without those of the routers: CLIP's or SigLIP's, or CLIP-FMoE eq. 4 of it.

        All tensors are in float32, whatever the precision of the model.

        Args:
            image_embeds: (B, D) of this process, normalized; `training.losses.gather` has those of all processes.
            text_embeds: (B, D), or with `caption_weights` (captions, D): those of all images, one after the other.
            logit_scale: the inverse of the temperature, of one element.
            pairing: which images and texts belong together, and which of the L captions of an image are there.
            logit_bias: of a model that has one, of one element.

        Returns:
            This process's part, a scalar: the mean of the parts is the loss of the global batch.
        """
        options = {"chunk_size": self.loss_chunk_size, "label_smoothing": self.label_smoothing}
        options["logit_bias"] = None if self.loss == "softmax" else logit_bias
        if pairing.caption_mask is None:
            return contrastive_loss(image_embeds, text_embeds, logit_scale, **options, pairing=pairing)
        texts = text_embeds.new_zeros(*pairing.caption_mask.shape, text_embeds.shape[-1])
        texts = texts.masked_scatter(pairing.caption_mask[..., None], text_embeds)  # (B, L, D)
        weights = torch.tensor(self.caption_weights, device=texts.device)
        return multi_positive_loss(image_embeds, texts, logit_scale, weights, pairing, **options)

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        """Also the activations of the pairs that are computed at a time, the images of a batch or of all pairs, their
        similarities with their gradients, and drawn pictures; on disk the model that is measured, and the best one."""
        cost, captions = super().cost(inputs), len(self.caption_weights or [1])

        def memory_a_pair() -> int:
            """Bytes of the activations of an image and its texts, and of the gradients of a layer's."""
            model, tokens = self.trained_model(inputs), text_length(inputs.model, inputs.data) * captions
            patches = self._patches(model, inputs)
            kept = count_activations(model, self.gradient_checkpointing, tokens, patches)
            return 4 * (kept + count_largest_layer(model, tokens, patches))

        def memory() -> int:
            batch = self.global_batch_size // self.gradient_accumulation_steps
            share = batch // inputs.num_processes
            rows = min(share, self.loss_chunk_size or share)
            # Images with texts and texts with images, and as many gradients; embeddings, and as many gradients
            compared = 16 * captions * (rows * batch + batch * embedding_size(inputs.model.clip))
            images = share + (inputs.data.known_pairs if self.data.in_memory else 0)
            held = cost["memory"]() + compared + bytes_of_rows(inputs.data) + bytes_of_images(inputs.model, images)
            return held + (self.mini_batch_size or share) * memory_a_pair()

        def most() -> int:
            models = 0 if self.evaluation is None else 1 if self.evaluation.keep_best is None else 2
            return cost["disk at most"]() + models * cost["disk"]()

        return cost | {"memory": memory, "memory a pair": memory_a_pair, "disk at most": most}

    def notes(self, inputs: SimpleNamespace) -> Iterator[str]:
        """How many pairs share a text in a batch, of all pairs in one sampler's, if they are quickly read. Raises
        ValueError where they cannot be trained on."""
        data, readable = inputs.data, inputs.data.readable
        batch = self.global_batch_size // self.gradient_accumulation_steps
        others = ("load_pairs", "choose_pairs", "batch_sampler")
        is_plain = all(getattr(type(self), name) is getattr(TrainStage, name) for name in others)
        is_few = isinstance(data.pairs, int) and batch <= data.pairs <= COUNTED
        if not is_plain or not is_few or readable is None or readable.source in WORLDS or readable.streaming:
            return
        try:
            rows = load_pairs(readable, images=False).remove_columns("image")
        except (OSError, ValueError):  # a fault that is told elsewhere
            return
        shares = self._keep_apart(Duplicates.of(rows, None), GlobalBatchSampler(len(rows), batch))
        yield duplicates_line(shares, self.duplicates, "text")

    def task(self, model: PreTrainedModel) -> ContrastiveTask:
        if self.expert_dropout is not None:
            drop_activations(model, self.expert_dropout)
        if self.patch_dropout is not None:
            drop_patches(model, self.patch_dropout)
        return ContrastiveTask(model, self)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> Trained | None:
        model, processor = load_clip(inputs.model, dtype=torch.float32), load_processor(inputs.model)
        self.set_trainable(model, context.seed)
        accelerator = context.new_accelerator()
        share = self._share(accelerator, context)
        rows = self.load_pairs(inputs, context)
        duplicates, sampler, shares, may_meet = None, None, None, True
        is_negative = self.duplicates == "negative"
        # Images are read only where they matter, and not of shards at whose images nobody is to look
        texts_alone = is_negative or self.data.indexed
        if not self.data.streaming:
            duplicates = context.duplicates(rows.remove_columns("image") if texts_alone else rows, processor.tokenizer)
            sampler = self.batch_sampler(rows, share, inputs, context)
            shares = self._keep_apart(duplicates, sampler)
            # Of shards, another pair stands in for one that cannot be read
            may_meet = duplicates.may_be_there or self.data.indexed
        loader = PairLoader(
            rows,
            processor,
            self.data,
            *share,
            sampler,
            self.caption_weights,
            self.augmentation,
            group_by_length=self.group_by_length,
            with_keys=not is_negative and may_meet,  # to find duplicates in a batch, a GPU has to be waited for
            image_keys=duplicates and duplicates.images,
        )
        if accelerator.is_main_process:
            with reading(self.data):
                loader.report_captions()
            print(
                f"{self.name}: {duplicates_line(shares, self.duplicates, 'text' if texts_alone else 'text or image')}"
            )
        self.train_model(model, processor, loader, accelerator, context, directory, self.evaluation)
        return None if shares is None else Trained(len(rows), shares)

    def _keep_apart(self, duplicates: Duplicates, sampler: DistributedBatchSampler) -> dict[str, float]:
        """Let a sampler keep duplicates apart if this stage does, and count them in its first epoch: for the record."""
        batches = sampler.all_batches()
        shuffled = left = duplicates.share_in(batches)
        if self.duplicates == "separate" and len(duplicates.members):
            sampler.duplicates = duplicates
            batches = sampler.all_batches()
            left = duplicates.share_in(batches)
        if self.duplicates != "negative" and all(duplicates.are_of_one_group(batch) for batch in batches):
            raise ValueError(
                f"{self.name}.data: in every batch, all pairs have the same text or image, so there are no negatives "
                "to learn from. Use data with more captions, or larger clusters"
            )
        return {"shuffled": round(float(shuffled), 4), "left": round(float(left), 4)}

    def problems(self, inputs: SimpleNamespace) -> Iterator[tuple[str, str]]:
        yield from super().problems(inputs)
        share = self.global_batch_size // (inputs.num_processes * self.gradient_accumulation_steps)
        if self.mini_batch_size is not None and share % self.mini_batch_size:
            yield "mini_batch_size", f"{self.mini_batch_size} does not divide a process's batch of {share} pairs"
        if self.evaluation is not None:
            yield from ((f"evaluation.{setting}", problem) for setting, problem in self.evaluation.problems())
        yield from self._problems_of_model(inputs, inputs.model.clip)

    def _problems_of_model(self, inputs: SimpleNamespace, config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
        sparse = is_sparse(config)
        towers = [config.text_config, config.vision_config] if sparse else []
        yield from self.router_problems(config)
        may_be_in_vain = any(1 in (tower.num_experts, tower.num_experts_per_tok) for tower in towers)
        trained = self.trained_names(inputs) if may_be_in_vain else []
        routers_of = {
            name: [one for one in trained if ".router." in one and one.startswith(name)]
            for name in ("text_model.", "vision_model.")
        }
        lone = sum(len(of) for of, tower in zip(routers_of.values(), towers, strict=False) if tower.num_experts == 1)
        for routers, tower in zip(routers_of.values(), towers, strict=False):
            # One expert has a router for the shape of its layer, which may train with all the rest
            in_vain = tower.num_experts == 1 and lone == len(trained)
            in_vain = in_vain or tower.num_experts > tower.num_experts_per_tok == 1 and tower.norm_topk_prob
            yield (
                "trainable",
                routers
                and in_vain
                and "routers would follow their balance loss alone: the weight of one expert a token is always 1 with "
                "norm_topk_prob, or where there is one. Upcycle with norm_topk_prob false or more num_experts_per_tok, "
                "or leave routers out",
            )
        sigmoid = family_of(config).sigmoid and self.loss != "softmax"
        if self.loss == "sigmoid" and not sigmoid:
            yield "loss", f"sigmoid needs a model with a logit_bias, as SigLIP; {config.model_type!r} has none"
        if sigmoid and self.label_smoothing:
            yield "label_smoothing", "it goes with the softmax loss; this model's is sigmoid"
        if self.augmentation is not None and family_of(config).naflex:
            yield "augmentation", "random crops have one size, but this model takes images of any shape: leave it out"
        if self.expert_dropout is not None and not sparse:
            yield "expert_dropout", f"it goes with a sparse model, but {self.model} is dense"
        if self.patch_dropout is not None and family_of(config).naflex:
            yield "patch_dropout", "it goes with images of one size: leave it out"
        elif self.patch_dropout is not None:
            patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
            if not patches_kept(patches, self.patch_dropout):
                yield (
                    "patch_dropout",
                    f"it leaves none of {patches} patches: take at most {(patches - 1) * 1000 // patches / 1000}",
                )
        if self.group_by_length and sigmoid:
            yield "group_by_length", "this model's texts are all padded to one length: leave it out"
        if self.mini_batch_size is not None and sparse:
            yield from (("mini_batch_size", problem) for problem in self._other_groups(config))

    def _other_groups(self, config: CLIPMoEConfig) -> Iterator[str]:
        """Why parts of a batch would not have the groups of the whole batch."""
        for tower, captions in (("text", len(self.caption_weights or [1])), ("vision", 1)):
            of_tower = getattr(config, f"{tower}_config")
            if not of_tower.moe_layers:
                continue
            if captions > 1 and of_tower.capacity_factor is not None:
                yield (
                    "an image may lack captions, so that parts would have other groups of texts for capacity than the "
                    "whole batch: leave it out, or upcycle without a capacity in the text tower"
                )
            elif of_tower.capacity_factor is not None:
                group, sequences = of_tower.capacity_group_size, self.mini_batch_size * captions
                if group is None or sequences % group:
                    yield (
                        f"{tower}_config.capacity_group_size is {group}, and {sequences} sequences are computed at a "
                        "time: set it in the stage that makes the model to a number that divides them"
                    )

    def fingerprints(self, inputs: SimpleNamespace) -> dict[str, str]:
        if self.evaluation is None or self.evaluation.keep_best is None:  # what is measured changes nothing
            return {}
        return {f"evaluation.{setting}": value for setting, value in self.evaluation.fingerprints().items()}

    def trained_config(self, inputs: SimpleNamespace) -> PreTrainedConfig:
        config = copy.deepcopy(inputs.model.clip)
        config.dtype = torch.float32
        return config

    def set_trainable(self, model: PreTrainedModel, seed: int = 0) -> None:
        with named_errors(self, "trainable" if self.lora is None else "lora"):
            set_trainable(model, self.trainable) if self.lora is None else add_adapters(model, self.lora, seed)
        if self.loss == "softmax" and hasattr(model, "logit_bias"):
            model.logit_bias.requires_grad_(False)  # which this loss does not have
            if not any(parameter.requires_grad for parameter in model.parameters()):
                raise ValueError("the softmax loss has no logit_bias, and nothing else trains (trainable)")
        warn_of_equal_experts(model)

    def trained_model(self, inputs: SimpleNamespace) -> PreTrainedModel:
        if self.lora is None:
            return super().trained_model(inputs)
        model = copy.deepcopy(weightless_model(self.trained_config(inputs)))
        self.set_trainable(model)
        return model

    def _patches(self, model: PreTrainedModel, inputs: SimpleNamespace) -> int | None:
        """Tokens of an image in training; None: as many as the model has positions."""
        if self.patch_dropout is None or family_of(inputs.model.clip).naflex:  # which `problems` refuses
            return most_patches(inputs.model)
        vision, positions = inputs.model.clip.vision_config, model.vision_model.embeddings.position_embedding
        patches = (vision.image_size // vision.patch_size) ** 2
        return positions.num_embeddings - patches + patches_kept(patches, self.patch_dropout)

    def trained_names(self, inputs: SimpleNamespace) -> list[str]:
        if self.lora is None:
            return super().trained_names(inputs)
        self.trained_model(inputs)  # raises where there is nothing to adapt
        return adapted_names(weightless_model(self.trained_config(inputs)), self.lora)


def warn_of_equal_experts(model: PreTrainedModel) -> None:
    """Warns of routers that train between experts that are equal and stay so, as after upcycling."""
    in_vain = []
    for name, block in model.named_modules():
        if not isinstance(block, CLIPMoESparseMoeBlock):
            continue
        weights = list(block.experts.parameters())
        stay = not any(weight.requires_grad or weight.is_meta for weight in weights)
        if stay and all(torch.equal(weight, weight[:1].expand_as(weight)) for weight in weights):
            routers = [router for router in block.router.modules() if isinstance(router, CLIPMoERouter)]
            trains = any(router.weight.requires_grad and router.config.norm_topk_prob for router in routers)
            in_vain += [f"{name}.router"] * trains
    if in_vain:
        warn_once(
            logger,
            f"{join_names(in_vain)} cannot learn where experts are equal and do not train: train these, too, or first",
        )


@dataclass(config=STRICT, kw_only=True)
class TrainExpertsStage(TrainStage):
    """One expert, trained with batches of one cluster each: the FFNs of a dense CLIP (Multistage Contrastive Learning,
    CLIP-MoE section 3), or the copies and gates of a fused model (CLIP-FMoE section 4.2)."""

    kind: ClassVar[str] = "train_experts"

    trainable: str = r"\.layers\.\d+\.mlp\."  # not the FFN of SigLIP's pooling
    # The pairs that it trains on.
    data: NumberedData
    # The number by which --experts chooses it.
    expert: int = Field(gt=0)
    # A cluster stage.
    clusters: Annotated[str, Reads("cluster")]
    # Only the samples of this first-level cluster (CLIP-FMoE); None: all.
    cluster: int | None = Field(default=None, ge=0)
    # How the batches of the clusters follow each other: shuffled, or one of each in turn until none has another
    # (CLIP-FMoE appendix C).
    order: Literal["shuffled", "round_robin"] = "shuffled"
    # What happens to the samples of a cluster that is smaller than a batch: they are left out, or go to the nearest
    # other cluster.
    small_clusters: Literal["drop", "merge"] = "drop"

    def steps(self, inputs: SimpleNamespace) -> int:
        """Before there are clusters, as if all samples were in the one, or in several that they fill with batches."""
        if self.num_epochs is None or inputs.clusters.folder is None:
            return super().steps(inputs) if self.num_epochs is None else AtMost(super().steps(inputs))
        batch_size = self.global_batch_size // self.gradient_accumulation_steps
        labels = self.labels(load_clusters(inputs.clusters.folder)[0], batch_size)
        batches = (np.unique(labels[labels >= 0], return_counts=True)[1] // batch_size).sum()
        return self.num_epochs * int(batches // self.gradient_accumulation_steps)

    def batch_sampler(self, rows: Rows, share: Share, inputs: SimpleNamespace, context: Context) -> ClusterBatchSampler:
        """Batches of one cluster each."""
        clusters, _ = load_clusters(Path(inputs.clusters), context.data_fingerprint(rows))
        batch_size = share.batch_size * share.world_size
        labels = self.labels(clusters, batch_size)
        sizes = np.unique(labels[labels >= 0], return_counts=True)[1]
        unused = (sizes % batch_size).sum()
        context.accelerator.on_main_process(print)(
            f"{self.name}: {len(sizes)} clusters, {(sizes < batch_size).sum()} of them smaller than a batch "
            f"(small_clusters: {self.small_clusters}); batches of one cluster leave {unused} of {sizes.sum()} samples "
            "unused in an epoch"
        )
        return ClusterBatchSampler(labels, *share, self.order)

    def labels(self, clusters: FeatureClusters, batch_size: int) -> np.ndarray:
        """(samples,) the cluster of each sample whose batches train this expert, or -1."""
        labels = clusters.labels.copy()
        if self.cluster is not None:
            labels[clusters.tuples[labels, 0] != self.cluster] = -1
        if self.small_clusters == "merge":
            ours = labels >= 0
            labels[ours] = merge_small_clusters(labels[ours], clusters.centers, batch_size)
        return labels


@dataclass(config=STRICT, kw_only=True)
class TrainRouterStage(TrainStage):
    """Routers trained with the experts frozen (CLIP-MoE section 4), or with fusion gates (CLIP-FMoE section 4.3). The
    defaults are CLIP-MoE's."""

    kind: ClassVar[str] = "train_router"

    trainable: str = r"\.mlp\.router\."
    balance_top_k: int | None = Field(default=1, gt=0)
    balance_mean: BalanceMean = "layer"
