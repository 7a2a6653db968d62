"""The command line: its queue commands, its views of staged runs, its errors."""

from __future__ import annotations

import json
import re
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
from airflow_broadway.staging.retention import mark_balanced, sweep_retention
from tests.cli_runs import DAG_ID, RUN_ID, make_shop, ran

RUN = ("--dag-id", DAG_ID, "--run-id", RUN_ID)


@pytest.fixture
def shop(tmp_path, monkeypatch):
    return make_shop(tmp_path, monkeypatch)


def orders(count: int) -> list[dict[str, object]]:
    return [{"n": n, "shop": "abc"[n % 3]} for n in range(count)]


# -- queue -----------------------------------------------------------------------------------------


@pytest.fixture
def queue(tmp_path):
    with SqliteQueue(tmp_path / "queue.db", "orders") as opened:
        yield opened


@pytest.fixture
def command(capsys, queue):
    """Run a command of the queue."""
    place = ["--path", str(queue.path), "--queue", "orders"]
    return lambda action, *words: ran(capsys, "queue", action, *place, *map(str, words))


def test_lines_of_a_file_are_sent(tmp_path, command, queue):
    # Given a file of lines, one of them empty, the last without its end
    (tmp_path / "lines").write_bytes(b'{"n": 1}\r\n\n\xff\xfe\nlast')

    # When it is sent
    result = command("send", tmp_path / "lines")

    # Then every line but the empty one is a message, byte for byte
    assert (result.code, result.out) == (0, "Sent 3 messages to 'orders'.\n")
    assert [m.data for m in queue.receive("g", 10)] == [b'{"n": 1}', b"\xff\xfe", b"last"]


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_empty_input_is_an_error_and_creates_no_queue(tmp_path, command, content):
    (tmp_path / "lines").write_bytes(content)

    result = command("send", tmp_path / "lines")

    assert result.code == 2
    assert f"nothing was sent: '{tmp_path / 'lines'}' has no line, or only empty ones" in result.err
    assert not (tmp_path / "queue.db").exists()


def test_lines_of_standard_input_are_sent(tmp_path, command, queue, monkeypatch):
    (tmp_path / "lines").write_bytes(b"a\n" * 12_000)
    with open(tmp_path / "lines") as file:
        monkeypatch.setattr("sys.stdin", file)
        result = command("send", "--json")

    assert (result.code, result.json) == (0, {"sent": 12_000})
    assert queue.depth().ready == 12_000


def test_queue_is_created_once(command, queue):
    result = command("create")
    assert (result.code, result.out) == (0, "Created the queue 'orders'.\n")
    queue.send([b"a"])

    result = command("create")
    assert (result.code, result.out) == (0, "'orders' exists already.\n")
    assert command("create", "--json").json == {"created": False}
    assert queue.depth().ready == 1


def test_missing_file_is_a_one_line_error(tmp_path, command):
    assert "No such file or directory" in command("send", tmp_path / "nothing").error


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("replay", "invalid choice: 'replay'"),
        ("queue purge", "invalid choice: 'purge'"),
        (
            "dead-letters list --pipeline m:C --limit -1",
            "expected a number of at least 1, got: '-1'",
        ),
        ("queue send --queue n", "one of the arguments --path --conn-id is required"),
        ("show --dag-id d", "the following arguments are required: --run-id"),
        ("runs --dagid d", "unrecognized arguments: --dagid d (see airflow-broadway runs --help)"),
        ("--foo runs", "unrecognized arguments: --foo (see airflow-broadway --help)"),
    ],
)
def test_wrong_arguments_are_a_one_line_error(capsys, arguments, error):
    assert error in ran(capsys, *arguments.split()).error


def test_password_in_an_address_is_not_printed(capsys):
    result = ran(capsys, "runs", "--staging", "nowhere://user:secret@host/broadway")

    assert "secret" not in result.out + result.err
    assert "nowhere://***@host" in result.error


DOCS = Path(__file__).parents[3] / "docs"


def guide_commands(page: str = "cli.md", command: str = "airflow-broadway") -> list[list[str]]:
    """The arguments of the commands that a page shows."""
    text = (DOCS / page).read_text().replace("\\\n", " ")
    commands = [line.strip().removeprefix("generate-orders | ") for line in text.splitlines()]
    commands += re.findall(rf"\| `({command} [^`]+)`", text) if page == "runbook.md" else []
    return [shlex.split(line)[1:] for line in commands if line.startswith(f"{command} ")]


@pytest.mark.parametrize(
    "arguments", [*guide_commands(), *guide_commands("runbook.md")], ids=" ".join
)
def test_commands_in_the_guides_parse(arguments):
    assert build_parser().parse_args(arguments).handler


@pytest.mark.parametrize("arguments", guide_commands("runbook.md", "airflow"), ids=" ".join)
def test_airflow_commands_in_the_runbook_parse(arguments):
    from airflow.cli.cli_parser import get_parser

    assert get_parser().parse_args(arguments).func


