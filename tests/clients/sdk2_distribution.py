"""What SDK 2 sends for distributions, as JSON; no job runs.

python sdk2_distribution.py '[{"pytorchddp": ...}, ...]'
"""

import json
import sys

from sagemaker.pytorch import PyTorch

estimators = [
    PyTorch(
        image_uri="111122223333.dkr.ecr.us-east-1.amazonaws.com/mine",
        entry_point="train.py",
        role="arn:aws:iam::111122223333:role/training",
        instance_type="ml.p4d.24xlarge",
        instance_count=2,
        distribution=distribution,
    )
    for distribution in json.loads(sys.argv[1])
]
print("SENT", json.dumps([estimator.hyperparameters() for estimator in estimators]))
