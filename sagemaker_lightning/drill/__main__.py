"""`python -m sagemaker_lightning.drill`: see command.py."""

import sys

from sagemaker_lightning.drill.command import main

sys.exit(main())
