"""
Loading and saving of sparse models: nothing is drawn at random in silence, files have the names of CLIP's, and the code
of custom models goes beside their weights.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version
from transformers import initialization as init
from transformers.utils import logging

from .configuration_clip_moe import SparseMoEConfig
from .experts import CLIPMoEExperts
from .self_test import self_test
from .sparse_moe import CLIPMoEGatedMLP, CLIPMoERouter, CLIPMoESparseMoeBlock, SparseEncoderLayer
from .transformers_internals import (
    ConversionOps,
    PrefixChange,
    WeightConverter,
    get_relative_import_files,
    register_checkpoint_conversion_mapping,
)

logger = logging.get_logger(__name__)

# In files, every sparse block and every gated FFN has an empty tensor of the first name, and a sparse block of a gated
# tower one of the second. Dense classes, which look for their FFN there, would take a random one and at most warn if
# there was nothing: this is an error
SPARSE_LAYER_MARKS = "fc1.weight", "gate_proj.weight"
# First parts of a whole model's weight names in files; a class with some of these parts ignores the rest
PARTS = ("text_model.", "vision_model.", "text_projection.", "visual_projection.", "classifier.", "logit_")

PACKAGE = Path(__file__).parent
# Custom classes -> their files
OWN_CLASSES: dict[type, Path] = {}
# `from modeling_clip_moe.sparse_moe import ...`
PACKAGE_IMPORT = re.compile(rf"^(\s*)from {PACKAGE.name}\.(\w+) import", flags=re.MULTILINE)


def require_one_encoder(state_dict: Mapping[str, Tensor], tied: Mapping[str, str], prefix: str = "") -> None:
    """Raises ValueError if weights that are one tensor in a model (`tied`: name -> name) differ in a state dict."""
    pairs = [(f"{prefix}{name}", f"{prefix}{source}") for name, source in tied.items()]
    differing = [
        name
        for name, source in pairs
        if name in state_dict
        and source in state_dict
        and state_dict[name].device.type != "meta"
        and not torch.equal(state_dict[name], state_dict[source])
    ]
    if differing:
        raise ValueError(
            f"A model with shared_encoder=True has one encoder, but the towers differ in {_abbreviate(differing)}. "
            "Tie them with model.tie_weights(), which keeps the text tower's, or set shared_encoder to False."
        )


def _abbreviate(keys: list[str]) -> str:
    shown, more = keys[:8], len(keys) - 8
    return ", ".join(shown) + (f", ... ({more} more)" if more > 0 else "")


def _warn_unquantized(model: nn.Module, name: str) -> None:
    """Warn of experts that a quantization left as they are, as those that only look for `nn.Linear` do."""
    experts = [module for module in model.modules() if isinstance(module, CLIPMoEExperts)]
    weights = [weight for module in experts for weight in module.weights()[::2]]
    if any(type(weight) is nn.Parameter and weight.is_floating_point() for weight in weights):
        up = "gate_up_proj" if experts[0].is_gated else "up_proj"
        logger.warning(
            f"{name}: the quantization left the experts as they are. Name their weights, experts.{up} and "
            "experts.down_proj, to quantize them, too."
        )


class EncodeMixin:
    """Methods of whole models: embeddings as tensors, not as outputs of transformers, and the self-test of a published
    folder."""

    # Parameters that CLIP's files hold without an axis
    _scalars = ("logit_scale",)

    def self_test(self, revision: str | None = None) -> dict[str, float]:
        """Raises ValueError where this does not compute what it did when it was published; see `self_test.py`."""
        return self_test(self, revision=revision)

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Embeddings (B, D) of texts (B, S), see `get_text_features`."""
        return self.get_text_features(input_ids, attention_mask, return_dict=True).pooler_output

    def encode_image(self, pixel_values: Tensor, **kwargs: Tensor) -> Tensor:
        """Embeddings (B, D) of images, see `get_image_features`."""
        return self.get_image_features(pixel_values, return_dict=True, **kwargs).pooler_output


