"""launch/train_command.py: what starts the toolkit says what it lacks."""

import importlib.util

import pytest

from sagemaker_lightning.launch import train_command


def test_without_the_toolkit_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    (tmp_path / "output").mkdir()
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("SAGEMAKER_TRAINING_MODULE", "other")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="1"):
        train_command.main()
    failure = (tmp_path / "output/failure").read_text()
    assert failure in capsys.readouterr().err
    assert failure.startswith("error: the training toolkit is not installed")
    assert failure.endswith("sagemaker-lightning[toolkit]")
