"""The tables of a group in files, as several registers change them."""

from __future__ import annotations

from dataclasses import replace

from airflow_broadway.producers.kafka.register import Place, Register
from airflow_broadway.producers.kafka.table import Table
from airflow_broadway.producers.kit.state_files import MemoryFiles
from airflow_broadway.testing import ManualClock

PLACE: Place = ("topic", 0)


def finish(register: Register, base: int) -> None:
    def finished(table: Table | None) -> tuple[Table, None]:
        return replace(table or Table(base=0), base=base), None

    register.change(PLACE, finished)


def test_that_there_is_nothing_to_change_is_not_said_of_an_old_version() -> None:
    # Given one register that has read the table, and another that changes it afterwards
    files, clock = MemoryFiles(), ManualClock()
    one, other = Register(files, clock), Register(files, clock)
    finish(one, 1)
    finish(other, 5)

    # When the first has something to do where the base is 5, and nothing elsewhere
    def once_there(table: Table | None) -> tuple[Table, int]:
        assert table is not None
        return (replace(table, base=6) if table.base == 5 else table), table.base

    found = one.change(PLACE, once_there)

    # Then it sees the other's change
    assert found == 5
    assert (one.read(PLACE), one.version(PLACE)) == (other.read(PLACE), 3)


def test_nothing_is_written_where_nothing_changes() -> None:
    files, clock = MemoryFiles(), ManualClock()
    register = Register(files, clock)
    finish(register, 1)

    def looked(table: Table | None) -> tuple[Table, int]:
        assert table is not None
        return table, table.base

    assert register.change(PLACE, looked) == 1
    assert register.version(PLACE) == 1
