"""Kernels that torch.compile makes: one for each shape, whatever came before.

On an upgrade: see `is_size_dynamic` and `is_stride_dynamic` in torch/_dynamo/pgo.py, who calls
them (variables/builder.py), and `recompile_limit` and `deterministic` in _dynamo/config.py and
_inductor/config.py. torch.compile(dynamic=False) is public and does the same, for those who call
it: a user's code does.
"""

from torch._dynamo import config as dynamo
from torch._dynamo.pgo import FrameStateSizeEntry
from torch._inductor import config as inductor

SHAPES = 64  # for which a function is compiled at most; then it is not compiled, which torch says


def of_their_own_shapes() -> None:
    """Have each shape of an input compiled by itself, for the rest of this process.

    A size that has changed, as that of an epoch's last batch, torch makes a variable of one kernel
    for all sizes: so a step's kernel, and the last bits of its sums, would depend on the steps
    before it, of which a run that goes on has seen others. Plain numbers become variables as ever:
    they change all the time, and no sum's order depends on them. Nor is it measured which kernel
    is fastest: the answer is another one each time.
    """
    FrameStateSizeEntry.is_size_dynamic = FrameStateSizeEntry.is_stride_dynamic = lambda self, dim: (
        False
    )
    dynamo.recompile_limit = max(SHAPES, dynamo.recompile_limit)
    inductor.deterministic = True
