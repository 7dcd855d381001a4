"""SDK 2's PyTorch with a script of one's own.

python sdk2_pytorch.py '{"image_uri": ..., "entry_point": ..., ...}'
"""

import json
import sys

from sagemaker.pytorch import PyTorch

job = json.loads(sys.argv[1])
inputs = job.pop("inputs", None)
estimator = PyTorch(role="arn:aws:iam::111122223333:role/training", instance_type="local", **job)
estimator.fit(inputs)
print("model:", estimator.model_data)
