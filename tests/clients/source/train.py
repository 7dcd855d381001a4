"""A job's own program that trains as the image does, with modules of the job's beside it."""

from app.train_multi_node import main

main()
