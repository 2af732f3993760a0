"""One CLIP whose parameters are the means of those of several, to start fine-tuning from (MoDE appendix D).

python -m conversion.average OUTPUT --models FOLDER FOLDER ...
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import CLIPModel

from conversion.checkpoints import architecture, load_clip, load_model
from conversion.files import new_folder, one_line_errors
from conversion.processors import copy_processor, require_same
from modeling_clip_moe import CLIPMoEModel


@torch.no_grad()
def average(sources: Sequence[str | Path]) -> CLIPModel | CLIPMoEModel:
    """The mean, taken in float64, of the parameters of models, of which two are in memory at a time.

    Raises:
        ValueError: a model is of another kind than the first, or has another configuration.
    """
    mean = load_clip(sources[0])
    sums = {name: parameter.double() for name, parameter in mean.named_parameters()}
    for source in sources[1:]:
        model = load_model(type(mean), source)
        if architecture(model.config, type(model.config)) != architecture(mean.config, type(mean.config)):
            raise ValueError(f"{source} has another configuration than {sources[0]}: they have no mean")
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            sums[name] += parameter.double()
    for name, parameter in mean.named_parameters():
        parameter.copy_(sums[name] / len(sources))
    return mean


def convert(sources: Sequence[str | Path], folder: Path) -> None:
    """Saves the mean of models and the processor of the first. Raises as `average` and `require_same`."""
    require_same(sources)
    average(sources).save_pretrained(folder)
    copy_processor(sources[0], folder)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m conversion.average", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="new folder for the model")
    parser.add_argument("--models", nargs="+", required=True, metavar="MODEL", help="folders or hub names")
    args = parser.parse_args(argv)
    with one_line_errors(), new_folder(args.output) as folder:
        convert(args.models, folder)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
