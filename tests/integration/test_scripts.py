"""scripts/ for the shell: the registry's address, the push and the upload.

And the AWS calls behind them.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import uuid
from pathlib import Path

import aws_services
import botocore.session
import pytest
import sweeper
from aws_services import ACCOUNT, REGION, client, script, served
from containers import DOCKER, ROOT, docker

from sagemaker_lightning.contract.rendezvous import free_port

pytestmark = pytest.mark.slow

SHELL = ("image_uri.sh", "push_image.sh", "upload_data.sh")


@pytest.fixture(scope="module")
def aws(tmp_path_factory) -> str:
    """A moto server with a bucket."""
    with aws_services.moto(tmp_path_factory.mktemp("moto")) as endpoint:
        client("s3", endpoint).create_bucket(Bucket="my-bucket")
        yield endpoint


def failed(completed: subprocess.CompletedProcess) -> str:
    """Return the one line of a script that failed."""
    assert completed.returncode != 0
    assert (completed.stdout, completed.stderr.count("\n")) == ("", 1), completed.stderr
    assert completed.stderr.startswith("error: ")
    return completed.stderr


def image_uri(
    *arguments: str, endpoint: str | None = None, **variables: str
) -> subprocess.CompletedProcess:
    return script(
        "image_uri.sh", *arguments, environment=aws_services.variables(endpoint, **variables)
    )


# image_uri.sh


def regions() -> list[tuple[str, str]]:
    """Return a region of ECR in each partition, with the partition's domain.

    botocore knows them.
    """
    session = botocore.session.get_session()
    resolver = session.get_component("endpoint_resolver")
    partitions = session.get_available_partitions()
    return [
        (session.get_available_regions("ecr", name)[0], resolver.get_partition_dns_suffix(name))
        for name in partitions
    ]


@pytest.mark.parametrize(("region", "suffix"), regions())
def test_the_address_in_each_partition(region, suffix):
    completed = image_uri("team/app", "1.0", ACCOUNT=ACCOUNT, AWS_REGION=region)
    assert completed.stdout == f"{ACCOUNT}.dkr.ecr.{region}.{suffix}/team/app:1.0\n", (
        completed.stderr
    )


def test_the_partitions_that_everybody_asks_for_are_among_them():
    assert {"cn-north-1", "us-gov-east-1", "af-south-1"} <= {region for region, _ in regions()}


def test_account_region_repository_and_tag_have_defaults(aws):
    version = subprocess.check_output(
        ["git", "describe", "--tags", "--always", "--dirty"], cwd=ROOT, text=True
    ).strip()
    completed = image_uri(endpoint=aws, AWS_REGION="", AWS_DEFAULT_REGION="eu-west-1")
    assert (
        completed.stdout
        == f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com/sagemaker-lightning:{version}\n"
    ), completed.stderr


MISTAKES = {
    "an account": (["a"], {"ACCOUNT": "123"}, "ACCOUNT: found '123', expected 12 digits"),
    "a region": (["a1"], {"AWS_REGION": "mars"}, "AWS_REGION: found 'mars'"),
    "a repository": (["My-App"], {}, "REPOSITORY: found 'My-App', expected lower-case letters"),
    "a host": (["example.com:5000/app"], {}, "REPOSITORY: found 'example.com:5000/app'"),
    "a tag": (["app", "a b"], {}, "TAG: found 'a b'"),
    "three arguments": (["a", "b", "c"], {}, "found 3 arguments: a b c"),
}


@pytest.mark.parametrize(("arguments", "variables", "line"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_an_address_is_one_line(arguments, variables, line):
    completed = image_uri(*arguments, **{"ACCOUNT": ACCOUNT, "AWS_REGION": REGION} | variables)
    assert line in failed(completed)


def test_without_a_region_or_credentials_one_line_says_so():
    assert "--region: found none" in failed(image_uri("app", "1"))
    assert "no AWS credentials found" in failed(image_uri("app", "1", AWS_REGION=REGION))


# build_image.sh


@pytest.fixture
def build(tmp_path):
    """A function that builds an image of one file with the given text, and returns its ID."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/build_image.sh", tmp_path / "scripts")
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY file /\n")
    tag = f"sagemaker-lightning-build-test:{uuid.uuid4().hex[:12]}"
    built = []

    def build(text: str) -> str:
        (tmp_path / "file").write_text(text)
        completed = subprocess.run(
            [str(tmp_path / "scripts/build_image.sh")],
            env=os.environ | {"DOCKER": DOCKER, "IMAGE": tag},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert completed.returncode == 0, completed.stderr
        built.append(docker("image", "inspect", "--format={{.Id}}", tag).stdout.strip())
        return built[-1]

    build.tag = tag
    yield build
    for identity in built:
        docker("image", "rm", "--force", identity)


def is_there(image: str) -> bool:
    return docker("image", "inspect", image).returncode == 0


@pytest.mark.docker
def test_an_earlier_image_of_the_tag_is_removed(build):
    earlier, later = build("1"), build("2")
    assert earlier != later and not is_there(earlier) and is_there(build.tag)
    assert build("2") == later and is_there(build.tag)  # built again, it is the same


@pytest.mark.docker
def test_an_earlier_image_with_another_tag_or_a_container_stays(build):
    tagged = build("1")
    docker("tag", tagged, f"{build.tag}-other")
    used = build("2")
    container = docker("create", *sweeper.labels(), used, "command").stdout.strip()
    build("3")
    try:
        assert is_there(tagged) and is_there(used) and is_there(f"{build.tag}-other")
    finally:
        docker("rm", container)
        docker("rmi", f"{build.tag}-other")


def test_make_run_takes_the_engine_that_is_named():
    for command in (["make", "run", "DOCKER=podman"], ["env", "DOCKER=podman", "make", "run"]):
        printed = subprocess.check_output([*command, "--dry-run"], cwd=ROOT, text=True)
        assert "\npodman run --rm " in printed and "docker" not in printed


# push_image.sh

VERSION = "v1.2-3-gabcdef0"
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def small_image(tmp_path) -> str:
    """An image of one file, with the labels of scripts/build_image.sh."""
    (tmp_path / "file").write_text("x")
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        archive.add(tmp_path / "file", "file")
    labels = [
        f"--change=LABEL org.opencontainers.image.{name}"
        for name in (f"version={VERSION}", f"revision={REVISION}")
    ]
    tag = "sagemaker-lightning-push-test:local"
    completed = docker("import", *labels, str(tmp_path / "image.tar"), tag)
    assert completed.returncode == 0, completed.stdout
    yield tag
    identity = docker("image", "inspect", "--format={{.Id}}", tag).stdout.strip()
    docker("rmi", "--force", identity)


@pytest.fixture
def registry(tmp_path) -> str:
    """A real registry on the loopback: Debian's package docker-registry."""
    command = shutil.which("docker-registry")
    if not command:
        pytest.skip("there is no docker-registry command (Debian: apt-get install docker-registry)")
    port = free_port()
    settings = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    (tmp_path / "registry.yml").write_text(json.dumps(settings))  # JSON is YAML
    with served(
        [command, "serve", str(tmp_path / "registry.yml")], port, tmp_path / "registry.log"
    ):
        yield f"127.0.0.1:{port}"


def tags(registry: str, name: str) -> set[str]:
    with urllib.request.urlopen(f"http://{registry}/v2/{name}/tags/list") as response:
        return set(json.load(response)["tags"])


def push(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Run make push with REPOSITORY, as a person does."""
    return subprocess.run(
        ["make", "--silent", "push", *arguments],
        cwd=ROOT,
        env=aws_services.variables(**variables),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.docker
def test_a_push_to_a_registry(small_image, registry):
    completed = push(f"IMAGE={small_image}", f"REPOSITORY={registry}/team/app", DOCKER=DOCKER)
    assert completed.returncode == 0, completed.stderr
    assert re.fullmatch(rf"{registry}/team/app@sha256:[0-9a-f]{{64}}\n", completed.stdout)
    assert tags(registry, "team/app") == {VERSION, REVISION[:12], "latest"}
    local = docker("image", "inspect", "--format={{.Id}}", small_image).stdout
    docker("rmi", "--force", local.strip())
    # What was pushed can be pulled by the name that was printed.
    pulled = docker("pull", completed.stdout.strip())
    assert pulled.returncode == 0, pulled.stdout
    assert docker("image", "inspect", "--format={{.Id}}", completed.stdout.strip()).stdout == local
    docker("tag", completed.stdout.strip(), small_image)


@pytest.mark.docker
def test_a_push_with_a_tag_of_the_users_own(small_image, registry):
    completed = push(f"IMAGE={small_image}", f"REPOSITORY={registry}/app:mine", DOCKER=DOCKER)
    assert completed.returncode == 0, completed.stderr
    assert tags(registry, "app") == {VERSION, REVISION[:12], "mine"}


@pytest.mark.docker
def test_a_registry_that_does_not_answer_fails_the_push(small_image):
    completed = push(
        f"IMAGE={small_image}", f"REPOSITORY=127.0.0.1:{free_port()}/app", DOCKER=DOCKER
    )
    assert completed.returncode != 0 and "refused" in completed.stderr
    assert completed.stdout == ""


DOCKER_STAND_IN = f"""#!/bin/sh
# Stands in for docker, whose engine cannot reach Amazon ECR here: writes down what it is asked for.
echo "$*" >>"$RECORD"
case "$*" in
login*) cat >>"$RECORD"; echo >>"$RECORD" ;;
*image.version*) echo "${{VERSION_LABEL-{VERSION}}}" ;;
*image.revision*) echo "${{REVISION_LABEL-{REVISION}}}" ;;
*RepoDigests*)
    echo other.example/app@sha256:1
    echo {ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/team/app@sha256:2
    ;;
esac
"""


@pytest.fixture
def recorded(tmp_path, aws):
    """Return a function that runs push_image.sh with a stand-in for docker.

    ECR is moto's. The function returns the finished process, and what docker was asked for.
    """
    stand_in = tmp_path / "docker-stand-in"
    stand_in.write_text(DOCKER_STAND_IN)
    stand_in.chmod(0o755)
    record = tmp_path / "record"

    def run(repository: str, **variables: str) -> tuple[subprocess.CompletedProcess, list[str]]:
        record.write_text("")
        environment = aws_services.variables(
            aws, DOCKER=str(stand_in), RECORD=str(record), **variables
        )
        completed = script("push_image.sh", repository, environment=environment)
        return completed, record.read_text().splitlines()

    return run


@pytest.mark.parametrize(
    "repository", ["team/app", f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/team/app"]
)
def test_a_push_to_amazon_ecr(recorded, aws, repository):
    ecr = client("ecr", aws)
    for known in ecr.describe_repositories()["repositories"]:
        ecr.delete_repository(repositoryName=known["repositoryName"], force=True)
    address = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/team/app"
    for attempt, created in enumerate((f"created the ECR repository team/app in {REGION}\n", "")):
        completed, docker_lines = recorded(repository)
        assert (completed.returncode, completed.stderr) == (0, created), attempt
        assert completed.stdout == f"{address}@sha256:2\n"
        assert [
            ecr_repository["repositoryName"]
            for ecr_repository in ecr.describe_repositories()["repositories"]
        ] == ["team/app"]
        login = docker_lines.index(f"login --username AWS --password-stdin {address.split('/')[0]}")
        assert docker_lines[login + 1] == f"{ACCOUNT}-auth-token"  # moto's password
        image = "sagemaker-lightning"
        assert [line for line in docker_lines if line.startswith(("tag", "push"))] == [
            f"tag {image} {address}:{VERSION}",
            f"push --quiet {address}:{VERSION}",
            f"tag {image} {address}:{REVISION[:12]}",
            f"push --quiet {address}:{REVISION[:12]}",
        ]


def test_an_image_without_version_or_revision_is_not_pushed_to_ecr(recorded):
    completed, docker_lines = recorded(
        "team/app", VERSION_LABEL="unknown", REVISION_LABEL="unknown"
    )
    assert (
        completed.returncode == 1
        and "has no version and no revision to tag it with" in completed.stderr
    )
    assert not [line for line in docker_lines if line.startswith("push")]


def test_a_mistake_in_a_push_is_one_line(recorded):
    assert "REPOSITORY: found 'My/App'" in failed(recorded("My/App")[0])
    assert "REPOSITORY: found 'example.com/My-App'" in failed(recorded("example.com/My-App")[0])
    environment = aws_services.variables(DOCKER="no-docker-here")
    assert "no Docker engine answers" in failed(
        script("push_image.sh", "a/b", environment=environment)
    )
    assert "found 0 arguments" in failed(script("push_image.sh", environment=environment))


@pytest.mark.docker
def test_an_image_that_is_not_there_is_one_line():
    environment = aws_services.variables(DOCKER=DOCKER, IMAGE="no-such-image")
    error_line = failed(script("push_image.sh", "127.0.0.1:1/app", environment=environment))
    assert "IMAGE: there is no image 'no-such-image' here; make build makes it" in error_line


def test_make_push_needs_a_repository():
    completed = push()
    assert (
        completed.returncode != 0
        and "make push REPOSITORY=NAME (Amazon ECR) or REPOSITORY=HOST/NAME" in completed.stdout
    )


# upload_data.sh


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of scripts/ in which CIFAR-10 is a small file; tests cannot reach the real one."""
    for folder in ("scripts", "sagemaker_lightning"):
        shutil.copytree(ROOT / folder, tmp_path / "checkout" / folder)
    (tmp_path / "published").write_bytes(b"cifar")
    path = tmp_path / "checkout/scripts/upload_data.sh"
    text = path.read_text()
    text = re.sub("^url=.*$", f"url=file://{tmp_path}/published", text, flags=re.MULTILINE)
    path.write_text(
        re.sub("^md5=.*$", f"md5={hashlib.md5(b'cifar').hexdigest()}", text, flags=re.MULTILINE)
    )
    return tmp_path / "checkout"


def upload(checkout: Path, aws: str | None, *arguments: str) -> subprocess.CompletedProcess:
    environment = aws_services.variables(aws, **({} if aws else {"AWS_REGION": REGION}))
    command = [str(checkout / "scripts/upload_data.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def stored(aws: str, key: str) -> bytes:
    return client("s3", aws).get_object(Bucket="my-bucket", Key=key)["Body"].read()


def test_the_address_and_the_checksum_are_torchvisions():
    from torchvision.datasets import CIFAR10

    text = (ROOT / "scripts/upload_data.sh").read_text()
    assert f"\nurl={CIFAR10.url}\n" in text
    assert f"\nmd5={CIFAR10.tgz_md5}\n" in text
    assert f"\nname={CIFAR10.filename}\n" in text


def test_the_data_is_fetched_once_and_copied(checkout, aws, tmp_path):
    for uri, key in (
        ("s3://my-bucket/cifar10", "cifar10/"),
        ("s3://my-bucket/a b/", "a b/"),
        ("s3://my-bucket", ""),
    ):
        completed = upload(checkout, aws, uri)
        assert completed.returncode == 0, completed.stderr
        assert completed.stdout == f"--channel=training=s3://my-bucket/{key}\n"
        assert stored(aws, f"{key}cifar-10-python.tar.gz") == b"cifar"
        (tmp_path / "published").unlink(missing_ok=True)  # the second time, the file is there
    assert [path.name for path in (checkout / "output").iterdir()] == ["cifar-10-python.tar.gz"]


def test_a_damaged_file_of_an_earlier_run_is_fetched_again(checkout, aws):
    (checkout / "output").mkdir()
    (checkout / "output/cifar-10-python.tar.gz").write_bytes(b"cif")
    assert upload(checkout, aws, "s3://my-bucket/again").returncode == 0
    assert stored(aws, "again/cifar-10-python.tar.gz") == b"cifar"


def test_a_file_of_the_users_own(checkout, aws, tmp_path):
    (tmp_path / "my file.gz").write_bytes(b"cifar")
    assert upload(checkout, aws, "s3://my-bucket/own", str(tmp_path / "my file.gz")).returncode == 0
    assert stored(aws, "own/cifar-10-python.tar.gz") == b"cifar"
    assert not (checkout / "output").exists()


def test_a_mistake_in_an_upload_is_one_line(checkout, aws, tmp_path):
    (tmp_path / "other.gz").write_bytes(b"dogs")
    error_line = failed(upload(checkout, aws, "s3://my-bucket/x", str(tmp_path / "other.gz")))
    assert (
        f"found MD5 {hashlib.md5(b'dogs').hexdigest()}, expected "
        f"{hashlib.md5(b'cifar').hexdigest()}" in error_line
    )
    assert "there is no such file" in failed(
        upload(checkout, aws, "s3://my-bucket/x", str(tmp_path / "absent"))
    )
    assert "found 's3://b/x', expected s3://BUCKET/PREFIX, BUCKET of 3 to 63 lower" in failed(
        upload(checkout, aws, "s3://b/x")
    )
    assert "found 'my-bucket', expected s3://BUCKET/PREFIX" in failed(
        upload(checkout, aws, "my-bucket")
    )
    assert "found 0 arguments" in failed(upload(checkout, aws))
    (tmp_path / "own").write_bytes(b"cifar")
    assert "NoSuchBucket" in failed(
        upload(checkout, aws, "s3://no-such-bucket/x", str(tmp_path / "own"))
    )
    assert "no AWS credentials" in failed(
        upload(checkout, None, "s3://my-bucket/x", str(tmp_path / "own"))
    )


def test_data_that_cannot_be_fetched_is_said_to_be_so(checkout, aws, tmp_path):
    (tmp_path / "published").unlink()
    completed = upload(checkout, aws, "s3://my-bucket/x")
    assert completed.returncode == 1
    assert completed.stderr.splitlines()[-1].endswith(
        "give the file: upload_data.sh s3://my-bucket/x FILE"
    )


# aws.py, and all scripts


def test_without_boto3_one_line_says_what_to_do():
    completed = subprocess.run(
        [sys.executable, "-S", str(ROOT / "scripts/aws.py"), "account"],
        capture_output=True,
        text=True,
    )
    assert (completed.returncode, completed.stdout) == (1, "")
    assert re.fullmatch(
        r"error: \S+ has no boto3; pip install boto3, or, in a checkout, .*\n", completed.stderr
    )


@pytest.mark.parametrize("name", SHELL)
def test_a_script_runs_from_anywhere_and_through_a_link(name, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(ROOT / "scripts" / name)
    completed = subprocess.run(
        [str(link), "s3://B", "x", "y", "z"],
        cwd=tmp_path,
        env=os.environ | {},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 1 and "found 4 arguments" in failed(completed)


def test_the_launcher_imports_only_boto3_and_the_standard_library():
    """The merging of parts imports numpy as well, and the command `completion`, which says so where
    it is not there, shtab. They import modules of ours that need no more (pyproject.toml).
    """
    import ast

    allowed = sys.stdlib_module_names | {"boto3", "botocore"}
    names = ("atomic_files", "command_line", "deadlines", "hyperparameters", "job_summary")
    names = (*names, "s3_address")
    contract = {f"sagemaker_lightning.contract.{name}" for name in names}
    row_modules = {
        f"sagemaker_lightning.rows.{name}"
        for name in ("archives", "byte_progress", "downloads", "manifests", "merge", "parts")
    }
    paths = {path: contract for path in (ROOT / "sagemaker_lightning/launcher").glob("*.py")}
    paths[ROOT / "sagemaker_lightning/launcher/completion.py"] = {"shtab"}
    paths |= {
        ROOT / f"{name.replace('.', '/')}.py": contract | row_modules | {"numpy"}
        for name in row_modules - {"parts"}
    }
    installed = "bolts_old_import.py"  # install_bolts.sh copies it into an environment
    paths |= {
        path: row_modules for path in (ROOT / "scripts").glob("*.py") if path.name != installed
    }
    for path, besides in paths.items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert (
                    name in besides | {"sagemaker_lightning.contract.errors"}
                    or name.startswith("sagemaker_lightning.launcher")
                    or name.split(".")[0] in allowed
                ), f"{path}: {name}"
