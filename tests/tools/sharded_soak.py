"""Interrupts sharded trainings of each kind at random, and compares them with undisturbed ones.

    python tests/tools/sharded_soak.py --rounds=100 --seed=1 --results=FILE [KIND ...]

Each round resumes twice within one epoch and once at an epoch's edge, killed or stopped. It adds a
line of JSON to the file of results; a round that is in the file already is not done again. At the
end, it prints how many rounds of each kind, and on each mesh, have ended with the same bits.
"""

import random
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import ranks
import sharded
import soak_rounds

MESHES = [(2, 1), (3, 1), (4, 1), (2, 2), (1, 2)]
KINDS: dict[str, tuple[str, list[tuple[int, int]]]] = {
    "2 ranks": ("", [(2, 1)]),
    "3 ranks, uneven": ("", [(3, 1)]),
    "4 ranks": ("", [(4, 1)]),
    "2x2 ranks": ("", [(2, 2)]),
    "bf16": ("bf16", MESHES),
    "mixed precision": ("mixed", MESHES),
    "activation checkpointing": ("recomputed", MESHES),
    "clipping": ("clipped", MESHES),
    "accumulation": ("accumulated", MESHES),
    "EMA": ("averaged", MESHES),
    "EMA in a state dict": ("average saved", MESHES),
    "scheduler": ("scheduled", MESHES),
    "tied weights": ("", MESHES),
    "frozen parts": ("frozen", MESHES),
    "several optimizers": ("two optimizers", MESHES),
    "buffers": ("buffers", MESHES),
    "meta device": ("meta", MESHES),
}
"""The kind of model (sharded.py), and the meshes, of each kind of round."""
BATCHES = 8
EPOCHS = 2


@dataclass
class Round:
    kind: str
    mesh: tuple[int, int]
    seed: int
    every: int
    """Optimizer steps between two checkpoints."""
    interruptions: list[str]
    resumed: list[int]
    """The steps that it resumed from."""
    problem: str
    """It is empty if the round ended with the same bits."""
    commit: str = ""

    @property
    def within(self) -> int:
        """How often it resumed within an epoch."""
        return sum(step % self.steps_of_epoch > 0 for step in self.resumed)

    @property
    def at_edge(self) -> int:
        """How often it resumed at an epoch's edge."""
        return sum(step % self.steps_of_epoch == 0 and step > 0 for step in self.resumed)

    @property
    def steps_of_epoch(self) -> int:
        # Lightning counts the steps of each of two optimizers.
        return {"accumulation": BATCHES // 2, "several optimizers": BATCHES * 2}.get(
            self.kind, BATCHES
        )


def planned(draws: random.Random) -> list[str]:
    """Return interruptions: two within an epoch, one at the edge, and perhaps one more.

    Ranks stop a batch after the signal; a kill leaves the checkpoint of a step before, or two.
    """
    epoch = draws.randrange(EPOCHS)
    first = draws.choice(["kill at {}:2", "kill at {}:3", "kill at {}:4", "stop at {}:2"])
    second = draws.choice(["kill at {}:4", "stop at {}:4"])
    within = [first.format(epoch), second.format(epoch)]
    edge = [draws.choice([f"stop at 0:{BATCHES - 2}", "kill at 1:0"])]
    interruptions = [*within, *edge] if epoch == 0 else [*edge, *within]
    if draws.random() < 0.5:
        action = draws.choice(["kill", "stop"])
        place = draws.choice([f"1:{BATCHES - 1}", "val 1:0", "val 1:1"])
        interruptions.append(f"{action} at {place}")
    return interruptions


@cache
def undisturbed(kind: str, mesh: tuple[int, int]) -> list[sharded.Trained]:
    """Return what each rank has at the end if nothing interrupts it."""
    with tempfile.TemporaryDirectory(prefix="sharded-") as folder:
        ended = train(Path(folder), kind, mesh, "", every=2)
    assert not any(each.error for each in ended), ended[0].output
    return [each.value for each in ended]


def train(folder: Path, kind: str, mesh: tuple[int, int], interruption: str, every: int) -> list:
    """Train on all ranks; return how they ended."""
    arguments = (folder / "checkpoints", kind, mesh, interruption, EPOCHS, every)
    return ranks.run(sharded.train, *arguments, nodes=(mesh[0] * mesh[1],), folder=folder)


def interrupted(name: str, seed: int) -> Round:
    draws = random.Random(f"{name} {seed}")
    kind, meshes = KINDS[name]
    mesh = draws.choice(meshes)
    every = 1 if kind == "accumulated" else draws.choice([1, 2])
    expected = undisturbed(kind, mesh)
    result = Round(name, mesh, seed, every, planned(draws), [], "")
    with tempfile.TemporaryDirectory(prefix="sharded-") as folder:
        for interruption in (*result.interruptions, ""):
            ended = []
            try:
                ended = train(Path(folder), kind, mesh, interruption, every)
            except EOFError:  # the last rank was killed, then the others
                assert interruption.startswith("kill"), interruption
            output = Path(folder, "rank-0.log").read_text()
            result.resumed += map(int, re.findall(r"resuming from step (\d+)", output))
            wanted = {"Interrupted: 143", ""} if interruption else {""}
            errors = {each.error for each in ended} - wanted
            if errors or "warning: resumed" in output:
                result.problem = f"{interruption}: {errors or output[-2000:]}"
                return result
    if [each.value for each in ended] != expected:
        result.problem = "other bits"
    elif result.within < 2 or result.at_edge < 1:
        result.problem = f"resumed elsewhere than planned: from steps {result.resumed}"
    return result


def table(rows: list[Round]) -> str:
    """Return how many rounds of each kind, and on each mesh, ended with the same bits."""
    counts: dict[str, Counter] = {}
    for row in rows:
        for name in (row.kind, f"any kind, {row.mesh[0]}x{row.mesh[1]} ranks", "all"):
            counts.setdefault(name, Counter()).update(
                identical=int(not row.problem), rounds=1, within=row.within, edge=row.at_edge
            )
    order = sorted(counts, key=lambda name: ([*KINDS, name].index(name), name))
    lines = [
        "| kind | identical | resumed within an epoch | at its edge |",
        "| --- | --- | --- | --- |",
    ]
    for name in order:
        count = counts[name]
        identical = f"{count['identical']} of {count['rounds']}"
        lines.append(f"| {name} | {identical} | {count['within']} | {count['edge']} |")
    return "\n".join(lines)


def main() -> None:
    results = Path("results/sharded.jsonl")
    arguments = soak_rounds.arguments_of(__doc__.splitlines()[0], KINDS, results)
    soak_rounds.run(arguments, Round, interrupted, table)


if __name__ == "__main__":
    main()
