"""What no checkpoint can bring back is said in the run that is not interrupted."""

from types import SimpleNamespace

import pytest
from short_fits import Noted, as_in_a_new_process, interrupted, trainer
from torch import nn

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.parts.reports import Reports


class Growing(Noted):
    """Gets a layer, and its optimizer the parameters, at the start of each later epoch."""

    def __init__(self, **moments: str) -> None:
        super().__init__(**moments)
        self.layers = nn.ModuleList()

    def on_train_epoch_start(self):
        if self.current_epoch > len(self.layers):
            self.layers.append(nn.Linear(1, 1))
            self.optimizers().optimizer.add_param_group({"params": self.layers[-1].parameters()})


def test_layers_that_are_made_while_training_and_trained_are_named_and_refused(tmp_path, capfd):
    with interrupted():
        trainer(tmp_path, max_epochs=3).fit(Growing(stop="batch 1:2"))
    said = capfd.readouterr().out
    assert said.count("model.layers.0.weight was made while training, and an optimizer has") == 1
    as_in_a_new_process()
    with pytest.raises(UserError, match=r"the model had got layers\.0\.weight; .*make all that"):
        trainer(tmp_path, max_epochs=3).fit(Growing())


def test_a_model_that_stays_as_it_is_made_is_not_named(tmp_path, capfd):
    trainer(tmp_path).fit(Noted())
    assert "was made while training" not in capfd.readouterr().out


def test_a_copy_in_memory_leaves_variables_to_the_next_checkpoint(monkeypatch, capsys):
    reports = Reports(SimpleNamespace(is_global_zero=True), None)
    reports.variables_at_start = {"mine.count": b"1"}
    monkeypatch.setattr(reports, "_variables_of_packages", dict)
    monkeypatch.setattr(reports, "_variables", lambda of_packages: {"mine.count": b"2"})
    with reports.wait_for_checkpoint():
        reports.report_variables()
    assert capsys.readouterr().out == ""
    reports.report_variables()
    assert capsys.readouterr().out.startswith("mine.count changes while training, and no checkp")
