"""The table of the rooms (README, "How it is built") stays true: who imports whom, and who reads the environment."""

import ast
import re
import sys
from pathlib import Path

import pytest

APP = Path(__file__).resolve().parent.parent / "app"
HEAVY = {"torch", "torchvision", "torchmetrics", "pytorch_lightning"}

# What each module may import: of the application, and besides the standard library.
MAY_IMPORT = {
    "__init__": set(),
    "environment": {"app.job_config"},
    "job_config": set(),
    "start": {"app.failures", "sagemaker_training"},
    "rendezvous": {"app.environment"},
    "smddp": {"pytorch_lightning", "smdistributed"},
    "failures": set(),
    "hyperparameters": set(),
    "supervise": {"psutil"},
    "peers": {"app.rendezvous"},
    "watch": {"app.peers"},
    "lifeline": {"pytorch_lightning"},
    "summary": {"app.environment", "app.hyperparameters"},
    "cifar": {"numpy", "torchvision"},
    "augmentation": {"torch"},
    "resident": {"app.augmentation", "torch"},
    "sharding": set(),
    "files": set(),
    "embeddings": {"app.sharding", "numpy", "pyarrow"},
    "blocks": {"app.files", "app.parts", "app.sharding", "numpy"},
    "parts": {"app.files", "numpy"},
    "split": {
        "app.blocks",
        "app.embeddings",
        "app.environment",
        "app.failures",
        "app.files",
        "app.hyperparameters",
        "app.memory",
        "app.mistakes",
        "app.parts",
        "app.sharding",
        "app.starting",
        "app.stop",
        "app.threads",
        "jsonargparse",
        "torch",
    },
    "similarity": {
        "app.embeddings",
        "app.environment",
        "app.failures",
        "app.split",
        "app.starting",
        "app.stop",
        "app.threads",
        "jsonargparse",
        "numpy",
        "torch",
    },
    "memory": set(),
    "threads": {"torch"},
    "starting": set(),
    "imports": {"app.threads", "torchvision", "pytorch_lightning"},
    "lean": {"fsspec", "lightning_fabric", "pytorch_lightning", "torch"},
    "schedule": {"torch", "pytorch_lightning"},
    "stop": set(),
    "exact": {"app.resident", "app.stop", "numpy", "torch", "pytorch_lightning"},
    "chance": {"app.exact", "torch", "pytorch_lightning"},
    "agreement": {"torch", "pytorch_lightning"},
    "checkpoints": {"app.files", "app.stop", "lightning_fabric", "lightning_utilities", "torch"},
    "folder": {"app.checkpoints", "app.files", "app.stop", "torch"},
    "curves": {"app.lean", "fsspec", "pytorch_lightning", "tensorboard"},
    "loops": {"pytorch_lightning"},
    "best": {"app.divergence", "pytorch_lightning", "torch"},
    "partial": {"lightning_utilities", "torch", "torchmetrics", "pytorch_lightning"},
    "same": {"pytorch_lightning"},
    "restart": {
        "app.agreement",
        "app.best",
        "app.chance",
        "app.checkpoints",
        "app.curves",
        "app.exact",
        "app.folder",
        "app.loops",
        "app.partial",
        "app.same",
        "pytorch_lightning",
    },
    "resume": {
        "app.agreement",
        "app.best",
        "app.chance",
        "app.checkpoints",
        "app.curves",
        "app.divergence",
        "app.exact",
        "app.folder",
        "app.loops",
        "app.partial",
        "app.restart",
        "app.same",
        "app.stop",
        "lightning_fabric",
        "pytorch_lightning",
    },
    "shards": {"app.environment", "app.resident", "numpy", "torch"},
    "datamodule": {
        "app.augmentation",
        "app.exact",
        "app.memory",
        "app.resident",
        "app.shards",
        "numpy",
        "torch",
        "pytorch_lightning",
    },
    "data": {"app.cifar", "app.datamodule", "numpy"},
    "model": {"torch", "torchvision", "pytorch_lightning"},
    "progress": {"app.starting", "pytorch_lightning"},
    "system": {"app.lean", "psutil", "torch", "pytorch_lightning"},
    "world": {"app.environment", "app.exact", "app.summary", "torch", "pytorch_lightning"},
    "artifacts": {"app.files", "torch", "torchvision", "pytorch_lightning"},
    "suggestions": set(),
    "flags": {"app.suggestions", "yaml"},
    "mistakes": {"app.flags", "app.suggestions", "jsonargparse"},
    "unions": {"jsonargparse"},
    "limits": {"app.environment", "jsonargparse", "torch"},
    "choice": {"app.data", "app.flags", "pytorch_lightning", "yaml"},
    "divergence": {"pytorch_lightning", "torch"},
    "cli": {
        "app.best",
        "app.chance",
        "app.choice",
        "app.curves",
        "app.divergence",
        "app.environment",
        "app.flags",
        "app.lean",
        "app.limits",
        "app.memory",
        "app.mistakes",
        "app.model",
        "app.progress",
        "app.resume",
        "app.schedule",
        "app.smddp",
        "app.system",
        "app.unions",
        "app.world",
        *HEAVY,
    },
    "train": {
        "app.artifacts",
        "app.cli",
        "app.environment",
        "app.failures",
        "app.files",
        "app.rendezvous",
        "app.hyperparameters",
        "app.imports",
        "app.lifeline",
        "app.progress",
        "app.starting",
        "app.stop",
        "app.threads",
        *HEAVY,
    },
    "train_multi_node": {
        "app.environment",
        "app.failures",
        "app.imports",
        "app.rendezvous",
        "app.starting",
        "app.stop",
        "app.train",
    },
    "train_torchrun": {"app.environment", "app.failures", "app.rendezvous", "app.starting", "app.threads", "torch"},
    "program": {"app.environment", "app.hyperparameters", "app.train_torchrun", "sagemaker_training"},
    "requirements": {"sagemaker_training"},
    "torchrun": {"torch"},
    "toolkit": {
        "app.environment",
        "app.failures",
        "app.peers",
        "app.program",
        "app.rendezvous",
        "app.requirements",
        "app.starting",
        "app.stop",
        "app.summary",
        "app.supervise",
        "app.train_torchrun",
        "app.watch",
        "sagemaker_training",
    },
}
STANDARD = set(sys.stdlib_module_names)


