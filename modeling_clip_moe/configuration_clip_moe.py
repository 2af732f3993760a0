"""CLIP-MoE configuration: transformers' CLIP configuration plus, in each tower, what its sparse layers look like."""

import math
from dataclasses import field
from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import CLIPTextConfig, CLIPVisionConfig, PreTrainedConfig

_LAYERS = "encoder.layers.*"
# Fields on which the weights of a tower's layers depend
_LAYER_FIELDS = """hidden_size intermediate_size num_attention_heads num_hidden_layers hidden_act layer_norm_eps
moe_layers num_experts moe_intermediate_size moe_mlp_bias num_shared_experts fusion_gate use_expert_bias
use_gated_mlp""".split()


def embedding_size(config: PreTrainedConfig) -> int:
    """The size of the embeddings of a whole CLIP; those of a SigLIP's images are as wide as their tower."""
    return config.projection_dim if hasattr(config, "projection_dim") else config.vision_config.hidden_size


class PublishedConfig(PreTrainedConfig):
    """A configuration that builds those of its towers, and that names its classes where it is saved, for
    `trust_remote_code=True`: `XConfig` in `configuration_y` is that of `XModel` in `modeling_y`, and one in another
    file that of `XModel` there."""

    _auto_class = "AutoConfig"
    auto_classes: ClassVar[dict[str, str]] = {}
    is_whole: ClassVar[bool] = False  # both images and texts

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        own, file = vars(cls).get("auto_classes", {}), cls.__module__.rpartition(".")[2]
        model = f"{file.replace('configuration_', 'modeling_')}.{cls.__name__.removesuffix('Config')}Model"
        cls.auto_classes = {"AutoConfig": f"{file}.{cls.__name__}", "AutoModel": model}
        if cls.is_whole:
            cls.auto_classes["AutoModelForZeroShotImageClassification"] = model
        cls.auto_classes |= own

    def __post_init__(self, **kwargs):
        for name, config_class in self.sub_configs.items():
            tower = getattr(self, name)
            if tower is None or isinstance(tower, dict):
                setattr(self, name, config_class(**(tower or {})))
        kwargs.setdefault("auto_map", dict(self.auto_classes))
        super().__post_init__(**kwargs)


