"""
Private names of libraries that the rooms use, with the lowest and the highest version in which each was read. Those of
transformers that can be imported are in `modeling_clip_moe/transformers_internals.py`.

torch 2.13.0 (2.11.0 was not at hand)
    `torch._dynamo`         `mark_static`, `config.recompile_limit`
    `torch._C._functorch`   `peek_interpreter_stack`: whether a transform runs
    `torch._ops`            `_len_torch_dispatch_stack_pre_dispatch`
    `torch._subclasses`     `FakeTensor`
    `torch.utils._python_dispatch`  `TorchDispatchMode`, `_get_current_dispatch_mode_stack`, `_mode_key` of a mode
    `nn.Module`             `_apply`, `_load_from_state_dict`
transformers 5.17.0 and 5.23.0
    `PreTrainedModel`       `_from_config`, `_no_split_modules`; the others are named in transformers_internals.py
    configurations          `_experts_implementation`, `_attn_implementation`
    experts of a layer      `_is_expert_parallel`, which 5.23.0 alone reads
datasets 5.0.1 and 5.2.0
    `Dataset`               `_fingerprint`, the hash of a dataset's tables and transforms
"""

NAMES = """
_C _apply _attn_implementation _can_record_outputs _dynamo _experts_implementation _fingerprint _from_config
_functorch _get_current_dispatch_mode_stack _grouped_linear _hf_peft_config_loaded _init_weights
_is_expert_parallel _keep_in_fp32_modules_strict _keys_to_ignore_on_load_unexpected
_len_torch_dispatch_stack_pre_dispatch _load_from_state_dict _mode_key _no_split_modules _ops _python_dispatch
_set_gradient_checkpointing _subclasses _tied_weights_keys _weight_conversions
""".split()
