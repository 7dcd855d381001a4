"""python -m sagemaker_lightning.shards: see command.py."""

from sagemaker_lightning.shards.command import main

if __name__ == "__main__":
    main()
