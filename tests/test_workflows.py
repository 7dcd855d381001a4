"""The forge's workflows call what a person can type, and take actions by their commit."""

import re

import pytest
import yaml
from containers import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps(workflow: dict) -> list[tuple[dict, dict]]:
    """Return the steps of all jobs, each with its job."""
    return [(job, step) for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile(path):
    called = []
    for job, step in steps(yaml.safe_load(path.read_text())):
        for words in re.findall(r"\bmake ([^&|;\n]*)", step.get("run", "")):
            names = [word for word in words.split() if "=" not in word]
            if names == ['"$TARGET"']:
                names = job["strategy"]["matrix"]["target"]
            called += names
    assert called and set(called) <= TARGETS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_takes_actions_by_their_commit(path):
    used = [step["uses"] for _, step in steps(yaml.safe_load(path.read_text())) if "uses" in step]
    assert used and all(re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action) for action in used)


def test_supported_versions_of_python_are_checked():
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"]
    assert jobs["quick"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13", "3.14"]
