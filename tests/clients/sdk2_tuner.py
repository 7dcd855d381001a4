"""SDK 2's HyperparameterTuner on AWS.

python sdk2_tuner.py '{"estimator": {...}, "ranges": {"name": [...]}, ...}'
"""

import json
import sys

from sagemaker import Session
from sagemaker.estimator import Estimator
from sagemaker.pytorch import PyTorch
from sagemaker.tuner import CategoricalParameter, HyperparameterTuner

job = json.loads(sys.argv[1])
fields = job.pop("estimator")
kind = PyTorch if "entry_point" in fields else Estimator
estimator = kind(sagemaker_session=Session(default_bucket="rehearsal"), **fields)
ranges = {name: CategoricalParameter(values) for name, values in job.pop("ranges").items()}
inputs = job.pop("inputs")
tuner = HyperparameterTuner(estimator, hyperparameter_ranges=ranges, **job)
tuner.fit(inputs, wait=True)
print("best:", tuner.best_training_job())
