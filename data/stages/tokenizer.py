"""The stage that learns a tokenizer."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.data.arguments import NumberedData
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Stage


@dataclass(config=STRICT, kw_only=True)
class TokenizerStage(Stage):
    """A tokenizer learned from the captions of a dataset, as CLIP's was from its own: for `initialize`.

    For example:

        clip-moe tokenizer runs/tokenizer --data.source symbols --data.num_samples 64 --vocab_size 512
    """

    kind: ClassVar[str] = "tokenizer"
    main_process_only: ClassVar[bool] = True

    # Data whose captions it learns from.
    data: NumberedData
    # Vocabulary size, at least the 514 bytes and special tokens. Captions with few words may yield fewer.
    vocab_size: int = Field(default=49408, gt=0)
    # Tokens of a caption, with the first and the last one; at most the max_position_embeddings of the model that it is
    # for. None: as many as these.
    max_length: int | None = Field(default=None, ge=3)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.data.pairs import shared_pairs
        from clip_moe.data.texts import all_captions
        from clip_moe.data.tokenizer import SAMPLE, learn_tokenizer, pieces_per_word
        from clip_moe.engine.files import save

        rows = shared_pairs(context, inputs.data, images=False)
        print(f"{self.name}: learns at most {self.vocab_size} tokens from {len(rows)} pairs", flush=True)
        tokenizer = learn_tokenizer(all_captions(rows), self.vocab_size, self.max_length)
        save(tokenizer, directory)
        pieces = pieces_per_word(tokenizer, itertools.islice(all_captions(rows), SAMPLE))
        print(f"{self.name}: {len(tokenizer)} tokens, learned from {len(rows)} pairs; {pieces:.2f} pieces a word")
