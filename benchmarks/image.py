"""The image: its size by part, and the cost of a changed line of code.

    python -m benchmarks.image IMAGE

The cost is in seconds to rebuild and bytes to push. IMAGE must have been built by `make build`. The
benchmark builds it again from a copy of this checkout, under another name that it removes. The
bytes are those of the layers that IMAGE lacks, before a push compresses them.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import report

sys.path.insert(0, str(report.ROOT / "tests"))
PACKAGES = "/opt/conda/envs/sagemaker-lightning/lib/python3.11/site-packages"
PARTS = {
    "CUDA libraries, cuDNN, NCCL": f"{PACKAGES}/nvidia",
    "torch": f"{PACKAGES}/torch",
    "Triton": f"{PACKAGES}/triton",
    "all Python packages": PACKAGES,
    "conda and its environment": "/opt/conda",
    "application": "/opt/sagemaker-lightning",
}


def docker(*arguments: str) -> str:
    """Return the docker client's output."""
    import containers

    done = containers.docker(*arguments)
    if done.returncode:
        raise SystemExit(f"{done.stdout}error: docker {arguments[0]} failed, see above")
    return done.stdout


def sizes(image: str) -> dict[str, int]:
    """Return the bytes of each part, and of the whole image."""
    listed = docker(
        "run",
        "--rm",
        "--entrypoint=du",
        image,
        "--summarize",
        "--bytes",
        "--count-links",
        *PARTS.values(),
    )
    found = {path: int(size) for size, path in (line.split("\t") for line in listed.splitlines())}
    whole = int(docker("image", "inspect", "--format={{.Size}}", image))
    return {name: found[path] for name, path in PARTS.items()} | {"the whole image": whole}


def rebuild(image: str) -> tuple[float, int]:
    """Return the seconds of a rebuild, and the bytes that a push would add.

    The change is one line in app/train.py.
    """
    import containers

    tag = f"{image.partition(':')[0]}-changed"
    variables = containers.build_variables()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        containers.copy_checkout(copy)
        try:
            for line in ("", "# changed\n"):
                with (copy / "app/train.py").open("a") as file:
                    file.write(line)
                began = time.perf_counter()
                built = containers.build(tag, copy, **variables)
                seconds = time.perf_counter() - began
                if built.returncode:
                    raise SystemExit(f"{built.stdout}error: the build failed, see above")
            return seconds, _new(image, tag)
        finally:
            containers.docker("image", "rm", "--force", tag)


def _new(image: str, changed: str) -> int:
    """Return the bytes of the layers that a changed image does not share with `image`."""
    layers = [
        json.loads(docker("image", "inspect", "--format={{json .RootFS.Layers}}", one))
        for one in (image, changed)
    ]
    new = sum(layer not in layers[0] for layer in layers[1])
    made = docker(
        "history", "--human=false", "--format={{.Size}}", changed
    ).split()  # the newest first
    return sum([int(size) for size in made if int(size)][:new])


def run(image: str) -> None:
    """Print the table."""
    print(f"\n{report.machine()}\n\n| part | GB |\n| --- | --- |")
    for name, size in sizes(image).items():
        print(f"| {name} | {size / 1e9:.4f} |")
    seconds, pushed = rebuild(image)
    print(
        f"\na changed line in app/: {seconds:.1f} s to rebuild, {pushed / 1e3:.0f} kB in new layers"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("image")
    run(parser.parse_args().image)
