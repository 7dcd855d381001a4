"""Which checkpoint a job resumes from: no files and no processes are needed.

It is decided from what each host has.
"""

import pytest

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.files.checkpoint_file import FORMAT_VERSION
from sagemaker_lightning.resume.files.selection import CheckpointId, HostCheckpoints, newest_common

TEN, TWENTY, THIRTY = (CheckpointId(step, number=7 * step) for step in (10, 20, 30))
OTHER_TEN = CheckpointId(10, number=8)  # of another run, which came to the same step


def host(
    name: str, *saves: CheckpointId, incomplete: tuple[CheckpointId, ...] = (), **known
) -> HostCheckpoints:
    return HostCheckpoints(name, saves, incomplete=frozenset(incomplete), **known)


CHOICES = {
    "one host": ([host("a", THIRTY, TWENTY)], THIRTY),
    "all have the newest": ([host("a", THIRTY, TWENTY), host("b", THIRTY, TWENTY)], THIRTY),
    "one lacks the newest": ([host("a", THIRTY, TWENTY), host("b", TWENTY, TEN)], TWENTY),
    "each lacks another one": ([host("a", THIRTY, TEN), host("b", TWENTY, TEN)], TEN),
    "the same step of two runs": ([host("a", TEN, OTHER_TEN), host("b", OTHER_TEN)], OTHER_TEN),
    "the best model is missing": ([host("a", THIRTY, TWENTY, incomplete=(THIRTY,))], TWENTY),
    "it is missing on the other host": (
        [host("a", THIRTY, TWENTY), host("b", THIRTY, TWENTY, incomplete=(THIRTY,))],
        TWENTY,
    ),
    "it is missing for all": ([host("a", THIRTY, TWENTY, incomplete=(THIRTY, TWENTY))], THIRTY),
    "an incomplete one is all they share": (
        [host("a", THIRTY, incomplete=(THIRTY,)), host("b", THIRTY, TEN)],
        THIRTY,
    ),
    "nobody has any": ([host("a"), host("b")], None),
    "a copy in memory that all have": (
        [host("a", THIRTY, TEN, in_memory={THIRTY}), host("b", THIRTY, TEN, in_memory={THIRTY})],
        THIRTY,
    ),
    "a copy in memory that one has": (
        [host("a", THIRTY, TEN, in_memory={THIRTY}), host("b", TEN)],
        TEN,
    ),
    "copies in memory alone, and none that all have": (
        [host("a", THIRTY, in_memory={THIRTY}), host("b", TWENTY, in_memory={TWENTY}), host("c")],
        None,
    ),
    "others are damaged": ([host("a", TEN, problems=("step 20 is damaged",))], TEN),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_newest_that_all_have(case: str):
    hosts, expected = CHOICES[case]
    assert newest_common(hosts, "folder") == expected
    if case != "the same step of two runs":  # any order of the hosts gives the same
        assert newest_common(hosts[::-1], "folder") == expected


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        ([host("a", TEN), host("b")], "(a has step 10; b has none)"),
        (
            [host("a", TWENTY, TEN, in_memory={TWENTY}), host("b", THIRTY, in_memory={THIRTY})],
            "(a has step 10; b has none)",
        ),
        ([host("a", TEN), host("b", OTHER_TEN)], "(a has step 10; b has step 10)"),
        (
            [
                host("a", problems=("one is damaged", "another")),
                host("b", problems=("third", "4th")),
            ],
            "(a has none; b has none; one is damaged on a; another on a; third on b)",
        ),
        (
            [host("a", TEN, folder="/of/a"), host("b", folder="/of/b")],
            "(a has step 10 in /of/a; b has none in /of/b)",
        ),
        ([host("a", TEN, folder="/of"), host("b", folder="/of")], "(a has step 10; b has none)"),
    ],
)
def test_without_a_common_checkpoint_a_run_does_not_start_again(hosts: list, line: str):
    with pytest.raises(UserError) as raised:
        newest_common(hosts, "--resume.dirpath=/folder")
    assert str(raised.value) == (
        "--resume.dirpath=/folder: found checkpoints, but none that every host has intact "
        f"{line}; restore one from a copy, or move them away to start over"
    )


@pytest.mark.parametrize("is_restart", [True, False])
@pytest.mark.parametrize(
    ("hosts", "begins"),
    [
        ([host("a", TEN), host("b")], True),
        ([host("a", TEN), host("b", THIRTY, in_memory={THIRTY})], True),
        ([host("a", TEN), host("b", problems=("one is damaged",))], False),
        ([host("a", TEN), host("b", OTHER_TEN)], False),
    ],
)
def test_hosts_that_died_while_they_wrote_their_first_checkpoint(hosts, begins, is_restart):
    """In the same containers, nothing but that explains why a host has none."""
    if begins and is_restart:
        assert newest_common(hosts, "folder", is_restart) is None
        return
    with pytest.raises(UserError, match="found checkpoints, but none"):
        newest_common(hosts, "folder", is_restart)


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_another_format_is_refused_on_all_hosts(version: int):
    """Another format on one host is refused on all hosts.

    That is so even if there is a checkpoint of this format: we cannot know which of the two the
    user means.
    """
    hosts = [host("a", TEN), host("b", TEN, other_formats=(("step-9.ckpt", version),))]
    with pytest.raises(UserError) as raised:
        newest_common(hosts, "--resume.dirpath=/folder")
    assert str(raised.value) == (
        f"--resume.dirpath=/folder: step-9.ckpt (on b) has checkpoint format {version}, this "
        f"version of the program has format {FORMAT_VERSION}; continue with the version that wrote "
        "it, or move the checkpoints away to start over"
    )
