"""Runs all benchmarks and prints one table.

    python -m benchmarks [--n 5] [--steps 10] [--data_dir DIR]      from the repository's root; minutes on 2 CPU cores
    python -m benchmarks.step, .original, .startup                  one of them; --help says what it takes
    python -m benchmarks.scaling                                    what more nodes bring: apart, with its own --help

They run one after another: two at a time would take the cores from each other.
"""

from benchmarks import original, report, startup, step, turns


def main() -> None:
    """Run what the flags ask for."""
    parser = report.parser(__doc__)
    turns.add_arguments(parser)
    original.add_arguments(parser)
    args = parser.parse_args()
    report.publish([step.run(args.n, args.steps), original.run(args.n, args.steps, args.data_dir), startup.run(args.n)])


if __name__ == "__main__":
    main()
