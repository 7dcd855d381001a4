"""Lanes of tests side by side (`make test`), and their order.

A lane is a set of files that run one after another, or a page whose commands do. pytest-xdist's own
`loadgroup` is `load` under pytest 9.2, which no longer lets a plugin change `item.nodeid`.
"""

import json
import re
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

# Files of one lane share a network (the SDKs' local mode has one name for it), an image's tag or a
# server, or look for orphans.
SHARED_LANES = {
    "local mode": {"test_clients_docker", "test_clients_sdk2", "test_clients_sdk3", "test_readme"},
    "image": {"test_container", "test_launch_checks", "test_nodes", "test_scripts"},
    "endpoint": {
        "test_rehearsal_endpoint",
        "test_rehearsal_job_access",
        "test_rehearsal_strangers",
    },
    "paged lists": {
        "test_rehearsal_addresses",
        "test_rehearsal_archives",
        "test_rehearsal_channels",
        "test_rehearsal_checkpoint_sync",
        "test_rehearsal_metrics",
    },
    "rehearsal": {"test_rehearsal", "test_rehearsal_processes", "test_sweeper"},
}
DURATIONS_FILE = Path(__file__).resolve().parents[1] / "durations.json"


def lane(nodeid: str) -> str:
    """Return the lane of a test: its page, its file, or the group of files that share something."""
    file, _, test = nodeid.partition("::")
    if page := re.match(r"test_a_block_of_a_page\[(docs/[\w-]+\.md):", test):
        return page[1]
    name = Path(file).stem
    return next((lane_name for lane_name, files in SHARED_LANES.items() if name in files), name)


class Lanes(LoadScopeScheduling):
    """Gives each worker one lane at a time, the slowest lane first."""

    def _split_scope(self, nodeid: str) -> str:
        return lane(nodeid)


def durations() -> dict[str, float]:
    """Return the seconds that each file took when the table was last written."""
    return json.loads(DURATIONS_FILE.read_text()) if DURATIONS_FILE.exists() else {}


def longest_first(nodeids: list[str]) -> dict[str, int]:
    """Return the position of each file in the run: by lane, the slowest lane first."""
    files = dict.fromkeys(nodeid.partition("::")[0] for nodeid in nodeids)
    file_seconds = durations()
    lane_seconds = {}
    for file in files:
        lane_seconds[lane(file)] = lane_seconds.get(lane(file), 0.0) + file_seconds.get(file, 0.0)
    ordered = sorted(
        files,
        key=lambda file: (
            -lane_seconds[lane(file)],
            lane(file),
            -file_seconds.get(file, 0.0),
            file,
        ),
    )
    return {file: position for position, file in enumerate(ordered)}