def test_guide_shows_all_commands():
    commands = {tuple(words[: 2 if words[0] == "queue" else 1]) for words in guide_commands()}

    queue = {("queue", "create"), ("queue", "send")}
    others = {("init",), ("remove",), ("runs",), ("show",), ("where",), ("check",)}
    assert commands == queue | others | {("crash-test",), ("depth",)}


def test_queue_commands_start_without_airflow():
    script = "import sys, airflow_broadway.cli, airflow_broadway.cli.queue\n"
    script += "assert not {'airflow', 'pyspark', 'pyarrow', 'fsspec'} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    "command", ["", "check", "init", "queue", "queue send", "dead-letters list"]
)
def test_version_is_printed(capsys, command):
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([*command.split(), "--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"airflow-broadway {__version__}\n"


@pytest.mark.parametrize("command", ["check", "depth", "crash-test", "dead-letters list"])
def test_pipeline_is_a_named_option(capsys, command):
    reference = "shop.orders:Orders"
    arguments = build_parser().parse_args([*command.split(), "--pipeline", reference])
    assert arguments.pipeline in (reference, [reference])
    with pytest.raises(SystemExit):
        build_parser().parse_args([*command.split(), reference])
    assert ("--pipeline" if command != "check" else "unrecognized") in capsys.readouterr().err


# -- runs and show ---------------------------------------------------------------------------------


def test_runs_are_listed_with_counts_and_balance(shop, capsys):
    # Given a settled run, and one that has not been settled
    shop.send(orders(5))
    shop.settled_run()
    shop.send(orders(2))
    shop.process("scheduled__later")

    # Then both are listed, in order, from the root in Airflow's configuration
    listed = ran(capsys, "runs", "--json").json
    rows = [(r["run_id"], r["received"], r["state"], r["balanced"]) for r in listed]
    assert rows == [(RUN_ID, 5, "settled", True), ("scheduled__later", 2, "published", None)]
    lines = ran(capsys, "runs", "--dag-id", DAG_ID).out.splitlines()
    titles = "TIME DAG RUN PIPELINE RECEIVED ACKED DEAD FAILED STATE BALANCED"
    assert " ".join(lines[0].split()) == titles
    row = f"{DAG_ID} {RUN_ID} Orders 5 5 0 0 settled yes"
    assert " ".join(lines[1].split()[2:]) == row
    assert lines[2].split()[-1] == "-"


def test_newest_runs_are_listed_and_the_rest_counted(shop, capsys):
    for number in range(3):
        shop.send(orders(1))
        shop.process(f"run-{number}")

    text = ran(capsys, "runs", "--limit", "2").out

    assert [line.split()[3] for line in text.splitlines()[1:3]] == ["run-1", "run-2"]
    assert text.endswith("These are the 2 newest of 3: --limit 3 shows all.\n")
    assert len(ran(capsys, "runs", "--json").json) == 3
    [newest] = ran(capsys, "runs", "--json", "--limit", "1").json
    assert newest["run_id"] == "run-2"
    assert "--limit: expected a number of at least 1" in ran(capsys, "runs", "--limit", "-1").error


def test_run_is_removed_only_after_settlement(shop, capsys):
    # Given a run that is not settled
    shop.send(orders(2))
    run, plan = shop.process()
    command_line = ["remove", *RUN, "--yes"]

    # Then it stays, and the error names the cure
    error = ran(capsys, *command_line).error
    assert "has 1 generation without a settlement" in error
    assert "clear its `ack` task" in error
    assert run.generations() != []

    # And once it is settled it is removed, with its mark
    shop.handle(run, plan)
    shop.settle(run)
    assert run.dag.list("_balanced") != []
    unconfirmed = ran(capsys, *command_line[:-1]).error
    assert "nothing was removed: use --yes to remove the files of run" in unconfirmed
    assert run.dag.list("_balanced") != []
    removed = ran(capsys, *command_line).out
    assert removed == f"Removed the files of run {RUN_ID} of the Dag {DAG_ID}.\n"
    assert ran(capsys, "runs", "--json").json == []
    assert run.dag.list("_balanced") == []


def test_missing_client_is_named_with_its_extra(shop, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    result = ran(capsys, "runs", "--staging", "s3://nobody@bucket/broadway")
    assert result.code == 2
    assert result.error.endswith(
        "cannot be opened, since its client is not installed: install airflow-broadway[s3]"
    )
    without_provider = ran(capsys, "runs", "--staging", "gs://nobody@bucket/broadway").error
    assert "install airflow-broadway[s3] for s3://, or Airflow's provider" in without_provider


def test_unknown_pipeline_name_is_an_error(shop, capsys):
    shop.settled_run()
    for command in (("runs",), ("archive", "list")):
        result = ran(capsys, *command, "--pipeline-name", "Ordres")
        assert result.code == 2
        assert "no run of a pipeline 'Ordres' has staged or archived anything" in result.error
        assert "pipelines there: Orders" in result.error
        assert ran(capsys, *command, "--pipeline-name", "Orders").code == 0


def test_no_runs_are_fine_but_no_root_is_an_error(shop, capsys, tmp_path):
    assert ran(capsys, "runs").out == f"No staged runs under {shop.staging}.\n"
    result = ran(capsys, "runs", "--staging", f"file://{tmp_path}/nothing")
    assert (
        "does not exist: the first run of a pipeline creates it; if runs use another one, pass"
        " --staging, or set `[broadway] staging`" in result.error
    )


def test_run_is_shown_with_generations_batches_and_report(shop, capsys):
    # Given a run of five orders, of which one fails in its batch and one before
    shop.bad(3)
    shop.send([*orders(4), {"n": 9, "void": True}])
    shop.settled_run()

    # When it is shown
    value = ran(capsys, "show", *RUN, "--json").json
    text = ran(capsys, "show", *RUN).out

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


def test_control_characters_of_senders_are_escaped(shop, capsys):
    # Given text with control characters
    title, red = "\x1b]0;owned\x07", "\x1b[31m\u202e"
    with shop.queue as queue:
        queue.send([json.dumps({"n": 1, "void": True}), json.dumps({"n": 2})])
    run = shop.settled_run()
    report = json.loads(run.files.read("report.json"))
    report["reasons"] = [{"count": 1, "stage": "process", "reason": red + title}]
    run.files.replace("report.json", json.dumps(report))

    # Then the commands print them as escapes
    result = ran(capsys, "show", *RUN).out
    nowhere = ran(capsys, "where", red + "id")
    error = ran(capsys, "show", "--dag-id", red, "--run-id", title).error
    for text in (result, nowhere.out, error):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert r"\x1b" in text


def test_other_folders_are_not_runs(shop, capsys):
    shop.send(orders(1))
    shop.settled_run()
    dag = Path(shop.run().files.full("")).parent
    (dag / "note.txt").write_text("mine")
    (dag / "other").mkdir()
    (shop.folder / "staging" / "file").write_text("")

    assert len(ran(capsys, "runs", "--json").json) == 1


def test_run_removed_by_retention_is_named(shop, capsys):
    shop.send(orders(1))
    run = shop.settled_run()
    mark_balanced(run)
    assert sweep_retention(run.store, "Orders", DAG_ID, keep=-1.0) == [RUN_ID]

    result = ran(capsys, "show", *RUN)

    assert f"there is no staged run {RUN_ID!r} of the Dag 'orders'" in result.error
    assert "7 days after it balanced" in result.error


def test_run_of_two_pipelines_needs_the_pipeline_name(shop, capsys):
    # Given the same run under another pipeline's name
    shop.send(orders(1))
    own = Path(shop.settled_run().store.root, "Orders")
    shutil.copytree(own, own.parent / "Returns")
    for path in (own.parent / "Returns").rglob("generations/*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "pipeline": "Returns"}))
    command_line = ["show", *RUN]

    # Then the candidates are listed, and a name selects one
    error = ran(capsys, *command_line).error
    assert "the pipelines ['Orders', 'Returns'] all staged" in error
    assert error.endswith("choose one with --pipeline-name")
    assert ran(capsys, *command_line, "--pipeline-name", "Orders").code == 0


# -- where -----------------------------------------------------------------------------------------


def test_message_is_found_with_batch_outcome_and_settlement(shop, capsys):
    # Given a run in which one order succeeds, one fails in its batch, and one before any
    shop.bad(1)
    good, bad, void = shop.send([{"n": 0, "shop": "a"}, {"n": 1, "shop": "b"}, {"void": True}])
    [record] = shop.settled_run().generations()
    batches = {numbers[0]: batch_id for _, batch_id, numbers in shop.calls()}

    # Then each message is found with its outcome
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
    assert f"batch id:      {batches[1]}\n" in ran(capsys, "where", bad).out


def test_redelivered_message_is_found_twice(shop, capsys):
    # Given an order that was dead-lettered, put back, and received again
    shop.bad(0)
    [message_id] = shop.send(orders(1))
    shop.settled_run()
    shop.queue.requeue()
    shop.process("manual__again")

    # Then both receipts are listed, the first one first
    first, second = ran(capsys, "where", message_id, "--json").json
    assert (first["run_id"], first["outcome"]) == (RUN_ID, "failed")
    assert (second["run_id"], second["outcome"]) == ("manual__again", None)
    assert (second["redelivered"], second["settlement"]) == (True, "published")
    assert second["batch_id"] is not None


def test_unknown_message_sets_the_exit_code(shop, capsys):
    shop.send(orders(1))
    shop.settled_run()

    result = ran(capsys, "where", "unknown")

    assert result.code == 1
    assert "No staged run" in result.out
    assert ran(capsys, "where", "unknown", "--json").json == []
