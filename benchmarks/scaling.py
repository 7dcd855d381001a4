"""The gain of more nodes: measured on one core a node, predicted for AWS, measured on AWS.

    python -m benchmarks.scaling local [--n 5] [--steps 6] [--batch_size 32]
                                       [-- FLAGS OF app/train.py]
    python -m benchmarks.scaling predict --step SECONDS [--megabytes 44.7] [--overlap 0.3] ...
    python -m benchmarks.scaling sagemaker --instances 1 2 4 8 -- FLAGS OF scripts/launch.py

All of it is weak scaling: a rank's batch size stays, so N nodes train on N times as many images in
a step. An epoch of the same images then has N times fewer steps, and is N times faster if the
exchange of gradients is free. The tables have the columns of the original's article (instances,
time, improvement), and put the article's improvement beside their own.

`local` measures in turns. Each round has one turn of each: our training (app/train_multi_node.py)
and torchvision's ResNet-18 in a bare loop in DDP by torchrun, each on one node and on two. A node
is a core of this machine with one thread; the nodes are connected by gloo over the loopback
interface. Its ratios:

    ours, plain     images/s of two nodes / of one; what is missing from 2.0 is communication, and
                    what the cores share
    efficiency      the first of these / the second: above 1, we lose less than plain DDP does
    two nodes       images/s of both nodes together, ours / plain
    cores           images/s of two nodes that exchange no gradients / of one node: they share
                    memory and caches, so not even this is 2.0
    communication   share of a step that vanishes without the exchange (DDP's no_sync): the time of
                    waiting, and the work of sending and adding, for which a node here has no second
                    core. Lightning still broadcasts one number after each step (was there a
                    SIGTERM?), which keeps the nodes in step
    waiting         share of a step from the last gradient computed to the last one exchanged, by
                    DDP's own timers: the node has nothing else to do. The buffers that DDP
                    broadcasts first are not part of it

`predict` prints its assumptions above its tables. `sagemaker` runs one job after another by
scripts/launch.py.
"""

import argparse
import sys

from benchmarks import jobs, prediction


def main() -> None:
    """Run what the flags ask for; the words after -- are another program's flags."""
    words = sys.argv[1:]
    end_of_words = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    local_parser = commands.add_parser(
        "local", help="measure with two cores of this machine as nodes"
    )
    if words[:1] == ["local"]:  # it brings torch, which a desk that starts jobs does without
        from benchmarks import local

        local.add_arguments(local_parser)
    prediction.add_arguments(
        commands.add_parser("predict", help="predict for instance types of AWS")
    )
    jobs.add_arguments(commands.add_parser("sagemaker", help="measure on AWS"))
    args = vars(parser.parse_args(words[:end_of_words]))
    command = args.pop("command")
    flags = words[end_of_words + 1 :]
    if command == "local":
        local.run(**args, flags=flags)
    elif command == "sagemaker":
        jobs.run(**args, flags=flags)
    else:
        prediction.run(**args)


if __name__ == "__main__":
    main()
