"""The protocol with one guard left out at a time, and the promise that each of them keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from tests.model.bundles import Bundles
from tests.model.protocol import Custody, Run
from tests.model.receipts import Receipts
from tests.model.rows import Rows


class Mutant(NamedTuple):
    """A model that lacks a guard.

    :param drop: The guard's name in the model.
    :param place: The guard's function in the code.
    :param guard: The guard's action there.
    :param promise: The promise that is broken without it.
    :param custody: The custody in which the violation shows.
    :param options: Options of the smallest run in which it shows.
    """

    drop: str
    place: str
    guard: str
    promise: str
    custody: Callable[[Run], Custody]
    options: dict[str, Any]


_PROCESS: Final = {"batchers": False, "results": ("ok",)}
_BATCH: Final = {"batchers": True, "results": ("ok",)}

MUTANTS: Final = (
    Mutant(
        "is_over",
        "runs.sweep.sweep",
        "asks Airflow whether another run is over, before it settles that run's messages",
        "the normal path makes no repetition",
        Rows,
        {**_PROCESS, "trouble": 0, "lapses": 0, "overlap": True},
    ),
    Mutant(
        "settling",
        "runs.sweep.sweep",
        "completes a settlement that was begun, instead of voiding it",
        "no outcome is contradicted",
        Rows,
        {**_BATCH, "lapses": 0, "trouble": 2},
    ),
    Mutant(
        "retention",
        "staging.retention.sweep_retention",
        "retains a run that has an unsettled generation, though it was marked balanced",
        "what is unsettled stays in staging",
        Rows,
        {**_PROCESS, "lapses": 0, "retention": True},
    ),
    Mutant(
        "listed first",
        "staging.run_folder.StagedRun.open_generation",
        "writes the copy for sweeps before the record",
        "a sweep finds what is unsettled",
        Rows,
        {**_PROCESS, "trouble": 0, "lapses": 0},
    ),
    Mutant(
        "publish",
        "staging.run_folder.StagedRun.publish",
        "checks whether settling has begun, before the manifest is created",
        "no manifest is published of what is being settled",
        Rows,
        {**_PROCESS, "lapses": 0},
    ),
    Mutant(
        "try",
        "core.formats.ownership.Ownership.check_try",
        "refuses a try when a later one has begun",
        "a batch is begun by the last try alone",
        Rows,
        {**_BATCH, "lapses": 0},
    ),
    Mutant(
        "journal",
        "core.formats.ownership.Ownership.check",
        "refuses a batch whose generation is being settled",
        "what a run no longer holds reaches no handle_batch",
        Rows,
        {**_BATCH, "lapses": 0},
    ),
    Mutant(
        "deadline",
        "core.formats.ownership.Ownership.check",
        "refuses a batch whose lease has lapsed",
        "what a run no longer holds reaches no handle_batch",
        Rows,
        {**_BATCH, "trouble": 0},
    ),
    Mutant(
        "outcome",
        "core.formats.record_batch.BatchRecorder.record",
        "creates an outcome exclusively: the first one stands",
        "no outcome is contradicted",
        Rows,
        {"batchers": True, "lapses": 0},
    ),
    Mutant(
        "record",
        "core.formats.record_batch.BatchRecorder.record",
        "records the outcome before any settlement may use it",
        "nothing is acknowledged without a recorded success",
        Rows,
        {**_BATCH, "trouble": 0, "lapses": 0},
    ),
    Mutant(
        "rest",
        "staging.settling.settlement.build_settlement",
        "acknowledges the rest only when every message has an outcome",
        "nothing is acknowledged without a recorded success",
        Rows,
        {**_BATCH, "lapses": 0},
    ),
    Mutant(
        "manifest",
        "staging.settling.settlement.build_settlement",
        "releases all of a generation that has published no manifest",
        "an incomplete generation is never acknowledged",
        Rows,
        {**_PROCESS, "lapses": 0},
    ),
    Mutant(
        "outcomes",
        "staging.settling.settlement.build_settlement",
        "looks at the manifest and the outcomes before anything is released",
        "no outcome is contradicted",
        Rows,
        {**_PROCESS, "trouble": 0, "lapses": 0},
    ),
    Mutant(
        "intent",
        "staging.settling.settlement.settle_generation",
        "creates the intent before the custodian settles",
        "what a run no longer holds reaches no handle_batch",
        Rows,
        {**_BATCH, "lapses": 0},
    ),
    Mutant(
        "forget",
        "staging.settling.journal.record_settled",
        "removes a generation from the list of unsettled ones after its report is written",
        "a sweep finds what is unsettled",
        Rows,
        {**_PROCESS, "trouble": 0, "lapses": 0},
    ),
    Mutant(
        "ended",
        "producers.sqlite.leases.settle",
        "settles nothing by a lease that has ended, and returns its report again",
        "who holds a message settles it",
        Rows,
        {**_PROCESS, "trouble": 0},
    ),
    Mutant(
        "never opened",
        "producers.sqlite.leases.settle",
        "ends a lease that has received nothing, so that a late holder cannot begin to",
        "nothing is received for what is settled",
        Rows,
        {**_PROCESS, "lapses": 0},
    ),
    Mutant(
        "deliveries",
        "producers.sqlite.queue.SqliteQueue.receive",
        "counts each delivery of a message",
        "a repetition is marked",
        Rows,
        {**_PROCESS, "lapses": 0},
    ),
    Mutant(
        "letter",
        "producers.engine.settlement.EngineSettlement.carry_out",
        "sends a dead letter before its message is deleted",
        "no message is lost",
        Receipts,
        {"batchers": False, "results": ("dead",), "trouble": 0, "lapses": 0},
    ),
    Mutant(
        "turn",
        "producers.rabbitmq.journal.QueueJournal.note_turn",
        "records its turn before it reads those of others",
        "a repetition is marked",
        Bundles,
        {"batchers": False, "results": ("dead",), "kinds": ("over",), "lapses": 0},
    ),
    Mutant(
        "confirm",
        "producers.rabbitmq.amqp.channels.ConfirmChannel",
        "acknowledges a delivery only once its bundle is confirmed",
        "no message is lost",
        Bundles,
        {**_PROCESS, "trouble": 0, "lapses": 0},
    ),
    Mutant(
        "publish failures",
        "producers.rabbitmq.settle.settlement.LeaseSettlement.run",
        "publishes failures again before the holding queue is purged",
        "no message is lost",
        Bundles,
        {"batchers": False, "results": ("dead",), "trouble": 0, "lapses": 0},
    ),
    Mutant(
        "is over",
        "producers.rabbitmq.journal.QueueJournal.is_over",
        "lets no generation begin that was released before its first message",
        "nothing is received for what is settled",
        Bundles,
        {**_PROCESS, "lapses": 0},
    ),
    Mutant(
        "covers",
        "producers.rabbitmq.settle.settlement.Progress.left",
        "releases nothing of a bundle that a noted settlement covers",
        "what is settled comes to no callback again",
        Bundles,
        {**_PROCESS, "lapses": 0, "kinds": ("again",), "overlap": True},
    ),
)
