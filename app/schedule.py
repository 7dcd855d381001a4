"""`app.schedule.Triangle`: the name by which jobs know it."""

from sagemaker_lightning.cli.lr_schedules import Triangle as Triangle
