"""contract/restart.py: what is known of a restart, and what model.json has of it."""

import pytest

from sagemaker_lightning.contract.restart import ContainerRestart


@pytest.mark.parametrize(
    ("step", "resumed_step", "lost"),
    [(17, 12, 5), (17, 17, 0), (17, 18, 0), (None, 0, None), (17, None, None)],
)
def test_how_many_steps_were_lost(step, resumed_step, lost):
    restart = ContainerRestart("a fault", step, 10.0, resumed_step)
    assert restart.lost_steps == lost


def test_what_model_json_has_of_a_restart():
    fields = {"why": "a fault", "step": 17, "at": 10.0}
    restart = ContainerRestart.read(fields)
    expected = {"reason": "a fault", "step": 17}
    unknown = dict.fromkeys(("resumed_step", "lost_steps", "seconds"))
    assert restart.described() == expected | unknown
    known = {"resumed_step": 12, "lost_steps": 5, "seconds": 2.35}
    assert restart.continued(12, at=12.3456).described() == expected | known