class WholeModelMixin(EncodeMixin):
    """Stands before the class of a whole dense model, whose towers become sparse."""

    dense_class: type[PreTrainedModel]
    text_model_class: type[PreTrainedModel]
    vision_model_class: type[PreTrainedModel]

    def __init__(self, config: SparseMoEConfig):
        super(self.dense_class, self).__init__(config)  # not the dense class's own, which builds dense towers
        self.text_model = self.text_model_class._from_config(config.text_config)
        self.vision_model = self.vision_model_class._from_config(config.vision_config)


class OneAxis(ConversionOps):
    """Gives a scalar one axis: CLIP's files hold `logit_scale` without one."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        (tensor,) = input_dict.values()
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        return {target_patterns[0]: tensor.reshape(-1)}

    @property
    def reverse_op(self):
        return self


class SparseMoEMixin:
    """The initialization of experts, and loading that refuses incomplete checkpoints, for models of all families. It
    stands before a family's own subclass of `PreTrainedModel`."""

    _auto_class = "AutoModel"
    # Otherwise looked up in the class that is built first, and remembered for its subclasses
    _can_set_experts_implementation_cached_value = True
    # Losses are means over the batch, whatever else a `Trainer` passes: it divides them by the accumulation steps
    accepts_loss_kwargs = False
    _scalars = ()
    # Weights that a checkpoint may lack
    _optional_weights = ()
    # The first part of the names of a tower's weights in files
    _tower_prefix = ""
    # The class of layers that replaces those of a family's own tower, which builds dense ones, before weights are drawn
    layer_class: type[SparseEncoderLayer] | None = None

    def post_init(self):
        self._register_conversions()
        if self.layer_class is not None and hasattr(self, "encoder"):
            layers = range(self.config.num_hidden_layers)
            self.encoder.layers = nn.ModuleList([self.layer_class(self.config, i) for i in layers])
        super().post_init()
        if any(name.endswith("expert_bias") for name, _ in self.named_buffers()):
            # It moves by steps that lower precision would lose
            self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), "expert_bias"}
        # Not those of its towers, which transformers adds: each ignores the other one
        own = {f"{name}." for name, _ in self.named_children()} | {self._tower_prefix}
        others = () if isinstance(self, WholeModelMixin) else [part for part in PARTS if part not in own]
        ignored = {f"^{re.escape(part)}" for part in others}
        marks = {rf"\.mlp\.{re.escape(mark)}$" for mark in SPARSE_LAYER_MARKS}
        self._keys_to_ignore_on_load_unexpected = ignored | marks

    def _register_conversions(self):
        # transformers looks conversions up by class name: without this, a subclass would load random weights. Not when
        # a class is made, since the first registration builds the table of all models
        changes = [PrefixChange(prefix_to_remove=self._tower_prefix[:-1])] if self._tower_prefix else []
        changes += [WeightConverter([name], [name], [OneAxis()]) for name in self._scalars]
        register_checkpoint_conversion_mapping(type(self).__name__, changes, overwrite=True)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        """
        Loads a model as `PreTrainedModel.from_pretrained` does, but never a partly random one.

        Raises:
            ValueError: the checkpoint is dense, lacks weights or holds others; this transformers splits experts
                wrongly; or the towers of a shared encoder differ or are split, over processes or by a device map.
        """
        if kwargs.get("config") is None:
            cls._refuse_dense(pretrained_model_name_or_path, kwargs)
        split, version = kwargs.get("distributed_config"), transformers_version
        splits_experts = getattr(split, "enable_expert_parallel", False) or (getattr(split, "ep_size", None) or 1) > 1
        if splits_experts and [int(part) for part in version.split(".")[:2]] < [5, 23]:
            raise ValueError(f"transformers {version} trains split experts wrongly: use transformers 5.23 or newer.")
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
            )
        except (IndexError, RuntimeError) as error:  # of accelerate and torch, where a device map splits tied weights
            settings, _ = cls.config_class.get_config_dict(pretrained_model_name_or_path, **kwargs)
            if kwargs.get("device_map") is None or not settings.get("shared_encoder"):
                raise
            raise ValueError(
                f"{pretrained_model_name_or_path} has shared_encoder=True, which has to fit into one device, but "
                f"device_map={kwargs['device_map']!r} failed ({type(error).__name__}). Raise max_memory, or name one "
                "device."
            ) from error
        if split is not None and getattr(model.config, "shared_encoder", False):
            raise ValueError(
                f"{pretrained_model_name_or_path} has shared_encoder=True: such a model cannot be split over "
                "processes. Leave distributed_config out."
            )
        if untied := sorted(model.get_expanded_tied_weights_keys().keys() - model.all_tied_weights_keys.keys()):
            raise ValueError(
                f"{pretrained_model_name_or_path} has shared_encoder=True in its configuration, but its towers differ "
                f"in {_abbreviate(untied)}. Is it a model of two encoders? Then set shared_encoder to False."
            )
        missing = sorted(key for key in info["missing_keys"] if not key.startswith(cls._optional_weights))
        left_over = sorted(info["unexpected_keys"])
        if missing or left_over:
            raise ValueError(
                f"{pretrained_model_name_or_path} does not hold the weights of this {cls.__name__}. "
                f"Missing: {_abbreviate(missing) or 'none'}. Left over: {_abbreviate(left_over) or 'none'}."
            )
        if getattr(model, "hf_quantizer", None) is not None:
            _warn_unquantized(model, pretrained_model_name_or_path)
        return (model, info) if output_loading_info else model

    @classmethod
    def _refuse_dense(cls, source, options):
        """Raises ValueError for a dense model, which transformers would load as one without experts."""
        try:
            settings, _ = cls.config_class.get_config_dict(source, **options)
        except OSError:  # an adapter without a config.json, or transformers' own error follows
            return
        parts = [settings, *(settings.get(name) or {} for name in ("text_config", "vision_config"))]
        is_sparse = any(part.get("moe_layers") for part in parts)
        model_type = (settings | (settings.get(cls.config_class.base_config_key) or {})).get("model_type")
        if model_type != cls.config_class.model_type and not is_sparse:
            raise ValueError(
                f"{source} is dense (model_type {model_type!r}) and has no experts for {cls.__name__}: "
                "`clip-moe upcycle` or `clip_moe.upcycle` makes it sparse."
            )

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As transformers', and writes the code of a registered class so that it loads without this package."""
        super().save_pretrained(save_directory, *args, **kwargs)
        own = next((OWN_CLASSES[parent] for parent in type(self).__mro__ if parent in OWN_CLASSES), None)
        if own is not None and kwargs.get("is_main_process", True):
            write_own_code(own, Path(save_directory))

    def gather_sharded_state_dict_for_save(self, model_to_save, state_dict, *args, **kwargs):
        """Part of `save_pretrained`: gives the weights of a tower the names that they have in files of a whole model,
        and adds the marks that make CLIP's own classes refuse the checkpoint."""
        self._register_conversions()  # of a model that came out of a pickle
        # By itself, transformers adds a prefix only to what had one when it was loaded
        if self._tower_prefix:
            used = getattr(self, "_weight_conversions", None) or []
            used = [conversion for conversion in used if not isinstance(conversion, PrefixChange)]
            self._weight_conversions = [*used, PrefixChange(prefix_to_remove=self._tower_prefix[:-1])]
        state_dict = dict(super().gather_sharded_state_dict_for_save(model_to_save, state_dict, *args, **kwargs))
        only_adapters = getattr(self, "_hf_peft_config_loaded", False)
        if state_dict and not only_adapters:  # empty: another process saves
            # A shared encoder is there twice, under CLIP's names, so that each tower loads alone
            tied = self.get_expanded_tied_weights_keys()
            require_one_encoder(state_dict, tied)
            state_dict |= {name: state_dict[source].clone() for name, source in tied.items() if source in state_dict}
            for name, module in model_to_save.named_modules():
                is_sparse, is_gated = (isinstance(module, of) for of in (CLIPMoESparseMoeBlock, CLIPMoEGatedMLP))
                if is_sparse or is_gated and name.endswith(".mlp"):
                    marks = SPARSE_LAYER_MARKS[: 2 if is_sparse and module.config.use_gated_mlp else 1]
                    state_dict |= {f"{name}.{mark}": torch.empty(0, dtype=self.dtype) for mark in marks}
        return state_dict

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        # transformers' Trainer loads the files of its checkpoints as they are
        require_one_encoder(state_dict, self.get_expanded_tied_weights_keys(), prefix)
        in_file, scalars = f"{prefix}{self._tower_prefix}", {f"{prefix}{scalar}" for scalar in self._scalars}
        for name in list(state_dict):
            if name.endswith(SPARSE_LAYER_MARKS) and state_dict[name].numel() == 0:
                del state_dict[name]
            elif name in scalars:
                state_dict[name] = state_dict[name].reshape(-1)
            elif name.startswith(in_file) and in_file != prefix:
                state_dict[prefix + name.removeprefix(in_file)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @classmethod
    def is_custom_code(cls) -> bool:
        # Of custom code, transformers does not initialize modules without weights of their own, such as an FFN, lest it
        # overwrite loaded weights. Ours respects them: it uses `transformers.initialization`
        return False

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        return super().get_correct_experts_implementation(requested_experts or "by_device")

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=None, **kwargs):
        if enable and gradient_checkpointing_func.keywords.get("use_reentrant") is not False:
            raise ValueError(
                "Reentrant gradient checkpointing loses the gradient of the router losses. Pass "
                '{"use_reentrant": False}, or no arguments.'
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        factor = getattr(self.config, "initializer_factor", 1.0)
        if isinstance(module, CLIPMoERouter):
            init.normal_(module.weight, std=module.config.hidden_size**-0.5 * factor)
            if module.expert_bias is not None:
                init.zeros_(module.expert_bias)
        elif isinstance(module, CLIPMoEExperts):
            up_proj, up_bias, down_proj, down_bias = module.weights()
            self._init_ffn(module.config, [up_proj], down_proj)
            for bias in (up_bias, down_bias):
                if bias is not None:
                    init.zeros_(bias)
        elif isinstance(module, CLIPMoEGatedMLP):
            self._init_ffn(module.config, [module.gate_proj.weight, module.up_proj.weight], module.down_proj.weight)

    def _init_ffn(self, config, up: list[Tensor], down: Tensor):
        """As `CLIPMLP`."""
        factor = getattr(self.config, "initializer_factor", 1.0)
        for weight in up:
            init.normal_(weight, std=(2 * config.hidden_size) ** -0.5 * factor)
        init.normal_(down, std=config.hidden_size**-0.5 * (2 * config.num_hidden_layers) ** -0.5 * factor)


def with_relative_imports(source: Path) -> str:
    """The code of a custom model's file with imports of files beside it in place of imports from this package.

    Raises:
        ValueError: a folder of weights would lack what it imports, or its name is that of a file of this package.
    """
    code = PACKAGE_IMPORT.sub(r"\1from .\2 import", source.read_text(encoding="utf-8"))
    imported = re.findall(r"^\s*(?:import|from) (\w+)", code, flags=re.MULTILINE)
    beside = sorted({name for name in imported if source.with_name(f"{name}.py").is_file()})
    refusals = {
        f"has the name of a file of {PACKAGE.name}, which is published beside weights, too: rename it": (
            (PACKAGE / source.name).is_file()
        ),
        f"imports {PACKAGE.name}, which is not there where its weights are loaded with trust_remote_code: import from "
        f"its files, as in `from {PACKAGE.name}.sparse_moe import CLIPMoERouter`": PACKAGE.name in imported,
        f"imports {', '.join(beside)}, which no folder of weights would hold: put all into one file": bool(beside),
    }
    for refusal, applies in refusals.items():
        if applies:
            raise ValueError(f"{source} {refusal}")
    return code


def write_own_code(source: Path, folder: Path) -> None:
    """Write a custom model's file next to its weights, and the files of this package that it needs."""
    (folder / source.name).write_text(code := with_relative_imports(source), encoding="utf-8")
    for name in re.findall(r"^\s*from \.(\w+) import", code, flags=re.MULTILINE):
        first = PACKAGE / f"{name}.py"
        for path in [first, *map(Path, get_relative_import_files(first))] if first.is_file() else ():
            shutil.copy(path, folder)
