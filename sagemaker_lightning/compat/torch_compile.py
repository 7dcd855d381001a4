"""Make torch.compile use one kernel for each shape, whatever it compiled before.

On an upgrade: see `is_size_dynamic` and `is_stride_dynamic` in torch/_dynamo/pgo.py, who calls them
(variables/builder.py), and `recompile_limit` and `deterministic` in _dynamo/config.py and
_inductor/config.py. torch.compile(dynamic=False) is public and does the same, but only the caller
of torch.compile can pass it: the user's code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo import config as dynamo
from torch._dynamo.pgo import FrameStateSizeEntry
from torch._inductor import config as inductor

# A function is compiled for at most this many shapes. After that it is not compiled, and torch says
# so.
MAX_SHAPES = 64


@contextmanager
def compile_each_shape() -> Iterator[None]:
    """Have each shape of an input compiled by itself, until the block ends.

    When a size changes, as in an epoch's last batch, torch compiles one kernel for all sizes, with
    the size as a variable. A step's kernel, and the last bits of its sums, would then depend on the
    steps before it, and a resumed run has seen other steps. Plain numbers still become variables:
    they change all the time, and no sum's order depends on them. torch does not measure which
    kernel is fastest either, because the answer differs each time.
    """
    entry: Any = FrameStateSizeEntry
    methods = entry.is_size_dynamic, entry.is_stride_dynamic
    settings = dynamo.recompile_limit, inductor.deterministic
    entry.is_size_dynamic = entry.is_stride_dynamic = lambda self, dim: False
    dynamo.recompile_limit = max(MAX_SHAPES, dynamo.recompile_limit)
    inductor.deterministic = True
    try:
        yield
    finally:
        entry.is_size_dynamic, entry.is_stride_dynamic = methods
        dynamo.recompile_limit, inductor.deterministic = settings
