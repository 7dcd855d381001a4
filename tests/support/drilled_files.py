"""The files of a drilled run."""

import json
import signal
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

from sagemaker_lightning.drill.command import Interruption
from sagemaker_lightning.resume.files import checkpoint_file


def run_of(folder: Path, **changes) -> Path:
    """Write the files of a run, and return their folder.

    `changes` may change a step's batch, learning rate or loss, a weight, a metric, a curve's value,
    a row, and more.
    """
    values = {
        "batch": "aa",
        "rates": [0.1],
        "loss": 0.5,
        "weight": 1.0,
        "metric": 0.25,
        "curve": 2.0,
        "row": "3",
        "moment": 1,
        "steps": 2,
        "place": 8,
        "starts": [0],
        "changed": [],
        "files": 0,
    } | changes
    model = folder / "ml/model"
    logs = folder / "ml/checkpoints/tensorboard"
    model.mkdir(parents=True)
    (folder / "work").mkdir()
    state = {"w": torch.tensor([0.0, values["weight"]])}
    own_state = {
        "number": values["moment"],
        "journal": values["moment"],
        "resumes": [values["moment"]],
        "step": 2,
        "parts": {"model_files": [values["moment"]]},
        "ranks": [
            {
                "data_epoch": {"made": values["moment"], "objects_before": None},
                "loader_positions": {
                    "loaders": [
                        {
                            "begun": values["moment"],
                            "workers": values["moment"],
                            "place": values["place"],
                        }
                    ]
                },
            }
        ],
    }
    checkpoint = {
        "state_dict": state,
        "callbacks": {"Timer": {"time_elapsed": values["moment"]}},
        checkpoint_file.ENTRIES_KEY: own_state,
    }
    checkpoint_file.write(
        folder / "ml/checkpoints/step-000000002.ckpt", checkpoint, 2, values["moment"]
    )
    torch.save(state, model / "model.pt")
    (model / "model.json").write_text(json.dumps({"metrics": {"val_loss": values["metric"]}}))
    (folder / "work/rows.csv").write_text(f"step,value\n1,{values['row']}\n")
    with SummaryWriter(str(logs / "version_0")) as writer:
        writer.add_scalar("loss", values["curve"], 1)
    with SummaryWriter(str(logs / "version_0/system/localhost")) as writer:
        writer.add_scalar("system/cpu", values["moment"], 1)
    for number in range(values["files"]):
        (model / f"file{number}").touch()
    step = {"batch": "aa", "learning rate": [(0.1).hex()]}
    steps = [
        {"at": ["batch", 0, k], "step": k + 1, **step, "loss": (0.5).hex()}
        for k in range(values["steps"])
    ]
    steps[-1] |= {
        "batch": values["batch"],
        "learning rate": [rate.hex() for rate in values["rates"]],
        "loss": values["loss"] if values["loss"] is None else values["loss"].hex(),
    }
    starts = [{"at": ["start", 0], "step": step, "workers": 0} for step in values["starts"]]
    end = {"at": ["end", 0], "changed": values["changed"]}
    lines = [json.dumps(entry) for entry in (*starts, *steps, end)]
    # The run was killed while it wrote.
    (folder / "steps-0.jsonl").write_text("\n".join(lines) + '\n{"at": ["bat')
    return folder


def run_positions(epochs: int, batches: int, validations: int, workers: int | None) -> list[dict]:
    """Return the lines that a run writes."""
    positions = [{"at": ["start", 0], "step": 0, "workers": workers}]
    for epoch in range(epochs):
        positions += [{"at": ["batch", epoch, batch]} for batch in range(batches)]
        positions += [{"at": ["validation", epoch, batches, batch]} for batch in range(validations)]
        positions += [{"at": ["epoch", epoch]}]
    return positions


STOP = Interruption("stop-in-epoch", "stop within an epoch", signal.SIGTERM, ("batch", 0, 1))
KILL = Interruption("kill-in-epoch", "kill within an epoch", signal.SIGKILL, ("batch", 0, 1))
