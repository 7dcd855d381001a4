"""SDK 3's HyperparameterTuner on AWS.

python sdk3_tuner.py '{"trainer": {...}, "ranges": {"name": [...]}, ...}'
"""

import json
import sys

from sagemaker.core.helper.session_helper import Session
from sagemaker.core.parameter import CategoricalParameter
from sagemaker.core.shapes import CheckpointConfig, OutputDataConfig, StoppingCondition
from sagemaker.core.training.configs import Compute, InputData, SourceCode
from sagemaker.train.distributed import Torchrun
from sagemaker.train.model_trainer import ModelTrainer
from sagemaker.train.tuner import HyperparameterTuner

job = json.loads(sys.argv[1])
trainer_fields = job.pop("trainer")
source_code = trainer_fields.pop("source_code", None)
torchrun = trainer_fields.pop("torchrun", None)
trainer = ModelTrainer(
    compute=Compute(**trainer_fields.pop("compute")),
    output_data_config=OutputDataConfig(s3_output_path=trainer_fields.pop("output")),
    checkpoint_config=CheckpointConfig(s3_uri=trainer_fields.pop("checkpoints")),
    stopping_condition=StoppingCondition(**trainer_fields.pop("stopping")),
    source_code=SourceCode(**source_code) if source_code else None,
    distributed=Torchrun(**torchrun) if torchrun else None,
    # Without it, the SDK asks AWS's own STS for a name, whatever AWS_ENDPOINT_URL says.
    sagemaker_session=Session(default_bucket="rehearsal"),
    **trainer_fields,
)
ranges = {name: CategoricalParameter(values) for name, values in job.pop("ranges").items()}
inputs = [InputData(channel_name=name, data_source=source) for name, source in job.pop("inputs")]
tuner = HyperparameterTuner(model_trainer=trainer, hyperparameter_ranges=ranges, **job)
tuner.tune(inputs=inputs, wait=True)
print("best:", tuner.best_training_job())
