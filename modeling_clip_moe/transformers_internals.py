"""
The parts of transformers that are not its public interface and that this package uses: what to look at when
transformers changes. The other files import them from here. Each was read in transformers 5.17.0 and 5.23.0.

What classes override or set, which cannot be imported:
    PreTrainedModel         `_init_weights`, `_set_gradient_checkpointing`, `_can_record_outputs`, `_no_split_modules`,
                            `_keys_to_ignore_on_load_unexpected`, `is_custom_code`,
                            `_can_set_experts_implementation_cached_value`, `get_correct_experts_implementation`,
                            `all_tied_weights_keys`, `get_expanded_tied_weights_keys`,
                            `gather_sharded_state_dict_for_save`,
                            `_weight_conversions` and `_hf_peft_config_loaded` of a loaded model
    PreTrainedConfig        `_attn_implementation`, `_experts_implementation`, `base_model_ep_plan`,
                            `base_model_fsdp_plan`, `base_model_tp_plan`
    experts of a layer      `_is_expert_parallel`
"""

# Weights in files under other names than in the model
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, PrefixChange, WeightConverter

# The code that goes beside weights
from transformers.dynamic_module_utils import custom_object_save, get_relative_import_files

# Implementations of experts by name. The decorator has to stand in the file of the class it decorates
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear, use_experts_implementation
from transformers.masking_utils import create_causal_mask

# Implementations of attention by name
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# CLIP's own attention and loss
from transformers.models.clip.modeling_clip import eager_attention_forward, image_text_contrastive_loss

# `return_dict=False`; autocast where the device has it
from transformers.utils.generic import can_return_tuple, maybe_autocast

# Router logits are recorded by hooks, and not passed through the layers
from transformers.utils.output_capturing import OutputRecorder, capture_outputs
