"""LLaVA-1.5 (arXiv:2310.03744) with a vision tower of ours, as CLIP-MoE's authors measure theirs (Table 3).

`stage: lab.llava:LlavaStage` builds a LLaVA, and `stage: lab.llava:TrainLlavaStage` trains it on conversations. Below
them are the batches of conversations and the parts of a new LLaVA.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import datasets
import torch
from pydantic import Field, JsonValue, model_validator
from pydantic.dataclasses import dataclass
from tokenizers import decoders
from tokenizers.processors import TemplateProcessing
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    CLIPConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaImageProcessorPil,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from clip_moe.conversion.checkpoints import load_clip, load_config, load_model, load_weights
from clip_moe.conversion.llava import expected_outputs, load_tower, verify, warn_without_experts
from clip_moe.conversion.model_stage import ModelStage
from clip_moe.conversion.processors import load_image_processor, load_processor, load_tokenizer
from clip_moe.data.arguments import DataArguments, NumberedData
from clip_moe.data.images import decode_image
from clip_moe.data.preparation import Preparation
from clip_moe.data.workers import errors_of_workers, worker_options
from clip_moe.data.worlds import is_world
from clip_moe.engine.context import Context
from clip_moe.engine.files import save
from clip_moe.engine.messages import join_names, suggestion
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model
from clip_moe.training.losses import all_reduce_sum
from clip_moe.training.optimizers import set_trainable
from clip_moe.training.samplers import GlobalBatchSampler, Share
from clip_moe.training.stages.steps import StepsStage
from clip_moe.training.task import Task
from lab.conversations import IMAGE, load_conversations

Prompt = Literal["plain", "chat"]
# The image and its caption, as in LLaVA's first stage (llava/train/train.py, `preprocess_plain`)
PLAIN = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] }}{% else %}"
    "{% generation %}{{ message['content'] }}\n{% endgeneration %}{% endif %}{% endfor %}"
)
# What the loss leaves out
IGNORED = -100
TOWER = "vision_tower"
# Rows of a language model's table of tokens come in multiples of it, as those of llava-hf/llava-1.5-7b-hf
TOKENS_MULTIPLE = 64
# LLaVA-1.5's prompt, that of Vicuna 1.1 (llava/conversation.py, `conv_vicuna_v1`). Tokenizers add the first token.
CHAT_TEMPLATE = (
    "{%- macro text(content) -%}{%- if content is string -%}{{ content }}{%- else -%}"
    "{%- for part in content if part['type'] == 'image' -%}<image>{{ '\\n' }}{%- endfor -%}"
    "{%- for part in content if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}"
    "{%- endif -%}{%- endmacro -%}"
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
    "{% for message in messages %}{% if message['role'] == 'user' %}USER: {{ text(message['content']) }} {% else %}"
    "ASSISTANT: {% generation %}{{ text(message['content']) }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@dataclass(config=STRICT, kw_only=True)
class LlavaStage(ModelStage):
    """A LLaVA of a vision tower and a language model, with a new projector between them, and its processor."""

    kind: ClassVar[str] = "new_llava"

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
        fields = LlamaConfig.__dataclass_fields__  # it takes any other name silently
        unknown = sorted(set(self.text_config or {}) - set(fields))
        if unknown:
            raise ValueError(f"LlamaConfig has no field {unknown[0]!r}: {suggestion(unknown[0], fields)}")
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        build(inputs.tower, directory, inputs.language_model, self.text_config)


class LlavaTask(Task):
    """A LLaVA together with its loss, that of the next token of an answer. Its tower computes as at inference.

    Args:
        accumulation: batches of a step.
    """

    def __init__(self, model: LlavaForConditionalGeneration, accumulation: int = 1):
        super().__init__(model)
        self.accumulation = accumulation
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
            See `clip_moe.training.contrastive_task.ContrastiveTask`.
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
    # Longer conversations are cut to so many tokens; `cut_conversations` in the log is their share.
    max_length: int = Field(default=2048, gt=0)
    # AdamW's decay of the squared gradient's mean.
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    # AdamW's epsilon.
    adam_epsilon: float = Field(default=1e-8, gt=0)

    @model_validator(mode="after")
    def _check_conversations(self):
        if not is_world(self.data.source) and not self.data.source.endswith(".json"):
            raise ValueError("data.source: conversations are in a .json of LLaVA's layout or a built-in world")
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        model = load_model(LlavaForConditionalGeneration, inputs.model, dtype=torch.float32)
        processor = load_processor(inputs.model)
        self.set_trainable(model)
        accelerator = context.new_accelerator()
        share = self.share(accelerator, context)
        positions = model.config.text_config.max_position_embeddings
        if self.max_length > positions:
            raise ValueError(
                f"{self.name}.max_length: {self.max_length} is more than the {positions} that the language model reads"
            )
        with accelerator.main_process_first():  # which fills the cache that the others read
            rows = load_conversations(inputs.data)
        settings = self.data, share, self.prompt, self.max_length, self.gradient_accumulation_steps
        loader = ConversationLoader(rows, processor, model.config, *settings)
        task = LlavaTask(model, self.gradient_accumulation_steps)
        self.train_model(task, processor, loader, accelerator, context, directory)

    def set_trainable(self, model: LlavaForConditionalGeneration) -> None:
        """Raises ValueError where the tower would train: LLaVA's loss has no router losses, and it does not see the
        tower's last layer."""
        trainable = set_trainable(model, self.trainable)
        in_tower = [name for name in trainable if TOWER in name]
        if in_tower:
            raise ValueError(
                f"{self.name}.trainable: {self.trainable!r} is found in {join_names(in_tower)}, but LLaVA's tower "
                "stays frozen: name the other parts, as in multi_modal_projector|language_model|lm_head"
            )


