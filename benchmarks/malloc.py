"""What the image's settings of glibc's malloc save in a step on the CPU.

    python -m benchmarks.malloc [--n 5] [--steps 30]

By default, malloc gives large blocks that are freed back to the kernel, and takes them again in the
next step, page by page: 10,000 to 15,000 pages in each step of ResNet-18 (mallopt(3)). Each ratio
is that of the processor seconds of a step in two processes which train side by side, with the
variables that the Dockerfile sets / without them.
"""

import json
import os
import subprocess
import sys
import time

from pytorch_lightning import Callback, Trainer

from benchmarks import report
from benchmarks.small_steps import CASES, fit

PAIRS = 5  # default of --n
STEPS = 30  # default of --steps
WARMUP_STEPS = 5


class Steps(Callback):
    """Takes the processor seconds of the steps after the first ones."""

    def __init__(self) -> None:
        self.number = 0
        self.began = 0.0

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Count a step."""
        self.number += 1
        if self.number == WARMUP_STEPS:
            self.began = time.process_time()


def measure(steps: int) -> float:
    """Return the processor seconds of steps of ResNet-18 in this process."""
    case = CASES["ResNet-18, batch 32"]
    clock = Steps()
    last = WARMUP_STEPS + steps
    fit(case, False, case.loader(last + 1), clock, max_steps=last, max_epochs=1)
    return time.process_time() - clock.began


def run(n: int, steps: int) -> list[report.Comparison]:
    """Measure n pairs."""
    plain = {name: text for name, text in os.environ.items() if name not in report.KEEPS_MEMORY}
    command = [sys.executable, "-m", "benchmarks.malloc", f"--steps={steps}", "--alone"]
    ratios = []
    for _ in range(n):
        pair = [
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, cwd=report.ROOT)
            for variables in (plain | report.KEEPS_MEMORY, plain)
        ]
        kept, given_back = (json.loads(process.communicate()[0]) for process in pair)
        ratios.append(kept / given_back)
    return [report.Comparison("ResNet-18, batch 32", "CPU seconds of a step", ratios)]


if __name__ == "__main__":
    parser = report.parser(__doc__)
    parser.set_defaults(n=PAIRS)
    parser.add_argument(
        "--steps",
        type=report.positive,
        default=STEPS,
        help="steps of each side (default: %(default)s)",
    )
    parser.add_argument("--alone", action="store_true", help="be one side; print its seconds")
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measure(args.steps)))
    else:
        report.publish(run(args.n, args.steps))
