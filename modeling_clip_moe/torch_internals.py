"""
The parts of torch that are not its public interface and that this package uses: what to look at when torch changes. The
other files import them from here. Each was read in torch 2.13.0 (2.11.0 was not at hand).

What cannot be imported:
    nn.Module               `_load_from_state_dict`, which classes override
    modes of dispatch       `_mode_key`, of those that make a program
"""

import torch
from torch import Tensor

# Whether a transform, such as `vmap`, runs
from torch._C._functorch import peek_interpreter_stack

# How many modes record a program before autograd
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


# torch's compiler takes seconds to import: only where something is compiled
def set_recompile_limit(limit: int) -> None:
    """How often a function may be compiled anew."""
    torch._dynamo.config.recompile_limit = limit


def mark_static(tensor: Tensor, axis: int) -> None:
    """Makes the size of an axis a constant of what is compiled."""
    torch._dynamo.mark_static(tensor, axis)
