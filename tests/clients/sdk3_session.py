"""SDK 3's ModelTrainer on AWS: python sdk3_session.py '{"training_image": ..., "role": ...}'"""

import json
import sys

from sagemaker.core.shapes import CheckpointConfig, OutputDataConfig, StoppingCondition
from sagemaker.core.training.configs import Compute, InputData
from sagemaker.train.model_trainer import ModelTrainer

job = json.loads(sys.argv[1])
inputs = [
    InputData(channel_name=name, data_source=source)
    for name, source in job.pop("inputs", {}).items()
]
trainer = ModelTrainer(
    compute=Compute(**job.pop("compute")),
    output_data_config=OutputDataConfig(s3_output_path=job.pop("output")),
    checkpoint_config=CheckpointConfig(s3_uri=job.pop("checkpoints")),
    stopping_condition=StoppingCondition(**job.pop("stopping")),
    **job,
)
trainer.train(input_data_config=inputs, wait=True, logs=True)
print("model:", trainer._latest_training_job.model_artifacts.s3_model_artifacts)
