"""The custody contract: messages that arrive while runs begin, work and end."""

from __future__ import annotations

import time

import pytest

from airflow_broadway.core.custody.protocol import Lease, Settlement, Source
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.model.message import Message
from airflow_broadway.testing.contract.base import ContractBase
from airflow_broadway.testing.harness import Harness, settlement_of


class Traffic(ContractBase):
    """The promises under continuous traffic."""

    def run_in_traffic(
        self, harness: Harness, generation: str, demand: int
    ) -> tuple[Lease, list[Message]]:
        """Runs once under traffic and ends with unmet demand; returns the recorded lease."""
        with self.source(harness, generation) as source:
            messages = self.taken_in_traffic(source, demand)
            lease = self.copied(source.lease)
            time.sleep(0.05)
        return lease, messages

    def taken_in_traffic(self, source: Source, demand: int) -> list[Message]:
        """Receives messages from a source, and stops it with unmet demand."""
        messages: list[Message] = []
        for _ in range(3):
            messages += source.secure(source.receive(demand, timeout=0.2))
            time.sleep(0.03)  # the credit of the last receive is not used up: more messages arrive
        return [*messages, *source.stop()]

    @pytest.mark.parametrize("demand", [7, 1_000])
    def test_no_message_that_arrives_while_runs_end_is_lost(
        self, harness: Harness, demand: int
    ) -> None:
        taken: list[bytes] = []
        with harness.publish_meanwhile() as sent:
            for number in range(5):
                lease, messages = self.run_in_traffic(harness, f"g{number}", demand)
                report = self.settle(harness, lease, settlement_of(messages))
                assert report == SettleReport(acked=len(messages))
                taken += [message.data for message in messages]
        taken += [message.data for message in self.rest_of_queue(harness)]

        assert sent
        assert sorted(taken) == sorted(sent)

    def test_messages_released_under_traffic_are_all_redelivered(self, harness: Harness) -> None:
        seen: dict[bytes, list[bool]] = {}
        with harness.publish_meanwhile() as sent:
            for number in range(4):
                with self.source(harness, f"g{number}") as source:
                    messages = self.taken_in_traffic(source, 1_000)
                    # As for a failed run without a manifest.
                    lease = self.copied(source.lease)
                    report = self.settle(harness, lease, Settlement(rest=RELEASE))
                    time.sleep(0.05)
                assert report == SettleReport(released=len(messages))
                for message in messages:
                    seen.setdefault(message.data, []).append(message.redelivered)
        rest: list[Message] = []
        for number in range(10):  # a run may end at a pause of the traffic
            if len(rest) < len(sent):
                rest += self.rest_of_queue(harness, f"rest {number}")

        assert sorted(message.data for message in rest) == sorted(sent)
        unmarked = [m.data for m in rest if m.data in seen and not m.redelivered]
        assert unmarked == [], "released, and redelivered without the mark"
        unseen = [m.data for m in rest if m.redelivered and m.data not in seen]
        assert unseen == [] or harness.marks_unseen, "marked as redelivered at the first delivery"
        assert all(all(marks[1:]) for marks in seen.values())

    def test_two_runs_under_traffic_share_the_messages(self, harness: Harness) -> None:
        taken: list[bytes] = []
        with harness.publish_meanwhile() as sent:
            with self.source(harness, "one") as one, self.source(harness, "two") as two:
                held: dict[str, list[Message]] = {"one": [], "two": []}
                for _ in range(3):
                    for name, source in (("one", one), ("two", two)):
                        held[name] += source.secure(source.receive(1_000, timeout=0.1))
                held["one"] += one.stop()
                first = self.copied(one.lease)
                report = self.settle(harness, first, settlement_of(held["one"]))
                assert report == SettleReport(acked=len(held["one"]))
                held["two"] += two.secure(two.receive(1_000, timeout=0.1))
                held["two"] += two.stop()
                second = self.copied(two.lease)
            report = self.settle(harness, second, settlement_of(held["two"]))
            assert report == SettleReport(acked=len(held["two"]))
            taken += [message.data for messages in held.values() for message in messages]
        taken += [message.data for message in self.rest_of_queue(harness)]

        assert sorted(taken) == sorted(sent)
