"""The documentation of each task in Airflow's UI, as Markdown: its work, and the effect of a clear.

A task's own ``doc_md`` replaces it.
"""

from __future__ import annotations

from typing import Final

PROCESS: Final = """\
Receives messages within its budget, runs `handle_message` on each, and stages the results. The
queue keeps the messages for this run until the task `ack` has settled them.

- **Red:** it could not continue; the log has the reason. Messages that it has not published are
  released to the queue.
- **Clear it**, with its downstream tasks: its messages are released, and redelivered. Batches
  built from them are void.
"""

BATCH: Final = """\
Groups the staged messages of one batcher into batches, by key, size and time. Where
`handle_batch` is plain Python, runs it too. It skips itself when there is no message for the
batcher.

- **Red:** some batches have no outcome. The others are valid.
- **Clear it** before the run is settled: the same batches, with the same ids; those that have
  an outcome do not run again. Afterwards trigger a run with
  `source=run`.
"""

SPARK: Final = """\
Runs `handle_batch` on every batch without an outcome, in one Spark application. It skips itself
when there is no batch.

- **Red:** the application did not get an outcome for every batch; the log has the reason. The
  others are valid.
- **Clear it** before the run is settled: only batches without an outcome run. Afterwards no
  code of yours runs; the log has the command that runs the batches again.
- **Mark it as a success:** messages without an outcome are released to the queue. They are never
  acknowledged.
"""

ACK: Final = """\
Starts with the run and ends last. Renews the leases, settles every message at its broker by its
outcome, and checks that each message received is in exactly one class. Its log summarizes the run
in sentences; `airflow-broadway show` has the counts of each generation and batcher.

- **Red means look:** a task failed, the sum does not balance, messages had lapsed, or too many
  failed (`fail_when`). Everything is settled or released all the same.
- **Clear it:** it reads the outcomes again. Nothing is settled twice.
- **Mark it as a success:** nothing is settled now. The next run settles what has an outcome,
  and releases the rest.
"""

RUN: Final = """\
Runs the whole pipeline in this one task: receives messages within its budget, handles them, and
settles each at its broker as its outcome arrives.

- **Red means look:** it could not receive, the sum does not balance, messages had lapsed, or
  too many failed (`fail_when`). Everything is settled or released all the same.
- **Clear it:** a new run. Settled messages stay settled.
"""
