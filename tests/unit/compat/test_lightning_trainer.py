"""compat/lightning_trainer.py: what a strategy does with this process."""

from pytorch_lightning.strategies import DDPStrategy

from sagemaker_lightning.compat import lightning_trainer


def test_what_a_strategy_does_with_this_process():
    strategy = DDPStrategy(find_unused_parameters=True)
    assert lightning_trainer.ddp_arguments(strategy) == {"find_unused_parameters": True}
    lightning_trainer.ddp_arguments(strategy)["bucket_cap_mb"] = 5
    assert strategy._ddp_kwargs["bucket_cap_mb"] == 5
    assert not lightning_trainer.copies_this_process(strategy)
    assert lightning_trainer.copies_this_process(DDPStrategy(start_method="fork"))
