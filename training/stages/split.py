"""The stage that reads pairs once, and holds out a test."""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from training.context import Context
from training.settings import STRICT
from training.stages.base import Model, NumberedData, Stage


@dataclass(config=STRICT, kw_only=True)
class SplitStage(Stage):
    """Pairs that are read and looked at once, with a split to train on and one to test on; others use it as their
    `data.source`.

    Where the data have no split `test`, a tenth is held out: no caption and no image of it is in training. What the
    captions allow at best is printed, and stands in `overview.md` and at the top of reports. Images in files of their
    own stay where they are.

        clip-moe split runs/pictures --data.source my/images --model training/symbol_clip
    """

    kind: ClassVar[str] = "split"
    main_process_only: ClassVar[bool] = True

    # The pairs to train on, and where the others lie.
    data: NumberedData
    # Whose tokenizer reads the captions: an earlier stage, a folder or a hub name.
    model: Model
    # The split to test on. Where the data have none of this name, one is held out.
    test_split: str = "test"
    # The share that is held out.
    held_out: float = Field(default=0.1, gt=0, lt=1)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        import datasets

        from conversion.processors import load_processor
        from data.held_out import hold_out
        from data.mixture import pairs_with_images
        from data.overview import look_at
        from data.pairs import one_row_an_image
        from data.sources import has_split
        from records.files import write_text
        from records.markdown import item

        tokenizer = load_processor(inputs.model).tokenizer
        if has_split(inputs.data, self.test_split):
            train, test = (pairs_with_images(one) for one in (inputs.data, inputs.data.of_split(self.test_split)))
            origin = f"its split {self.test_split}"
        else:
            train, test = hold_out(pairs_with_images(inputs.data), self.held_out, context.seed)
            origin = f"{self.held_out:.0%} held out, whose captions and images are not in training"
        test = one_row_an_image(test)
        datasets.DatasetDict(train=train, test=test).save_to_disk(directory)
        lines = [f"The test is {origin}.", *look_at(train, test, tokenizer).sentences]
        write_text(directory / "overview.md", "\n".join(map(item, lines)) + "\n")
        print("\n".join([f"{self.name}: {inputs.data.source}", *lines]))
