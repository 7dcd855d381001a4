"""Runs the user's function on the rows of a table, each host on its own rows.

    docker run -e SAGEMAKER_PROGRAM=app/split.py IMAGE train        as a job's program
    python app/split.py --function mine.compute --input rows.npy    on a desk

A job gives the function as a hyperparameter: function=mine.compute. The code is in
sagemaker_lightning/rows/job.py.
"""

if __name__ == "__main__":  # first of all: the imports below take seconds
    from sagemaker_lightning.process.start import before_torch

    before_torch()

from sagemaker_lightning.rows.job import main

if __name__ == "__main__":
    main()
