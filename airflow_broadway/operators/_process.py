"""One execution of a process task: receive, secure, handle, stage, publish.

Securing comes before any callback, and the manifest last: what dies before it is published leaves
messages that their lease gives back.
"""

from __future__ import annotations

import json
import logging
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_broadway.core.acknowledger import Judged, RunAcknowledger
from airflow_broadway.core.broadway import Broadway
from airflow_broadway.core.custody import (
    RELEASE,
    Action,
    Custodian,
    Delivery,
    Entry,
    Lease,
    SettleReport,
    Settlement,
    Source,
    Verdict,
)
from airflow_broadway.core.errors import BroadwayError, PipelineError
from airflow_broadway.core.manifest import Manifest, paths
from airflow_broadway.core.message import AckRef, Message
from airflow_broadway.core.processor import ChunkResult
from airflow_broadway.core.processors import ProcessorPool
from airflow_broadway.core.producer import ProducerEnv
from airflow_broadway.operators._leases import LeaseKeeper
from airflow_broadway.staging.settlement import build_settlement, settle_generation
from airflow_broadway.staging.store import StagedRun
from airflow_broadway.staging.writer import ProcessWriter

log = logging.getLogger(__name__)

#: Messages asked for at a time: enough that a broker's round trip is shared by many, few enough that
#: what a stop gives back unprocessed is soon handled elsewhere.
DEMAND = 1000

