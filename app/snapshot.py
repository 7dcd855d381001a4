"""The state of a job at a moment at which nothing is half done: all that is needed to go on from there."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pytorch_lightning import Trainer

from app import checkpoints, curves, loops, partial, revive, schedule, written
from app.agreement import Agreement
from app.chance import Chance
from app.compat import lightning_callbacks, lightning_checkpoints, lightning_loops
from app.errors import UserError
from app.exact import reached
from app.held import Held
from app.plain import NotPlain, plain
from app.proof import Proof
from app.state import digest

COMMON = {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "optimizer_states",
          "lr_schedulers", "hparams_name", "hyper_parameters", "hparams_type", "datamodule_hparams_name",
          "datamodule_hyper_parameters", "datamodule_hparams_type"}  # fmt: skip
"""What is the same on all ranks in a Lightning checkpoint, or of the first one for all."""
HYPER = ("hyper_parameters", "datamodule_hyper_parameters", "hparams", "datamodule_hparams")
LATER = "optimizer_states"


class Snapshot:
    """Takes states.

    Args:
        trainer: Lightning's trainer.
        agreement: What all ranks say to each other.
        chance: What knows the seed of all.
        proof: What knows what came of earlier interruptions.
    """

    def __init__(self, trainer: Trainer, agreement: Agreement, chance: Chance, proof: Proof) -> None:
        self.trainer, self.agreement, self.chance, self.proof = trainer, agreement, chance, proof
        self.held, self.given = Held(trainer), revive.limits(trainer)
        self.limits = self.given  # with what hooks that begin training have added
        self.before_data: Mapping[str, Any] | None = None  # what objects held when the training data was made anew
        self.run: Mapping[str, Any] = {}  # what `same.described`
        self.said = False  # that the ranks have learning rates of their own

    def take(self, kind: str) -> dict[str, Any]:
        """Return the state of the job, copied; of a "validation", which changes no optimizer, without copies of these.

        Before such a state is written, it has to be made `whole`.
        """
        trainer, gather = self.trainer, self.agreement.gather
        first = trainer.is_global_zero
        of_first = (
            time.time_ns(),
            curves.tell(trainer.loggers) if first else [],
            written.names(trainer) if first else {},
        )
        moment, loggers, files = gather(of_first)[0]
        state, notes = self.lightnings(kind)
        own = {name: value for name, value in state.items() if name not in COMMON}
        told = gather((digest(own), schedule.rates(trainer)))
        if told[0][0] == told[trainer.global_rank][0]:
            own = {}
        self._compare([rates for _, rates in told])
        self.held.within = kind != "epoch"
        known = partial.of_rank(trainer, gather, self.held) | {"own": own, "notes": notes if own else {}}
        known["gradients"] = partial.gradients(trainer, gather)
        ours = {
            "step": trainer.global_step, "kind": kind, "number": moment, "saved_at": moment / 1e9,
            "seed": self.chance.seed, "world_size": trainer.world_size, "should_stop": bool(trainer.should_stop),
            "ranks": gather(known), "shown": partial.of_job(trainer),
            "run": self.run, "loggers": loggers, "files": files,
            "reached": reached(trainer) if kind != "epoch" else None, "notes": notes,
            "made": lightning_loops.loaders_made_in(trainer), "searched": revive.searched(trainer),
            "limits": self.given, "added": self._added(), "tickets": revive.tickets(trainer),
            "groups": revive.groups(trainer), "before_data": self.before_data,
        }  # fmt: skip
        if kind == "epoch":
            loops.end_as_lightning_does(state["loops"]["fit_loop"])
        return state | {checkpoints.KEY: ours | {"journal": self.proof.run, "resumes": self.proof.resumes}}

    def begin(self, added: Sequence[int]) -> None:
        """Take what is there now for what a run begins with, but for the epochs and steps that were `added` before."""
        self.held.mark()
        self.limits = [now - more for now, more in zip(revive.limits(self.trainer), added, strict=True)]

    def _added(self) -> list[int]:
        return [now - then for now, then in zip(revive.limits(self.trainer), self.limits, strict=True)]

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a validation with all of it copied."""
        return state | {LATER: plain(state[LATER], state[checkpoints.KEY]["notes"], self._cannot_be_saved, (LATER,))}

    def lightnings(self, kind: str = "") -> tuple[dict[str, Any], dict]:
        """Return what Lightning saves, as others can read it too; and what of it was of another type."""
        notes: dict[tuple, tuple] = {}
        with lightning_callbacks.pruned_as_it_is(self.trainer):
            state = lightning_checkpoints.state_of(self.trainer)
        later = {LATER: state.pop(LATER)} if kind == "validation" else {}
        return plain(state, notes, self._cannot_be_saved) | later, notes

    def _compare(self, rates: Sequence[list[float]]) -> None:
        """Say, once, that the ranks do not train one model any more, of whose weights a checkpoint has the first's."""
        other = next((rank for rank, own in enumerate(rates) if own != rates[0]), 0)
        if other and not self.said and self.trainer.is_global_zero:
            print(
                f"warning: the learning rates are {_listed(rates[0])} on rank 0 and {_listed(rates[other])} on rank "
                f"{other}, so that the ranks have other weights, too: once it is interrupted, this run is not exact; "
                "set them by what all ranks know, such as self.log(..., sync_dist=True)",
                flush=True,
            )
        self.said = self.said or bool(other)

    def _cannot_be_saved(self, found: NotPlain) -> Any:
        """Return the text that stands for a hyperparameter, which no run needs to go on; else UserError."""
        name = str(found.path[0])
        if name.startswith(HYPER):
            return f"({found.kind})"
        kind = type(self.trainer.lightning_module)
        model = f"{kind.__module__}.{kind.__qualname__}"
        whose = {"state_dict": "state_dict() of", "callbacks": "a callback of", "lr_schedulers": "a scheduler of",
                 LATER: "an optimizer of"}  # fmt: skip
        of = whose.get(name, "on_save_checkpoint() or state_dict() of")
        raise UserError(
            f"a checkpoint of this run could not be read again: {found} ({of} {model}); keep numbers, text, tensors, "
            "arrays, lists and dicts there"
        )


def _listed(rates: list[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(rates))
