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
from airflow_broadway.staging.archive.letters import ArchiveLetters, put_failed
from airflow_broadway.staging.archive.table import archive_folder
from airflow_broadway.staging.store import Store
from airflow_broadway.testing import ManualClock
from tests.cli_runs import ORDERS_MODULE, ran

GUIDE = Path(__file__).parents[3] / "docs" / "dead-letters.md"
ME = ("--pipeline", "shop.orders:Orders")


@pytest.fixture
def letters(capsys):
    """Run ``airflow-broadway dead-letters``, by default for the pipeline of the tests."""
    return lambda action, *words, me=ME: ran(capsys, "dead-letters", action, *me, *words)


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """The queue of a pipeline that can be imported."""
    path = str(tmp_path / "queue.db")
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text("")
    (tmp_path / "shop" / "orders.py").write_text(ORDERS_MODULE.format(path=path))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("shop", "shop.orders"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{tmp_path}/staging")
    sqlite_queue = SqliteQueue(path, "orders")
    sqlite_queue.send([b"the first"])
    sqlite_queue.settle("g", Settlement(rest=Verdict(Action.ACK)))
    return sqlite_queue


def kill(queue: SqliteQueue, *bodies: bytes, reason: str = "ValueError: why") -> list[str]:
    """Dead-letter messages; return their ids."""
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


def test_commands_of_the_guide_run(queue, capsys):
    lines = guide()
    assert len(lines) == 15
    for line in lines:
        [key, _] = kill(queue, b'{"n": 1}', b"{}")
        words = shlex.split(line.replace("3f2a90c1d4e5b607-1042", key))[1:]
        result = ran(capsys, *words)
        assert (result.code, result.err) == (0, ""), line
        assert result.out
        queue.delete()


def test_dead_letters_are_listed_with_reason_and_time(queue, letters):
    first, second = kill(queue, b"one", b"three")
    [third] = kill(queue, b"x", reason="KeyError: 'y'")

    result = letters("list")

    head, first_row, *_ = result.out.splitlines()[2:]
    assert head.split() == ["MESSAGE", "ID", "ATTEMPT", "STAGE", "DIED", "AT", "BYTES", "REASON"]
    assert first_row.split()[:3] == [first, "1", "process"]
    assert first_row.endswith("3  ValueError: why")
    limited = letters("list", "--limit", "2").out
    assert limited.endswith("These are the first 2: --limit shows more.\n")
    chosen = letters("list", "--reason", "KeyError", "--json").json
    assert [(letter["message_id"], letter["bytes"]) for letter in chosen] == [(third, 1)]
    assert "body" not in chosen[0]
    none = letters("list", "--message-id", second, "--reason", "KeyError")
    assert (none.code, none.out.startswith("No dead letters in queue 'orders'")) == (0, True)


def test_payload_is_shown_as_text_json_or_hex(queue, letters):
    good, bad = kill(queue, b'{"b": [1, "\xc3\xbc"]}', b"\x00\xffab")

    text = letters("show", good).out
    assert "reason:     ValueError: why\n" in text
    assert text.endswith('payload:    16 bytes\n{"b": [1, "ü"]}\n')
    indented = letters("show", good, "--as", "json").out
    assert indented.endswith('{\n  "b": [\n    1,\n    "ü"\n  ]\n}\n')
    assert letters("show", bad, "--as", "hex").out.endswith("00000000  00 ff 61 62\n")
    refused = letters("show", bad, "--as", "json")
    assert refused.code == 2
    assert "a payload is no JSON" in refused.err
    both = letters("show", good, bad, "--json").json
    assert [letter.get("body") for letter in both] == ['{"b": [1, "ü"]}', None]
    assert both[1]["body_base64"] == "AP9hYg=="


def test_payload_is_cut_and_escaped_on_a_terminal(queue, letters):
    long, hostile = kill(queue, b"x" * 5_000, b"\x1b[2J\xe2\x80\xae evil \xff\r\n2nd")
    cut = letters("show", long).out
    assert cut.endswith("x" * 2_000 + "\n")
    assert "5,000 bytes, of which these are the first 2,000 (--bytes shows more)\n" in cut
    assert letters("show", long, "--bytes", "5000").out.count("x") == 5_000
    assert letters("show", hostile).out.endswith("\\x1b[2J\\u202e evil \\xff\\r\n2nd\n")


def test_unknown_ids_are_named(queue, letters):
    [key] = kill(queue, b"a")
    named = ("--message-id", key, "no-such-1")

    result = letters("show", key, "no-such-1")
    moved = letters("requeue", *named)
    again = letters("delete", *named, "--json")

    assert (result.code, moved.code, again.code) == (1, 1, 1)
    assert result.out.endswith(": no-such-1.\n")
    assert moved.out.splitlines()[1] == "No dead letters of it, or no more: no-such-1."
    assert again.json == {"deleted": 0, "unknown": sorted([key, "no-such-1"]), "refused": {}}
    assert queue.depth().ready == 1


def test_delete_and_requeue_need_a_selection(queue, letters):
    kill(queue, b"a")
    for action in ("requeue", "delete"):
        for more, why in (((), "neither was given"), (("--all", "--reason", "x"), "not both")):
            error = letters(action, *more).error
            assert "use either --all or filters" in error
            assert why in error
    assert queue.depth().dead == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("Orders --place elsewhere", "lie with it, and not in 'elsewhere'"),
        ("Orders --conn-id no_such", "no value with 'path'"),
        ("Templated", "has the template queue="),
        ("Nothing", "Nothing"),
    ],
)
def test_errors_are_one_line(queue, letters, words, error):
    assert error in letters("list", *f"--pipeline shop.orders:{words}".split(), me=()).error