def modules() -> list[Path]:
    return sorted(APP.glob("*.py"))


def imports(path: Path) -> set[str]:
    """Return what a module imports: `app.x` for the application's own modules, else the top-level package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            own = node.module == "app"
            names = [f"app.{alias.name}" for alias in node.names] if own else [node.module]
        else:
            continue
        found |= {name if name.startswith("app.") else name.split(".")[0] for name in names}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.stem)
def test_a_module_imports_what_its_room_allows(path):
    assert imports(path) - STANDARD <= MAY_IMPORT[path.stem]


def test_every_room_is_there():
    assert {path.stem for path in modules()} == set(MAY_IMPORT)


def test_one_module_names_sagemakers_variables():
    readers = {path.stem for path in modules() if re.search(r"[\"']SM_[A-Z]+[\"'_]", path.read_text())}
    assert readers == {"environment"}


def test_only_launchers_write_the_environment():
    writes = r"os\.environ\.update|os\.environ\[[^]]+\] *=|os\.putenv|os\.environ\.setdefault"
    writers = {path.stem for path in modules() if re.search(writes, path.read_text())}
    assert writers == {"train_multi_node", "threads", "requirements"}


def test_no_module_shadows_a_package():
    """`python app/train.py` puts app/ first on the path: a module there must not be taken for another's package."""
    others = set(sys.stdlib_module_names) | {"sagemaker", "torch", "lightning", "numpy", "yaml", "tensorboard", "boto3"}
    assert not others & {path.stem for path in modules()}


def test_modules_and_functions_stay_short():
    for path in modules():
        source = path.read_text()
        assert source.count("\n") <= 220, path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 50, f"{path}: {node.name}"
