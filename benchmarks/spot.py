"""A spot job of two nodes in the rehearsal, interrupted many times, and the same job alone.

    python -m benchmarks.spot --interruptions=25 --seed=1 --engine=auto

Prints whether the weights are the same to the last bit, the work that was lost, and the goodput.
The seed decides each interruption: with or without a warning, of one node or of both, and its
moment, from the start of the containers on. It needs the tests' image, or root with
--engine=processes.
"""

import argparse
import io
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/support"))


def main(interruptions: int, seed: int, engine: str, epochs: int) -> None:
    """Run both jobs, and print their results."""
    from containers import IMAGE_TAG
    from rehearsals import Rehearsal

    rule = ["of any unwarned", "of any warned", "of all either"][seed % 3]
    flags = [
        f"--interrupt=every ~20s {interruptions} times {rule}",
        f"--seed={seed}",
        f"--engine={engine}",
    ]
    flags += ["--grace=30"]
    hyperparameters = {
        "trainer.max_epochs": str(epochs),
        "data.batch_size": "64",
        "resume.every_n_steps": "5",
    }
    fields = {
        "hosts": 2,
        "HyperParameters": hyperparameters,
        "Environment": {"OMP_NUM_THREADS": "1"},
    }
    fields["StoppingCondition"] = {"MaxRuntimeInSeconds": 4 * 3600}
    spot = {
        "EnableManagedSpotTraining": True,
        "CheckpointConfig": {"S3Uri": "s3://rehearsal/checkpoints"},
    }
    spot["StoppingCondition"] = fields["StoppingCondition"] | {"MaxWaitTimeInSeconds": 4 * 3600}
    with tempfile.TemporaryDirectory() as folder, Rehearsal(Path(folder), *flags) as server:
        weights = []
        seconds = []
        for more_fields in ({}, spot):
            began = time.monotonic()
            name = server.create(IMAGE_TAG, **fields | more_fields)
            job = server.wait_until_ended(name, 4 * 3600)
            assert job["TrainingJobStatus"] == "Completed", (job, server.lines(name))
            weights.append(
                torch.load(io.BytesIO(server.archive(name)["model.pt"]), weights_only=True)
            )
            seconds.append(time.monotonic() - began)
        record = json.loads((server.folder / name / "job.json").read_text())
    interruptions_met = [
        transition["Status"] for transition in job["SecondaryStatusTransitions"]
    ].count("Interrupted")
    is_same = weights[0].keys() == weights[1].keys()
    is_same = is_same and all(
        torch.equal(value, weights[1][key]) for key, value in weights[0].items()
    )
    print(
        f"seed {seed}, {rule}: {interruptions_met} interruptions, weights "
        f"{'the same' if is_same else 'NOT THE SAME'}"
    )
    print(
        f"alone {seconds[0]:.0f} s, interrupted {seconds[1]:.0f} s in "
        f"{len(record['attempts'])} attempts"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spot")
    parser.add_argument("--interruptions", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=["auto", "docker", "processes"], default="auto")
    parser.add_argument("--epochs", type=int, default=20)
    main(**vars(parser.parse_args()))
