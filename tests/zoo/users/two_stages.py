"""Two trainings in one program: a short one, and one that begins with its weights.

The second one has other settings.

python two_stages.py FLAGS
"""

import shutil
import sys
from pathlib import Path

from app import train


def main():
    """Pretrain, and fine-tune the result."""
    first = [
        "--trainer.max_epochs=2",
        "--resume.dirpath=output/first",
        "--checkpoint.dirpath=output/first",
    ]
    train.main([*sys.argv[1:], *first])
    shutil.copy("output/model/model.pt", "pretrained.pt")
    second = [
        "--model.init_from=pretrained.pt",
        "--model.lr=0.001",
        "--resume.dirpath=output/second",
    ]
    train.main([*sys.argv[1:], *second, "--checkpoint.dirpath=output/second"])
    Path("pretrained.pt").unlink()


if __name__ == "__main__":
    main()
