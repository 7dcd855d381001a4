"""Finds phrases that plain English does without, long sentences, and names that the code lacks.

    python tests/tools/prose.py

prints a line for each and ends with status 1 if there is one; `make lint` runs it. It reads the
pages without their blocks of code, the comments, docstrings and messages of Python's files, those
of tests too, and the comments of Makefile, Dockerfile, scripts and workflows.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/", "results/")
COMMENTED = ("Makefile", "Dockerfile", ".sh", ".yml", "run")  # .ci/run
FOLDERS = ("app", "benchmarks", "examples", "sagemaker_lightning", "sagemaker_rehearsal", "scripts")
OF_PHRASES = ("tests/tools/prose.py", "tests/tools/test_prose.py")
"""Files that have the phrases because they are about them."""

PHRASES = {
    r"(?<![Tt]here)(?<!,) is none\b": "is not a ..., has no ...",  # "was 1, is none" is a value
    r"(?<![Tt]here) are none\b": "are not ...",
    r"\bnone (?:is|are) to\b": "must not",
    r"\bthat (?:is|are) no\b(?! longer)": "that is not a",
    r"\bfor who\b": "for whoever, or name them",
    r"\btold\b(?! apart)": "asked to, said, named, known",
    r"(?:^|[.:;] )Of (?=[a-z])": "begin with the subject",
    r"(?:^|[.:;] )Nor\b": "and not, neither",
    r"\b(?:goes|go|going|went|gone) on\b": "continue",
    r"\b(?:came|comes?) (?:out )?of (?!age\b)": "the result of, caused",
    r"\ballowed (?:is|are)\b": "expected",
    r"[,;:] allowed [^,.;:]{0,40} (?:is|are)\b": "expected",
    r"(?:^|[.,;:] )(?:[Ll]ogged|[Nn]amed|[Nn]eeded|Not \w+) (?:is|are)\b": "expected ...",
}
"""What is looked for, and what says it plainly. A space may be the end of a line."""

PHRASES_OF_TEXTS = {
    r"\banew\b": "again, over",
    r"(?<![Tt]here\s)(?<!that\s)\b(?:is|are) no\b"
    r"(?! (?:longer|reason|more|larger|deeper)\b)": "is not a",
}
"""What is looked for in texts, but not in the names of tests."""

PHRASES_OF_PAGES = {
    r"\bone's\b": "your, a user's",
    r"\bof (?:which|whom)\b": "begin a new sentence, or name it",
    r"\b(?:is|are|was|were) to be\b": "must, shall, will",
}
"""What is looked for in pages alone: messages that tests and programs read have these, too."""

OF_OTHERS = {
    "CheckpointIO": "Lightning's",
    "_post_forward": "torch's",
    "_set_sampler_epoch": "Lightning's",
    "ncclGetErrorString": "NCCL's",
    "rhOWNER": "an example of a name",
    "vectorize": "numpy's",
    "ELBOModule": "pyro's",
    "HyperparameterTuner": "the SDKs'",
    "MLFLOW_TRACKING_URI": "MLflow's",
    "MultiheadAttention": "torch's",
    "ShareableList": "Python's",
    "WANDB_API_KEY": "W&B's",
    "_executor": "SPDL's",
    "register_module_forward_hook": "torch's",
    "ZeroRedundancyOptimizer": "torch's",
    "ddp_fork": "Lightning's",
    "build-image.sh": "the original's",
    "conda-3.11.txt": "make lock-conda writes it",
    "container_entry_point": "SDK 2's",
    "dictConfig": "Python's",
    "gpu-DATE.json": "make gpu writes it",
    "image-cpu.txt": "make lock TORCH=cpu writes it",
    "madvise": "the kernel's",
    "py1e": "litdata's",
    "sagemaker_lightning_before_hooks": "made of two names",
    "train_multi_node_torchrun.py": "the original's",
}
"""Names that texts have and the code does not, and whose they are."""
OF_OTHERS_ONLY = "sagemaker_lightning/compat/"
"""The folder whose texts cite names within other packages."""

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"`([A-Za-z_]\w*(?:[./][\w-]+)*)(?:\(\))?`")
"""What a text has in backticks, if it is a name of code or a path."""
MAX_WORDS = 50
ENDS = re.compile(r"(?<=[.!?])\s|\n\s*\n|\n(?=\s*[-#|])|\|")
"""Ends of sentences, of paragraphs, of points of a list and of cells of a table."""
LINK = re.compile(r"\]\([^)]*\)")


def files(*ends: str) -> list[Path]:
    """Return the repository's files whose names end so."""
    folders = (*FOLDERS, ".ci", ".github", "docs", "locks", "results", "tests")
    within = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    found = [path for path in (*ROOT.iterdir(), *within) if path.name.endswith(ends)]
    return sorted(path for path in found if path.is_file() and path.suffix != ".pyc")