class ConversationLoader(torch.utils.data.Dataset):
    """The batches of one process, for ever, from any batch on.

    Args:
        rows: of `lab.conversations.load_conversations`.
        config: of the model: how many tokens an image has.
        share: how large the batches are and which part of them is this process's.
        prompt: "plain", the image and the first answer; "chat", all turns by the processor's chat template.
        max_length: longer conversations are cut to so many tokens.
        accumulation: batches of a step, whose answers are counted together.
    """

    def __init__(
        self,
        rows: datasets.Dataset,
        processor: LlavaProcessor,
        config: LlavaConfig,
        arguments: DataArguments,
        share: Share,
        prompt: Prompt,
        max_length: int,
        accumulation: int = 1,
    ):
        self.rows, self.processor, self.arguments = rows, processor, arguments
        self.prepare = Preparation(processor.image_processor)
        self.image_tokens, self.prompt, self.max_length = config.image_seq_length, prompt, max_length
        self.accumulation, self.seed = accumulation, share.seed
        self.template = PLAIN if prompt == "plain" else processor.chat_template
        if "{% generation %}" not in (self.template or ""):
            raise ValueError(
                "the processor's chat template does not mark answers with {% generation %}: take one that does, as "
                "that of a llava stage"
            )
        # What the tokenizer puts before every text
        self.begin = processor.tokenizer("")["input_ids"]
        self.sampler = GlobalBatchSampler(len(rows), share)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.sampler)

    def batches(self, start: int) -> Iterator[dict[str, torch.Tensor]]:
        """Batches from number `start` of the run on: `input_ids`, `attention_mask` and `labels` (B, S), padded on the
        right; `pixel_values` (images, C, H, W), unless no conversation has one; `cut` (B,), 1 for those that were cut;
        `answer_tokens`, how many tokens are learned of all batches of a step.

        Args:
            start: the first batch of a step.
        """
        batches = self._batches(start)
        while True:
            step = list(islice(batches, self.accumulation))
            answer_tokens = sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in step).float()
            yield from (batch | {"answer_tokens": answer_tokens} for batch in step)

    def _batches(self, start: int) -> Iterator[dict[str, torch.Tensor]]:
        """The same, without `answer_tokens`."""
        options = worker_options(self.arguments, self.seed)
        with errors_of_workers():
            yield from DataLoader(
                self, batch_sampler=self.sampler.from_batch(start), collate_fn=self._collate, **options
            )

    def __getitem__(self, epoch_and_index: tuple[int, int]) -> dict[str, Any]:
        row = self.rows[epoch_and_index[1]]
        tokens, is_answer = self.encode(row["turns"])
        image = row["image"]
        if image is not None:
            image = self.prepare(decode_image(image))["pixel_values"]
        return {"tokens": tokens, "is_answer": is_answer, "image": image}

    def encode(self, turns: Sequence[str]) -> tuple[list[int], list[bool]]:
        """The tokens of a whole conversation, and which of them are of answers, with the token that ends one."""
        if self.prompt == "plain":
            turns = [IMAGE if IMAGE in turns[0] else "", turns[1]]
        tokens = self.processor.image_token * self.image_tokens
        messages = [
            {"role": "assistant" if number % 2 else "user", "content": text.replace(IMAGE, tokens, 1 - number % 2)}
            for number, text in enumerate(turns)
        ]
        encoded = self.processor.tokenizer.apply_chat_template(
            messages, chat_template=self.template, return_dict=True, return_assistant_tokens_mask=True
        )
        marks = [False] * len(self.begin) + list(map(bool, encoded["assistant_masks"]))
        return self.begin + encoded["input_ids"], marks

    def _collate(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        lengths = [min(len(row["tokens"]), self.max_length) for row in rows]
        tokens = [torch.tensor(row["tokens"][:length]) for row, length in zip(rows, lengths, strict=True)]
        answers = [torch.tensor(row["is_answer"][:length]) for row, length in zip(rows, lengths, strict=True)]
        labels = [ids.where(marks, IGNORED) for ids, marks in zip(tokens, answers, strict=True)]
        images = [row["image"] for row in rows if row["image"] is not None]
        image_token = self.processor.image_token_id
        seen = sum(int((ids == image_token).sum()) for ids in tokens)
        if seen != len(images) * self.image_tokens:
            raise ValueError(
                f"max_length {self.max_length} cuts an image, which takes {self.image_tokens} tokens after the prompt"
            )
        padding = self.processor.tokenizer.pad_token_id
        batch = {
            "input_ids": pad_sequence(tokens, batch_first=True, padding_value=padding),
            "attention_mask": pad_sequence(list(map(torch.ones_like, tokens)), batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
            "cut": torch.tensor([float(len(row["tokens"]) > self.max_length) for row in rows]),
        }
        return batch | ({"pixel_values": torch.stack(images)} if images else {})


def build(
    tower_source: str | Path,
    folder: Path,
    language_model: str | Path | None = None,
    text_config: dict[str, Any] | None = None,
) -> None:
    """Saves a LLaVA-1.5 whose projector is new, and its processor, into `folder`.

    The processor pads images to squares with their mean color, as LLaVA-1.5 does, then does what the tower's does. Its
    chat template is `CHAT_TEMPLATE`.

    Args:
        tower_source: a folder or hub name of a dense or sparse CLIP, or of a `CLIPMoEVisionModel`.
        language_model: a folder or hub name of one whose table of tokens can grow, such as Vicuna; None: a Llama with
            random weights and the tokenizer of `tower_source`.
        text_config: of that one, fields of `LlamaConfig`.
    """
    vision_config = load_config(tower_source)
    is_dense = type(vision_config) is CLIPConfig
    tower = load_clip(tower_source).vision_model if is_dense else load_tower(tower_source)
    if language_model is None:
        tokenizer = text_tokenizer(load_tokenizer(tower_source))
        add_tokens(tokenizer)
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        fields = {"vocab_size": len(tokenizer), "dtype": torch.float32, **ids, **(text_config or {})}
        model = LlamaForCausalLM(LlamaConfig(**fields))
        tokenizer.model_max_length = model.config.max_position_embeddings
    else:
        config, tokenizer = load_config(language_model), load_tokenizer(language_model)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"{language_model} is no language model: it is of type {config.model_type!r}")
        model = load_weights(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], language_model)
        add_tokens(tokenizer)
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=TOKENS_MULTIPLE)
    llava = join(tower, model, tokenizer.convert_tokens_to_ids(IMAGE))
    save(llava, folder)
    settings = load_image_processor(tower_source).to_dict()
    settings = {
        name: settings[name] for name in LlavaImageProcessorPil.valid_kwargs.__annotations__ if name in settings
    }
    processor = LlavaProcessor(
        image_processor=LlavaImageProcessorPil(**settings | {"do_pad": True}),
        tokenizer=tokenizer,
        patch_size=tower.config.patch_size,
        vision_feature_select_strategy=llava.config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
    save(processor, folder)
    expected = expected_outputs(llava, tower)
    del llava, tower, model
    verify(folder, expected)


def join(tower: PreTrainedModel, language_model: PreTrainedModel, image_token: int) -> LlavaForConditionalGeneration:
    """A LLaVA of a vision tower, whose patches it sees of the last layer but one, a language model and a random
    projector; the tower takes the model's dtype."""
    config = LlavaConfig(
        vision_config=tower.config,
        text_config=language_model.config,
        image_token_index=image_token,
        image_seq_length=(tower.config.image_size // tower.config.patch_size) ** 2,
        dtype=language_model.config.dtype,
    )
    warn_without_experts(config)
    with torch.device("meta"):  # all of it is replaced
        llava = LlavaForConditionalGeneration(config)
    llava.model.vision_tower, llava.model.language_model = tower, language_model.model
    llava.lm_head, llava.generation_config = language_model.lm_head, language_model.generation_config
    projector = llava.model.multi_modal_projector.to_empty(device="cpu")
    for linear in (projector.linear_1, projector.linear_2):
        linear.reset_parameters()  # torch's own, as LLaVA's code
    llava.tie_weights()
    return llava.to(language_model.dtype).eval()


def text_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """A CLIP's tokenizer for a language model: texts begin with the first token, and do not end with the last."""
    backend, first = tokenizer.backend_tokenizer, tokenizer.bos_token
    backend.no_truncation()
    backend.no_padding()
    template = f"{first} $A"
    backend.post_processor = TemplateProcessing(single=template, special_tokens=[(first, tokenizer.bos_token_id)])
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("</w>", " ")])  # as `CLIPTokenizer`
    names = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def add_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Adds the token of an image, and one for padding where there is none. Padding stands on the left, where answers
    can go on from what it pads."""
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.padding_side = "left"
