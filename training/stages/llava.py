"""LLaVA-1.5 (arXiv:2310.03744) with a vision tower of ours, as CLIP-MoE's authors measure theirs (Table 3)."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
from pydantic import Field, JsonValue, model_validator
from pydantic.dataclasses import dataclass
from torch import nn
from transformers import CLIPConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from conversion import llava
from conversion.checkpoints import load_model
from conversion.processors import load_processor
from data.sources import reading
from data.worlds import WORLDS
from modeling_clip_moe import CLIPMoEConfig, CLIPMoEVisionConfig
from records.messages import cut, what_is_meant
from training.context import Context
from training.conversations import ConversationLoader, Prompt
from training.estimates import Unknown
from training.losses import all_reduce_sum
from training.optimizers import set_trainable
from training.settings import STRICT
from training.stages.base import Model, NumberedData, Stage
from training.stages.train import StepsStage

TOWER = "vision_tower"


@dataclass(config=STRICT, kw_only=True)
class LlavaStage(Stage):
    """A LLaVA of a vision tower and a language model, with a new projector between them: `conversion.llava`."""

    kind: ClassVar[str] = "llava"
    makes_model: ClassVar[bool] = True
    main_process_only: ClassVar[bool] = True

    # An earlier stage, a folder or a hub name: a CLIP, of which the vision tower is taken.
    tower: Model
    # A folder or hub name, such as lmsys/vicuna-7b-v1.5.
    language_model: Model | None = None
    # Instead: fields of transformers' LlamaConfig, for a language model with random weights and the tower's tokenizer.
    text_config: dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _check(self):
        if (self.language_model is None) == (self.text_config is None):
            raise ValueError("exactly one of language_model and text_config must be set")
        known = LlamaConfig.__dataclass_fields__
        unknown = sorted(set(self.text_config or {}) - set(known))
        if unknown:
            raise ValueError(
                f"LlamaConfig has no field {', '.join(map(repr, unknown))}: {what_is_meant(unknown[0], known)}"
            )
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        llava.build(inputs.tower, directory, inputs.language_model, self.text_config)

    def output_config(self, inputs: SimpleNamespace) -> LlavaConfig:
        tower, *others = inputs.tower.known_configs
        if others or not isinstance(tower, CLIPConfig | CLIPMoEConfig | CLIPMoEVisionConfig):
            raise ValueError(f"{self.name}.tower: {self.tower} is no CLIP with one vision tower")
        if self.text_config is None:
            text_config = inputs.language_model.known_configs[0]
        else:  # the tower's tokens, and that of an image
            words = getattr(tower, "text_config", CLIPConfig().text_config).vocab_size + 1
            known = words if hasattr(tower, "text_config") else 0
            text_config = llava.llama_config({"vocab_size": words} | self.text_config, known)
        return llava.llava_config(getattr(tower, "vision_config", tower), text_config, image_token=0)


class LlavaTask(nn.Module):
    """A LLaVA together with its loss, that of the next token of an answer. Its tower computes as at inference.

    Args:
        accumulation: batches of a step.
    """

    def __init__(self, model: LlavaForConditionalGeneration, accumulation: int = 1):
        super().__init__()
        self.model, self.accumulation = model, accumulation
        # What Accelerate shards one by one with FSDP2: of a tower, transformers also names parts of whole CLIPs
        kinds = {type(module).__name__ for module in model.modules()}
        self._no_split_modules = sorted(kinds.intersection(model._no_split_modules))

    def train(self, mode: bool = True) -> "LlavaTask":
        super().train(mode)
        self.model.model.vision_tower.eval()  # frozen: no capacity of experts, no noise of routers
        return self

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of the answers in a batch, of which the mean over the batches of a step and over the processes is
        that over the tokens of all their answers; and what is logged of it.

        Args:
            batch: of a `ConversationLoader`, this process's share.

        Returns:
            See `training.contrastive_task.ContrastiveTask`.
        """
        cut, tokens = batch.pop("cut"), batch.pop("answer_tokens")
        all_tokens, processes = all_reduce_sum(tokens), all_reduce_sum(torch.ones_like(tokens))
        # Gradients are averaged over the processes, and over the batches of a step
        share = all_tokens.clamp(min=1) / processes / self.accumulation
        nothing = 0.0 if "pixel_values" in batch else self._see_nothing(batch["labels"].device)
        loss = self.model(**batch, num_items_in_batch=share, use_cache=False).loss + nothing
        return loss, {"loss": loss.detach(), "cut_conversations": cut.mean(), "answer_tokens": all_tokens}

    def _see_nothing(self, device: torch.device) -> torch.Tensor:
        """0, computed from a black image: tower and projector must compute in every process, and in the same order."""
        config = self.model.config.vision_config
        image = torch.zeros(1, config.num_channels, config.image_size, config.image_size, device=device)
        return 0 * sum(features.sum() for features in self.model.get_image_features(image).pooler_output)


