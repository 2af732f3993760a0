"""Conversations about images as the batches of a process, with labels on the tokens of answers alone."""

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal

import datasets
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlavaConfig, LlavaProcessor

from data.conversations import IMAGE
from data.images import decode_image
from data.preparation import Preparation
from data.sources import DataArguments
from data.workers import errors_of_workers, worker_options
from training.samplers import GlobalBatchSampler, Share

logger = logging.getLogger(__name__)

Prompt = Literal["plain", "chat"]
# The image and its caption, as in LLaVA's first stage (llava/train/train.py, `preprocess_plain`)
PLAIN = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] }}{% else %}"
    "{% generation %}{{ message['content'] }}\n{% endgeneration %}{% endif %}{% endfor %}"
)
# What the loss leaves out
IGNORED = -100
# Conversations that are looked at to tell how many are too long
LOOKED_AT = 10_000


class ConversationLoader(torch.utils.data.Dataset):
    """The batches of one process, for ever, from any batch on.

    Args:
        rows: of `data.conversations.load_conversations`.
        config: of the model: how many tokens an image has.
        share: how large the batches are and which part of them is this process's.
        prompt: "plain", the image and the first answer; "chat", all turns by the processor's chat template.
        max_length: longer conversations are cut to so many tokens.
        accumulation: batches of a step, whose answers are counted together.

    Raises:
        ValueError: the data are fewer than a global batch, or the chat template does not mark answers.
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
        self.sampler = GlobalBatchSampler(len(rows), *share)

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
            image = decode_image(image, self.arguments.image_root)
            image = self.prepare(image)
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

    def report_cut(self) -> None:
        """Warns of conversations that are longer than `max_length`, with their share, and of those whose answers are
        cut off whole: of all, or of as many as `LOOKED_AT` tell."""
        chosen = np.random.default_rng(self.seed).permutation(len(self.rows))[:LOOKED_AT]
        marks = [self.encode(turns)[1] for turns in self.rows.select_columns("turns").select(np.sort(chosen))["turns"]]
        cut = [of_one for of_one in marks if len(of_one) > self.max_length]
        if cut:
            unanswered = sum(not any(of_one[: self.max_length]) for of_one in cut)
            logger.warning(
                "%.1f%% of the conversations of %s (%d looked at) are longer than max_length, %d tokens, and are cut; "
                "of %d of them no answer is left",
                100 * len(cut) / len(marks), self.arguments.source, len(marks), self.max_length, unanswered,
            )  # fmt: skip

    def _collate(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        lengths = [min(len(row["tokens"]), self.max_length) for row in rows]
        tokens = [torch.tensor(row["tokens"][:length]) for row, length in zip(rows, lengths, strict=True)]
        answers = [torch.tensor(row["is_answer"][:length]) for row, length in zip(rows, lengths, strict=True)]
        labels = [of_one.where(marks, IGNORED) for of_one, marks in zip(tokens, answers, strict=True)]
        images = [row["image"] for row in rows if row["image"] is not None]
        image_token = self.processor.image_token_id
        seen = sum(int((of_one == image_token).sum()) for of_one in tokens)
        if seen != len(images) * self.image_tokens:
            wholes = [row["tokens"] for row in rows if image_token in row["tokens"]]
            least = max(len(whole) - whole[::-1].index(image_token) for whole in wholes)
            raise ValueError(
                f"max_length {self.max_length} cuts an image, which takes {self.image_tokens} tokens: with the prompt "
                f"before it, {least} are needed"
            )
        padding = self.processor.tokenizer.pad_token_id
        batch = {
            "input_ids": pad_sequence(tokens, batch_first=True, padding_value=padding),
            "attention_mask": pad_sequence(list(map(torch.ones_like, tokens)), batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
            "cut": torch.tensor([float(len(row["tokens"]) > self.max_length) for row in rows]),
        }
        return batch | ({"pixel_values": torch.stack(images)} if images else {})
