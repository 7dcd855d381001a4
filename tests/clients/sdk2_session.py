"""SDK 2's Estimator on AWS, as the tutorial's run_sagemaker.py uses it.

python sdk2_session.py '[{...}, {...}]'
"""

import json
import sys

from sagemaker import Session
from sagemaker.estimator import Estimator

for job in json.loads(sys.argv[1]):
    name, inputs = job.pop("job_name", None), job.pop("input_path", None)
    estimator = Estimator(sagemaker_session=Session(), **job)
    estimator.fit(inputs=inputs, job_name=name, logs="All")
    print("model:", estimator.model_data)
