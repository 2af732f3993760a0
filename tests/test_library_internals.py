"""Private names of libraries are used only where they are listed.

These are the ones that the rooms use, with the lowest and the highest version in which each was read. Those of
torch and transformers that models need are in `torch_internals.py` and `transformers_internals.py`.

torch 2.13.0 (2.11.0 was not at hand)
    `nn.Module`             `_apply`, `_load_from_state_dict`; the others are in torch_internals.py
transformers 5.17.0 and 5.23.0
    `PreTrainedModel`       `_from_config`, `_no_split_modules`; the others are named in transformers_internals.py
    configurations          `_experts_implementation`, `_attn_implementation`
    experts of a layer      `_is_expert_parallel`, which 5.23.0 alone reads
datasets 5.0.1 and 5.2.0
    `Dataset`               `_fingerprint`, the hash of a dataset's tables and transforms
"""

import ast

from documents import ROOT

NAMES = """
_C _apply _attn_implementation _can_record_outputs _dynamo _experts_implementation _fingerprint _from_config
_functorch _get_current_dispatch_mode_stack _grouped_linear _hf_peft_config_loaded _init_weights
_is_expert_parallel _keep_in_fp32_modules_strict _keys_to_ignore_on_load_unexpected
_len_torch_dispatch_stack_pre_dispatch _load_from_state_dict _mode_key _no_split_modules _ops _python_dispatch
_set_gradient_checkpointing _subclasses _tied_weights_keys _weight_conversions
""".split()
ROOMS = "modeling_clip_moe engine data conversion evaluation training app examples lab".split()


def is_private(name):
    return name.startswith("_") and not name.endswith("__") and name != "_"


def own_and_used(place, source):
    """The private names that a file defines, and its line for each that it takes of something else."""
    own, used = set(), []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(attr=name):
                used.append((name, f"{place}:{node.lineno}"))
            case ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.ImportFrom(module=module, names=names):
                parts = [*(module or "").split("."), *(alias.name for alias in names)]
                used += [(name, f"{place}:{node.lineno}") for name in parts]
            case ast.Import(names=names):
                parts = [part for alias in names for part in alias.name.split(".")]
                used += [(name, f"{place}:{node.lineno}") for name in parts]
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=name), *_]):
                used.append((str(name), f"{place}:{node.lineno}"))
    return own, [(name, where) for name, where in used if is_private(name)]


def test_private_names_of_libraries_are_listed():
    """Those that a file defines are its own; listed ones may stand anywhere, such as overridden methods."""
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py") if not file.is_symlink()]
    assert len(files) > 200
    own, used, found = {"_fields"}, [], set()  # the fields of a named tuple are documented
    for file in files:
        source = file.read_text(encoding="utf-8")
        own_names, used_names = own_and_used(file.relative_to(ROOT), source)
        own, used = own | own_names, used + used_names
        found |= {name for name in NAMES if name in source}
    assert not [f"{where} {name}" for name, where in used if name not in own | {*NAMES}]
    assert {name for name, _ in used} | found >= set(NAMES)
