"""``airflow-broadway dead-letters``; the commands of ``docs/dead-letters.md`` run as they stand."""

from __future__ import annotations

import base64
import json
import re
import shlex
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest

from airflow_broadway.core.custody.dead_letters import Choice, DeadLetter
from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.staging.archive.failed import failures, put_failed
from airflow_broadway.staging.archive.layout import archive_folder
from airflow_broadway.staging.store import Folder, Store
from airflow_broadway.testing import ManualClock
from tests.cli_runs import ran

Capsys = pytest.CaptureFixture[str]
GUIDE = Path(__file__).parents[3] / "docs" / "dead-letters.md"
MODULE = """
from airflow_broadway import Broadway
from airflow_broadway.producers.sqlite import SqliteProducer


class Orders(Broadway):
    producer = SqliteProducer(queue="orders", path={path!r})

    def handle_message(self, processor, message, context):
        return message


class Templated(Orders):
    producer = SqliteProducer(queue="{{{{ params.queue }}}}", path={path!r})
"""
ME = ("--pipeline", "shop.orders:Orders")


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SqliteQueue:
    """The queue of a pipeline that can be imported."""
    path = str(tmp_path / "queue.db")
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text("")
    (tmp_path / "shop" / "orders.py").write_text(MODULE.format(path=path))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("shop", "shop.orders"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{tmp_path}/staging")
    made = SqliteQueue(path, "orders")
    made.send([b"the first"])
    made.settle("g", Settlement(rest=Verdict(Action.ACK)))
    return made


def kill(queue: SqliteQueue, *bodies: bytes, reason: str = "ValueError: why") -> list[str]:
    """Dead letters; their ids."""
    cleared = uuid.uuid4().hex
    queue.receive(cleared, 1000)
    queue.settle(cleared, Settlement(rest=Verdict(Action.ACK)))
    queue.send(bodies)
    name = uuid.uuid4().hex
    ids = [message.message_id for message in queue.receive(name, len(bodies))]
    queue.settle(name, Settlement(rest=Verdict(Action.DEAD_LETTER, 0.0, reason, "process")))
    return ids


def guide() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("airflow-broadway dead-letters ")]


def test_the_commands_of_the_guide_run(queue: SqliteQueue, capsys: Capsys) -> None:
    lines = guide()
    assert len(lines) == 15
    for line in lines:
        [key, _] = kill(queue, b'{"n": 1}', b"{}")
        words = shlex.split(line.replace("3f2a90c1d4e5b607-1042", key))[1:]
        done = ran(capsys, *words)
        assert (done.code, done.err) == (0, ""), line
        assert done.out
        queue.delete()


def test_letters_are_listed_with_what_people_choose_by(queue: SqliteQueue, capsys: Capsys) -> None:
    first, second = kill(queue, b"one", b"three")
    [third] = kill(queue, b"x", reason="KeyError: 'y'")

    done = ran(capsys, "dead-letters", "list", *ME)

    head, first_row, *_ = done.out.splitlines()[2:]
    assert head.split() == ["MESSAGE", "ID", "ATTEMPT", "STAGE", "DIED", "AT", "BYTES", "REASON"]
    assert first_row.split()[:3] == [first, "1", "process"]
    assert first_row.endswith("3  ValueError: why")
    limited = ran(capsys, "dead-letters", "list", *ME, "--limit", "2").out
    assert limited.endswith("These are the first 2: --limit shows more.\n")
    chosen = ran(capsys, "dead-letters", "list", *ME, "--reason", "KeyError", "--json").json
    assert [(each["message_id"], each["bytes"]) for each in chosen] == [(third, 1)]
    assert "body" not in chosen[0]
    none = ran(capsys, "dead-letters", "list", *ME, "--message-id", second, "--reason", "KeyError")
    assert (none.code, none.out.startswith("No dead letters in queue 'orders'")) == (0, True)


