"""compat/torch_compile.py: the settings of the compiler, for a time."""

import pytest
from torch._dynamo import config as dynamo
from torch._dynamo.pgo import FrameStateSizeEntry
from torch._inductor import config as inductor

from sagemaker_lightning.compat import torch_compile


def test_each_shape_is_compiled_for_itself_until_the_block_ends():
    def settings() -> tuple:
        return (
            FrameStateSizeEntry.is_size_dynamic,
            FrameStateSizeEntry.is_stride_dynamic,
            dynamo.recompile_limit,
            inductor.deterministic,
        )

    before = settings()
    with pytest.raises(ZeroDivisionError), torch_compile.compile_each_shape():
        size_is_dynamic, stride_is_dynamic, limit, is_deterministic = settings()
        assert not size_is_dynamic(None, 0) and not stride_is_dynamic(None, 0)
        assert limit >= torch_compile.MAX_SHAPES > before[2] and is_deterministic
        raise ZeroDivisionError
    assert settings() == before
