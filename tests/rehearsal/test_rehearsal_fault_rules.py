"""Rules for faults: what a text stands for, what is refused, and what is drawn."""

import pytest

from sagemaker_rehearsal.faults.rules import KINDS, Faults, parse


@pytest.mark.parametrize(
    ("text", "kind", "rank", "hosts", "seconds", "step", "at", "every"),
    [
        ("kill rank at step 12", "kill rank", None, "any", None, 12, None, None),
        (
            "freeze  rank 1 at 40s of algo-2 for 30s",
            *("freeze rank", 1, "algo-2", 30.0, None, 40.0, None),
        ),
        ("cut network every ~1m of all for 2m", "cut network", None, "all", 120.0, None, None, 60),
        ("any every 5m 10 times of any", "any", None, "any", None, None, None, 300.0),
        ("flip checkpoint at step 3", "flip checkpoint", None, "any", None, 3, None, None),
        (
            "slow rank 0 at step 7 of algo-1,algo-2",
            *("slow rank", 0, "algo-1,algo-2", None, 7, None, None),
        ),
    ],
)
def test_the_fault_that_a_text_is(text, kind, rank, hosts, seconds, step, at, every):
    fault = parse(text)
    assert (fault.kind, fault.rank, fault.hosts, fault.seconds) == (kind, rank, hosts, seconds)
    assert (fault.rule.step, fault.rule.at, fault.rule.every) == (step, at, every)
    assert fault.rule.hosts == hosts and fault.text == " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("freeze", "expected one of kill rank, "),
        ("kill rank", "expected one of"),  # when?
        ("kill rank at noon", "expected one of"),
        ("kill rank at 3s unwarned", "expected one of"),
        ("kill rank at 3s gap 3s", "expected one of"),
        ("kill rank at 3s of nobody", "expected one of"),
        ("explode at 3s", "expected one of"),
        ("fill disk 3 at 3s", "expected a number after 'rank' alone"),
        ("kill rank at 3s for 5s", "expected 'for' with what lasts: cut network, "),
        ("halve checkpoint at 3s for 5s", "expected 'for' with what lasts"),
        ("freeze rank at 3s for 0s", "expected after 'for' a time above 0"),
        ("freeze rank at 3s for 673h", "up to 672h"),
        ("freeze rank every 0s", "expected a time above 0 after 'every'"),
        ("freeze rank at 700h", "expected times up to 672h"),
    ],
)
def test_a_wrong_rule_of_a_fault_is_refused(text, words):
    with pytest.raises(ValueError, match="^--fault: found ") as error:
        parse(text)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_fault_by_hand_has_no_time():
    fault = parse("freeze rank 0 of algo-2 for 3s", by_hand=True)
    assert (fault.rule, fault.hosts, fault.seconds) == (None, "algo-2", 3.0)
    with pytest.raises(ValueError, match="^FAULT: found .*, expected no time"):
        parse("freeze rank 0 at 3s", by_hand=True)
    with pytest.raises(ValueError, match="^FAULT: found 'melt', expected one of "):
        parse("melt", by_hand=True)


def test_every_kind_is_a_rule():
    for kind in KINDS:
        assert parse(f"{kind} at step 3").kind == kind


def test_faults_come_due_one_after_another_and_are_drawn_from_the_seed():
    hosts = ["algo-1", "algo-2", "algo-3"]
    texts = ["kill rank every 10s", "freeze rank at step 3 of algo-2", "any at 500s"]

    def drawn(seed: str) -> list[tuple[str, list[str]]]:
        faults = Faults([parse(text) for text in texts], hosts, seed)
        found = []
        for attempt in range(20):
            faults.schedule.begin(100.0 * attempt, first=attempt == 0)
            while due := faults.due(100.0 * attempt + 10, 3):
                found.append((due[0].kind, due[1].hosts))
        assert faults.never_due() == []
        return found

    first = drawn("1")
    assert first[1] == ("freeze rank", ["algo-2"]) and first[0][0] == "kill rank"
    assert [kind for kind, _ in first].count("kill rank") == 20
    assert [kind for kind, _ in first].count("any") == 1
    assert {host for _, names in first for host in names} == set(hosts)
    assert drawn("1") == first != drawn("2")


def test_a_fault_comes_again_within_an_attempt():
    """An interruption, which ends its attempt, comes again in the next one."""
    faults = Faults([parse("kill rank every 10s 3 times")], ["algo-1"], "0")
    faults.schedule.begin(0.0, first=True)
    times = [now for now in range(100) if faults.due(float(now), None)]
    assert times == [10, 20, 30]
    random_faults = Faults([parse("kill rank every ~10s")], ["algo-1"], "0")
    random_faults.schedule.begin(0.0, first=True)
    count = sum(random_faults.due(float(now), None) is not None for now in range(10_000))
    assert 850 < count < 1050  # one that is due within the same second comes in the next


def test_faults_of_one_time_come_due_both():
    faults = Faults([parse("kill rank at step 3"), parse("fill disk at step 3")], ["algo-1"], "0")
    assert [faults.due(0.0, 3)[0].kind for _ in range(2)] == ["kill rank", "fill disk"]
    assert faults.due(0.0, 3) is None


def test_the_hosts_of_a_fault_by_hand():
    hosts = ["algo-1", "algo-2"]
    faults = Faults([], hosts, "0")
    for words, expected in (("of all", hosts), ("of algo-2", ["algo-2"])):
        due = faults.now(parse(f"kill rank {words}", by_hand=True))
        assert (due.hosts, due.why) == (expected, "by hand")
    assert len(faults.now(parse("kill rank", by_hand=True)).hosts) == 1
