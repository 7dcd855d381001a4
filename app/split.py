"""Runs a function of the user's on the rows of a table, each host on its own.

    docker run -e SAGEMAKER_PROGRAM=app/split.py IMAGE train        with the hyperparameter function=mine.compute
    python app/split.py --function mine.compute --input rows.npy    on a desk

What it does is in sagemaker_lightning/rows/job.py.
"""

if __name__ == "__main__":  # before all else: what is imported takes seconds
    from sagemaker_lightning.process.start import before_torch

    before_torch()

from sagemaker_lightning.rows.job import main

if __name__ == "__main__":
    main()
