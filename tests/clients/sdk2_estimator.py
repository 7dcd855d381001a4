"""SDK 2's Estimator on this machine.

python sdk2_estimator.py '{"image_uri": ..., "inputs": ..., ...}'
"""

import json
import sys

from sagemaker.estimator import Estimator

job = json.loads(sys.argv[1])
inputs = job.pop("inputs", None)
estimator = Estimator(role="arn:aws:iam::111122223333:role/training", instance_type="local", **job)
estimator.fit(inputs)
print("model:", estimator.model_data)
