"""Child processes for the pages: bounded in time, number and output; answers are shared."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
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

#: The start of a child, which records that it ran.  Its first argument is its time limit.
PREAMBLE = """
import json, os, sys, time
request = json.load(sys.stdin)
open({log!r}, "a").write(json.dumps(request) + "\\n")
def answer(value):
    print(json.dumps({{"answer": value}}))
"""


class World:
    """Children that run a few lines, and their log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.clock = ManualClock()

    def children(self, code: str, **options: Any) -> Children:
        text = PREAMBLE.format(log=str(self.log)) + code
        program = (sys.executable, "-S", "-c", text)
        return Children(program=program, clock=self.clock, keep=10.0, **options)

    @property
    def runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test that is a coroutine function."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


ECHO = "answer([sys.argv[2:], request])"


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@in_loop
async def test_request_goes_to_stdin_and_its_answer_is_cached(world):
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


@in_loop
async def test_no_option_is_on_the_command_line_of_a_child(world):
    children = world.children('answer(open(f"/proc/{os.getpid()}/cmdline").read())')
    answer = await children.ask({"ask": "depth", "queues": "sasl.password"})
    assert answer.value.startswith(sys.executable)
    assert "sasl.password" not in answer.value


@in_loop
async def test_requests_of_one_user_do_not_delay_another(world):
    async def ask_as(user, children, ask):
        USER.set(user)
        await children.ask({"ask": ask})
        return user

    children = world.children("time.sleep(0.3);" + ECHO)
    questions = [ask_as("viewer", children, str(n)) for n in range(12)]
    viewer = [asyncio.ensure_future(question) for question in questions]
    await asyncio.sleep(0.05)
    # The admin sends another request, and the viewer's last one
    admin = [ask_as("admin", children, "other"), ask_as("admin", children, "11")]
    await asyncio.gather(*map(asyncio.ensure_future, admin))
    assert sum(task.done() for task in viewer) <= 4
    await asyncio.gather(*viewer)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(json.dumps({'error': 'no broker'}))", "no broker"),
        ("raise ValueError('secret')", "ended with exit code 1 without an answer: use"),
        ("print('no json, but secret')", "ended with exit code 0 without an answer"),
        ("os.kill(os.getpid(), 9)", "was ended by signal 9 without"),
        ("print('x' * 2000)", "has more than 1,000 bytes"),
    ],
)
@in_loop
async def test_child_failure_is_one_cached_sentence_without_secrets(world, code, text):
    children = world.children(code, most_bytes=1000)
    for _ in range(2):
        with pytest.raises(ChildError) as caught:
            await children.ask({"ask": "a"})
        assert text in str(caught.value)
        assert "secret" not in str(caught.value)
    assert world.runs == 1


@in_loop
async def test_missing_program_is_one_sentence(world):
    with pytest.raises(ChildError, match="no process could be started: No such file"):
        await Children(program=("/no/such/program",)).ask({"ask": "depth"})


@in_loop
async def test_timed_out_child_is_ended_with_its_children(world):
    # A child that heeds no interrupt, with a child of its own
    code = f"""
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
other = os.fork()
if other:
    open({str(world.folder / "pids")!r}, "w").write(f"{{os.getpid()}} {{other}}")
time.sleep(60)
"""

    while not (world.folder / "pids").exists():  # a busy machine begins late
        children = world.children(code, timeout=0.5, grace=0.1)
        with pytest.raises(ChildError, match="the broker did not answer within"):
            await children.ask({"ask": "depth"})
    pids = [int(pid) for pid in (world.folder / "pids").read_text().split()]
    eventually(lambda: all(map(is_gone, pids)))


@in_loop
async def test_interrupted_child_may_release_what_it_holds(world):
    code = f"""
try:
    open({str(world.folder / "begun")!r}, "w")
    time.sleep(60)
finally:
    open({str(world.folder / "released")!r}, "w")
"""

    while not (world.folder / "begun").exists():
        with pytest.raises(ChildError):
            await world.children(code, timeout=0.5, grace=30).ask({"ask": "depth"})
    assert (world.folder / "released").exists()


@in_loop
async def test_number_of_children_is_bounded(world):
    code = f"""
here = {str(world.folder)!r} + f"/at-work-{{os.getpid()}}"
open(here, "w")
answer(len([name for name in os.listdir({str(world.folder)!r}) if name.startswith("at-work")]))
time.sleep(0.05)
os.remove(here)
"""

    children = world.children(code, most=2, most_of_user=2)
    answers = await asyncio.gather(*(children.ask({"ask": str(n)}) for n in range(6)))
    assert max(answer.value for answer in answers) <= 2
    assert world.runs == 6


