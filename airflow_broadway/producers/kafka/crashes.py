"""What processes died of, once it is known: sent to the dead letters, without being handled.

A crash is counted for what the process had claimed last, or for the batches that it died of
(``table.blame``), which the next run claims in smaller portions, and from the second crash on alone
(``partition``), down to one message.

Little of ``kit.suspects`` serves here.  That counts by message and sorts what a broker hands out;
Kafka hands out by offset, so crashes are ranges in a partition's table, change with it in one step,
and are known before anything is asked for.  And where others put all off for a suspect, here what
is in front of it, or in another partition, goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from airflow_broadway.producers.kafka import dead_letters
from airflow_broadway.producers.kafka.client import Cluster, Place
from airflow_broadway.producers.kafka.dead_letters import Why
from airflow_broadway.producers.kafka.ranges import of_offsets
from airflow_broadway.producers.kafka.register import Register
from airflow_broadway.producers.kafka.table import Table, free, skip, suspects
from airflow_broadway.producers.kit.suspects import why_crashed

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.kafka.options import KafkaOptions

__all__ = ["set_aside_crashed"]

log = logging.getLogger(__name__)


def set_aside_crashed(
    producer: KafkaOptions,
    cluster: Cluster,
    register: Register,
    env: ProducerEnv,
    places: Sequence[Place],
) -> int:
    """Send to the dead letters what processes died of that handled nothing else; how many.

    What cannot be sent stays, and is logged.
    """
    found = 0
    now = env.clock.now().timestamp()
    for place in places:
        table = register.known(place)
        if table is None:
            continue
        ready = free(table, env.generation, now, order=producer.order)
        whys = {
            each.low: Why(
                why_crashed(each.times),
                "process",
                table.held[each.low].attempts + 1 if each.low in table.held else 1,
                again=True,
            )
            for each in suspects(table, ready, least=producer.max_crashes)
            if each.alone
        }
        if not whys:
            continue
        refused = dead_letters.send(
            cluster,
            producer,
            {place: whys},
            pipeline=env.pipeline,
            generation=env.generation,
        )
        for reason in dict.fromkeys(refused.values()):
            log.error("%s-%d: what crashed its processes stays there: %s", *place, reason)
        sent = [offset for offset in whys if (place, offset) not in refused]
        _finish(register, place, sent)
        for offset in sent:
            log.error("%s-%d-%d is set aside: %s.", *place, offset, whys[offset].reason)
        found += len(sent)
    return found


def _finish(register: Register, place: Place, offsets: Sequence[int]) -> None:
    def without(table: Table | None) -> tuple[Table, None]:
        assert table is not None
        return skip(table, of_offsets(offsets)), None

    register.change(place, without)