def test_a_payload_is_shown_as_text_json_or_hex(queue: SqliteQueue, capsys: Capsys) -> None:
    good, bad = kill(queue, b'{"b": [1, "\xc3\xbc"]}', b"\x00\xffab")

    def shown(key: str, *options: str) -> str:
        return ran(capsys, "dead-letters", "show", *ME, key, *options).out

    text = shown(good)
    assert "reason:     ValueError: why\n" in text
    assert text.endswith('payload:    16 bytes\n{"b": [1, "ü"]}\n')
    assert shown(good, "--as", "json").endswith('{\n  "b": [\n    1,\n    "ü"\n  ]\n}\n')
    assert shown(bad, "--as", "hex").endswith("00000000  00 ff 61 62\n")
    refused = ran(capsys, "dead-letters", "show", *ME, bad, "--as", "json")
    assert refused.code == 2
    assert "a payload is no JSON" in refused.err
    both = ran(capsys, "dead-letters", "show", *ME, good, bad, "--json").json
    assert [each.get("body") for each in both] == ['{"b": [1, "ü"]}', None]
    assert both[1]["body_base64"] == "AP9hYg=="


def test_a_payload_is_cut_and_nothing_in_it_reaches_the_terminal(
    queue: SqliteQueue, capsys: Capsys
) -> None:
    long, hostile = kill(queue, b"x" * 5_000, b"\x1b[2J\xe2\x80\xae evil \xff\r\n2nd")
    cut = ran(capsys, "dead-letters", "show", *ME, long).out
    assert cut.endswith("x" * 2_000 + "\n")
    assert "5,000 bytes, of which these are the first 2,000 (--bytes shows more)\n" in cut
    assert ran(capsys, "dead-letters", "show", *ME, long, "--bytes", "5000").out.count("x") == 5_000
    shown = ran(capsys, "dead-letters", "show", *ME, hostile).out
    assert shown.endswith("\\x1b[2J\\u202e evil \\xff\\r\n2nd\n")


def test_ids_that_are_none_are_named(queue: SqliteQueue, capsys: Capsys) -> None:
    [key] = kill(queue, b"a")
    named = ("--message-id", key, "no-such-1")

    shown = ran(capsys, "dead-letters", "show", *ME, key, "no-such-1")
    moved = ran(capsys, "dead-letters", "requeue", *ME, *named)
    again = ran(capsys, "dead-letters", "delete", *ME, *named, "--json")

    assert (shown.code, moved.code, again.code) == (1, 1, 1)
    assert shown.out.endswith(": no-such-1.\n")
    assert moved.out.splitlines()[1] == "No dead letters of it, or no more: no-such-1."
    assert again.json == {"deleted": 0, "unknown": sorted([key, "no-such-1"]), "refused": {}}
    assert queue.depth().ready == 1


def test_nothing_is_moved_without_a_choice(queue: SqliteQueue, capsys: Capsys) -> None:
    kill(queue, b"a")
    for action in ("requeue", "delete"):
        for more, why in (
            ((), "neither was given"),
            (("--all", "--reason", "x"), "not both"),
        ):
            refused = ran(capsys, "dead-letters", action, *ME, *more)
            assert refused.code == 2
            assert "use either --all or filters" in refused.err
            assert why in refused.err
    assert queue.depth().dead == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", *ME, "--since", "noon"], "--since: expected a timestamp in ISO 8601"),
        (["list", *ME, "--place", "elsewhere"], "lie with it, and not in 'elsewhere'"),
        (["list", *ME, "--conn-id", "no_such"], "nothing beside 'path'"),
        (["list", "--pipeline", "shop.orders:Templated"], "has the template queue="),
        (["list", "--pipeline", "shop.orders:Nothing"], "Nothing"),
    ],
)
def test_what_is_wrong_is_one_line(
    queue: SqliteQueue, capsys: Capsys, words: list[str], said: str
) -> None:
    refused = ran(capsys, "dead-letters", *words)
    assert refused.code == 2
    assert said in refused.err
    assert refused.err.count("\n") == 1


def test_a_pipeline_with_a_template_is_given_as_json(queue: SqliteQueue, capsys: Capsys) -> None:
    [key] = kill(queue, b"a")
    options = {"producer": {"queue": "orders"}}
    reference = json.dumps({"class": "shop.orders:Templated", "options": options})
    found = ran(capsys, "dead-letters", "list", "--pipeline", reference, "--json").json
    assert [each["message_id"] for each in found] == [key]


# ------------------------------------------------------------------------------- for the page


