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

sys.path.insert(0, str(report.ROOT / "tests/support"))
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

    completed = containers.docker(*arguments)
    if completed.returncode:
        raise SystemExit(f"{completed.stdout}error: docker {arguments[0]} failed, see above")
    return completed.stdout


def sizes(image: str) -> dict[str, int]:
    """Return the bytes of each part, and of the whole image."""
    output = docker(
        "run",
        "--rm",
        "--entrypoint=du",
        image,
        "--summarize",
        "--bytes",
        "--count-links",
        *PARTS.values(),
    )
    part_bytes = {
        path: int(size) for size, path in (line.split("\t") for line in output.splitlines())
    }
    image_bytes = int(docker("image", "inspect", "--format={{.Size}}", image))
    return {name: part_bytes[path] for name, path in PARTS.items()} | {
        "the whole image": image_bytes
    }


def rebuild(image: str) -> tuple[float, int]:
    """Return the seconds of a rebuild, and the bytes that a push would add.

    The change is one line in app/train.py.
    """
    import containers

    tag = f"{image.partition(':')[0]}-changed"
    variables = containers.build_variables()
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder)
        containers.copy_checkout(checkout)
        try:
            for added_line in ("", "# changed\n"):
                with (checkout / "app/train.py").open("a") as file:
                    file.write(added_line)
                began = time.perf_counter()
                build = containers.build(tag, checkout, **variables)
                seconds = time.perf_counter() - began
                if build.returncode:
                    raise SystemExit(f"{build.stdout}error: the build failed, see above")
            return seconds, _new(image, tag)
        finally:
            containers.docker("image", "rm", "--force", tag)


def _new(image: str, changed: str) -> int:
    """Return the bytes of the layers that a changed image does not share with `image`."""
    layers = [
        json.loads(docker("image", "inspect", "--format={{json .RootFS.Layers}}", tag))
        for tag in (image, changed)
    ]
    new_layers = sum(layer not in layers[0] for layer in layers[1])
    # The newest comes first.
    layer_sizes = docker("history", "--human=false", "--format={{.Size}}", changed).split()
    return sum([int(size) for size in layer_sizes if int(size)][:new_layers])


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
