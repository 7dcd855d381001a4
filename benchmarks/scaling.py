"""What more nodes bring: measured here with one core a node, predicted for AWS, and measured on AWS.

    python -m benchmarks.scaling local [--n 5] [--steps 6] [--batch_size 32] [-- FLAGS OF app/train.py]
    python -m benchmarks.scaling predict --step SECONDS [--megabytes 44.7] [--overlap 0.3] ...
    python -m benchmarks.scaling sagemaker --instances 1 2 4 8 -- FLAGS OF scripts/launch.py

All of it is weak scaling: the batch of a rank stays, so that N nodes train on N times as many images in a step. An
epoch of the same images then has N times fewer steps, and is N times faster if the exchange of gradients is free. The
tables are those of the original's article (instances, time, improvement), beside whose improvement they put theirs.

`local` measures in turns, each round with one of each: our training (app/train_multi_node.py) and torchvision's
ResNet-18 in a bare loop in DDP by torchrun, each on one node and on two. A node is a core of this machine with one
thread; the nodes talk by gloo over the loopback interface. What its ratios mean:

    ours, plain     images/s of two nodes / of one; of 2.0, the rest is communication and what the cores share
    efficiency      the first of these / the second: above 1, we lose less than plain DDP does
    two nodes       images/s of both nodes together, ours / plain
    cores           images/s of two nodes that exchange no gradients / of one node: memory and caches are shared, so
                    that not even this is 2.0
    communication   share of a step that is not there without the exchange (DDP's no_sync): the time that waiting takes,
                    and the work of sending and adding, for which a node here has no second core. What Lightning
                    broadcasts after each step, one number (was there a SIGTERM?), stays and keeps the nodes in step
    waiting         share of a step from the last gradient computed to the last one exchanged, by DDP's own timers:
                    in which the node has nothing else to do. Not in it: the buffers that DDP broadcasts first

`predict` says what it assumes above its tables. `sagemaker` runs one job after another by scripts/launch.py.
"""

import argparse
import sys

from benchmarks import jobs, prediction


def main() -> None:
    """Run what the flags ask for; what comes after -- is another program's."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    here = commands.add_parser("local", help="measure with two cores of this machine as nodes")
    if words[:1] == ["local"]:  # it brings torch, which a desk that starts jobs does without
        from benchmarks import local

        local.add_arguments(here)
    prediction.add_arguments(
        commands.add_parser("predict", help="predict for instance types of AWS")
    )
    jobs.add_arguments(commands.add_parser("sagemaker", help="measure on AWS"))
    args = vars(parser.parse_args(words[:at]))
    command = args.pop("command")
    flags = words[at + 1 :]
    if command == "local":
        local.run(**args, flags=flags)
    elif command == "sagemaker":
        jobs.run(**args, flags=flags)
    else:
        prediction.run(**args)


if __name__ == "__main__":
    main()
