"""One process of several that run models together over gloo: `main(rank, folder)`; `launch` starts them.

`FOLDER/job.pt` holds the stages, each a degree and its tasks; a process with a rank below the degree takes part in a
stage and writes the tasks' results to `FOLDER/STAGE-RANK.pt`. Nothing here imports transformers, which would cost every
process seconds: what is computed is compared by the tests, with references they have.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from nxdi_qwen.compile.graph_model import GraphModel
from nxdi_qwen.compile.graphs import CONTEXT, CONTINUATION, DECODE, HEAD, GraphSpec, capture, pass_specs
from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.model import Batch, HybridCausalLM, PrefillOutput, State, text_positions
from nxdi_qwen.modeling.partition import SINGLE, Parallel
from nxdi_qwen.modeling.state import StateDescription, cut_state, describe_state, merge_state
from tests.parallel.faults import FAULTS, Case
from tests.parallel.seam_checks import CHECKS

SLOTS, MAX_LENGTH = 5, 160
ROW_LENGTHS = (1, 5, 64, 130)
DECODE_STEPS = 8
GRAPH_ROWS, GRAPH_TOKENS = 2, 70
# What stands in the slots when their state is moved: slot -> tokens.
MOVED = {3: 64, 0: 5, 1: 70}


class Piece(NamedTuple):
    """`logits` [n, V] after n tokens of a prompt, the first of which is number `begin`."""

    what: str
    prompt: int
    begin: int
    logits: Tensor


class Report(NamedTuple):
    """`digest` is over all logits' bits; `kept`: no call changed a bit of a slot without part in it.

    Only rank 0 reports the pieces.
    """

    pieces: list[Piece]
    digest: str
    kept: bool


class Session:
    """Requests in slots, fed the tokens of known prompts: slot s serves prompt s. The state starts as NaN."""

    def __init__(self, model: Any, prompts: Tensor, description: StateDescription) -> None:
        self.model, self.prompts = model, prompts
        self.state = [tensor.fill_(torch.nan) for tensor in description.allocate()]
        self.lengths = [0] * SLOTS
        self.pieces: list[Piece] = []
        self.kept = True

    def prefill(self, what: str, counts: Mapping[int, int], layout: str = "right", width: int = 0) -> None:
        """The next `counts[slot]` tokens of each slot, one row each; a row without tokens is idle, and names a slot."""
        width = width or max(counts.values())
        batch = self._batch(list(counts), counts, layout, width)
        out = self.model.prefill(batch, self.state)
        every = self.model.head(out.hidden)
        for row, (slot, count) in enumerate(counts.items()):
            if count:
                self._keep(what, slot, every[row, batch.valid[row]])
                self._keep(f"{what}, last", slot, out.logits[row][None], skipped=count - 1)
        self._accept(out.state, counts)

    def decode(self, what: str, slots: Sequence[int], steps: int) -> None:
        """Single tokens; row i is slot i, so that all other slots are idle rows."""
        for _ in range(steps):
            counts = {slot: int(slot in slots) for slot in range(SLOTS)}
            batch = self._batch(list(counts), counts, "right", 1)._replace(slots=None)
            logits, state = self.model.decode(batch, self.state)
            for slot in slots:
                self._keep(what, slot, logits[slot][None])
            self._accept(state, counts)

    def verify(self, what: str, counts: Mapping[int, int], accepted: int) -> None:
        """A few tokens a row, of which the first `accepted` count."""
        batch = self._batch(list(counts), counts, "right", max(counts.values()))
        logits, states = self.model.verify(batch, self.state)
        for row, (slot, count) in enumerate(counts.items()):
            self._keep(what, slot, logits[row, :count])
        self._accept(states[accepted - 1], {slot: min(count, accepted) for slot, count in counts.items()})

    def report(self) -> Report:
        return _report([self])

    def _batch(self, slots: list[int], counts: Mapping[int, int], layout: str, width: int) -> Batch:
        ids = torch.full((len(slots), width), 7)
        valid = torch.zeros(len(slots), width, dtype=torch.bool)
        for row, slot in enumerate(slots):
            begin, count = self.lengths[slot], counts[slot]
            first = width - count if layout == "left" else 0
            ids[row, first : first + count] = self.prompts[slot, begin : begin + count]
            valid[row, first : first + count] = True
        start = torch.tensor([self.lengths[slot] for slot in slots])
        return Batch(ids, valid, text_positions(start, valid), start, torch.tensor(slots))

    def _keep(self, what: str, slot: int, logits: Tensor, skipped: int = 0) -> None:
        self.pieces.append(Piece(what, slot, self.lengths[slot] + skipped, logits.clone()))

    def _accept(self, state: State, added: Mapping[int, int]) -> None:
        idle = [slot for slot in range(SLOTS) if not added.get(slot)]
        pairs = zip(self.state, state, strict=True)
        self.kept &= all(torch.equal(old[idle].view(torch.int32), new[idle].view(torch.int32)) for old, new in pairs)
        self.state = list(state)
        for slot, count in added.items():
            self.lengths[slot] += count


def _report(sessions: Sequence[Session]) -> Report:
    pieces = [piece for session in sessions for piece in session.pieces]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece.logits.contiguous().numpy().tobytes())
    return Report(pieces, digest.hexdigest(), all(session.kept for session in sessions))


class Exported:
    """Captured programs behind the calls that `Session` makes of a model."""

    def __init__(self, model: HybridCausalLM, parallel: Parallel, description: StateDescription) -> None:
        specs = [
            *pass_specs(model.config, CONTEXT, GRAPH_ROWS, GRAPH_TOKENS),
            *pass_specs(model.config, CONTINUATION, GRAPH_ROWS, GRAPH_TOKENS),
            *pass_specs(model.config, DECODE, SLOTS, 1),
            GraphSpec(HEAD, GRAPH_ROWS * GRAPH_TOKENS, 1),
        ]
        programs = {spec.name: capture(spec, model.config, torch.float32, description, parallel) for spec in specs}
        self.code = {name: program.graph_module.code for name, program in programs.items()}
        self.constants = {name: program.constants for name, program in programs.items()}
        calls = {name: program.module() for name, program in programs.items()}
        self.graphs = GraphModel(model.config, calls, model.state_dict())

    def prefill(self, batch: Batch, state: State) -> PrefillOutput:
        logits, hidden, state = self.graphs.context(batch, state)
        return PrefillOutput(logits, hidden, state, [])

    def decode(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        return self.graphs.decode(batch, state)

    def head(self, hidden: Tensor) -> Tensor:
        return self.graphs.head(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])


class Runner:
    """The tasks of one rank; at `SINGLE` they are the same without any other process."""

    def __init__(self, folder: Path, parallel: Parallel = SINGLE) -> None:
        self.folder, self.parallel = folder, parallel
        self.models: dict[Case, tuple[HybridCausalLM, StateDescription]] = {}

    def changeable(self, case: Case) -> tuple[HybridCausalLM, Session]:
        """A model of its own, which may be changed, and a session of it."""
        model, description = self._load(case)
        return model, Session(model, self._prompts(case.name), description)

    def loaded(self, case: Case) -> tuple[HybridCausalLM, StateDescription]:
        if case not in self.models:
            self.models[case] = self._load(case)
        return self.models[case]

    def session(self, case: Case) -> Session:
        model, description = self.loaded(case)
        return Session(model, self._prompts(case.name), description)

    def _load(self, case: Case) -> tuple[HybridCausalLM, StateDescription]:
        source = ModelSource.from_checkpoint(self.folder / case.name)
        parallel = Parallel(self.parallel.degree, self.parallel.rank, case.expert_degree)
        description = describe_state(source.config, SLOTS, MAX_LENGTH, torch.float32, parallel)
        return source.load(torch.float32, parallel), description

    def _prompts(self, name: str) -> Tensor:
        return torch.load(self.folder / name / "prompts.pt")

    def parity(self, case: Case) -> Report:
        """Rows alone, ragged batches, pieces, verification; all but the first from slots full of NaN."""
        sessions = []

        def session() -> Session:
            sessions.append(self.session(case))
            return sessions[-1]

        for length in ROW_LENGTHS:
            session().prefill(f"row of {length}", {2: length})
        for layout in ("right", "left"):
            ragged = session()
            ragged.prefill(f"ragged {layout}", {3: 130, 0: 5, 4: 0, 1: 64}, layout, width=137)
            ragged.decode(f"decode after ragged {layout}", (3, 0, 1), DECODE_STEPS if layout == "right" else 1)
        pieces = session()
        for counts in ({1: 3, 4: 65}, {1: 1, 4: 0, 2: 2}, {1: 64, 4: 5}):
            pieces.prefill("pieces", counts)
        pieces.decode("decode after pieces", (1, 4), 1)
        drafts = session()
        drafts.prefill("before verify", {0: 20, 3: 2})
        drafts.verify("verify", {0: 4, 3: 2}, accepted=3)
        drafts.verify("verify again", {3: 1, 0: 3}, accepted=1)
        drafts.decode("decode after verify", (0, 3), 1)
        return _report(sessions)

    def faulty(self, fault: str) -> Report:
        """A short run of a model that is broken on purpose."""
        planted = FAULTS[fault]
        with planted.loading():
            model, session = self.changeable(planted.case)
        with planted.running(model, self.parallel):
            session.prefill("ragged", {3: 30, 0: 5, 1: 2})
            session.decode("decode", (3, 0), 2)
        return session.report()

    def exported(self, case: Case) -> tuple[Report, dict[str, str], dict[str, dict[str, Any]]]:
        """The captured programs' logits, code and constants."""
        model, description = self.loaded(case)
        parallel = Parallel(self.parallel.degree, self.parallel.rank, case.expert_degree)
        programs = Exported(model, parallel, description)
        session = Session(programs, self._prompts(case.name), description)
        session.prefill("ragged", {3: 64, 1: 5}, "left", GRAPH_TOKENS)
        session.prefill("idle row", {2: 70, 1: 0}, width=GRAPH_TOKENS)
        session.prefill("continued", {3: 3, 1: 66}, width=GRAPH_TOKENS)
        session.decode("decode", (3, 1), DECODE_STEPS)
        return session.report(), programs.code, programs.constants

    def leave(self, case: Case) -> Report:
        """Writes the state after a ragged prefill, and goes on without a move."""
        session = self.session(case)
        session.prefill("before the move", MOVED)
        torch.save(session.state, state_path(self.folder, case.name, self.parallel.degree, self.parallel.rank))
        session.pieces.clear()
        self._go_on(session)
        return session.report()

    def arrive(self, case: Case, degree: int) -> Report:
        """Goes on from the state that `degree` ranks wrote."""
        session = self.session(case)
        states = rank_states(self.folder, case.name, degree)
        whole = describe_state(session.model.config, SLOTS, MAX_LENGTH, torch.float32)
        session.state = cut_state(merge_state(states, whole), whole, self.parallel)
        for slot, count in MOVED.items():
            session.lengths[slot] = count
        self._go_on(session)
        return session.report()

    def _go_on(self, session: Session) -> None:
        session.decode("decode after the move", tuple(MOVED), DECODE_STEPS)
        session.prefill("piece after the move", {0: 66, 4: 0, 3: 3})

    def seam(self, check: str) -> Any:
        return CHECKS[check](self.parallel)


