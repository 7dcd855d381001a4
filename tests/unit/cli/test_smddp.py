"""cli/smddp.py: AWS's own strategy, with its package and without."""

import sys

import pytest
from command_lines import cli, no_flags_of_pytest  # noqa: F401  a fixture for each test

from sagemaker_lightning.cli import smddp
from sagemaker_lightning.contract.errors import UserError


@pytest.mark.slow
def test_smddp_is_refused_where_the_package_is_not_installed():
    with pytest.raises(
        UserError,
        match=r"^--trainer.strategy=smddp: the package smdistributed is not in this image .* use",
    ):
        cli("--trainer.strategy=smddp")


def test_smddp_registers_its_backend_where_the_package_is_installed(tmp_path, monkeypatch):
    """A stand-in for AWS's package only records that it was imported.

    AWS's own package registers the backend when it is imported.
    """
    module = tmp_path / "packages/smdistributed/dataparallel/torch/torch_smddp"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("REGISTERED = True\n")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    for name, value in (("WORLD_SIZE", "16"), ("RANK", "9"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    strategy = smddp.strategy()
    assert sys.modules["smdistributed.dataparallel.torch.torch_smddp"].REGISTERED
    assert strategy.process_group_backend == "smddp"
    assert strategy.cluster_environment.world_size() == 16
    assert strategy.cluster_environment.global_rank() == 9
    for name in [name for name in sys.modules if name.startswith("smdistributed")]:
        del sys.modules[name]
