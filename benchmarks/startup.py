"""Seconds from a training's start to its first optimizer step / of its imports alone.

    python -m benchmarks.startup [--n 5] [--image IMAGE]

The trainings are `python app/train.py`, the toolkit's `train`, and, if an image is given, `docker
run IMAGE train`. Each starts without and with a checkpoint, on the default data. The imports alone
are a process, or container, that imports torch, torchvision and pytorch_lightning.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from benchmarks import report

CALLBACK = f"{__package__}.startup.FirstStep"
PAIRS = 5  # default of --n
IMPORTS = ["-c", "import torch, torchvision, pytorch_lightning, time; print(time.time())"]


class FirstStep(Callback):
    """Prints the time of the first optimizer step's end, and ends the process.

    The time is in seconds since 1970. A run of one step continues to its end, so that the same
    callbacks train and write its checkpoint.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print the time, and leave."""
        if trainer.max_steps == 1:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(time.time(), flush=True)
        if model := os.environ.get("SM_MODEL_DIR"):  # a job without a model has failed
            Path(model, "model.pt").touch()
        os._exit(0)


def seconds(command: list[str], **variables: str) -> float:
    """Return the seconds from the start of `line` to the time that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        start_time = time.time()
        completed = subprocess.run(
            command,
            cwd=folder,
            env=report.variables(**variables),
            capture_output=True,
            text=True,
        )
    printed = re.findall(r"^\d{9,}\.\d+$", completed.stdout, re.MULTILINE)
    if completed.returncode or not printed:
        raise SystemExit(
            f"{completed.stdout}{completed.stderr}error: {' '.join(command)} failed, see above"
        )
    return float(printed[-1]) - start_time


def program() -> float:
    """Start app/train.py."""
    return seconds(
        [sys.executable, str(report.ROOT / "app/train.py"), f"--trainer.callbacks+={CALLBACK}"]
    )


def train() -> float:
    """Start the toolkit's `train`."""
    with tempfile.TemporaryDirectory() as base_dir:
        settings(Path(base_dir))
        variables = {"SAGEMAKER_BASE_DIR": base_dir, "SAGEMAKER_PROGRAM": "app/train_multi_node.py"}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = [str(report.ROOT / "entrypoint.sh"), "train"]
        return seconds(
            command,
            PATH=path,
            SAGEMAKER_TRAINING_MODULE="sagemaker_lightning.launch.toolkit_hook:main",
            **variables,
        )


def container(image: str, checkpoints: Path) -> float:
    """Start a container's `train`, from the checkpoint in a folder if there is one."""
    with tempfile.TemporaryDirectory() as base_dir:
        return seconds(_container(image, checkpoints, settings(Path(base_dir))))


def checkpoint(image: str, folder: Path) -> None:
    """Let a job write a checkpoint of one step to a folder."""
    with tempfile.TemporaryDirectory() as base_dir:
        file = settings(Path(base_dir), **{"trainer.max_steps": "1"})
        subprocess.run(_container(image, folder, file), check=True, stdout=subprocess.DEVNULL)


def _container(image: str, checkpoints: Path, settings_file: Path) -> list[str]:
    mounts = [
        f"{settings_file}:/opt/ml/input/config/hyperparameters.json:ro",
        f"{checkpoints}:/opt/ml/checkpoints",
    ]
    mounts += [f"{report.ROOT / 'benchmarks'}:/opt/sagemaker-lightning/benchmarks:ro"]
    return ["docker", "run", "--rm", *(f"--volume={mount}" for mount in mounts), image, "train"]


def settings(base_dir: Path, **more_hyperparameters: str) -> Path:
    """Write the hyperparameters, and return their file."""
    file = base_dir / "input/config/hyperparameters.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"trainer.callbacks+": CALLBACK} | more_hyperparameters))
    return file


def run(n: int, image: str | None = None) -> list[report.Comparison]:
    """Compare in n rounds, after one that fills the file cache and does not count."""
    plain = {"app/train.py": program, "train": train}
    ratios_by_name = _ratios(n, plain, lambda: seconds([sys.executable, *IMPORTS]))
    if image:
        imports = ["docker", "run", "--rm", "--entrypoint=python", image, *IMPORTS]
        with (
            tempfile.TemporaryDirectory() as no_checkpoints,
            tempfile.TemporaryDirectory() as one_checkpoint,
        ):
            checkpoint(image, Path(one_checkpoint))
            starts = {"docker run": partial(container, image, Path(no_checkpoints))}
            starts["docker run, resumed"] = partial(container, image, Path(one_checkpoint))
            ratios_by_name |= _ratios(n, starts, lambda: seconds(imports))
    quantities = (
        "seconds: start to first optimizer step / importing torch, torchvision, pytorch_lightning"
    )
    return [
        report.Comparison(f"startup, {name}", quantities, ratios)
        for name, ratios in ratios_by_name.items()
    ]


def _ratios(
    n: int, starts: Mapping[str, Callable[[], float]], imports: Callable[[], float]
) -> dict[str, list[float]]:
    ratios: dict[str, list[float]] = {name: [] for name in starts}
    for number in range(n + 1):
        alone = imports()
        for name, start in starts.items():
            ours = start()
            if number:
                ratios[name].append(ours / alone)
                print(f"startup, {name}: {ours:.2f} / {alone:.2f} = {ours / alone:.3f}", flush=True)
    return ratios


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give --n its default here, and add the image."""
    parser.set_defaults(n=PAIRS)
    parser.add_argument("--image", help="also measure docker run IMAGE train")


if __name__ == "__main__":
    parser = report.parser(__doc__)
    add_arguments(parser)
    report.publish(run(**vars(parser.parse_args())))