def without_code(page: str) -> str:
    """Return a page's text with empty lines in place of its blocks of code."""
    return FENCE.sub(lambda block: "\n" * block[0].count("\n"), page)


def texts(name: str, content: str) -> Iterator[tuple[int, str]]:
    """Yield the texts for people that a file has, each with the number of its first line."""
    if name.endswith(".md"):
        yield 1, without_code(content)
        return
    if not name.endswith(".py"):
        yield 1, "\n".join(line.partition("#")[2].lstrip("# ") for line in content.splitlines())
        return
    comment: list[str] = []
    begins = 0
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT:
            begins = begins if comment else token.start[0]
            comment.append(token.string.lstrip("# "))
        elif comment and token.type != tokenize.NL:
            yield begins, "\n".join(comment)
            comment = []
        if tokenize.tok_name[token.type] in ("STRING", "FSTRING_MIDDLE"):
            yield token.start[0], token.string.strip("rbfu\"'")


def phrases(name: str, content: str) -> Iterator[str]:
    """Yield a line for each phrase of the table that a file has."""
    table = PHRASES | PHRASES_OF_TEXTS | (PHRASES_OF_PAGES if name.endswith(".md") else {})
    for first, text in texts(name, content):
        for pattern, plain in table.items():
            for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.MULTILINE):
                line = first + text.count("\n", 0, match.end())
                phrase = " ".join(match[0].strip(".:; \n").split())
                yield f"{name}:{line}: {phrase!r}: say it plainly ({plain})"


def phrases_of_tests(name: str, content: str) -> Iterator[str]:
    """Yield a line for each phrase of the table that the name of a test has."""
    for match in re.finditer(r"^ *def test_(\w+)", content, re.MULTILINE):
        for pattern, plain in PHRASES.items():
            if phrase := re.search(pattern, match[1].replace("_", " "), re.IGNORECASE):
                line = 1 + content.count("\n", 0, match.end())
                yield f"{name}:{line}: {phrase[0].strip()!r} in a name: say it plainly ({plain})"


@cache
def words_of_code() -> set[str]:
    """Return the words of all paths, and of all files but pages, without those in backticks."""
    known = set(OF_OTHERS)
    for path in files(""):
        known.update(re.findall(r"[\w.-]+|\w+", str(path.relative_to(ROOT))), [path.stem])
        if path.suffix not in (".md", ".png") and path != Path(__file__):
            content = path.read_text(errors="replace")
            content = NAME.sub("", content) if path.suffix == ".py" else content
            known.update(re.findall(r"[\w-]+", content))
    return known


def unknown_names(name: str, content: str) -> Iterator[str]:
    """Yield a line for each name that a text has in backticks, and no code and no path has."""
    for first, text in texts(name, content):
        for match in NAME.finditer(text):
            if match[1] in words_of_code():
                continue
            parts = match[1].split("/" if "/" in match[1] else ".")
            if lacking := [part for part in parts if part not in words_of_code()]:
                line = first + text.count("\n", 0, match.start())
                yield f"{name}:{line}: `{match[1]}`: no code has {lacking[0]} (see OF_OTHERS)"


def long_sentences(name: str, content: str) -> Iterator[str]:
    """Yield a line for each sentence of a page that is longer than MAX_WORDS."""
    text = without_code(content)
    begin = 0
    for end in (*(match.end() for match in ENDS.finditer(text)), len(text)):
        words = len(re.findall(r"\S*\w\S*", LINK.sub("]", text[begin:end])))
        if words > MAX_WORDS:
            line = 1 + text.count("\n", 0, begin)
            yield f"{name}:{line}: a sentence of {words} words: make two of it, or a list"
        begin = end


def main() -> int:
    """Print what is found; return 1 if there is anything, else 0."""
    found: list[str] = []
    for path in files(".md", ".py", *COMMENTED):
        name = str(path.relative_to(ROOT))
        content = path.read_text()
        if name.startswith("tests/") and name.endswith(".py"):
            found += phrases_of_tests(name, content)
        is_page = name.endswith(".md") and (path.parent == ROOT or name.startswith(PAGES))
        is_code = name.endswith(".py") and name.startswith(FOLDERS)
        is_test = name.startswith("tests/") and name.endswith(".py") and name not in OF_PHRASES
        if is_page or is_code or is_test or name.endswith(COMMENTED):
            found += phrases(name, content)
        # The changelog and the compatibility layer name what this code does not have.
        if (is_page and name != "CHANGELOG.md") or (
            is_code and not name.startswith(OF_OTHERS_ONLY)
        ):
            found += unknown_names(name, content)
        if is_page and name != "CHANGELOG.md":
            found += long_sentences(name, content)
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
