"""The runtime's public names: SageMaker jobs by Lightning that survive interruptions.

The names below are imported when they are first used: `import sagemaker_lightning` imports neither
torch nor Lightning. From then on, `lightning.pytorch` and `pytorch_lightning` are two names of the
same modules (compat/namespaces.py).
"""

from importlib import import_module

from sagemaker_lightning.compat import namespaces

namespaces.register()

__version__ = "0.2.0"

PUBLIC = {
    "Application": "cli.application",
    "SageMakerCLI": "cli.run",
    "SageMakerEnvironment": "contract.environment",
    "UserError": "contract.errors",
    "join_hosts": "contract.rendezvous",
    "report_failures": "contract.reporting",
    "ExactResume": "resume.callback",
    "BestModel": "resume.files.best_model",
    "Seeding": "data.seeding",
    "make_deterministic": "data.deterministic",
    "ShardedDataset": "shards.dataset",
    "ShardBatches": "shards.order",
    "Heartbeat": "callbacks.heartbeat",
    "RankConsistency": "callbacks.rank_consistency",
    "GradientWeighting": "callbacks.gradient_weighting",
    "LearningRateScaling": "callbacks.lr_scaling",
    "Divergence": "callbacks.divergence",
    "LogProgress": "callbacks.progress",
    "HostMetrics": "callbacks.host_metrics",
    "Logger": "callbacks.loggers.tensorboard_events",
    "Triangle": "cli.lr_schedules",
}
"""The public names, and the modules that have them."""

__all__ = [*PUBLIC, "__version__"]  # noqa: PLE0604  (names alone)


def __getattr__(name: str) -> object:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not PUBLIC[name].startswith("contract."):  # all others need Lightning
        import_module(f"{__name__}.compat.versions").check()
    value = globals()[name] = getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
    if name == "ExactResume":
        # A resumed run that differs says why, by a search that is no part of the training.
        import_module(f"{__name__}.drill.causes").register()
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