@strict
class CLIPMoETowerConfig(PublishedConfig):
    """
    The sparse layers of a tower; by default there are none: a plain CLIP tower.

    Args:
        use_gated_mlp (`bool`): whether the FFNs of all layers and their experts are gated, as SwiGLU is with
            `hidden_act="silu"` (arXiv:2002.05202): down(act(gate(x)) * up(x)).
        num_experts (`int`): experts of a sparse layer, E.
        num_experts_per_tok (`int`): experts that compute each token, K.
        moe_layers (`list[int]`): the sparse layers, counted from 0. Empty: a dense tower.
        moe_intermediate_size (`int`, *optional*): width of an expert (DeepSeekMoE, arXiv:2401.06066). None:
            `intermediate_size`, that of the dense FFN.
        moe_mlp_bias (`bool`): whether experts, shared ones too, have biases.
        num_shared_experts (`int`): experts as wide as the others that compute every token, without a router
            (DeepSeekMoE).
        scoring_func (`str`): how a router scores the experts: `"softmax"`, or `"sigmoid"`, each expert on its own
            (DeepSeek-V3).
        use_expert_bias (`bool`): whether a bias, which training moves towards balance, adds to the scores that choose
            the experts, and not to their weights (arXiv:2408.15664).
        norm_topk_prob (`bool`): whether the weights of a token's experts are scaled to sum to 1 (CLIP-MoE,
            CLIP-FMoE), or stay the router's probabilities (CLIP-UP).
        norm_before_capacity (`bool`): with `norm_topk_prob`, whether that happens before capacity drops choices, whose
            weight is then lost, or after it, so that what is left sums to 1 (CLIP-UP B.3, whose "before routing" is
            `norm_topk_prob=False`).
        routed_scaling_factor (`float`): the factor of the final weights.
        fusion_gate (`bool`): whether the dense FFN stays beside the experts and a learned gate mixes the two
            (CLIP-FMoE).
        capacity_factor (`float`, *optional*): C, in training: an expert takes at most ceil(T * C / E) of T tokens
            (CLIP-UP). None: no limit.
        eval_capacity_factor (`float`, *optional*): C, in evaluation. With a limit, the embedding of an input depends
            on the rest of its batch.
        capacity_group_size (`int`, *optional*): how many consecutive sequences of a batch share a capacity. None: the
            whole batch of a process.
        router_jitter_noise (`float`): in training, the router sees its input times random numbers between 1 - noise
            and 1 + noise.
    """

    # Splits over processes by transformers' `DistributedConfig`: the experts (EP), every layer (FSDP2), and by
    # `base_model_tp_plan` heads and dense FFNs (TP)
    base_model_fsdp_plan = {"embeddings": "free_full_weight", _LAYERS: "free_full_weight"}
    # A custom configuration may name classes in place of `CLIPMoERouter` and `CLIPMoEExperts`
    router_class: ClassVar[type | None] = None
    experts_class: ClassVar[type | None] = None

    use_gated_mlp: bool = False
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_layers: list[int] = field(default_factory=list)
    moe_intermediate_size: int | None = None
    moe_mlp_bias: bool = True
    num_shared_experts: int = 0
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    use_expert_bias: bool = False
    norm_topk_prob: bool = True
    norm_before_capacity: bool = False
    routed_scaling_factor: float | int = 1.0
    fusion_gate: bool = False
    capacity_factor: float | int | None = None
    eval_capacity_factor: float | int | None = None
    capacity_group_size: int | None = None
    router_jitter_noise: float | int = 0.0

    def __post_init__(self, **kwargs):
        kwargs.pop("model_type", None)  # the dictionary of a dense CLIP tower carries another one
        super().__post_init__(**kwargs)
        self.validate_moe()  # here as a plain ValueError; `@strict` repeats it on saving and wraps it

    @property
    def expert_size(self) -> int:
        """The width of an expert."""
        return self.intermediate_size if self.moe_intermediate_size is None else self.moe_intermediate_size

    @property
    def output_size(self) -> int:
        """The size of what the tower pools."""
        return self.hidden_size

    @property
    def base_model_ep_plan(self) -> dict[str, str]:
        """Expert parallelism: each process has some of the experts of every sparse layer."""
        experts, up = f"{_LAYERS}.mlp.experts", "gate_up_proj" if self.use_gated_mlp else "up_proj"
        stacked = [name + kind for name in (up, "down_proj") for kind in ("", "_bias") if self.moe_mlp_bias or not kind]
        return {f"{experts}.{name}": "grouped_gemm" for name in stacked} | {experts: "ep_dispatch_experts"}

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """Tensor parallelism of the tower's modules: the heads of its attention and the width of dense FFNs and shared
        experts. Experts are not split: transformers has no style for their stacked biases."""
        plan = {f"{_LAYERS}.self_attn.{name}_proj": "colwise" for name in "qkv"}
        plan[f"{_LAYERS}.self_attn.out_proj"] = "rowwise"
        has_dense_layers, has_base = len(self.moe_layers) < self.num_hidden_layers, self.fusion_gate
        has_shared = self.num_shared_experts > 0
        for ffn, is_there in (("mlp", has_dense_layers), ("mlp.base", has_base), ("mlp.shared_experts", has_shared)):
            if is_there:
                first, last = (("gate_proj", "up_proj"), "down_proj") if self.use_gated_mlp else (("fc1",), "fc2")
                plan |= {f"{_LAYERS}.{ffn}.{name}": "colwise" for name in first} | {
                    f"{_LAYERS}.{ffn}.{last}": "rowwise"
                }
        return plan

    def validate_moe(self):
        """Part of `@strict`-powered validation. Refuses settings that contradict each other."""
        top_k, width, num_layers = self.num_experts_per_tok, self.moe_intermediate_size, self.num_hidden_layers
        limits = {
            "num_experts_per_tok": (1 <= top_k <= self.num_experts, f"between 1 and num_experts ({self.num_experts})"),
            "moe_intermediate_size": (width is None or width >= 1, "at least 1"),
            "num_shared_experts": (self.num_shared_experts >= 0, "at least 0"),
            "moe_layers": (
                all(0 <= layer < num_layers and self.moe_layers.count(layer) == 1 for layer in self.moe_layers),
                f"different layers between 0 and {num_layers - 1}",
            ),
            "norm_before_capacity": (
                self.norm_topk_prob or not self.norm_before_capacity,
                "False with norm_topk_prob=False",
            ),
            "routed_scaling_factor": (0 < self.routed_scaling_factor < math.inf, "above 0 and finite"),
            "router_jitter_noise": (0 <= self.router_jitter_noise < 1, "at least 0 and below 1"),
        }
        for name in ("capacity_factor", "eval_capacity_factor", "capacity_group_size"):
            value = getattr(self, name)
            limits[name] = value is None or 0 < value < math.inf, "above 0 and finite, or None for no limit"
        for name, (is_within, limit) in limits.items():
            if not is_within:
                raise ValueError(f"{name} must be {limit}, got {getattr(self, name)}.")


