"""Runs the benchmarks of one machine and prints one table.

    python -m benchmarks [--n 5] [--steps 10] [--data_dir DIR]
        all of them, from the repository's root: minutes on 2 CPU cores
    python -m benchmarks.step, .original, .startup, .data   one of them; --help lists its flags
    python -m benchmarks.side_by_side                       trainings that share the machine
    python -m benchmarks.interruptions cost                 checkpoints and restarts
    python -m benchmarks.restart                            a rank's death, and what it costs
    python -m benchmarks.hangs                              false alarms of the watch for hangs
    python -m benchmarks.data_shards                        shards, from a disk and from S3
    python -m benchmarks.proof                              the cost of proving each resume
    python -m benchmarks.small_steps                        what ExactResume costs a small step
    python -m benchmarks.checkpoint_cost                    a checkpoint's stall and size
    python -m benchmarks.malloc                             what the image's settings of malloc save
    python -m benchmarks.sharded                            a sharded model's steps and checkpoints
    python -m benchmarks.accuracy RECIPE --data_dir DIR     seconds to an accuracy, by a recipe
    python -m benchmarks.image IMAGE                        the image, and the cost of a change
    python -m benchmarks.scaling                            the gain of more nodes

They run one after another: two at a time would take the cores from each other.
"""

from benchmarks import data, original, report, startup, step, turns


def main() -> None:
    """Run what the flags ask for."""
    parser = report.parser(__doc__)
    turns.add_arguments(parser)
    original.add_arguments(parser)
    args = parser.parse_args()
    found = [step.run(args.n, args.steps), *original.run(args.n, args.steps, args.data_dir)]
    report.publish([*found, *startup.run(args.n), *data.run(args.n, args.data_dir)])


if __name__ == "__main__":
    main()
