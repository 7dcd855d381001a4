"""Settings of libraries that training changes are named."""

import decimal

import torch

from sagemaker_lightning.state.library_settings import changed, present


def test_settings_that_change_are_named():
    before = present()
    with decimal.localcontext() as context:
        decimal.Decimal(1) / 3  # which sets flags
        assert changed(before) == []
        context.prec = 3
        assert changed(before) == ["decimal.getcontext()"]
    torch.set_float32_matmul_precision("medium")
    try:
        assert changed(before) == ["torch.get_float32_matmul_precision()"]
    finally:
        torch.set_float32_matmul_precision(before["torch.get_float32_matmul_precision()"])
    assert changed(before) == []