@strict
class CLIPMoETextConfig(CLIPMoETowerConfig, CLIPTextConfig):
    """Text tower: the fields of `CLIPTextConfig` and of `CLIPMoETowerConfig`."""

    model_type = "clip_moe_text_model"


@strict
class CLIPMoEVisionConfig(CLIPMoETowerConfig, CLIPVisionConfig):
    """Vision tower: the fields of `CLIPVisionConfig` and of `CLIPMoETowerConfig`."""

    model_type = "clip_moe_vision_model"


@strict
class SparseMoEConfig(PublishedConfig):
    """
    Both towers of a model of any family, and the losses of their routers.

    Args:
        text_config, vision_config (`dict` or configuration, *optional*): the towers, of the classes in `sub_configs`.
        output_router_logits (`bool`): whether outputs carry the router logits and `aux_loss`, which adds to the loss.
        router_aux_loss_coef (`float`): weight of the load balancing loss, which is 1 at perfect balance.
        router_z_loss_coef (`float`): weight of the router z-loss (CLIP-UP: 0.001).
    """

    is_whole = True
    base_model_fsdp_plan = {}  # the towers have theirs; the default is a language model's

    text_config: dict | PreTrainedConfig | None = None
    vision_config: dict | PreTrainedConfig | None = None
    output_router_logits: bool = False
    router_aux_loss_coef: float | int = 0.01
    router_z_loss_coef: float | int = 0.0

    def __post_init__(self, **kwargs):
        if misplaced := [name for name in kwargs if name in CLIPMoETowerConfig.__annotations__]:
            raise ValueError(f"{', '.join(misplaced)} must be in {' or '.join(self.sub_configs)}, not beside them.")
        super().__post_init__(**kwargs)


@strict
class CLIPMoEConfig(SparseMoEConfig):
    """
    Both towers of a CLIP, and the losses of their routers: the fields of `SparseMoEConfig` and these.

    Args:
        shared_encoder (`bool`): whether both towers have the same layers, and apart from each other only embeddings,
            last norm and projection (LIMoE; CLIP-UP Table 1). How tokens are routed is still set for each tower.
        projection_dim (`int`): size of the embeddings that images and texts share.
        logit_scale_init_value (`float`): logarithm of the initial scale of the similarities.
        initializer_factor (`float`): scale of the initial projections.
    """

    auto_classes: ClassVar[dict[str, str]] = {
        "AutoModelForImageClassification": "modeling_clip_moe.CLIPMoEForImageClassification"
    }
    model_type = "clip_moe"
    sub_configs = {"text_config": CLIPMoETextConfig, "vision_config": CLIPMoEVisionConfig}

    shared_encoder: bool = False
    projection_dim: int = 512
    logit_scale_init_value: float | int = 2.6592
    initializer_factor: float | int = 1.0

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        # So that a tower with its projection loads from a whole model's folder; CLIP's own files do not always agree
        self.text_config.projection_dim = self.vision_config.projection_dim = self.projection_dim
        self.validate_shared_encoder()  # here as a plain ValueError; `@strict` repeats it on saving and wraps it

    def validate_shared_encoder(self):
        """Part of `@strict`-powered validation. Refuses towers that cannot have the same layers."""
        if not self.shared_encoder:
            return
        text, vision = self.text_config, self.vision_config
        for name in _LAYER_FIELDS:
            # The number of experts says nothing where there are none
            if name == "num_experts" and not text.moe_layers:
                continue
            if getattr(text, name) != getattr(vision, name):
                raise ValueError(
                    f"shared_encoder=True needs towers of one {name}, but it is {getattr(text, name)} in text_config "
                    f"and {getattr(vision, name)} in vision_config. Make them equal, or leave shared_encoder out."
                )
