"""Settings of libraries that training changes are named."""

import decimal
import logging
import warnings

import numpy as np
import torch

from sagemaker_lightning.state.library_settings import changed_loggers, logger_settings, present


def changed(before: dict[str, object]) -> list[str]:
    return [name for name, value in present().items() if before[name] != value]


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


def test_flushing_small_numbers_to_zero_is_named():
    before = present()
    try:
        assert torch.set_flush_denormal(True)
        assert changed(before) == ["torch.set_flush_denormal()"]
    finally:
        torch.set_flush_denormal(False)


def test_what_else_changes_results_is_named(tmp_path, monkeypatch):
    before = present()
    monkeypatch.chdir(tmp_path)
    assert changed(before) == ["os.getcwd()"]
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert changed(before) == ["os.getcwd()"]
        warnings.simplefilter("error")
        patched.setattr(torch.backends.mkldnn, "enabled", False)
        with np.printoptions(precision=3):
            assert changed(before) == [
                "numpy.get_printoptions()",
                "os.getcwd()",
                "warnings.filters",
                "torch.backends.mkldnn.enabled",
            ]


def test_a_folder_that_is_gone_is_no_error(tmp_path, monkeypatch):
    (folder := tmp_path / "gone").mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert present()["os.getcwd()"] == ""


def test_the_level_of_a_users_logger_that_changes_is_named():
    first = logger_settings()
    own, librarys = logging.getLogger("own_program"), logging.getLogger("torch.of_a_library")
    for logger in (own, librarys):
        logger.setLevel(logging.INFO)
    assert changed_loggers(first) == []  # a level that is first seen now
    for logger in (own, librarys):
        logger.setLevel(logging.ERROR)
    named = ["logging.getLogger('own_program') (its level or its filters)"]
    assert changed_loggers(first) == named
    own.setLevel(logging.INFO)
    assert changed_loggers(first) == []
    own.addFilter(lambda record: True)
    assert changed_loggers(first) == named