def test_templated_pipeline_is_passed_as_json(queue, letters):
    [key] = kill(queue, b"a")
    options = {"producer": {"queue": "orders"}}
    reference = json.dumps({"class": "shop.orders:Templated", "options": options})
    [letter] = letters("list", "--json", me=("--pipeline", reference)).json
    assert letter["message_id"] == key


# ------------------------------------------------------------------------------- for the page


def test_dead_letters_are_counted_by_reason_and_paged(queue, letters):
    kill(queue, b"one", b"two", b"three")
    last = kill(queue, b"x", b"y", reason="KeyError: 'y'")
    words = ("list", "--by-reason")

    result = letters(*words, "--limit", "2", "--offset", "3", "--json")

    page = result.json
    assert [letter["message_id"] for letter in page.pop("letters")] == last
    assert page == {
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
    chosen = letters(*words, "--reason", "KeyError", "--json").json
    assert (chosen["total"], chosen["matching"], len(chosen["letters"])) == (5, 2, 2)
    assert letters(*words).out.splitlines()[1:3] == [
        "      3  process  ValueError: why",
        "      2  process  KeyError: 'y'",
    ]


def test_scan_stops_at_its_time_limit(queue, letters, monkeypatch):
    kill(queue, b"one", b"two", b"three")
    kill(queue, b"x", reason="KeyError")
    clock = ManualClock()
    takes = Choice.takes

    def slow(choice, letter):
        clock.advance(1.0)
        return takes(choice, letter)

    monkeypatch.setattr(Choice, "takes", slow)
    monkeypatch.setattr("airflow_broadway.cli.dead_letters.SystemClock", lambda: clock)
    words = ("list", "--by-reason", "--seconds", "2")

    result = letters(*words, "--json").json
    assert (result["total"], result["matching"], result["whole"]) == (4, 2, False)
    assert "There was no time to look at all" in letters(*words).out
    # Letters that the filter excludes take time, too.
    none = letters(*words, "--reason", "KeyError", "--json").json
    assert (none["matching"], none["whole"]) == (0, False)


def test_json_payload_is_cut_on_request(queue, letters):
    [key] = kill(queue, "aü".encode() * 3000)

    whole = letters("show", key, "--json").json
    cut = letters("show", f"--message-id={key}", "--bytes", "3", "--json")
    within = letters("show", key, "--bytes", "2", "--json").json

    assert len(whole[0]["body"]) == 6000
    assert (cut.json[0]["bytes"], cut.json[0]["body"]) == (9000, "aü")
    assert base64.b64decode(within[0]["body_base64"]) == b"a\xc3"
    assert "no message ids" in letters("show").error


def test_pipeline_is_selected_by_name(queue, letters):
    [key] = kill(queue, b"a")
    several = ("--pipeline", "shop.orders:Nothing", "--pipeline", "shop.orders:Templated", *ME)

    [letter] = letters("list", "--named", "Orders", "--json", me=several).json
    assert letter["message_id"] == key
    failing = letters("delete", "--named", "Other", "--all", me=several)
    assert "Nothing" in failing.error  # whose name is not known
    known = letters("delete", "--named", "Other", "--all")
    assert "none of these pipelines is named 'Other': they are ['Orders']" in known.error
    assert "choose one with --named" in letters("delete", "--all", me=several).error
    assert queue.depth().dead == 1


@pytest.fixture
def archive(queue, tmp_path):
    """The pipeline's archive with two failures of one run, and one of another."""
    (tmp_path / "staging").mkdir()
    folder = archive_folder(Store.open(f"file://{tmp_path}/staging"), "Orders")
    now = datetime(2026, 1, 31, tzinfo=UTC)
    for generation, ids in (("a" * 32, ("m1", "m2")), ("b" * 32, ("m3",))):
        owner = {"dag_id": "shop", "run_id": "backfill"}
        lease = Lease(kind="archive", generation=generation, seconds=60, deadline=now, owner=owner)
        dead = Verdict(Action.DEAD_LETTER, 0.0, f"ValueError: {ids[-1]}", "batch")
        put_failed(folder, lease, [Entry(id_, "", dead) for id_ in ids], now)
    return folder


def test_archive_failures_are_listed_and_deleted(archive, letters):
    listed = letters("list", "--archive", "--json").json
    assert [(row["message_id"], row["reason"], row["stage"]) for row in listed] == [
        ("m1", "ValueError: m2", "batch"),
        ("m2", "ValueError: m2", "batch"),
        ("m3", "ValueError: m3", "batch"),
    ]
    assert "run backfill of shop" in letters("show", "--archive", "m1").out
    # The broker has none
    assert "No dead letters" in letters("list").out

    # Nothing of it can be sent back
    refused = letters("requeue", "--archive", "--message-id", "m1")
    assert refused.code == 1
    assert "m1 stays: the archive, or its run, has it still" in refused.out

    deleted = letters("delete", "--archive", "--message-id", "m1", "m9", "--json").json
    assert deleted == {"deleted": 1, "unknown": ["m9"], "refused": {}}
    assert [letter.message_id for letter in ArchiveLetters(archive).letters()] == ["m2", "m3"]
    letters("delete", "--archive", "--reason", "m2")
    assert archive.list("_failed") == [f"{'b' * 32}.jsonl"]


def test_archive_uses_no_broker(archive, letters):
    assert "--archive uses no broker" in letters("list", "--archive", "--place", "other").error


def test_payload_is_exported_unchanged(queue, letters):
    body = (
        '{"callback":"https://shop.example/hook?token=abc","contact":"bob@example.org",'
        '"amount":9900,"to":"carol@example.org","from":"amqp://guest:secret@host"}'
    )
    [key] = kill(queue, body.encode(), reason="ValueError: no order at https://a:b@shop.example")

    [letter] = letters("show", key, "--json").json
    assert letter["body"] == body
    assert letter["reason"] == "ValueError: no order at https://a:b@shop.example"
    assert letters("show", key).out.endswith(f"\n{body}\n")


def test_list_has_no_properties_and_no_long_text(queue, letters, monkeypatch):
    """100 messages with headers of 128 KB would exceed what the API server reads."""
    long = "é" * 65_000
    letter = DeadLetter("i", b"x", {"h": long}, long, "s" * 65_000, 1, None, None, "g")
    monkeypatch.setattr(SqliteQueue, "letters", lambda *_: (letter for _ in range(100)))

    result = letters("list", "--by-reason", "--json")

    assert "properties" not in result.json["letters"][0]
    assert len(result.out) < 4 * 1024 * 1024


def test_new_queue_has_no_dead_letters(queue, letters):
    Path(queue.path).unlink()

    result = letters("list", "--by-reason", "--json")

    assert (result.code, result.json["total"], result.json["letters"]) == (0, 0, [])
    assert result.json["place"].endswith("queue.db, to which nothing was sent yet")
    assert letters("list").out.startswith("No dead letters in queue")
    for act in ("requeue", "delete"):
        assert "there is no queue file" in letters(act, "--all").error
    assert not Path(queue.path).exists()
