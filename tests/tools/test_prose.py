"""prose.py: what `make lint` finds in texts."""

import pytest
from prose import MAX_WORDS, long_sentences, phrases, phrases_of_tests, unknown_names

NONE = "is" + " none"  # not as one: this file may be read, too


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("docs/a.md", f"A lock {NONE}.", [(1, NONE)]),
        ("docs/a.md", "One line,\nand what came\nof it.", [(3, "came of")]),
        ("docs/a.md", "It ends. Of each host, two.\n\nNor does it.", [(1, "Of"), (3, "Nor")]),
        ("docs/a.md", "```\nallowed is 1\n```\nallowed are 2", [(4, "allowed are")]),
        ("a.py", f'def f():\n    """A lock\n    {NONE.replace(" ", chr(10))}."""\n', [(4, NONE)]),
        ("a.py", "x = 1\n# a host that\n# is no rank\ny = 2", [(3, "that is no")]),
        ("a.py", "x = 1\n# a host that\ny = 2\n# is no rank", [(4, "is no")]),
        ("a.py", "f'{x}: found {y}, allowed is {z}'", [(1, "allowed is")]),
        ("a.py", "'the job goes '\n'on'; 'it went on'", [(2, "went on")]),
        ("a.py", "def f(told): told()", []),
        ("a.py", "'found 1, needed are 2'; 'what is needed is 2'", [(1, ", needed are")]),
        ("a.py", "'found 1, allowed after x are 2'", [(1, ", allowed after x are")]),
        ("Makefile", "x: y  # one lock\n# is" + " none.\n\ttold", [(2, NONE)]),
        ("docs/a.md", "It is no" + " lock.\nIt begins\nanew.", [(1, "is no"), (3, "anew")]),
        ("docs/a.md", "a lock of\none's own", [(2, "one's")]),
        ("a.py", "'it begins ' + anew + 'anew'", [(1, "anew")]),
        ("a.py", "'what comes out of it'; 'what came of age'", [(1, "comes out of")]),
        ("a.py", "'hosts are no ranks, and are none of ours'", [(1, "are no"), (1, "are none")]),
        ("a.py", "'a model of which it is to be one'", []),
        ("docs/a.md", "a model of which it is to be one", [(1, "is to be"), (1, "of which")]),
        (
            "docs/a.md",
            "It is said that none is\nto be saved.",
            [(2, "is to be"), (2, "none is to")],
        ),
    ],
)
def test_phrases(name, content, found):
    """In pages, docstrings, comments and messages, also over the ends of lines."""
    lines = list(phrases(name, content))
    assert len(lines) == len(found)
    for (line, phrase), text in zip(found, sorted(lines), strict=True):
        assert text.startswith(f"{name}:{line}: {phrase!r}: ")


@pytest.mark.parametrize(
    "text",
    [
        "There is none.",
        "there is no lock, which is no longer so",
        "no one has it",
        "None if there is none",
        "that is no longer",
        "told apart",
        "the end of Of",
        "the lock was a, is none",
        "the outcome of age, which is no larger",
    ],
)
def test_phrases_that_are_plain(text):
    assert list(phrases("docs/a.md", text)) == []


def test_phrases_in_names_of_tests():
    names = "test_a_run_goes" + "_on", "test_of" + "_two_hosts", "test_hosts_are_told_apart"
    content = "".join(f"def {name}():\n    pass\n" for name in names)
    assert [
        line.partition(" in a name")[0] for line in phrases_of_tests("tests/a.py", content)
    ] == [
        "tests/a.py:1: 'goes on'",
        "tests/a.py:3: 'of'",
    ]


def test_names_that_no_code_has():
    gone = "settle" + "_searches"
    page = f"`ExactResume`, `trainer.fit()`,\n`contract/log.py`, `{gone}` and `resume/{gone}.py`\n"
    page += f"```\n`{gone}`\n```\n"
    lines = list(unknown_names("docs/a.md", page))
    assert [line.partition(": no code")[0] for line in lines] == [
        f"docs/a.md:2: `{gone}`",
        f"docs/a.md:2: `resume/{gone}.py`",
    ]
    (line,) = unknown_names("a.py", f'{gone} = 1\n"""\nIt has `{gone}` and `ExactResume`."""')
    assert line.startswith(f"a.py:3: `{gone}`: no code has ")


def test_sentences_that_are_too_long():
    """Points of a list and cells of a table are sentences of their own, and links have no words."""
    most = "a " * (MAX_WORDS - 1) + "b"
    page = f"Short.\n\n{most}\n- {most}\n\n| {most} | {most} |\n\nx {most}. [b]({most * 2}).\n"
    lines = list(long_sentences("docs/a.md", page))
    assert [line.partition(": a sentence")[0] for line in lines] == ["docs/a.md:8"]
