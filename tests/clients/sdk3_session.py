"""SDK 3's ModelTrainer on AWS.

python sdk3_session.py '[{"training_image": ..., "role": ...}, ...]'
"""

import json
import sys

from sagemaker.core.helper.session_helper import Session
from sagemaker.core.shapes import CheckpointConfig, OutputDataConfig, StoppingCondition
from sagemaker.core.training.configs import Compute, InputData, SourceCode
from sagemaker.train.model_trainer import ModelTrainer

for job in json.loads(sys.argv[1]):
    inputs = [
        InputData(channel_name=name, data_source=source)
        for name, source in job.pop("inputs", {}).items()
    ]
    trainer = ModelTrainer(
        compute=Compute(**job.pop("compute")),
        output_data_config=OutputDataConfig(s3_output_path=job.pop("output")),
        checkpoint_config=CheckpointConfig(s3_uri=job.pop("checkpoints")),
        stopping_condition=StoppingCondition(**job.pop("stopping")),
        source_code=SourceCode(**job.pop("source_code")) if "source_code" in job else None,
        # For the source; without it, the SDK asks AWS's own STS for a name, whatever
        # AWS_ENDPOINT_URL says.
        sagemaker_session=Session(default_bucket="rehearsal"),
        **job,
    )
    trainer.train(input_data_config=inputs, wait=True, logs=True)
    print("model:", trainer._latest_training_job.model_artifacts.s3_model_artifacts)
