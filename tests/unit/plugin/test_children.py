"""Child processes for the pages: bounded in time, number and output; answers are shared."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.plugin.children import OFF, Answer, ChildError, Children, asks_brokers
from airflow_broadway.plugin.depths import Depths
from airflow_broadway.plugin.fair_semaphore import USER
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.runs.backlog.queues import WatchedQueues
from airflow_broadway.runs.backlog.reports import BacklogReport, PipelineKey
from airflow_broadway.testing.clock import ManualClock
from tests.waiting import eventually

#: What a child begins with: it writes down that it ran.  Its first argument is its own bound.
PREAMBLE = """
import json, os, sys, time
asked = json.load(sys.stdin)
open({log!r}, "a").write(json.dumps(asked) + "\\n")
def answer(value):
    print(json.dumps({{"answer": value}}))
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


ECHO = "answer([sys.argv[2:], asked])"


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_question_goes_to_standard_input_and_its_answer_serves_others_for_some_seconds(
    world: World,
) -> None:
    async def asks() -> None:
        children = world.children(ECHO)
        question = {"ask": "depth", "queues": "secret"}
        first, same = await asyncio.gather(children.ask(question), children.ask(question))
        # No argument but the seconds after which it ends by itself
        assert first == same == Answer([[], question], world.clock.now())
        world.clock.advance(9.9)
        assert await children.ask(question) == first
        assert world.runs == 1
        assert (await children.ask({"ask": "b"})).value[1] == {"ask": "b"}
        world.clock.advance(0.2)
        await children.ask(question)
        assert world.runs == 3

    ran(asks)


def test_no_option_is_on_the_command_line_of_a_child(world: World) -> None:
    async def asks() -> None:
        children = world.children('answer(open(f"/proc/{os.getpid()}/cmdline").read())')
        answer = await children.ask({"ask": "depth", "queues": "sasl.password"})
        assert answer.value.startswith(sys.executable)
        assert "sasl.password" not in answer.value

    ran(asks)


def test_the_requests_of_one_user_keep_no_other_user_waiting(world: World) -> None:
    async def ask_as(user: str, children: Children, ask: str) -> str:
        USER.set(user)
        await children.ask({"ask": ask})
        return user

    async def asks() -> None:
        children = world.children("time.sleep(0.3);" + ECHO)
        questions = [ask_as("viewer", children, str(n)) for n in range(12)]
        viewer = [asyncio.ensure_future(each) for each in questions]
        await asyncio.sleep(0.05)
        # The admin asks something else, and what the viewer's last request asks
        admin = [ask_as("admin", children, "other"), ask_as("admin", children, "11")]
        await asyncio.gather(*map(asyncio.ensure_future, admin))
        assert sum(each.done() for each in viewer) <= 4
        await asyncio.gather(*viewer)

    ran(asks)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(json.dumps({'error': 'no broker'}))", "no broker"),
        ("raise ValueError('secret')", "ended with exit code 1 without an answer: use"),
        ("print('no json, but secret')", "ended with exit code 0 without an answer"),
        ("os.kill(os.getpid(), 9)", "was ended by signal 9 without"),
        ("print('x' * 2000)", "has more than 1,000 bytes"),
    ],
)
def test_what_goes_wrong_is_one_sentence_without_secrets_and_kept_too(
    world: World, code: str, said: str
) -> None:
    async def asks() -> None:
        children = world.children(code, most_bytes=1000)
        for _ in range(2):
            with pytest.raises(ChildError) as caught:
                await children.ask({"ask": "a"})
            assert said in str(caught.value)
            assert "secret" not in str(caught.value)
        assert world.runs == 1

    ran(asks)


def test_a_program_that_is_not_there_is_one_sentence(world: World) -> None:
    async def asks() -> None:
        with pytest.raises(ChildError, match="no process could be started: No such file"):
            await Children(program=("/no/such/program",)).ask({"ask": "depth"})

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
            with pytest.raises(ChildError, match="the broker did not answer within"):
                await children.ask({"ask": "depth"})

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
                await world.children(code, timeout=0.5, grace=30).ask({"ask": "depth"})

    ran(asks)
    assert (world.folder / "given back").exists()


def test_only_some_are_at_work_at_once(world: World) -> None:
    code = f"""
here = {str(world.folder)!r} + f"/at-work-{{os.getpid()}}"
open(here, "w")
answer(len([each for each in os.listdir({str(world.folder)!r}) if each.startswith("at-work")]))
time.sleep(0.05)
os.remove(here)
"""

    async def asks() -> None:
        children = world.children(code, most=2, most_of_user=2)
        answers = await asyncio.gather(*(children.ask({"ask": str(n)}) for n in range(6)))
        assert max(answer.value for answer in answers) <= 2
        assert world.runs == 6

    ran(asks)


def test_one_who_gives_up_does_not_stop_the_others(world: World) -> None:
    async def asks() -> None:
        children = world.children("time.sleep(0.2);" + ECHO)
        first = asyncio.ensure_future(children.ask({"ask": "list"}))
        await asyncio.sleep(0)
        first.cancel()
        assert (await children.ask({"ask": "list"})).value == [[], {"ask": "list"}]
        assert world.runs == 1

    ran(asks)


