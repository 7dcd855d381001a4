"""K-fold cross-validation: a program of one's own that trains each fold in turn.

Each fold has its own folder of checkpoints.

python kfold.py FLAGS
"""

import json
import sys
from pathlib import Path

from app import train

FOLDS = 3


def main():
    """Train all folds, and write the mean of their validation losses."""
    losses = []
    for fold in range(FOLDS):
        folder = Path("output/folds", str(fold))
        train.main(
            [
                *sys.argv[1:],
                f"--data.fold={fold}",
                f"--resume.dirpath={folder / 'checkpoints'}",
                f"--checkpoint.dirpath={folder / 'best'}",
                f"--logger.save_dir={folder / 'logs'}",
            ]
        )
        about = json.loads(Path("output/model/model.json").read_text())
        losses.append(about["metrics"]["val_loss"])
    Path("cross-validation.json").write_text(
        json.dumps({"val_loss": sum(losses) / FOLDS, "losses": losses})
    )


if __name__ == "__main__":
    main()
