#!/usr/bin/env python3
"""Merges what the hosts of a job have computed into one file of each array.

scripts/merge_parts.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sagemaker_lightning.rows.merge import main

if __name__ == "__main__":
    main()