def test_letters_are_counted_by_reason_and_shown_in_pages(
    queue: SqliteQueue, capsys: Capsys
) -> None:
    kill(queue, b"one", b"two", b"three")
    last = kill(queue, b"x", b"y", reason="KeyError: 'y'")
    words = ("list", *ME, "--by-reason")

    done = ran(capsys, "dead-letters", *words, "--limit", "2", "--offset", "3", "--json")

    assert [each["message_id"] for each in done.json.pop("letters")] == last
    assert {name: value for name, value in done.json.items() if name != "letters"} == {
        "place": f"queue 'orders' in {queue.path}",
        "total": 5,
        "matching": 5,
        "whole": True,
        "reasons": [
            {"count": 3, "stage": "process", "reason": "ValueError: why"},
            {"count": 2, "stage": "process", "reason": "KeyError: 'y'"},
        ],
        "other_reasons": 0,
    }
    chosen = ran(capsys, "dead-letters", *words, "--reason", "KeyError", "--json").json
    assert (chosen["total"], chosen["matching"], len(chosen["letters"])) == (5, 2, 2)
    text = ran(capsys, "dead-letters", *words).out
    assert text.splitlines()[1:3] == [
        "      3  process  ValueError: why",
        "      2  process  KeyError: 'y'",
    ]


