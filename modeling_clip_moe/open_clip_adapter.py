"""CLIP-MoE with the calls of open_clip, for programs that use those:
`model, transform, tokenizer = load_clip("user/clip-moe")`."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoProcessor, PreTrainedModel

from .configuration_clip_mode import CLIPMoDEConfig
from .families import FAMILY_OF_TYPE, longest_text


class OpenCLIPAdapter(nn.Module):
    """A CLIP of transformers with the calls of open_clip's models. In texts, what follows the first `eos_token_id` is
    padding."""

    def __init__(self, model: PreTrainedModel, eos_token_id: int):
        super().__init__()
        self.model = model
        self.eos_token_id = eos_token_id

    @property
    def logit_scale(self) -> Tensor:
        """Scalar: the logarithm of the scale of similarities."""
        return self.model.logit_scale.squeeze()

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Embeddings (B, projection_dim) of images (B, channels, height, width)."""
        features = self.model.get_image_features(image, return_dict=True).pooler_output
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Embeddings (B, projection_dim) of token ids (B, S)."""
        mask = None
        if not hasattr(self.model, "logit_bias"):  # SigLIP reads padding, too
            is_end = (text == self.eos_token_id).long()
            mask = (is_end.cumsum(dim=-1) - is_end == 0).long()  # up to the first end
        features = self.model.get_text_features(text, attention_mask=mask, return_dict=True).pooler_output
        return F.normalize(features, dim=-1) if normalize else features

    def forward(
        self, image: Tensor | None = None, text: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Normalized embeddings of both, None for what is not given, and the scale of similarities."""
        image_features = None if image is None else self.encode_image(image, normalize=True)
        text_features = None if text is None else self.encode_text(text, normalize=True)
        return image_features, text_features, self.logit_scale.exp()


def load_clip(
    name: str, device: str | torch.device = "cpu", revision: str | None = None, **kwargs
) -> tuple[OpenCLIPAdapter, Callable[[Image.Image], Tensor], Callable[[str | Sequence[str]], Tensor]]:
    """
    Loads a sparse or dense model and its processor, as CLIP_benchmark's function of this name does.

    Args:
        name: folder or hub name.
        kwargs: passed to `AutoModel.from_pretrained`.

    Returns:
        the model in evaluation mode, a function of one image to a tensor (channels, height, width), and a function of
        texts to token ids (B, S).

    Raises:
        ValueError: a mixture of whole CLIPs, whose similarities are no product of two embeddings; or a model for
            images of any shape, each of which is three tensors.
    """
    model_type = AutoConfig.from_pretrained(name, revision=revision).model_type
    if model_type == CLIPMoDEConfig.model_type:
        raise ValueError(f"{name} is a mixture of CLIPs: take one of its experts, such as {name}/expert_0")
    if model_type in FAMILY_OF_TYPE and FAMILY_OF_TYPE[model_type].naflex:
        raise ValueError(f"{name} takes images of any shape (NaFlex), but open_clip's of one: call it by transformers")
    model = AutoModel.from_pretrained(name, revision=revision, **kwargs).eval().to(device)
    processor = AutoProcessor.from_pretrained(name, revision=revision)

    def transform(image: Image.Image) -> Tensor:
        return processor.image_processor(image.convert("RGB"), return_tensors="pt").pixel_values[0]

    def tokenize(texts: str | Sequence[str]) -> Tensor:
        texts, length = [texts] if isinstance(texts, str) else list(texts), longest_text(model.config.text_config)
        options = {"padding": "max_length", "truncation": True, "max_length": length, "return_tensors": "pt"}
        return processor.tokenizer(texts, **options).input_ids

    end, separator = processor.tokenizer.eos_token_id, processor.tokenizer.sep_token_id
    return OpenCLIPAdapter(model, separator if end is None else end), transform, tokenize