@dataclass(config=STRICT, kw_only=True)
class TrainLlavaStage(StepsStage):
    """A stage of LLaVA's training: conversations about images, of which the answers' tokens are learned."""

    kind: ClassVar[str] = "train_llava"
    samples: ClassVar[str] = "conversations"

    # A llava or train_llava stage, a folder or a hub name of a LLaVA.
    model: Model
    # Conversations: a .json in LLaVA's layout, whose entries may lack an image, or a built-in world, whose pictures are
    # described and asked about.
    data: NumberedData
    # Regular expression, matched anywhere in a parameter's name; everything else is frozen. The tower always is.
    trainable: str = "multi_modal_projector"
    # plain: the image, then its first answer, as in LLaVA's first stage. chat: all turns, by the model's chat template.
    prompt: Prompt = "chat"
    # Parts of a step that are computed one after the other: more of them lower memory, and the loss stays the same.
    gradient_accumulation_steps: int = Field(default=1, gt=0)
    # Longer conversations are cut to so many tokens.
    max_length: int = Field(default=2048, gt=0)
    # AdamW's decay of the squared gradient's mean.
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    # AdamW's epsilon.
    adam_epsilon: float = Field(default=1e-8, gt=0)

    @model_validator(mode="after")
    def _check_conversations(self):
        unused = [name for name in ("in_memory", "captions_per_line") if getattr(self.data, name)]
        if unused:
            raise ValueError(f"data.{unused[0]} is not for conversations")
        if self.data.source not in WORLDS and not self.data.source.endswith(".json"):
            raise ValueError("data.source: conversations are in a .json of LLaVA's layout or a built-in world")
        return self

    def task(self, model: PreTrainedModel) -> LlavaTask:
        return LlavaTask(model, self.gradient_accumulation_steps)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        model = load_model(LlavaForConditionalGeneration, inputs.model, dtype=torch.float32)
        processor = load_processor(inputs.model)
        self.set_trainable(model)
        accelerator = context.new_accelerator()
        share = self._share(accelerator, context)
        rows = context.conversations(inputs.data)
        settings = self.data, share, self.prompt, self.max_length, self.gradient_accumulation_steps
        loader = ConversationLoader(rows, processor, model.config, *settings)
        if accelerator.is_main_process:
            with reading(self.data):
                loader.report_cut()
        self.train_model(model, processor, loader, accelerator, context, directory)

    def problems(self, inputs: SimpleNamespace) -> Iterator[tuple[str, str]]:
        yield from super().problems(inputs)
        with contextlib.suppress(Unknown):
            config = self.trained_config(inputs)
            positions, image = config.text_config.max_position_embeddings, config.image_seq_length
            words = len(f"{llava.CHAT_BEGIN} USER:".split()) if self.prompt == "chat" else 0  # each a token or more
            if not image + words < self.max_length <= positions:
                before = f" and the {words} words before it" if words else ""
                yield (
                    "max_length",
                    f"{self.max_length} must be more than the {image} tokens of an image{before}, and at most the "
                    f"{positions} that the language model reads",
                )

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        cost = super().cost(inputs)

        def memory() -> int:
            known = f"{cost['memory']() / 1e9:,.2f} GB, and activations"
            raise Unknown(f"{known}, which depend on how long the conversations are")

        return cost | {"memory": memory}

    def trained_config(self, inputs: SimpleNamespace) -> LlavaConfig:
        config = copy.deepcopy(inputs.model.known_configs[0])
        if not isinstance(config, LlavaConfig):
            raise ValueError(f"{self.name}.model: a LLaVA is needed, not a model of type {config.model_type!r}")
        config.dtype = torch.float32
        return config

    def set_trainable(self, model: LlavaForConditionalGeneration, seed: int = 0) -> None:
        """Raises ValueError where the tower would train: LLaVA's loss has no router losses, and it does not see the
        tower's last layer."""
        trainable, _ = set_trainable(model, self.trainable)
        in_tower = [name for name in trainable if TOWER in name]
        if in_tower:
            raise ValueError(
                f"{self.name}.trainable: {self.trainable!r} is found in {cut(in_tower)}, but LLaVA's tower stays "
                "frozen: name the other parts, as in multi_modal_projector|language_model|lm_head"
            )
