"""The few AWS calls that the shell scripts make: sagemaker_lightning/launcher/aws.py lists them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sagemaker_lightning.launcher.aws import main

if __name__ == "__main__":
    main()