@in_loop
async def test_cancelled_request_does_not_stop_the_others(world):
    children = world.children("time.sleep(0.2);" + ECHO)
    first = asyncio.ensure_future(children.ask({"ask": "list"}))
    await asyncio.sleep(0)
    first.cancel()
    assert (await children.ask({"ask": "list"})).value == [[], {"ask": "list"}]
    assert world.runs == 1


@in_loop
async def test_disabled_children_are_not_started(world):
    with pytest.raises(ChildError) as caught:
        await world.children(ECHO, allowed=lambda: False).ask({"ask": "list"})
    assert str(caught.value) == OFF
    assert world.runs == 0


def test_brokers_are_queried_only_if_enabled(monkeypatch):
    monkeypatch.delenv("AIRFLOW__BROADWAY__ASK_BROKERS", raising=False)
    assert not asks_brokers()
    monkeypatch.setenv("AIRFLOW__BROADWAY__ASK_BROKERS", "True")
    assert asks_brokers()


@in_loop
async def test_child_gets_no_signing_keys(world, monkeypatch):
    for name in ("API__SECRET_KEY", "API_AUTH__JWT_SECRET", "API_AUTH__JWT_SECRET_CMD"):
        monkeypatch.setenv(f"AIRFLOW__{name}", "a key")
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "connections need it")

    answer = await world.children("answer(dict(os.environ))").ask({})
    assert "a key" not in answer.value.values()
    assert answer.value["AIRFLOW__CORE__FERNET_KEY"] == "connections need it"


def question_of(producer: Producer, ask: str, **more: Any) -> dict[str, Any]:
    queues = WatchedQueues("Orders", [producer]).dumps()
    return {"ask": ask, "queues": queues, "staging": None, **more}


@in_loop
async def test_real_child_builds_the_producer_and_imports_nothing_local(tmp_path, monkeypatch):
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
    queues = WatchedQueues("Orders", [producer]).dumps()
    report = BacklogReport(at=datetime.now(UTC), by="run r", depth=None, queues=queues)

    children = Children(timeout=120.0)
    depths = Depths(children)
    key = PipelineKey("Orders", "d")
    await depths.ask([(None, key, report)])
    depth = depths.recall(None, key)
    assert depth is not None
    assert (depth.ready, depth.dead, depth.unknown) == (1, 2, "")

    page = {"choice": {"stage": "process"}, "limit": 1, "offset": 0, "seconds": 10}
    listing = (await children.ask(question_of(producer, "list", **page))).value
    assert (listing["total"], listing["matching"], len(listing["letters"])) == (2, 2, 1)
    [letter] = listing["letters"]
    request = question_of(producer, "show", id=letter["message_id"], bytes=10)
    assert (await children.ask(request)).value["body"] == "1"
    assert not (tmp_path / "imported").exists()


@dataclass(frozen=True)
class Foreign(SqliteProducer):
    """A producer of a module that is none of the package's."""


@in_loop
async def test_real_child_loads_only_package_producers_and_masks_errors():
    children = Children(timeout=120.0)
    more = {"choice": {}, "limit": 1, "offset": 0, "seconds": 1}
    foreign = Foreign(queue="orders", path="/no/such.db")
    with pytest.raises(ChildError, match="is not one of this package"):
        await children.ask(question_of(foreign, "list", **more))
    missing = SqliteProducer(queue="orders", path="/no/such/queue.db")
    with pytest.raises(ChildError, match="no/such"):
        await children.ask(question_of(missing, "list", **more))


@pytest.mark.parametrize(
    "settings",
    [
        {"plugin.library.paths": "/staging/planted.so"},
        {"sasl.kerberos.kinit.cmd": "touch /tmp/planted"},
        {"ssl.ca.location": "/etc/shadow", "socket.keepalive.enable": True},
    ],
)
def test_no_option_makes_a_child_load_or_run_anything(settings):
    # Whoever can write to the staging root chooses the options
    producer = KafkaProducer(group_id="g", topics=["t"], hosts="127.0.0.1:1", settings=settings)
    text = WatchedQueues("Orders", [producer]).dumps()
    name = next(iter(settings))

    with pytest.raises(PipelineError, match=rf"settings\.{name} can have its client read a file"):
        WatchedQueues.loads(text, own=True)
    # The triggerer trusts the Dag
    assert WatchedQueues.loads(text).producers == [producer]


def test_harmless_settings_reach_a_child():
    settings = {"socket.keepalive.enable": True, "security.protocol": "SASL_SSL"}
    producer = KafkaProducer(group_id="g", topics=["t"], hosts="127.0.0.1:1", settings=settings)

    text = WatchedQueues("Orders", [producer]).dumps()

    assert WatchedQueues.loads(text, own=True).producers == [producer]
