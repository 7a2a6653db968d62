"""Connections that are dropped, delayed or half-closed, by a proxy before the broker."""

from __future__ import annotations

import time

from tests.faults.found import Found
from tests.faults.proxy import Proxy
from tests.faults.rabbitmq_cases.place import Place
from tests.faults.rabbitmq_cases.registry import case
from tests.faults.rabbitmq_cases.working import ends_well, finish, found_by_workers, spawn


def _broken(place: Place, name: str, harm: str) -> Found:
    place.fill(5_000)
    with Proxy(place.server.address) as proxy:
        worker = spawn(place, lease=40.0, most=600, uri=f"amqp://127.0.0.1:{proxy.port}")
        for pause in (0.3, 0.7, 0.5):
            time.sleep(pause)
            getattr(proxy, harm)()
            if harm == "stall":
                time.sleep(1.0)
                proxy.go_on()
        ends_well(worker)

    finish(place, lease=40.0, most=600)

    return found_by_workers(place, name, 5_000)


@case()
def the_network_drops_connections(place: Place, name: str) -> Found:
    return _broken(place, name, "cut")


@case()
def the_network_closes_one_half(place: Place, name: str) -> Found:
    return _broken(place, name, "half_close")


@case()
def the_network_stands_still(place: Place, name: str) -> Found:
    return _broken(place, name, "stall")
