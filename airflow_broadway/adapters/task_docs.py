"""What Airflow's UI shows about each task, as Markdown: what it does, and what a click on it does.

A task's own ``doc_md`` replaces it.
"""

from __future__ import annotations

from typing import Final

PROCESS: Final = """\
Receives messages within its budget, runs `handle_message` on each, and stages the results. The
queue keeps the messages for this run until the task `ack` has settled them.

- **Red:** it could not go on; the log says why. What it has not published goes back to the
  queue.
- **Clear it**, with its downstream tasks: what it held goes back, and is received anew. Batches
  that were made of it are void.
"""

BATCH: Final = """\
Groups the staged messages of one batcher into batches, by key, size and time. Where
`handle_batch` is plain Python, runs it too. It skips itself when there is no message for the
batcher.

- **Red:** some batches have no outcome. The others stand.
- **Clear it** before the run is settled: the same batches, with the same ids; those that have
  an outcome do not run again. Afterwards trigger a run with
  `source=run`.
"""

SPARK: Final = """\
Runs `handle_batch` on every batch without an outcome, in one Spark application. It skips itself
when there is no batch.

- **Red:** the application did not get an outcome for every batch; the log says why. The others
  stand.
- **Clear it** before the run is settled: only batches without an outcome run. Afterwards no
  code of yours runs; the log has the command that runs the batches again.
- **Mark it as a success:** messages without an outcome go back to the queue. They are never
  acknowledged.
"""

ACK: Final = """\
Starts with the run and ends last. Renews the leases, settles every message at its broker by
what became of it, and checks that each message received is in exactly one class. Its log tells
the run in sentences; `airflow-broadway show` has the figures of each generation and batcher.

- **Red means look:** a task failed, the sum does not balance, messages had lapsed, or too many
  failed (`fail_when`). Everything is settled or given back all the same.
- **Clear it:** it reads the outcomes again. Nothing is settled twice.
- **Mark it as a success:** nothing is settled now. The next run settles what has an outcome,
  and gives back the rest.
"""

RUN: Final = """\
Runs the whole pipeline in this one task: receives messages within its budget, handles them, and
settles each at its broker as its outcome comes.

- **Red means look:** it could not receive, the sum does not balance, messages had lapsed, or
  too many failed (`fail_when`). Everything is settled or given back all the same.
- **Clear it:** a new run. What was settled stays settled.
"""