#: Seconds that one receive waits, so that a stop is noticed.
RECEIVE_TIMEOUT = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When a process task stops pulling; see :class:`BroadwayProcessorOperator`."""

    max_messages: int | None = None
    max_bytes: int | None = None
    max_seconds: float | None = 300.0
    wait_seconds: float = 0.0
    idle_seconds: float = 1.0


def entry_of(message: Message, verdict: Verdict) -> Entry:
    """The entry that settles ``message`` by ``verdict``."""
    data = message.acknowledger.data
    delivery = data if isinstance(data, Delivery) else Delivery()
    return Entry(
        message.message_id,
        delivery.receipt,
        verdict,
        message.attempt,
        delivery.payload,
        delivery.properties,
    )


class Process:
    """One execution of a process task.

    :param run: The run's staging folder.
    :param env: What the producer is opened in; names the generation.
    """

    def __init__(
        self, run: StagedRun, pipeline: Broadway, *, env: ProducerEnv, budget: Budget
    ) -> None:
        self._run = run
        self._pipeline = pipeline
        self._env = env
        self._budget = budget
        self._clock = env.clock
        self._stopped = ""
        self._received = 0
        self._received_bytes = 0
        self._failed = 0
        self._settled_now = SettleReport()
        self._custodian: Custodian | None = None

    def stop(self, reason: str) -> None:
        """Stop pulling; what was received is finished.  Called from a signal handler."""
        self._stopped = self._stopped or reason

    def run(self) -> dict[str, Any]:
        """Do it all; returns the reference that later tasks get.

        :raises BroadwayError: If the broker or staging fails; everything received was given back.
        """
        started = self._clock.now()
        source = self._pipeline.producer.source(self._env)
        try:
            owner = self._env.owner
            self._run.open_generation(
                source.lease,
                task_id=owner["task_id"],
                map_index=owner["map_index"],
                try_number=owner["try_number"],
            )
            try:
                with self._keeper(source.lease) as keeper:
                    writer = ProcessWriter(self._run, self._env.generation, self._pipeline)
                    self._handle_all(source, writer)
                    keeper.check()
                    manifest = self._publish(source.lease, writer, started.isoformat())
            except BaseException:
                # Nothing of this execution counts: give back now what would else wait for the
                # lease to lapse.
                self._give_back(source.lease)
                raise
        finally:
            source.close()
        self._finish(manifest)
        return self._reference(manifest)

    def _keeper(self, lease: Lease) -> LeaseKeeper:
        producer = self._pipeline.producer
        return LeaseKeeper(
            lambda: producer.custodian(self._env), [lease] if producer.renews else []
        )

    # -- messages ------------------------------------------------------------------------------

    def _handle_all(self, source: Source, writer: ProcessWriter) -> None:
        acknowledger = RunAcknowledger(self._pipeline.producer, _Sink(self, writer))
        pool = ProcessorPool(self._pipeline, finish=writer.convert)
        number = 0
        try:
            for chunk, result in pool.map(self._dispatches(source, acknowledger)):
                self._failed += len(result.failed)
                if self._pipeline.batchers and result.successful:
                    writer.messages(number, result.successful)
                for message in _unaccounted(chunk, result):
                    writer.entry(entry_of(message, RELEASE))
                number += 1
        finally:
            pool.close()

    def _dispatches(
        self, source: Source, acknowledger: RunAcknowledger
    ) -> Iterator[list[Message]]:
        for messages in self._receive(source):
            yield self._taken(messages, acknowledger)

    def _taken(
        self, messages: Sequence[Message], acknowledger: RunAcknowledger
    ) -> list[Message]:
        transform = self._pipeline.producer.transformer
        generation = self._env.generation
        taken = []
        for message in messages:
            taken_message = message.with_acknowledger(
                AckRef(acknowledger, generation, message.acknowledger.data)
            )
            if transform is not None:
                taken_message = transform(taken_message)
                if type(taken_message) is not Message:
                    raise PipelineError(
                        f"the transformer must return a Message, got: {taken_message!r:.200}"
                    )
            taken.append(taken_message)
        return taken

    def _receive(self, source: Source) -> Iterator[Sequence[Message]]:
        """What the source gives within the budget, secured."""
        budget, clock = self._budget, self._clock
        start = last = clock.monotonic()
        while not self._stopped:
            now = clock.monotonic()
            limit = budget.idle_seconds if self._received else max(
                budget.wait_seconds, budget.idle_seconds
            )
            demand = DEMAND
            if budget.max_messages is not None:
                demand = min(demand, budget.max_messages - self._received)
            if demand <= 0:
                return self.stop("max_messages")
            if budget.max_bytes is not None and self._received_bytes >= budget.max_bytes:
                return self.stop("max_bytes")
            if budget.max_seconds is not None:
                left = budget.max_seconds - (now - start)
                if left <= 0:
                    return self.stop("max_seconds")
                limit = min(limit, left)
            messages = source.secure(
                source.receive(demand, timeout=min(RECEIVE_TIMEOUT, limit))
            )
            if messages:
                self._received += len(messages)
                self._received_bytes += sum(message.size for message in messages)
                last = clock.monotonic()
                yield messages
            elif clock.monotonic() - last >= limit:
                return self.stop("empty")
        return None

    def settle_now(self, judged: list[Judged]) -> None:
        """Carry verdicts out at the broker, for ``ack_immediately``."""
        entries = [entry_of(message, verdict) for message, verdict in judged]
        self._settled_now += self._open_custodian().settle_now(self._lease, entries)

    # -- the end -------------------------------------------------------------------------------

    def _publish(self, lease: Lease, writer: ProcessWriter, started_at: str) -> Manifest:
        staged = writer.close()
        manifest = Manifest(
            generation=self._env.generation,
            root_id=self._run.store.root_id(),
            host=socket.gethostname(),
            lease=lease.to_json(),
            received=self._received,
            received_bytes=self._received_bytes,
            failed=self._failed,
            settled_now=self._settled_now.to_json(),
            batchers=staged.counts,
            files=staged.files,
            entries=staged.entries,
            configured=staged.configured,
            dropped=staged.dropped,
            stopped=self._stopped,
            started_at=started_at,
            ended_at=self._clock.now().isoformat(),
        )
        self._run.files.replace(paths.lease(lease.generation), _dumps(lease))
        self._run.publish(manifest)
        log.info(
            "Received %d messages (%d bytes) in generation %s; %d failed; to batchers: %s;"
            " stopped by %s.",
            manifest.received,
            manifest.received_bytes,
            manifest.generation,
            manifest.failed,
            manifest.batchers or "none",
            manifest.stopped,
        )
        if manifest.dropped:
            log.warning("Columns that the schema lacks were dropped: %s.", manifest.dropped)
        return manifest

    def _finish(self, manifest: Manifest) -> None:
        """Settle here what no other task will: a pipeline without batchers, an empty run."""
        if manifest.received and self._pipeline.batchers:
            return
        record = self._run.generation(manifest.generation)
        settlement = build_settlement(self._run, record, self._pipeline).settlement
        report = settle_generation(self._run, record, self._open_custodian(), settlement)
        log.info("Settled: %s.", report)
        self._close_custodian()

    def _give_back(self, lease: Lease) -> None:
        try:
            record = self._run.generation(lease.generation)
            report = settle_generation(
                self._run, record, self._open_custodian(), Settlement(rest=RELEASE)
            )
            log.warning("Gave back %d messages of this execution.", report.released)
        except (BroadwayError, OSError) as error:
            # The lease lapses by itself; the first error is the one to show.
            log.error("Could not give messages back; their lease lapses by itself: %s", error)
        self._close_custodian()

    def _open_custodian(self) -> Custodian:
        if self._custodian is None:
            self._custodian = self._pipeline.producer.custodian(self._env)
        return self._custodian

    def _close_custodian(self) -> None:
        if self._custodian is not None:
            self._custodian.close()
            self._custodian = None

    @staticmethod
    def _reference(manifest: Manifest) -> dict[str, Any]:
        return {
            "generation": manifest.generation,
            "received": manifest.received,
            "failed": manifest.failed,
            "batchers": manifest.batchers,
            "stopped": manifest.stopped,
        }


class _Sink:
    """Keeps the verdicts of the process stage: in entries, or at the broker at once."""

    def __init__(self, process: Process, writer: ProcessWriter) -> None:
        self._process = process
        self._writer = writer

    def record(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        for message, verdict in successful:
            if verdict.action is not Action.ACK:  # a plain success gets ``rest``
                self._writer.entry(entry_of(message, verdict))
        for message, verdict in failed:
            self._writer.entry(entry_of(message, verdict))

    def settle_now(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        self._process.settle_now([*successful, *failed])


def _unaccounted(chunk: list[Message], result: ChunkResult) -> list[Message]:
    """Those of a chunk that no callback returned: they must not be taken for successes."""
    given = [message.message_id for message in chunk]
    if not result.failed and given == [message.message_id for message in result.successful]:
        return []
    seen = Counter(message.message_id for message in result.successful)
    seen.update(message.message_id for message in result.failed)
    known = set(given)
    for message_id, times in seen.items():
        if message_id not in known or times > 1:
            raise PipelineError(
                f"the callbacks returned message {message_id!r} {times} times, in a chunk that"
                f" {'holds it once' if message_id in known else 'does not hold it'}; return each"
                " message as it was given, changed by its put_… functions"
            )
    return [message for message in chunk if message.message_id not in seen]


def _dumps(lease: Lease) -> str:
    return json.dumps(lease.to_json(), sort_keys=True)
