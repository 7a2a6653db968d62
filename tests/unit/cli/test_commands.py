"""The command line: its queue commands, its views of staged runs, its errors."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from airflow_broadway.cli.app import build_parser
from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.version import __version__
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.staging.retention import sweep_retention
from tests.cli_runs import DAG_ID, RUN_ID, Shop, make_shop, ran

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    return make_shop(tmp_path, monkeypatch)


def orders(count: int) -> list[dict[str, object]]:
    return [{"n": n, "shop": "abc"[n % 3]} for n in range(count)]


# -- queue -----------------------------------------------------------------------------------------


@pytest.fixture
def queue(tmp_path: Path) -> list[str]:
    return ["--path", str(tmp_path / "queue.db"), "--queue", "orders"]


def kill(path: Path, count: int) -> list[str]:
    """Make dead letters of the next messages."""
    held = SqliteQueue(path, "orders")
    ids = [message.message_id for message in held.receive("g", count)]
    held.settle("g", Settlement(rest=Verdict(Action.DEAD_LETTER, 0.0, "out of stock", "batch")))
    held.close()
    return ids


def test_each_line_of_a_file_becomes_a_message(
    tmp_path: Path, capsys: Capsys, queue: list[str]
) -> None:
    # Given a file of lines, one of them empty, the last without its end
    (tmp_path / "lines").write_bytes(b'{"n": 1}\r\n\n\xff\xfe\nlast')

    # When it is sent
    done = ran(capsys, "queue", "send", *queue, str(tmp_path / "lines"))

    # Then each line that is not empty is a message, byte by byte
    assert (done.code, done.out) == (0, "Sent 3 messages to 'orders'.\n")
    bodies = [m.data for m in SqliteQueue(tmp_path / "queue.db", "orders").receive("g", 10)]
    assert bodies == [b'{"n": 1}', b"\xff\xfe", b"last"]


def test_lines_come_from_standard_input_too(
    tmp_path: Path, capsys: Capsys, queue: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lines").write_bytes(b"a\n" * 12_000)
    with open(tmp_path / "lines") as file:
        monkeypatch.setattr("sys.stdin", file)
        done = ran(capsys, "queue", "send", *queue, "--json")

    assert (done.code, done.json) == (0, {"sent": 12_000})
    assert ran(capsys, "queue", "depth", *queue, "--json").json["ready"] == 12_000


def test_the_depth_of_a_queue_is_one_line(tmp_path: Path, capsys: Capsys, queue: list[str]) -> None:
    SqliteQueue(tmp_path / "queue.db", "orders").send([b"a", b"b", b"c"])
    kill(tmp_path / "queue.db", 1)

    done = ran(capsys, "queue", "depth", *queue)

    assert done.code == 0
    assert done.out.startswith("2 ready, 0 delayed, 0 leased, 1 dead; the oldest ready one arrived")


def test_dead_letters_are_listed_requeued_and_purged(
    tmp_path: Path, capsys: Capsys, queue: list[str]
) -> None:
    # Given three dead letters
    SqliteQueue(tmp_path / "queue.db", "orders").send([b"a", b"\xff", b"c", b"d"])
    first, second, third = kill(tmp_path / "queue.db", 3)

    # Then a table and JSON list them with their reasons
    shown = ran(capsys, "queue", "dead", *queue, "--limit", "2").out
    assert shown.splitlines()[1].split()[:3] == [first, "1", "batch"]
    assert "out of stock" in shown
    assert shown.endswith("These are 2 of 3: --limit shows more, --by-reason counts them.\n")
    listed = ran(capsys, "queue", "dead", *queue, "--json").json
    assert [each["reason"] for each in listed] == ["out of stock"] * 3
    assert [each.get("body") for each in listed] == ["a", None, "c"]
    assert listed[1]["body_base64"] == "/w=="

    # When one is put back, one deleted, then the rest of everything
    done = ran(capsys, "queue", "requeue", *queue, "--message-id", first)
    assert (done.code, done.out) == (0, "Put 1 dead letter back into 'orders'.\n")
    purge = ["queue", "purge", *queue]
    refused = ran(capsys, *purge, "--dead", "--message-id", second)
    assert (refused.code, "use --yes to delete 1 dead letter of" in refused.error) == (2, True)
    assert ran(capsys, *purge, "--dead", "--message-id", second, "--yes").code == 0

    # Then one is dead still, and one is ready beside the message that never was
    depth = ran(capsys, "queue", "depth", *queue, "--json").json
    assert (depth["ready"], depth["dead"]) == (2, 1)
    assert ran(capsys, "queue", "dead", *queue, "--json").json[0]["message_id"] == third
    refused = ran(capsys, *purge, "--ready")
    assert "use --yes to delete 2 messages of 'orders' that no run holds" in refused.error
    assert ran(capsys, *purge, "--ready", "--yes", "--json").json == {"purged": 2}
    assert ran(capsys, "queue", "requeue", *queue, "--json").json == {"requeued": 1}
    assert ran(capsys, "queue", "dead", *queue).out == "No dead letters.\n"


def test_an_id_that_is_no_dead_letter_shows_in_the_exit_code(
    tmp_path: Path, capsys: Capsys, queue: list[str]
) -> None:
    SqliteQueue(tmp_path / "queue.db", "orders").send([b"a"])

    [dead] = kill(tmp_path / "queue.db", 1)

    done = ran(capsys, "queue", "requeue", *queue, "--message-id", "nobody", dead, "zzz")

    assert (done.code, done.out.splitlines()) == (
        1,
        ["Put 1 dead letter back into 'orders'.", "These are no dead letters of it: nobody, zzz."],
    )
    told = ran(
        capsys, "queue", "purge", *queue, "--dead", "--yes", "--message-id", dead, "--json"
    ).json
    assert told == {"purged": 0, "unknown": [dead]}


def test_dead_letters_are_counted_by_reason(
    tmp_path: Path, capsys: Capsys, queue: list[str]
) -> None:
    with SqliteQueue(tmp_path / "queue.db", "orders") as orders:
        ids = orders.send([b"a", b"b", b"c"])
        orders.receive("g", 3)
        odd = Verdict(Action.DEAD_LETTER, 0.0, "a bad price", "process")
        orders.settle_now("g", [Entry(ids[0], "", odd)])
        rest = Verdict(Action.DEAD_LETTER, 0.0, "out of stock", "batch")
        orders.settle("g", Settlement(rest=rest))

    done = ran(capsys, "queue", "dead", *queue, "--by-reason")

    assert [line.split() for line in done.out.splitlines()] == [
        ["COUNT", "STAGE", "REASON"],
        ["2", "batch", "out", "of", "stock"],
        ["1", "process", "a", "bad", "price"],
    ]
    assert ran(capsys, "queue", "dead", *queue, "--by-reason", "--json").json[0]["count"] == 2


def test_the_queues_of_a_file_are_listed(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "queue.db"
    SqliteQueue(path, "orders").send([b"a", b"b"])
    SqliteQueue(path, "clicks").send([b"c"])
    monkeypatch.setenv("AIRFLOW_CONN_Q", json.dumps({"conn_type": "sqlite", "host": str(path)}))

    done = ran(capsys, "queue", "list", "--conn-id", "q")

    assert [line.split()[:2] for line in done.out.splitlines()] == [
        ["QUEUE", "READY"],
        ["clicks", "1"],
        ["orders", "2"],
    ]
    listed = ran(capsys, "queue", "list", "--path", str(path), "--json").json
    assert [each["queue"] for each in listed] == ["clicks", "orders"]


def test_a_mistyped_queue_is_refused_instead_of_shown_empty(
    tmp_path: Path, capsys: Capsys, queue: list[str]
) -> None:
    path = tmp_path / "queue.db"
    assert ran(capsys, "queue", "depth", *queue).error.endswith(
        f"there is no queue file {path}: correct --path"
    )
    SqliteQueue(path, "orders").send([b"a"])
    wrong = ran(capsys, "queue", "depth", "--path", str(path), "--queue", "order")
    assert wrong.error.endswith(f"the queue file {path} has no queue 'order'; it has ['orders']")


def test_a_queue_is_created_once(tmp_path: Path, capsys: Capsys, queue: list[str]) -> None:
    done = ran(capsys, "queue", "create", *queue)
    assert (done.code, done.out) == (0, "Created the queue 'orders'.\n")
    SqliteQueue(tmp_path / "queue.db", "orders").send([b"a"])

    done = ran(capsys, "queue", "create", *queue)
    assert (done.code, done.out) == (0, "'orders' exists already.\n")
    assert ran(capsys, "queue", "create", *queue, "--json").json == {"created": False}
    assert ran(capsys, "queue", "depth", *queue, "--json").json["ready"] == 1


def test_a_file_of_lines_that_is_not_there_is_one_line_of_error(
    tmp_path: Path, capsys: Capsys, queue: list[str]
) -> None:
    done = ran(capsys, "queue", "send", *queue, str(tmp_path / "nothing"))

    assert "No such file or directory" in done.error


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("replays",), "invalid choice: 'replays'"),
        (("queue", "purge", "--path", "q", "--queue", "n"), "one of the arguments --dead --ready"),
        (
            ("queue", "dead", "--path", "q", "--queue", "n", "--limit", "-1"),
            "expected a number of at least 1, got: '-1'",
        ),
        (("queue", "depth", "--queue", "n"), "one of the arguments --path --conn-id is required"),
        (("replay", "--dag-id", "d"), "the following arguments are required: --run-id"),
    ],
)
def test_wrong_arguments_are_one_line_of_error(
    capsys: Capsys, arguments: tuple[str, ...], error: str
) -> None:
    assert error in ran(capsys, *arguments).error


def test_a_password_in_an_address_is_not_printed(capsys: Capsys) -> None:
    done = ran(capsys, "runs", "--staging", "nowhere://user:secret@host/broadway")

    assert "secret" not in done.out + done.err
    assert "nowhere://***@host" in done.error


GUIDE = Path(__file__).parents[3] / "docs" / "cli.md"


def shown() -> list[list[str]]:
    """The arguments of the commands that the guide shows."""
    lines = [line.strip() for line in GUIDE.read_text().replace("\\\n", " ").splitlines()]
    commands = [line.removeprefix("generate-orders | ") for line in lines]
    return [shlex.split(each)[1:] for each in commands if each.startswith("airflow-broadway ")]


@pytest.mark.parametrize("arguments", shown(), ids=" ".join)
def test_each_command_that_the_guide_shows_is_one(arguments: list[str]) -> None:
    assert build_parser().parse_args(arguments).handler


def test_the_guide_shows_each_command() -> None:
    nested = ("queue", "kafka", "pubsub")
    commands = {tuple(each[: 2 if each[0] in nested else 1]) for each in shown()}

    actions = ("create", "list", "send", "depth", "dead", "requeue", "purge")
    queue = {("queue", action) for action in actions}
    others = {("remove",), ("replay",), ("runs",), ("show",), ("where",), ("check",)}
    pubsub = {("pubsub", action) for action in ("show", "seek")}
    assert commands == queue | {("kafka", "show")} | pubsub | others | {("crash-test",), ("depth",)}


def test_the_queue_commands_start_without_airflow() -> None:
    script = "import sys, airflow_broadway.cli, airflow_broadway.cli.queue\n"
    script += "assert not {'airflow', 'pyspark', 'pyarrow', 'fsspec'} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_release_is_printed(capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"airflow-broadway {__version__}\n"


@pytest.mark.parametrize("command", ["depth", "crash-test", "dead-letters list", "kafka show"])
def test_a_pipeline_is_an_option_of_one_name(capsys: Capsys, command: str) -> None:
    reference = "shop.orders:Orders"
    found = build_parser().parse_args([*command.split(), "--pipeline", reference])
    assert found.pipeline in (reference, [reference])
    with pytest.raises(SystemExit):
        build_parser().parse_args([*command.split(), reference])
    assert "--pipeline" in capsys.readouterr().err


# -- runs and show ---------------------------------------------------------------------------------


def test_runs_are_listed_with_what_they_received_and_whether_they_balance(
    shop: Shop, capsys: Capsys
) -> None:
    # Given a settled run, and one that has not been settled
    shop.send(orders(5))
    shop.settled_run()
    shop.send(orders(2))
    shop.process("scheduled__later")

    # Then both are listed, in order, from the root of Airflow's configuration
    listed = ran(capsys, "runs", "--json").json
    told = [(r["run_id"], r["received"], r["state"], r["balanced"]) for r in listed]
    assert told == [(RUN_ID, 5, "settled", True), ("scheduled__later", 2, "published", None)]
    lines = ran(capsys, "runs", "--dag-id", DAG_ID).out.splitlines()
    heads = ["TIME", "DAG", "RUN", "PIPELINE", "RECEIVED", "ACKED", "DEAD", "FAILED", "STATE"]
    assert lines[0].split() == [*heads, "BALANCED"]
    about = [DAG_ID, RUN_ID, "Orders", "5", "5", "0", "0", "settled", "yes"]
    assert lines[1].split()[2:] == about
    assert lines[2].split()[-1] == "-"


def test_the_newest_runs_are_listed_and_the_others_counted(shop: Shop, capsys: Capsys) -> None:
    for number in range(3):
        shop.send(orders(1))
        shop.process(f"run-{number}")

    text = ran(capsys, "runs", "--limit", "2").out

    assert [line.split()[3] for line in text.splitlines()[1:3]] == ["run-1", "run-2"]
    assert text.endswith("These are the 2 newest of 3: --limit 3 shows all.\n")
    assert len(ran(capsys, "runs", "--json").json) == 3
    assert [each["run_id"] for each in ran(capsys, "runs", "--json", "--limit", "1").json] == [
        "run-2"
    ]
    assert "--limit is to be at least 1" in ran(capsys, "runs", "--limit", "-1").error


def test_a_run_is_removed_once_it_is_settled(shop: Shop, capsys: Capsys) -> None:
    # Given a run that is not settled
    shop.send(orders(2))
    run, plan = shop.process()
    asked = ["remove", "--dag-id", DAG_ID, "--run-id", RUN_ID, "--yes"]

    # Then it stays, with the way out
    error = ran(capsys, *asked).error
    assert "has 1 generation that nobody has settled" in error
    assert "clear its `ack` task" in error
    assert run.generations() != []

    # And once it is settled it goes, with its mark
    shop.handle(run, plan)
    shop.settle(run)
    assert run.dag.list("_balanced") != []
    assert "nothing was removed: use --yes to remove the files of run" in (
        ran(capsys, *asked[:-1]).error
    )
    assert run.dag.list("_balanced") != []
    assert ran(capsys, *asked).out == f"Removed the files of run {RUN_ID} of the Dag {DAG_ID}.\n"
    assert ran(capsys, "runs", "--json").json == []
    assert run.dag.list("_balanced") == []


def test_a_client_that_is_not_installed_is_named_with_its_extra(
    shop: Shop, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    done = ran(capsys, "runs", "--staging", "s3://nobody@bucket/broadway")
    assert done.code == 2
    assert done.error.endswith(
        "cannot be opened, since its client is not installed: install airflow-broadway[s3]"
    )


def test_a_pipelines_name_of_which_nothing_is_staged_is_an_error(
    shop: Shop, capsys: Capsys
) -> None:
    shop.settled_run()
    for command in (("runs",), ("archive", "list")):
        done = ran(capsys, *command, "--pipeline-name", "Ordres")
        assert done.code == 2
        assert "no run of a pipeline 'Ordres' has staged or archived anything" in done.error
        assert "pipelines there: Orders" in done.error
        assert ran(capsys, *command, "--pipeline-name", "Orders").code == 0


def test_no_runs_are_no_error_but_no_root_is(shop: Shop, capsys: Capsys, tmp_path: Path) -> None:
    assert ran(capsys, "runs").out == f"No staged runs under {shop.staging}.\n"
    done = ran(capsys, "runs", "--staging", f"file://{tmp_path}/nothing")
    assert (
        "does not exist: the first run of a pipeline creates it; if runs use another one, pass"
        " --staging, or set `[broadway] staging`" in done.error
    )


def test_a_run_is_shown_with_its_generations_batches_and_report(shop: Shop, capsys: Capsys) -> None:
    # Given a run of five orders, of which one fails in its batch and one before
    shop.bad(3)
    shop.send([*orders(4), {"n": 9, "void": True}])
    shop.settled_run()

    # When it is shown
    run = ["--dag-id", DAG_ID, "--run-id", RUN_ID]
    value = ran(capsys, "show", *run, "--json").json
    text = ran(capsys, "show", *run).out

    # Then the generation, the batches with their outcomes and the report's sum are there
    [generation] = value["generations"]
    assert (generation["received"], generation["failed"]) == (5, 1)
    assert generation["settled"]["acked"] == 3
    assert sum(batch["size"] for batch in value["batches"]) == 4
    assert sum(batch["outcome"]["failed"] for batch in value["batches"]) == 1
    assert value["report"]["totals"]["dead_lettered"] == 2
    assert f"Run {RUN_ID} of the Dag {DAG_ID}, pipeline Orders: settled." in text
    assert value["batches"][0]["batch_id"] in text
    assert ": balanced.\n5 messages received: 3 acked, 2 dead-lettered.\n2 failed: " in text


def test_a_terminal_acts_on_nothing_that_a_sender_wrote(shop: Shop, capsys: Capsys) -> None:
    # Given a message whose id and key a terminal would act on
    title, red = "\x1b]0;owned\x07", "\x1b[31m\u202e"
    with shop.queue as queue:
        queue.send([json.dumps({"n": 1, "void": True}), json.dumps({"n": 2})])
    run = shop.settled_run()
    report = json.loads(run.files.read("report.json"))
    report["reasons"] = [{"count": 1, "stage": "process", "reason": red + title}]
    run.files.replace("report.json", json.dumps(report))

    # Then what the commands print of it are escapes
    shown = ran(capsys, "show", "--dag-id", DAG_ID, "--run-id", RUN_ID).out
    nowhere = ran(capsys, "where", red + "id")
    error = ran(capsys, "show", "--dag-id", red, "--run-id", title).error
    for text in (shown, nowhere.out, error):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert r"\x1b" in text


def test_what_lies_beside_the_runs_is_no_run(shop: Shop, capsys: Capsys) -> None:
    shop.send(orders(1))
    shop.settled_run()
    dag = Path(shop.run().files.full("")).parent
    (dag / "note.txt").write_text("mine")
    (dag / "other").mkdir()
    (shop.folder / "staging" / "file").write_text("")

    assert len(ran(capsys, "runs", "--json").json) == 1


def test_a_run_that_retention_removed_is_named(shop: Shop, capsys: Capsys) -> None:
    shop.send(orders(1))
    run = shop.settled_run()
    from airflow_broadway.staging.retention import mark_balanced

    mark_balanced(run)
    assert sweep_retention(run.store, "Orders", DAG_ID, keep=-1.0) == [RUN_ID]

    done = ran(capsys, "show", "--dag-id", DAG_ID, "--run-id", RUN_ID)

    assert f"there is no staged run {RUN_ID!r} of the Dag 'orders'" in done.error
    assert "7 days after it balanced" in done.error


def test_a_run_that_two_pipelines_staged_is_chosen_by_the_pipelines_name(
    shop: Shop, capsys: Capsys
) -> None:
    # Given the same run under another pipeline's name
    shop.send(orders(1))
    run = shop.settled_run()
    own = Path(run.store.root, "Orders")
    shutil.copytree(own, own.parent / "Returns")
    for path in (own.parent / "Returns").rglob("generations/*.json"):
        value = json.loads(path.read_text())
        path.write_text(json.dumps({**value, "pipeline": "Returns"}))
    asked = ["show", "--dag-id", DAG_ID, "--run-id", RUN_ID]

    # Then the candidates are listed, and a name decides
    error = ran(capsys, *asked).error
    assert "the pipelines ['Orders', 'Returns'] all staged" in error
    assert error.endswith("choose one with --pipeline-name")
    assert ran(capsys, *asked, "--pipeline-name", "Orders").code == 0


# -- where -----------------------------------------------------------------------------------------


def test_a_message_is_found_with_its_batch_outcome_and_settlement(
    shop: Shop, capsys: Capsys
) -> None:
    # Given a run in which one order succeeds, one fails in its batch, and one before any
    shop.bad(1)
    good, bad, void = shop.send([{"n": 0, "shop": "a"}, {"n": 1, "shop": "b"}, {"void": True}])
    run = shop.settled_run()
    [record] = run.generations()
    batches = {numbers[0]: batch_id for _, batch_id, numbers in shop.calls()}

    # Then each is found where it went
    [place] = ran(capsys, "where", good, "--json").json
    assert (place["run_id"], place["generation"]) == (RUN_ID, record.generation)
    assert (place["batcher"], place["batch_id"]) == ("default", batches[0])
    assert (place["outcome"], place["verdict"], place["reason"]) == ("succeeded", None, None)
    assert place["settlement"] == "settled"
    assert datetime.fromisoformat(place["settled_at"]) <= datetime.now(UTC)

    [place] = ran(capsys, "where", bad, "--dag-id", DAG_ID, "--json").json
    assert (place["batch_id"], place["outcome"]) == (batches[1], "failed")
    assert (place["verdict"], place["reason"]) == ("dead_letter", "bad order")

    [place] = ran(capsys, "where", void, "--json").json
    assert (place["batcher"], place["outcome"]) == (None, "failed before any batch")
    assert (place["verdict"], place["reason"]) == ("dead_letter", "void")
    text = ran(capsys, "where", bad).out
    assert f"batch id:      {batches[1]}\n" in text


def test_a_message_that_came_twice_is_found_twice(shop: Shop, capsys: Capsys) -> None:
    # Given an order that was dead-lettered, put back, and received again
    shop.bad(0)
    [message_id] = shop.send(orders(1))
    shop.settled_run()
    shop.queue.requeue_dead()
    shop.process("manual__again")

    # Then both receipts are told, the first one first
    first, second = ran(capsys, "where", message_id, "--json").json
    assert (first["run_id"], first["outcome"]) == (RUN_ID, "failed")
    assert (second["run_id"], second["outcome"]) == ("manual__again", None)
    assert (second["redelivered"], second["settlement"]) == (True, "published")
    assert second["batch_id"] is not None


def test_a_message_that_no_run_has_is_told_by_the_exit_code(shop: Shop, capsys: Capsys) -> None:
    shop.send(orders(1))
    shop.settled_run()

    done = ran(capsys, "where", "nobody")

    assert done.code == 1
    assert "No staged run" in done.out
    assert ran(capsys, "where", "nobody", "--json").json == []
