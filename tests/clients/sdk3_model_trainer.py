"""SDK 3's ModelTrainer on this machine.

python sdk3_model_trainer.py '{"training_image": ..., "source_code": ...}'
"""

import json
import sys

from sagemaker.core.training.configs import Compute, InputData, SourceCode
from sagemaker.train.distributed import Torchrun
from sagemaker.train.model_trainer import Mode, ModelTrainer

job = json.loads(sys.argv[1])
compute = Compute(instance_type="local_cpu", instance_count=job.pop("instance_count", 1))
inputs = [
    InputData(channel_name=name, data_source=source)
    for name, source in job.pop("inputs", {}).items()
]
source_code = SourceCode(**job.pop("source_code")) if "source_code" in job else None
distributed = Torchrun(**job.pop("torchrun")) if "torchrun" in job else None
trainer = ModelTrainer(
    training_mode=Mode.LOCAL_CONTAINER,
    compute=compute,
    source_code=source_code,
    distributed=distributed,
    **job,
)
trainer.train(input_data_config=inputs)
