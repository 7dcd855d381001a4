"""`app.schedule.Triangle`: the name of the schedule in existing jobs' settings."""

from sagemaker_lightning.cli.lr_schedules import Triangle as Triangle
