"""Child processes for the pages: bounded in time, number and output; answers are shared."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.plugin.children import OFF, Answer, ChildError, Children
from airflow_broadway.plugin.declared import Declared
from airflow_broadway.plugin.depths import Depths
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.testing.clock import ManualClock
from tests.waiting import eventually

#: What a child begins with: it writes down that it ran.  Its first argument is its own bound.
PREAMBLE = """
import json, os, sys, time
sys.argv.pop(1)
open({log!r}, "a").write(json.dumps(sys.argv[1:]) + "\\n")
"""


class World:
    """Children that run a few lines, and what they wrote down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.clock = ManualClock()

    def children(self, code: str, **given: Any) -> Children:
        text = PREAMBLE.format(log=str(self.log)) + code
        program = (sys.executable, "-S", "-c", text)
        return Children(program=program, clock=self.clock, keep=10.0, **given)

    @property
    def runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def ran(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run what is to be made within a loop."""
    asyncio.run(call())


ECHO = "print(json.dumps(sys.argv[1:]))"


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_command_is_asked_for_json_and_its_answer_serves_others_for_some_seconds(
    world: World,
) -> None:
    async def asks() -> None:
        children = world.children(ECHO)
        first, same = await asyncio.gather(children.ask("runs", "a"), children.ask("runs", "a"))
        assert first == same == Answer(["runs", "a", "--json"], 0, world.clock.now())
        world.clock.advance(9.9)
        assert await children.ask("runs", "a") == first
        assert world.runs == 1
        assert (await children.ask("runs", "b")).value[1] == "b"
        world.clock.advance(0.2)
        await children.ask("runs", "a")
        assert world.runs == 3

    ran(asks)


def test_what_begins_with_a_dash_is_no_option_behind_two(world: World) -> None:
    async def asks() -> None:
        answer = await world.children(ECHO).ask("depth", "--timeout=1", "--", "-a")
        assert answer.value == ["depth", "--timeout=1", "--json", "--", "-a"]

    ran(asks)


def test_a_change_is_made_each_time_and_what_was_known_is_asked_anew(world: World) -> None:
    async def asks() -> None:
        children = world.children(ECHO + "; sys.exit(1)")
        assert (await children.ask("list")).code == 1
        await children.change("delete")
        await children.change("delete")
        await children.ask("list")
        assert world.runs == 4

    ran(asks)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "print('noise', file=sys.stderr); print('airflow-broadway: error: no broker at"
            " amqp://me:secret@host, it says', file=sys.stderr); sys.exit(2)",
            "no broker at amqp://***@host, it says",
        ),
        ("raise ValueError('secret')", "ended with exit code 1 and ValueError: run it where"),
        ("print('no json, but secret')", "ended with exit code 0: run it where a worker runs"),
        ("os.kill(os.getpid(), 9)", "was ended by signal 9: run it where"),
        ("print('x' * 2000)", "said more than 1,000 bytes"),
    ],
)
def test_what_goes_wrong_is_one_sentence_without_secrets_and_kept_too(
    world: World, code: str, said: str
) -> None:
    async def asks() -> None:
        children = world.children(code, most_bytes=1000)
        for _ in range(2):
            with pytest.raises(ChildError) as caught:
                await children.ask("depth", "a")
            assert said in str(caught.value)
            assert "secret" not in str(caught.value)
        assert world.runs == 1

    ran(asks)


def test_a_program_that_is_not_there_is_one_sentence(world: World) -> None:
    async def asks() -> None:
        with pytest.raises(ChildError, match="could not be started: No such file"):
            await Children(program=("/no/such/program",)).ask("depth")

    ran(asks)


def test_at_its_time_out_a_command_is_ended_with_all_that_it_started(world: World) -> None:
    # A child that heeds no interrupt, with a child of its own
    code = f"""
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
other = os.fork()
if other:
    open({str(world.folder / "pids")!r}, "w").write(f"{{os.getpid()}} {{other}}")
time.sleep(60)
"""

    async def asks() -> None:
        while not (world.folder / "pids").exists():  # a busy machine begins late
            children = world.children(code, timeout=0.5, grace=0.1)
            with pytest.raises(ChildError, match="`airflow-broadway depth` did not answer within"):
                await children.ask("depth")

    ran(asks)
    pids = [int(each) for each in (world.folder / "pids").read_text().split()]
    eventually(lambda: all(map(is_gone, pids)))


def test_an_interrupted_command_may_give_back_what_it_holds(world: World) -> None:
    code = f"""
try:
    open({str(world.folder / "begun")!r}, "w")
    time.sleep(60)
finally:
    open({str(world.folder / "given back")!r}, "w")
"""

    async def asks() -> None:
        while not (world.folder / "begun").exists():
            with pytest.raises(ChildError):
                await world.children(code, timeout=0.5, grace=30).ask("depth")

    ran(asks)
    assert (world.folder / "given back").exists()


def test_only_some_are_at_work_at_once(world: World) -> None:
    code = f"""
here = {str(world.folder)!r} + f"/at-work-{{os.getpid()}}"
open(here, "w")
print(len([each for each in os.listdir({str(world.folder)!r}) if each.startswith("at-work")]))
time.sleep(0.05)
os.remove(here)
"""

    async def asks() -> None:
        children = world.children(code, most=2)
        answers = await asyncio.gather(*(children.ask("depth", str(n)) for n in range(6)))
        assert max(answer.value for answer in answers) <= 2
        assert world.runs == 6

    ran(asks)


def test_one_who_gives_up_stops_neither_the_others_nor_a_change(world: World) -> None:
    async def asks() -> None:
        children = world.children("time.sleep(0.2);" + ECHO)
        for call in (children.ask, children.change):
            first = asyncio.ensure_future(call("list"))
            await asyncio.sleep(0)
            first.cancel()
        assert (await children.ask("list")).value == ["list", "--json"]
        while world.runs < 2:
            await asyncio.sleep(0.01)

    ran(asks)


def test_where_it_is_switched_off_nothing_is_started(world: World) -> None:
    async def asks() -> None:
        allowed = [False, False, True]
        children = world.children(ECHO, allowed=lambda: allowed.pop(0))
        for call in (children.ask, children.change):
            with pytest.raises(ChildError) as caught:
                await call("list")
            assert str(caught.value) == OFF
        assert world.runs == 0
        await children.change("list")
        assert world.runs == 1

    ran(asks)


def test_a_command_is_not_given_the_keys_that_the_api_server_signs_with(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("API__SECRET_KEY", "API_AUTH__JWT_SECRET", "API_AUTH__JWT_SECRET_CMD"):
        monkeypatch.setenv(f"AIRFLOW__{name}", "a key")
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "connections need it")

    async def asks() -> None:
        answer = await world.children("print(json.dumps(dict(os.environ)))").ask("list")
        assert "a key" not in answer.value.values()
        assert answer.value["AIRFLOW__CORE__FERNET_KEY"] == "connections need it"

    ran(asks)


def test_the_command_line_itself_is_what_is_run() -> None:
    async def asks() -> None:
        children = Children()
        with pytest.raises(ChildError, match="the folder /no/such does not exist"):
            await children.ask("queue", "list", "--path", "/no/such/file")

    ran(asks)


def test_a_pipelines_backlog_is_asked_of_the_command_line_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "queue.db")
    SqliteQueue(path, "orders").send([b"1", b"2"])
    code = f"""
from airflow_broadway import Broadway
from airflow_broadway.producers.sqlite import SqliteProducer

class Orders(Broadway):
    producer = SqliteProducer(queue="orders", path={path!r})

    def handle_message(self, processor, message, context):
        return message
"""
    (tmp_path / "asked_shop.py").write_text(code)
    monkeypatch.setenv("AIRFLOW__CORE__DAGS_FOLDER", str(tmp_path))
    declared = Declared(
        dag_id="d", name="Orders", task_id="t", reference={"class": "asked_shop:Orders"}
    )

    async def asks() -> None:
        depths = Depths(Children(timeout=300.0))
        await depths.ask([declared])
        depth = depths.recall(declared)
        assert depth is not None
        assert (depth.ready, depth.unknown) == (2, "")

    ran(asks)