def test_looking_ends_in_time_and_says_so(
    queue: SqliteQueue, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(queue, b"one", b"two", b"three")
    kill(queue, b"x", reason="KeyError")
    clock = ManualClock()
    takes = Choice.takes

    def slow(choice: Choice, letter: DeadLetter) -> bool:
        clock.advance(1.0)
        return takes(choice, letter)

    monkeypatch.setattr(Choice, "takes", slow)
    monkeypatch.setattr("airflow_broadway.cli.dead_letters.SystemClock", lambda: clock)
    words = ("list", *ME, "--by-reason", "--seconds", "2")

    found = ran(capsys, "dead-letters", *words, "--json").json
    assert (found["total"], found["matching"], found["whole"]) == (4, 2, False)
    assert "There was no time to look at all" in ran(capsys, "dead-letters", *words).out
    # Letters that are not chosen take time, too.
    none = ran(capsys, "dead-letters", *words, "--reason", "KeyError", "--json").json
    assert (none["matching"], none["whole"]) == (0, False)


def test_a_payload_in_json_is_cut_on_request(queue: SqliteQueue, capsys: Capsys) -> None:
    [key] = kill(queue, "aü".encode() * 3000)

    whole = ran(capsys, "dead-letters", "show", *ME, key, "--json").json
    cut = ran(capsys, "dead-letters", "show", *ME, f"--message-id={key}", "--bytes", "3", "--json")
    within = ran(capsys, "dead-letters", "show", *ME, key, "--bytes", "2", "--json").json

    assert len(whole[0]["body"]) == 6000
    assert (cut.json[0]["bytes"], cut.json[0]["body"]) == (9000, "aü")
    assert base64.b64decode(within[0]["body_base64"]) == b"a\xc3"
    assert "no message ids" in ran(capsys, "dead-letters", "show", *ME).error


def test_of_several_pipelines_the_one_of_a_name_is_meant(
    queue: SqliteQueue, capsys: Capsys
) -> None:
    [key] = kill(queue, b"a")
    several = (
        "--pipeline",
        "shop.orders:Nothing",
        "--pipeline",
        "shop.orders:Templated",
        *ME,
    )

    named = ran(capsys, "dead-letters", "list", *several, "--named", "Orders", "--json").json
    assert [each["message_id"] for each in named] == [key]
    nobody = ran(capsys, "dead-letters", "delete", *several, "--named", "Other", "--all")
    assert "Nothing" in nobody.error  # it may be the one
    known = ran(capsys, "dead-letters", "delete", *ME, "--named", "Other", "--all")
    assert "none of these pipelines is named 'Other': they are ['Orders']" in known.error
    unnamed = ran(capsys, "dead-letters", "delete", *several, "--all")
    assert "choose one with --named" in unnamed.error
    assert queue.depth().dead == 1


@pytest.fixture
def archive(queue: SqliteQueue, tmp_path: Path) -> Folder:
    """The pipeline's archive, in which two messages of one run failed, and one of another."""
    (tmp_path / "staging").mkdir()
    folder = archive_folder(Store.open(f"file://{tmp_path}/staging"), "Orders")
    now = datetime(2026, 1, 31, tzinfo=UTC)
    for generation, ids in (("a" * 32, ("m1", "m2")), ("b" * 32, ("m3",))):
        owner = {"dag_id": "shop", "run_id": "backfill"}
        lease = Lease(kind="archive", generation=generation, seconds=60, deadline=now, owner=owner)
        dead = Verdict(Action.DEAD_LETTER, 0.0, f"ValueError: {ids[-1]}", "batch")
        put_failed(folder, lease, [Entry(each, "", dead) for each in ids], now)
    return folder


def test_what_failed_in_a_backfill_is_seen_and_deleted_like_any_dead_letter(
    archive: Folder, capsys: Capsys
) -> None:
    us = (*ME, "--archive")
    listed = ran(capsys, "dead-letters", "list", *us, "--json").json
    assert [(each["message_id"], each["reason"], each["stage"]) for each in listed] == [
        ("m1", "ValueError: m2", "batch"),
        ("m2", "ValueError: m2", "batch"),
        ("m3", "ValueError: m3", "batch"),
    ]
    assert "run backfill of shop" in ran(capsys, "dead-letters", "show", *us, "m1").out
    # The broker's own are others
    assert "No dead letters" in ran(capsys, "dead-letters", "list", *ME).out

    # Nothing of it can be sent back
    refused = ran(capsys, "dead-letters", "requeue", *us, "--message-id", "m1")
    assert refused.code == 1
    assert "m1 stays: the archive, or its run, has it still" in refused.out

    deleted = ran(capsys, "dead-letters", "delete", *us, "--message-id", "m1", "m9", "--json").json
    assert deleted == {"deleted": 1, "unknown": ["m9"], "refused": {}}
    assert [each["message_id"] for each in failures(archive)] == ["m2", "m3"]
    ran(capsys, "dead-letters", "delete", *us, "--reason", "m2")
    assert archive.list("failed") == [f"{'b' * 32}.jsonl"]


def test_of_an_archive_no_broker_is_asked(archive: Folder, capsys: Capsys) -> None:
    refused = ran(capsys, "dead-letters", "list", *ME, "--archive", "--place", "other")

    assert refused.code == 2
    assert "--archive uses no broker" in refused.err


def test_a_payload_is_exported_byte_for_byte(queue: SqliteQueue, capsys: Capsys) -> None:
    body = (
        '{"callback":"https://shop.example/hook?token=abc","contact":"bob@example.org",'
        '"amount":9900,"to":"carol@example.org","from":"amqp://guest:secret@host"}'
    )
    [key] = kill(queue, body.encode(), reason="ValueError: no order at https://a:b@shop.example")

    [letter] = ran(capsys, "dead-letters", "show", *ME, key, "--json").json
    assert letter["body"] == body
    assert letter["reason"] == "ValueError: no order at https://a:b@shop.example"
    assert ran(capsys, "dead-letters", "show", *ME, key).out.endswith(f"\n{body}\n")


def test_the_list_has_no_properties_and_no_long_text(
    queue: SqliteQueue, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender's headers, 100 of 128 KB, would pass what the API server reads of an answer."""
    letter = DeadLetter(
        "i", b"x", {"h": "é" * 65_000}, "é" * 65_000, "s" * 65_000, 1, None, None, "g"
    )
    monkeypatch.setattr(SqliteQueue, "letters", lambda *_: (letter for _ in range(100)))

    done = ran(capsys, "dead-letters", "list", *ME, "--by-reason", "--json")

    assert "properties" not in done.json["letters"][0]
    assert len(done.out) < 4 * 1024 * 1024


def test_a_new_queue_has_no_dead_letters_and_nothing_of_it_is_moved(
    queue: SqliteQueue, capsys: Capsys
) -> None:
    Path(queue.path).unlink()

    found = ran(capsys, "dead-letters", "list", *ME, "--by-reason", "--json")

    assert (found.code, found.json["total"], found.json["letters"]) == (0, 0, [])
    assert found.json["place"].endswith("queue.db, to which nothing was sent yet")
    assert ran(capsys, "dead-letters", "list", *ME).out.startswith("No dead letters in queue")
    for act in ("requeue", "delete"):
        assert "there is no queue file" in ran(capsys, "dead-letters", act, *ME, "--all").error
    assert not Path(queue.path).exists()