def test_where_it_is_switched_off_nothing_is_started(world: World) -> None:
    async def asks() -> None:
        with pytest.raises(ChildError) as caught:
            await world.children(ECHO, allowed=lambda: False).ask({"ask": "list"})
        assert str(caught.value) == OFF
        assert world.runs == 0

    ran(asks)


def test_no_broker_is_asked_unless_that_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIRFLOW__BROADWAY__ASK_BROKERS", raising=False)
    assert not asks_brokers()
    monkeypatch.setenv("AIRFLOW__BROADWAY__ASK_BROKERS", "True")
    assert asks_brokers()


def test_a_command_is_not_given_the_keys_that_the_api_server_signs_with(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("API__SECRET_KEY", "API_AUTH__JWT_SECRET", "API_AUTH__JWT_SECRET_CMD"):
        monkeypatch.setenv(f"AIRFLOW__{name}", "a key")
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "connections need it")

    async def asks() -> None:
        answer = await world.children("answer(dict(os.environ))").ask({})
        assert "a key" not in answer.value.values()
        assert answer.value["AIRFLOW__CORE__FERNET_KEY"] == "connections need it"

    ran(asks)


def question_of(producer: Producer, ask: str, **more: Any) -> dict[str, Any]:
    queues = WatchedQueues("Orders", [producer]).dumps()
    return {"ask": ask, "queues": queues, "staging": None, **more}


def test_a_real_child_builds_the_producer_from_options_and_imports_nothing_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given modules of a user, where Python would look for them without -I
    for name in ("json.py", "airflow_broadway.py", "orders.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nraise SystemExit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = str(tmp_path / "queue.db")
    with SqliteQueue(path, "orders") as queue:
        queue.send([b"1", b"2", b"\xff"])
        queue.receive("g", 2)
        queue.settle("g", Settlement(rest=Verdict(Action.DEAD_LETTER, 0.0, "why", "process")))
    producer = SqliteProducer(queue="orders", path=path)
    report = BacklogReport(
        at=datetime.now(UTC),
        by="run r",
        depth=None,
        queues=WatchedQueues("Orders", [producer]).dumps(),
    )

    async def asks() -> None:
        children = Children(timeout=120.0)
        depths = Depths(children)
        key = PipelineKey("Orders", "d")
        await depths.ask([(None, key, report)])
        depth = depths.recall(None, key)
        assert depth is not None
        assert (depth.ready, depth.dead, depth.unknown) == (1, 2, "")

        asked = {"choice": {"stage": "process"}, "limit": 1, "offset": 0, "seconds": 10}
        found = (await children.ask(question_of(producer, "list", **asked))).value
        assert (found["total"], found["matching"], len(found["letters"])) == (2, 2, 1)
        [letter] = found["letters"]
        shown = question_of(producer, "show", id=letter["message_id"], bytes=10)
        assert (await children.ask(shown)).value["body"] == "1"

    ran(asks)
    assert not (tmp_path / "imported").exists()


@dataclass(frozen=True)
class Foreign(SqliteProducer):
    """A producer of a module that is none of the package's."""


def test_a_real_child_loads_no_producer_of_another_module_and_masks_what_it_says() -> None:
    async def asks() -> None:
        children = Children(timeout=120.0)
        more = {"choice": {}, "limit": 1, "offset": 0, "seconds": 1}
        foreign = Foreign(queue="orders", path="/no/such.db")
        with pytest.raises(ChildError, match="is not one of this package"):
            await children.ask(question_of(foreign, "list", **more))
        missing = SqliteProducer(queue="orders", path="/no/such/queue.db")
        with pytest.raises(ChildError, match="no/such"):
            await children.ask(question_of(missing, "list", **more))

    ran(asks)


@pytest.mark.parametrize(
    "settings",
    [
        {"plugin.library.paths": "/staging/planted.so"},
        {"sasl.kerberos.kinit.cmd": "touch /tmp/planted"},
        {"ssl.ca.location": "/etc/shadow", "socket.keepalive.enable": True},
    ],
)
def test_no_option_has_a_client_load_or_run_anything_in_a_child(settings: dict[str, Any]) -> None:
    # Whoever can write to the staging root chooses the options
    producer = KafkaProducer(group_id="g", topics=["t"], hosts="127.0.0.1:1", settings=settings)
    text = WatchedQueues("Orders", [producer]).dumps()
    name = next(iter(settings))

    with pytest.raises(PipelineError, match=rf"settings\.{name} can have its client read a file"):
        WatchedQueues.loads(text, own=True)
    # The triggerer trusts the Dag
    assert WatchedQueues.loads(text).producers == [producer]


def test_settings_that_open_nothing_are_taken_to_a_child() -> None:
    settings = {"socket.keepalive.enable": True, "security.protocol": "SASL_SSL"}
    producer = KafkaProducer(group_id="g", topics=["t"], hosts="127.0.0.1:1", settings=settings)

    text = WatchedQueues("Orders", [producer]).dumps()

    assert WatchedQueues.loads(text, own=True).producers == [producer]
