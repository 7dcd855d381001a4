"""The forge's workflows call what a person can type, and take actions by their commit."""

import os
import re
import shutil
import subprocess

import pytest
import yaml
from containers import ROOT

from sagemaker_lightning import __version__
from sagemaker_lightning.compat import versions

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps(workflow: dict) -> list[tuple[dict, dict]]:
    """Return the steps of all jobs, each with its job.

    A job that calls another workflow has none.
    """
    return [(job, step) for job in workflow["jobs"].values() for step in job.get("steps", ())]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile(path):
    called = []
    for job, step in steps(yaml.safe_load(path.read_text())):
        for words in re.findall(r"\bmake ([^&|;)\n]*)", step.get("run", "")):
            names = [word for word in words.split() if "=" not in word]
            if names == ['"$TARGET"']:
                names = job["strategy"]["matrix"]["target"]
            called += names
    assert called and set(called) <= TARGETS


def known_names(job: dict) -> dict[str, set[str]]:
    """Return what the expressions of a job may name, by the first word of an expression."""
    matrix = job.get("strategy", {}).get("matrix", {})
    rows = matrix.get("include", [])
    return {
        "matrix": (matrix.keys() - {"include"}).union(*rows),
        "needs": {*([job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", ()))},
        "steps": {step["id"] for step in job.get("steps", ()) if "id" in step},
        "env": {
            *job.get("env", {}),
            *(name for step in job["steps"] for name in step.get("env", {})),
        },
    }


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_expression_of_a_workflow_names_what_is_there(path):
    """actionlint looks for it, too, and is not everywhere; schemas and zizmor do not."""
    jobs = yaml.safe_load(path.read_text())["jobs"]
    for job in (each for each in jobs.values() if "steps" in each):
        known = known_names(job)
        for expression in re.findall(r"\$\{\{(.*?)\}\}", yaml.dump(job)):
            for context, name in re.findall(r"\b(\w+)\.([\w-]+)", expression):
                assert name in known.get(context, {name}), expression


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_takes_actions_by_their_commit(path):
    used = [step["uses"] for _, step in steps(yaml.safe_load(path.read_text())) if "uses" in step]
    assert used and all(re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action) for action in used)


def test_what_is_released_has_passed_the_checks():
    """The wheel comes last, as no index takes a version back, and is the one that was tested."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert jobs["check"] == {"uses": "./.github/workflows/check.yml"}
    assert jobs["image"]["needs"] == "check" and jobs["wheel"]["needs"] == ["check", "image"]
    last_steps = [step["run"] for step in jobs["wheel"]["steps"] if "run" in step]
    assert last_steps == ["make publish"]


def test_the_lists_of_an_image_are_copied(tmp_path):
    stand_in = tmp_path / "docker"
    stand_in.write_text("#!/bin/sh\necho $*\n")
    stand_in.chmod(0o755)
    shutil.copy2(ROOT / "Makefile", tmp_path)
    subprocess.run(
        ["make", "--silent", "sbom", "IMAGE=x", f"DOCKER={stand_in}"], cwd=tmp_path, check=True
    )
    for name in ("packages.cdx.json", "licenses.txt"):
        copied = (tmp_path / "output/sbom" / name).read_text()
        assert copied == f"run --rm x cat sbom/{name}\n"


def test_supported_versions_of_python_are_checked():
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"]
    assert jobs["quick"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13", "3.14"]


def test_the_oldest_and_the_other_names_are_checked():
    """The oldest Lightning and torch, and Lightning under its other name."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"]
    rows = jobs["compat"]["strategy"]["matrix"]["include"]
    assert {row["package"] for row in rows} == {"pytorch-lightning", "lightning"}
    assert versions.OLDEST_LIGHTNING in {row["version"] for row in rows}
    assert any(f"torch~={versions.OLDEST_TORCH}." in row["with"] for row in rows)


def test_only_a_tagged_version_is_published(tmp_path):
    """`make publish` looks at the commit's tags before it uploads anything."""
    for name in ("Makefile", "sagemaker_lightning/__init__.py", "scripts/uv.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
    (tmp_path / "scripts/uv.sh").write_text("#!/bin/bash\necho uploads $* $UV_PUBLISH_TOKEN\n")

    def publish(**variables: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["make", "--silent", "publish"],
            cwd=tmp_path,
            env=os.environ | variables,
            text=True,
            stdout=subprocess.PIPE,
            check=False,
        )

    subprocess.run([*git, "tag", "v0"], cwd=tmp_path, check=True)
    refused = publish()
    assert refused.returncode != 0 and f"found no tag v{__version__}" in refused.stdout
    assert "uploads" not in refused.stdout
    subprocess.run([*git, "tag", f"v{__version__}"], cwd=tmp_path, check=True)
    # A workflow sets both, empty if the repository has no such setting.
    published = publish(PACKAGE_INDEX="", PACKAGE_INDEX_TOKEN="")
    assert published.stdout == "uploads publish --trusted-publishing always output/dist/*\n"
    published = publish(PACKAGE_INDEX="https://example.com", PACKAGE_INDEX_TOKEN="x")
    assert published.stdout == (
        "uploads publish --publish-url https://example.com output/dist/* x\n"
    )
