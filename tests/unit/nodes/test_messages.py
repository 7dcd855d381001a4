"""nodes/messages.py: what hosts and ranks say, as lines."""

import json

import pytest

from sagemaker_lightning.nodes.mesh import Peer
from sagemaker_lightning.nodes.messages import Doubt, Greeting, HostMessage, RankMessage, Suspicion

MESSAGES = {
    b'{"dead": {"why": "x", "doubt": 0}}': HostMessage(dead=Suspicion("x", Doubt.NONE)),
    b'{"dead": {"why": "x", "doubt": 1}}': HostMessage(dead=Suspicion("x", Doubt.OTHER_HOST)),
    b'{"dead": {"why": "x", "doubt": 3}}': HostMessage(dead=Suspicion("x", Doubt.OWN_HOST)),
    b'{"dead": {"why": "x"}}': HostMessage(dead=Suspicion("x", Doubt.OWN_HOST)),
    b'{"dead": {"why": 1}, "done": true}': HostMessage(done=True),
    b'{"dead": "x", "ready": true}': HostMessage(ready=True),
    b'{"ready": true, "forks": true}': HostMessage(ready=True, forks=True),
    b'{"status": 1, "failed": [], "stopped": {}}': HostMessage(),
    b'{"failed": "a", "stopped": "b"}': HostMessage(failed="a", stopped="b"),
    b"{}": None,
    b'["status"]': None,
    b"GET / HTTP/1.1": None,
}


@pytest.mark.parametrize("line", MESSAGES)
def test_fields_of_a_message_with_another_type_are_left_out(line):
    assert HostMessage.parse(line) == MESSAGES[line]


GREETINGS = {
    b'{"host": "a", "settings": {"b": "1"}, "more": "c"}': Greeting("a", {"b": "1"}),
    b'{"host": "a", "settings": {"b": 1}}': None,
    b'{"host": ["a"], "settings": {}}': None,
    b'{"host": "a", "settings": []}': None,
    b"GET / HTTP/1.1": None,
}


@pytest.mark.parametrize("line", GREETINGS)
def test_a_greeting_has_a_name_and_settings(line):
    assert Greeting.parse(line) == GREETINGS[line]


def test_a_message_is_read_as_it_was_sent():
    message = HostMessage("", True, True, 0, True, Suspicion("x", Doubt.NONE), "", "b")
    assert HostMessage.parse(message.line()) == message
    assert HostMessage(status="new").merged_with(HostMessage()).status == "new"
    for field in ("ready", "forks", "done"):  # and nothing that the sender has not said
        assert json.loads(HostMessage(**{field: True}).line()) == {field: True}
    for rank_message in (RankMessage("a", "b", True, "c", "d"), RankMessage()):
        assert RankMessage.parse(rank_message.line()) == rank_message


@pytest.mark.parametrize("said", [{"done": True}, {"failed": ""}, {"stopped": ""}], ids=str)
def test_a_rank_that_has_said_so_has_explained_its_end(said):
    assert RankMessage(**said).explains_end
    assert not RankMessage(rank="a", status="epoch 1").explains_end


def test_what_a_host_has_said_once_holds_until_it_says_otherwise():
    peer = Peer()
    assert (peer.ready, peer.done, peer.status) == (False, False, "it had just started")
    for message, known in (
        (HostMessage(status="epoch 1"), (False, False, "epoch 1")),
        (HostMessage(ready=True), (True, False, "epoch 1")),
        (HostMessage(status="epoch 2"), (True, False, "epoch 2")),
        (HostMessage(done=True), (True, True, "epoch 2")),
        (HostMessage(status=""), (True, True, "")),
    ):
        peer.says(message)
        assert (peer.ready, peer.done, peer.status) == known


@pytest.mark.parametrize("end", ["failed", "stopped"])
def test_a_host_that_knows_why_the_job_ends_is_done(end):
    """It is not lost when its connection ends."""
    peer = Peer()
    peer.says(HostMessage(**{end: ""}))
    assert peer.done and not peer.ready


@pytest.mark.parametrize(
    ("sent", "known"),
    [("1.5", 1.5), ("-1.0", 0.0), ("NaN", 0.0), ('"9"', 0.0), ("1e9", 0.0), ("true", 0.0)],
)
def test_seconds_since_a_fault_are_believed_within_limits(sent, known):
    line = f'{{"fault": {{"why": "x", "kind": "death", "seconds_ago": {sent}}}}}'
    assert HostMessage.parse(line.encode()).fault.seconds_ago == known
