"""Launches one SageMaker training job of the image and follows it to its end.

scripts/launch.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sagemaker_lightning.launcher.command import main

if __name__ == "__main__":
    main()