def state_path(folder: Path, name: str, degree: int, rank: int) -> Path:
    return folder / f"state-{name}-{degree}-{rank}.pt"


def rank_states(folder: Path, name: str, degree: int) -> list[State]:
    """The states that `leave` wrote, in rank order."""
    return [torch.load(state_path(folder, name, degree, rank)) for rank in range(degree)]


def run_stage(runner: Runner, tasks: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], Any]:
    """Each task is the name of a method of `Runner`, then its arguments."""
    results = {}
    for task in tasks:
        result = getattr(runner, task[0])(*task[1:])
        if isinstance(result, Report) and runner.parallel.rank:
            result = result._replace(pieces=[])
        results[task] = result
    return results


@torch.no_grad()
def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    job = torch.load(folder / "job.pt", weights_only=False)
    for number, (degree, tasks) in enumerate(job["stages"]):
        if rank >= degree:
            continue
        rendezvous = folder / f"rendezvous-{number}"
        # Sleeps through stages without this rank: the store's own waiting takes time from those who work.
        while rank and not rendezvous.exists():
            time.sleep(0.05)
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            world_size=degree,
            rank=rank,
            timeout=timedelta(seconds=job["timeout"]),
        )
        results = run_stage(Runner(folder, Parallel(degree, rank)), tasks)
        torch.save(results, folder / f"{number}-{rank}.pt")
        distributed.barrier()
        distributed.destroy_process_group()
