"""The stage that trains a CLIP. Kinds of training differ in pairs, batches and loss.

Another kind is a subclass of `TrainStage`. It overrides a method for each thing that it does otherwise: `choose_pairs`,
`batch_sampler`, `contrastive_loss`, `router_loss` or `auxiliary_losses`.
"""

import dataclasses
import math
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.data.arguments import Augmentation, Data
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT, Reads, refuse
from clip_moe.engine.stage import named_errors
from clip_moe.evaluation.measured_tasks import REHEARSED_ROWS
from clip_moe.training.stages.steps import REHEARSED_STEPS, StepsStage
from clip_moe.training.train_settings import Evaluation, LoraSettings, Trainable

if typing.TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

    from clip_moe.data.columns import Rows
    from clip_moe.training.contrastive_task import ContrastiveTask
    from clip_moe.training.keep import Keep
    from clip_moe.training.losses import Pairing, Reduce
    from clip_moe.training.samplers import DistributedBatchSampler, Share
    from clip_moe.training.task import AuxiliaryLoss
    from modeling_clip_moe import CLIPMoEConfig


@dataclass(config=STRICT, kw_only=True)
class TrainStage(StepsStage):
    """Contrastive training of a dense or a sparse CLIP.

    For example:

        clip-moe train runs/tuned --model training/symbol_clip --data.source symbols --data.num_samples 64 \\
            --global_batch_size 8 --max_steps 2 --learning_rate 1e-4
    """

    kind: ClassVar[str] = "train"
    samples: ClassVar[str] = "pairs"

    # Kinds of weights, or a regular expression, searched for in parameter names; all others are frozen to the bit.
    trainable: Trainable = "."
    # Adapters to train instead of the weights, and merged into them at the end.
    lora: LoraSettings | None = None

    # Random crops; None: images are resized and cropped in their center.
    augmentation: Augmentation | None = None

    # Pairs with the same text or image. "separate": kept in different batches if possible, else positives. "positive":
    # shuffled, and positives. "negative": shuffled, and negatives, as in the papers; with ten classes in batches of 64
    # it learns as much and forgets less of other kinds.
    duplicates: Literal["separate", "positive", "negative"] = "separate"

    # CLIP's softmax, or SigLIP's sigmoid (arXiv:2303.15343), which needs a model with a logit_bias and is its default.
    loss: Literal["softmax", "sigmoid"] | None = None
    # Fraction of the contrastive loss's target that is spread over all pairs.
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)

    # Weights of the losses of an image's L captions, which sum to 1 (gamma in CLIP-FMoE eq. 4). None: each epoch draws
    # one caption.
    caption_weights: list[Annotated[float, Field(ge=0)]] | None = Field(default=None, min_length=1)
    # Pairs of a process's batch to embed at a time (GradCache, arXiv:2101.06983): less memory, 4/3 of the computation,
    # the same loss and gradient. None: all at once.
    mini_batch_size: int | None = Field(default=None, gt=0)
    # A frozen model to keep while others learn (ZSCL, arXiv:2303.06628), or an embed stage of the same pairs by it.
    keep: Annotated[str, Reads("model", "embed")] | None = None
    # Weight of its loss.
    keep_weight: float = Field(default=1.0, gt=0)
    # Its embeddings, by 1 - cos (MoE-ViE, arXiv:2608.17402), or its softmax over a batch, by the KL divergence.
    keep_of: Literal["embeddings", "similarities"] = "embeddings"
    # Other pairs to keep it on, as many a step as are learned.
    keep_data: Data | None = None
    # Keep it on the pairs that are learned, too.
    keep_new: bool = True
    # Rows of the similarity matrix held at a time; None: all.
    loss_chunk_size: int | None = Field(default=None, gt=0)

    # With use_expert_bias, a step moves an expert's bias by 1e-3 times the sign of how far its load is below the mean
    # (arXiv:2408.15664), or how many standard deviations (MoE-ViE, arXiv:2608.17402, which does not tell its factor).
    expert_bias_update: Literal["sign", "z_score"] = "sign"

    # Evaluation during training; None: none.
    evaluation: Evaluation | None = None

    @property
    def incidental(self) -> Collection[str]:
        """What is measured, unless it chooses the weights."""
        return StepsStage.incidental if self._chooses else (*StepsStage.incidental, "evaluation")

    @property
    def _chooses(self) -> bool:
        return self.evaluation is not None and self.evaluation.load_best_model_at_end

    def fingerprints(self, inputs: SimpleNamespace) -> dict[str, str]:
        """Hashes of what chooses the weights, too."""
        return super().fingerprints(inputs) | (self.evaluation.fingerprints() if self._chooses else {})

    @model_validator(mode="after")
    def _check(self):
        weights = self.caption_weights
        refuse(
            (
                self.lora is not None and self.trainable != ".",
                f"trainable {self.trainable!r}: with lora, use lora.trainable",
            ),
            (
                weights is not None and abs(sum(weights) - 1) > 1e-6,
                f"caption_weights {weights} must sum to 1, got {sum(weights or []):g}",
            ),
            (
                weights is not None and self.data.streaming,
                "data.streaming: caption_weights need numbered samples, which a stream lacks: remove one of them",
            ),
            (
                self.keep is None and self.changed("keep_weight", "keep_of", "keep_data", "keep_new"),
                "keep_weight, keep_of, keep_data and keep_new go with keep, the model to keep",
            ),
            (self.keep_data is None and not self.keep_new, "keep_new: false needs other pairs: set keep_data"),
            (
                weights is not None and (self.keep_data is not None or self.keep_of == "similarities"),
                "caption_weights go with a keep of embeddings on the pairs that are learned alone",
            ),
            (
                self.global_batch_size == self.gradient_accumulation_steps,
                "global_batch_size: a step of one pair has no negatives: use 2 or more",
            ),
            (
                self.augmentation is not None and self.data.in_memory,
                "augmentation changes images in every epoch, but data.in_memory keeps them fixed: remove one of them",
            ),
        )
        return self

    def load_pairs(self, inputs: SimpleNamespace, context: Context) -> "Rows":
        """The pairs to train on, whose images can be read."""
        from clip_moe.data.pairs import shared_pairs

        return self.choose_pairs(shared_pairs(context, inputs.data), inputs, context)

    def choose_pairs(self, rows: "Rows", inputs: SimpleNamespace, context: Context) -> "Rows":
        """The pairs to train on, of all that the data have: here all."""
        return rows

    def batch_sampler(
        self, rows: "Rows", share: "Share", inputs: SimpleNamespace, context: Context
    ) -> "DistributedBatchSampler":
        """Which pairs make a batch: by default all pairs, shuffled. A stream is not asked.

        Args:
            rows: what `choose_pairs` returned; a sampler gives positions in them.
            share: how large the batches are and which part of them is this process's.
            inputs, context: see `Stage.run`.
        """
        from clip_moe.training.samplers import GlobalBatchSampler

        return GlobalBatchSampler(len(rows), share)

    def contrastive_loss(
        self,
        image_embeds: "torch.Tensor",
        text_embeds: "torch.Tensor",
        logit_scale: "torch.Tensor",
        pairing: "Pairing",
        logit_bias: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        """The loss of the global batch, without those of the routers: CLIP's or SigLIP's, or CLIP-FMoE eq. 4 of it.

        All tensors are in float32, whatever the precision of the model.

        Args:
            image_embeds: (B, D) of this process, normalized; `clip_moe.training.losses.gather` gathers all processes'.
            text_embeds: (B, D), or with `caption_weights` (captions, D): those of all images, one after the other.
            logit_scale: the inverse of the temperature, of one element.
            pairing: which images and texts belong together, and which of the L captions of an image are there.
            logit_bias: one element, for a model that has it.

        Returns:
            This process's part, a scalar: the mean of the parts is the loss of the global batch.
        """
        import torch

        from clip_moe.training.losses import contrastive_loss, multi_positive_loss

        options = {"chunk_size": self.loss_chunk_size, "label_smoothing": self.label_smoothing}
        options["logit_bias"] = None if self.loss == "softmax" else logit_bias
        if pairing.caption_mask is None:
            return contrastive_loss(image_embeds, text_embeds, logit_scale, **options, pairing=pairing)
        texts = text_embeds.new_zeros((*pairing.caption_mask.shape, text_embeds.shape[-1]))
        texts = texts.masked_scatter(pairing.caption_mask[..., None], text_embeds)  # (B, L, D)
        weights = torch.tensor(self.caption_weights, device=texts.device)
        return multi_positive_loss(image_embeds, texts, logit_scale, weights, pairing, **options)

    def task(self, model: "PreTrainedModel", inputs: SimpleNamespace) -> "ContrastiveTask":
        from clip_moe.training.contrastive_task import ContrastiveTask

        return ContrastiveTask(model, self, self.auxiliary_losses(model, inputs))

    def auxiliary_losses(self, model: "PreTrainedModel", inputs: SimpleNamespace) -> "list[AuxiliaryLoss]":
        """Losses that see model, outputs and batch, beside those of the routers."""
        return []

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> tuple[int, dict[str, float]] | None:
        import torch

        from clip_moe.conversion.checkpoints import load_clip
        from clip_moe.conversion.processors import load_processor
        from clip_moe.data.local_data import reading
        from clip_moe.data.pairs import shared_pairs
        from clip_moe.engine.provenance import duplicates_line
        from clip_moe.training.duplicates import shared_duplicates
        from clip_moe.training.keep import JoinedLoader
        from clip_moe.training.loader import PairLoader

        model, processor = load_clip(inputs.model, dtype=torch.float32), load_processor(inputs.model)
        self.set_trainable(model, context.seed)
        accelerator = context.new_accelerator()
        share = self.share(accelerator, context)
        if problems := dict.fromkeys(self.problems(model, share.batch_size)):  # of both towers alike
            raise ValueError("; ".join(f"{self.name}.{problem}" for problem in problems))
        rows = self.load_pairs(inputs, context)
        # Images are read only where they matter, and not of shards at whose images nobody is to look
        compares_texts_alone = self.duplicates == "negative" or self.data.indexed
        # Which share of the pairs has a duplicate in its batch in the first epoch; a stream has no such numbers
        sampler = shares = keys = None
        if self.data.streaming:
            keys = True
        else:
            compared = rows.remove_columns("image") if compares_texts_alone else rows
            duplicates = shared_duplicates(context, compared, processor.tokenizer)
            sampler = self.batch_sampler(rows, share, inputs, context)
            batches = sampler.all_batches()
            shuffled = left = duplicates.share_in(batches)
            if self.duplicates == "separate" and len(duplicates.members):
                sampler.duplicates = duplicates
                batches = sampler.all_batches()
                left = duplicates.share_in(batches)
            if self.duplicates != "negative" and all(duplicates.are_of_one_group(batch) for batch in batches):
                raise ValueError(
                    f"{self.name}.data: in every batch, all pairs have the same text or image, so there are no "
                    "negatives to learn from. Use data with more captions, or larger clusters"
                )
            shares = {"shuffled": round(float(shuffled), 4), "left": round(float(left), 4)}
            # In shards, another pair replaces an unreadable one
            if duplicates.may_be_there or self.data.indexed:
                keys = duplicates.images
        # To find the duplicates in a batch, a GPU has to be waited for
        keys = None if self.duplicates == "negative" else keys
        weights, augmentation = self.caption_weights, self.augmentation
        kept, keep = self.kept(inputs, rows, model, context, share.batch_size)
        loader = PairLoader(rows, processor, self.data, share, sampler, weights, augmentation, keys, kept)
        context.sample_bytes["images"] = loader.bytes_in_memory
        if accelerator.is_main_process:
            with reading(self.data.source):
                loader.report_captions(self.name)
            compared = "text" if compares_texts_alone else "text or image"
            print(f"{self.name}: {duplicates_line(shares, self.duplicates, compared)}")
        task = self.task(model, inputs)
        task.keep = keep
        if self.keep_data is not None:
            loader = JoinedLoader(
                loader, PairLoader(shared_pairs(context, inputs.keep_data), processor, self.keep_data, share)
            )
        self.train_model(task, processor, loader, accelerator, context, directory, self.evaluation)
        return None if shares is None else (len(rows), shares)

    def kept(
        self, inputs: SimpleNamespace, rows: "Rows", model: "PreTrainedModel", context: Context, batch_size: int
    ) -> "tuple[Mapping[str, np.ndarray], Keep | None]":
        """The teacher's embeddings of the pairs, if they are there, and its loss."""
        from clip_moe.training.keep import Keep, load_teacher

        if self.keep is None:
            return {}, None
        with named_errors(self, "keep"):
            kept, teacher = load_teacher(self, inputs, rows, model, context)
        return kept, Keep(teacher, self.keep_weight, self.keep_of, batch_size, self.keep_new)

    def rehearsed(self, num_samples: int) -> typing.Self:
        """Also measured once, on few rows."""
        stage = super().rehearsed(num_samples)
        if stage.evaluation is None:
            return stage
        rows = {"every_steps": REHEARSED_STEPS, "max_rows": REHEARSED_ROWS}
        return dataclasses.replace(stage, evaluation=dataclasses.replace(stage.evaluation, **rows))

    def with_batch(self, batch_size: int, num_processes: int) -> typing.Self:
        """With parts of the batch that divide it."""
        stage = super().with_batch(batch_size, num_processes)
        size = None if self.mini_batch_size is None else math.gcd(self.mini_batch_size, batch_size)
        return dataclasses.replace(stage, mini_batch_size=size)

    def set_trainable(self, model: "PreTrainedModel", seed: int = 0) -> None:
        """Let what trains require a gradient, and nothing else. Raises ValueError where that cannot be."""
        from clip_moe.training.optimizers import add_adapters, set_trainable, warn_of_idle_parts

        with named_errors(self, "trainable" if self.lora is None else "lora"):
            set_trainable(model, self.trainable) if self.lora is None else add_adapters(model, self.lora, seed)
        if self.loss == "softmax" and hasattr(model, "logit_bias"):
            model.logit_bias.requires_grad_(False)  # which this loss does not have
        warn_of_idle_parts(self.name, model)

    def router_loss(
        self, config: "CLIPMoEConfig", outputs: Any, batch: "Mapping[str, torch.Tensor]", reduce: "Reduce"
    ) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
        """The losses of a sparse model's routers, and scalars to log: see `router_losses`."""
        from clip_moe.training.losses import router_losses

        return router_losses(config, outputs, batch, reduce)

    def problems(self, model: "PreTrainedModel", batch_size: int) -> "Iterator[str]":
        """Settings that do not fit the model, or the batch of a process: `setting: why`."""
        from modeling_clip_moe.families import family_of, sparse_towers

        config, family, part = model.config, family_of(model.config), self.mini_batch_size
        if part is not None and batch_size % part:
            yield f"mini_batch_size: {part} does not divide a process's batch of {batch_size} pairs"
        if self.loss == "sigmoid" and not family.sigmoid:
            yield f"loss: sigmoid needs a model with a logit_bias, as SigLIP; {config.model_type!r} has none"
        if self.label_smoothing and family.sigmoid and self.loss != "softmax":
            yield "label_smoothing: it needs the softmax loss, but this model's is sigmoid"
        if self.augmentation is not None and family.naflex:
            yield "augmentation: it needs images of one size, but this model takes any shape: remove it"
        towers = sparse_towers(config)
        if self.expert_bias_update == "z_score" and not any(tower.use_expert_bias for tower in towers.values()):
            yield (
                "expert_bias_update: z_score moves biases of experts, but this model has none: upcycle with "
                "use_expert_bias true, or remove it"
            )
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        for name, tower in towers.items():
            # One expert has a router for the shape of its layer
            is_always_1 = tower.num_experts > tower.num_experts_per_tok == 1 and tower.norm_topk_prob
            if is_always_1 and any(".router." in parameter and parameter.startswith(name) for parameter in trained):
                yield (
                    "trainable: routers would follow their balance loss alone: with norm_topk_prob, the weight of one "
                    "expert a token is always 1. Upcycle with norm_topk_prob false or more num_experts_per_tok, or "
                    "leave routers out"
                )
            if part is None or tower.capacity_factor is None:
                continue
            group = tower.capacity_group_size
            # An image may lack captions, so that parts would have other groups of texts than the whole batch
            if group is None or part % group or name == "text" and len(self.caption_weights or ()) > 1:
                yield (
                    f"mini_batch_size: {name}_config.capacity_group_size is {group}, and {part} sequences are computed "
                    "at a time: set it in the stage that makes the model to a number that divides them; several "
                    "captions an image go without a capacity of the text tower"
                )
