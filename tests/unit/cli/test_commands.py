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

from airflow_broadway.cli.arguments import build_parser
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


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_input_without_a_message_is_an_error_and_makes_no_queue(
    tmp_path: Path, capsys: Capsys, queue: list[str], content: bytes
) -> None:
    (tmp_path / "lines").write_bytes(content)

    done = ran(capsys, "queue", "send", *queue, str(tmp_path / "lines"))

    assert done.code == 2
    assert f"nothing was sent: '{tmp_path / 'lines'}' has no line, or only empty ones" in done.err
    assert not (tmp_path / "queue.db").exists()


def test_lines_come_from_standard_input_too(
    tmp_path: Path, capsys: Capsys, queue: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lines").write_bytes(b"a\n" * 12_000)
    with open(tmp_path / "lines") as file:
        monkeypatch.setattr("sys.stdin", file)
        done = ran(capsys, "queue", "send", *queue, "--json")

    assert (done.code, done.json) == (0, {"sent": 12_000})
    assert SqliteQueue(tmp_path / "queue.db", "orders").depth().ready == 12_000


def test_a_queue_is_created_once(tmp_path: Path, capsys: Capsys, queue: list[str]) -> None:
    done = ran(capsys, "queue", "create", *queue)
    assert (done.code, done.out) == (0, "Created the queue 'orders'.\n")
    SqliteQueue(tmp_path / "queue.db", "orders").send([b"a"])

    done = ran(capsys, "queue", "create", *queue)
    assert (done.code, done.out) == (0, "'orders' exists already.\n")
    assert ran(capsys, "queue", "create", *queue, "--json").json == {"created": False}
    assert SqliteQueue(tmp_path / "queue.db", "orders").depth().ready == 1


def test_a_file_of_lines_that_is_not_there_is_one_line_of_error(
    tmp_path: Path, capsys: Capsys, queue: list[str]
) -> None:
    done = ran(capsys, "queue", "send", *queue, str(tmp_path / "nothing"))

    assert "No such file or directory" in done.error


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("replay",), "invalid choice: 'replay'"),
        (("queue", "purge"), "invalid choice: 'purge'"),
        (
            ("dead-letters", "list", "--pipeline", "m:C", "--limit", "-1"),
            "expected a number of at least 1, got: '-1'",
        ),
        (("queue", "send", "--queue", "n"), "one of the arguments --path --conn-id is required"),
        (("show", "--dag-id", "d"), "the following arguments are required: --run-id"),
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
    commands = {tuple(words[: 2 if words[0] == "queue" else 1]) for words in shown()}

    queue = {("queue", "create"), ("queue", "send")}
    others = {("remove",), ("runs",), ("show",), ("where",), ("check",)}
    assert commands == queue | others | {("crash-test",), ("depth",)}


def test_the_queue_commands_start_without_airflow() -> None:
    script = "import sys, airflow_broadway.cli, airflow_broadway.cli.queue\n"
    script += "assert not {'airflow', 'pyspark', 'pyarrow', 'fsspec'} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_release_is_printed(capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"airflow-broadway {__version__}\n"


@pytest.mark.parametrize("command", ["depth", "crash-test", "dead-letters list"])
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
    assert "--limit: expected a number of at least 1" in ran(capsys, "runs", "--limit", "-1").error


def test_a_run_is_removed_once_it_is_settled(shop: Shop, capsys: Capsys) -> None:
    # Given a run that is not settled
    shop.send(orders(2))
    run, plan = shop.process()
    asked = ["remove", "--dag-id", DAG_ID, "--run-id", RUN_ID, "--yes"]

    # Then it stays, with the way out
    error = ran(capsys, *asked).error
    assert "has 1 generation without a settlement" in error
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
    assert generation["account"]["acked"] == 3
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
    shop.queue.requeue()
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
