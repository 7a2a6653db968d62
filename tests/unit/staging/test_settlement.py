from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from airflow_broadway import Broadway
from airflow_broadway.core.custody.protocol import Delivery, Entry, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerUnavailable, StagingDamaged, StagingError
from airflow_broadway.core.formats.parts import part_id, record_split
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.model.acks import NO_ACK
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.run_folder import StagedRun, iter_unsettled
from airflow_broadway.staging.settling.held_messages import HeldMessages
from airflow_broadway.staging.settling.journal import settled_journal
from airflow_broadway.staging.settling.settlement import build_settlement, settle_generation
from airflow_broadway.staging.store import host_name
from tests.unit.staging.kit import (
    FakeCustodian,
    Republishing,
    Silent,
    batches_of,
    message,
    open_generation,
    open_run,
    pipeline_of,
    publish,
    record_outcome,
    stream,
)

DEAD = Verdict(Action.DEAD_LETTER, 0.0, "why", "batch")


def pipeline_with(producer: Silent | None = None) -> Broadway:
    return pipeline_of(producer, b=Batcher(batch_size=3))


def failed(name: str, action: Action = Action.DEAD_LETTER) -> Entry:
    return Entry(name, f"receipt of {name}", Verdict(action, 0.0, "why", "batch"))


def planned(run: StagedRun, pipeline: Broadway, *generations: str) -> BatchPlan:
    return plan_batches(run, pipeline, "b", generations, try_label="1")


def verdicts(settlement: Settlement) -> dict[str, str]:
    return {entry.message_id: entry.verdict.action.value for entry in settlement.entries()}


def everything(settlement: Settlement) -> dict[str, str]:
    assert settlement.everything is not None
    return {entry.message_id: entry.receipt for entry in settlement.everything()}


# --------------------------------------------------------------------------------------------------
# Verdicts
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("only", [None, ["b"], ["other"]])
def test_successes_without_an_entry_are_dead_lettered_once_in_chosen_batchers(tmp_path, only):
    run, pipeline = open_run(tmp_path), pipeline_with(Silent(on_success="dead_letter"))
    generation = publish(run, pipeline, [stream(3)])
    plan = planned(run, pipeline, generation)
    [batch] = batches_of(run, plan)
    record_outcome(run, plan, batch, entries=[failed("m-1")])

    settlement, _, _ = build_settlement(run, generation, pipeline, [plan], final=True, only=only)

    letters = [(entry.message_id, *place) for entry, *place in settlement.dead_letters()]
    wanted = ["m-1", "m-0", "m-2"] if only != ["other"] else []
    assert letters == [(name, "b", batch.batch_id) for name in wanted]


def test_only_the_chosen_batches_count(tmp_path):
    run, pipeline = open_run(tmp_path), pipeline_with()
    generation = publish(run, pipeline, [stream(6)])
    plan = planned(run, pipeline, generation)
    first, second = batches_of(run, plan)
    record_outcome(run, plan, first)
    record_outcome(run, plan, second)

    settlement, complete, _ = build_settlement(
        run, generation, pipeline, [plan], final=False, batches=[second.batch_id]
    )

    assert (settlement.batches, complete) == ((second.batch_id,), False)


def test_complete_settlement_acks_the_rest_and_names_exceptions(tmp_path):
    # Given six messages in two batches with outcomes, one of them failed, and one failed before
    run, pipeline = open_run(tmp_path), pipeline_with()
    generation = publish(run, pipeline, [stream(6)], entries=[failed("early", Action.RETRY)])
    plan = planned(run, pipeline, generation)
    first, second = batches_of(run, plan)
    record_outcome(run, plan, first, entries=[failed("m-1")])
    record_outcome(run, plan, second)

    # When the settlement is built
    settlement, complete, progress = build_settlement(
        run, generation, pipeline, [plan], final=False
    )

    # Then
    assert complete
    assert settlement.rest == ACK
    assert verdicts(settlement) == verdicts(settlement) == {"early": "retry", "m-1": "dead_letter"}
    assert settlement.expected == 7
    receipts = {f"m-{n}": f"receipt-{n}" for n in range(6)}
    assert everything(settlement) == {"early": "receipt of early", **receipts}
    assert (progress.received, progress.staged, progress.decided) == (7, 6, 6)
    assert (progress.batches, progress.recorded) == (2, 2)


@pytest.mark.parametrize("decided", [0, 1])
def test_parts_of_a_split_batch_are_settled_separately(tmp_path, decided):
    # Given two batches by key, whose positions alternate, and one of them in two parts
    run, pipeline = open_run(tmp_path), pipeline_with()
    messages = [message(number, batcher="b", batch_key=f"k{number % 2}") for number in range(6)]
    generation = publish(run, pipeline, [messages])
    plan = planned(run, pipeline, generation)
    even, _ = sorted(batches_of(run, plan), key=lambda batch: str(batch.batch_key))
    parts = [
        replace(even, batch_id=part_id(even.batch_id, number), size=size, part=part)
        for number, (size, part) in enumerate([(2, [[0, 0], [0, 2]]), (1, [[0, 4], [0, 4]])])
    ]
    parts = [replace(part, sources={generation: part.size}) for part in parts]
    record_split(run.files, plan.path, "b", even, parts, "test")

    # When one part has an outcome, with a failure
    first, *others = [("m-0", "m-2"), ("m-4",)][decided]
    record_outcome(run, plan, parts[decided], entries=[failed(first)])
    settlement, complete, progress = build_settlement(run, generation, pipeline, [plan], final=True)

    # Then its messages alone are settled
    assert not complete
    assert settlement.rest == RELEASE
    assert verdicts(settlement) == {first: "dead_letter", **dict.fromkeys(others, "ack")}
    assert (progress.staged, progress.decided) == (6, 1 + len(others))
    assert (progress.batches, progress.recorded) == (3, 1)


def test_batches_of_other_generations_do_not_count(tmp_path):
    run, pipeline = open_run(tmp_path), pipeline_with()
    first, second = (publish(run, pipeline, [stream(3, start)]) for start in (0, 3))
    plan = planned(run, pipeline, first, second)
    record_outcome(run, plan, batches_of(run, plan)[0])

    _, complete, progress = build_settlement(run, first, pipeline, [plan], final=True)

    assert complete
    assert (progress.batches, progress.recorded) == (1, 1)


def test_plan_of_another_root_is_refused(tmp_path):
    run, pipeline = open_run(tmp_path), pipeline_with()
    generation = publish(run, pipeline, [stream(3)])
    plan = replace(planned(run, pipeline, generation), root_id="another", host="elsewhere")

    with pytest.raises(StagingError, match="elsewhere"):
        build_settlement(run, generation, pipeline, [plan], final=True)


def test_manifest_with_too_few_messages_is_damaged(tmp_path):
    run, pipeline = open_run(tmp_path), pipeline_with()
    manifest = run.manifest(publish(run, pipeline, [stream(3)]))
    assert manifest is not None
    recorded = Recorded(run)

    with pytest.raises(StagingDamaged, match="received 2 messages, but has 3 staged ones"):
        HeldMessages(recorded, replace(manifest, received=2), pipeline.producer, [])


def test_messages_with_outcome_are_settled_and_the_rest_released(tmp_path):
    run, pipeline = open_run(tmp_path), pipeline_with()
    generation = publish(run, pipeline, [stream(7)])
    plan = planned(run, pipeline, generation)
    record_outcome(run, plan, batches_of(run, plan)[1], entries=[failed("m-4")])

    settlement, complete, progress = build_settlement(run, generation, pipeline, [plan], final=True)

    assert not complete
    assert settlement.rest.action is Action.RELEASE
    assert verdicts(settlement) == {"m-3": "ack", "m-4": "dead_letter", "m-5": "ack"}
    assert (progress.decided, progress.staged) == (3, 7)


def test_unpublished_generation_is_released_whole(tmp_path):
    run = open_run(tmp_path)
    generation = open_generation(run).generation
    settlement, complete, _ = build_settlement(run, generation, pipeline_with(), [], final=True)
    assert (complete, settlement.rest.action) == (False, Action.RELEASE)
    assert settlement.everything is None
    assert settlement.expected is None


def test_batcher_without_a_plan_is_named(tmp_path, caplog):
    run, pipeline = open_run(tmp_path), pipeline_with()
    generation = publish(run, pipeline, [stream(2)])
    _, complete, progress = build_settlement(run, generation, pipeline, None, final=True)
    assert not complete
    assert progress.unplanned == ("b",)
    assert "2 of 2 staged messages released, without an outcome (no plan for b)" in (caplog.text)


def test_immediately_settled_messages_are_not_settled_again(tmp_path):
    # Given one settled in a processor and staged, one settled there and failed, one in its batch
    run, pipeline = open_run(tmp_path), pipeline_with(Silent(on_success="noop"))
    staged = message(0, batcher="b").with_acknowledger(NO_ACK)
    now = SettleReport(acked=1, dead_lettered=1)
    chunk = [staged, *stream(2, 1)]
    generation = publish(run, pipeline, [chunk], settled=[failed("early")], settled_now=now)
    plan = planned(run, pipeline, generation)
    record_outcome(run, plan, batches_of(run, plan)[0], settled=[Entry("m-2", "", ACK)])

    settlement, complete, progress = build_settlement(
        run, generation, pipeline, [plan], final=False
    )

    # Then only the fourth is left
    assert complete
    assert verdicts(settlement) == {"m-1": "leave"}
    assert list(everything(settlement)) == ["m-1"]
    assert settlement.expected == 1
    assert progress.settled_now == SettleReport(acked=2, dead_lettered=1)


def test_shared_batch_settles_each_generation_separately(tmp_path):
    # Given an id that both generations hold, failed in one of them only
    run, pipeline = open_run(tmp_path), pipeline_with()
    first = publish(run, pipeline, [stream(1)])
    second = publish(run, pipeline, [stream(2)], map_index=1)
    plan = planned(run, pipeline, first, second)
    [batch] = batches_of(run, plan)
    sources = [plan.generations.index(generation) for generation in (first, second)]
    record_outcome(run, plan, batch, entries=[failed("m-0"), failed("m-1")], sources=sources)

    settlements = {
        generation: build_settlement(run, generation, pipeline, [plan], final=False)[0]
        for generation in (first, second)
    }

    assert verdicts(settlements[first]) == {"m-0": "dead_letter"}
    assert verdicts(settlements[second]) == {"m-1": "dead_letter"}


def test_entry_of_a_shared_batch_must_name_its_generation(tmp_path):
    run, pipeline = open_run(tmp_path), pipeline_with()
    first = publish(run, pipeline, [stream(1)])
    second = publish(run, pipeline, [stream(2)], map_index=1)
    plan = planned(run, pipeline, first, second)
    record_outcome(run, plan, batches_of(run, plan)[0], entries=[failed("m-1")])

    with pytest.raises(StagingDamaged, match="'m-1' names no generation"):
        build_settlement(run, second, pipeline, [plan], final=False)


def test_republished_messages_carry_their_body(tmp_path):
    run, pipeline = open_run(tmp_path), pipeline_with(Republishing(on_success="noop"))
    delivery = Delivery(payload=b"body", properties="{}")
    generation = publish(run, pipeline, [[message(0, batcher="b", delivery=delivery)]])
    plan = planned(run, pipeline, generation)
    record_outcome(run, plan, batches_of(run, plan)[0])
    settlement, _, _ = build_settlement(run, generation, pipeline, [plan], final=False)
    [entry] = settlement.entries()
    assert (entry.payload, entry.properties) == (b"body", "{}")


def test_newest_plan_of_a_generation_decides(tmp_path):
    # Given a batcher that was cleared together with one of two process tasks
    clocked = open_run(tmp_path)
    pipeline = pipeline_with()
    kept = publish(clocked, pipeline, [stream(3)])
    void = publish(clocked, pipeline, [stream(3, 10)], map_index=1)
    planned(clocked, pipeline, kept, void)
    clocked.clock.sleep(5)
    again = publish(clocked, pipeline, [stream(3, 20)], map_index=1)
    newer = planned(clocked, pipeline, kept, again)
    assert Recorded(clocked).deciding(pipeline.batchers, kept) == [newer]
    assert Recorded(clocked).deciding(pipeline.batchers, "nowhere") == []


# --------------------------------------------------------------------------------------------------
# The journal
# --------------------------------------------------------------------------------------------------


def ready(tmp_path: Path) -> tuple[StagedRun, Broadway, str, BatchPlan]:
    run, pipeline = open_run(tmp_path), pipeline_with()
    generation = publish(run, pipeline, [stream(3)])
    plan = planned(run, pipeline, generation)
    record_outcome(run, plan, batches_of(run, plan)[0], entries=[failed("m-1")])
    return run, pipeline, generation, plan


def settle(
    run: StagedRun, pipeline: Broadway, generation: str, plan: BatchPlan, custodian: FakeCustodian
) -> SettleReport:
    built, _, progress = build_settlement(run, generation, pipeline, [plan], final=True)
    return settle_generation(run, run.generation(generation), custodian, built, progress=progress)


def test_settlement_is_journalled_and_unlisted(tmp_path):
    run, pipeline, generation, plan = ready(tmp_path)
    custodian = FakeCustodian({generation: ["m-0", "m-1", "m-2"]})
    report = settle(run, pipeline, generation, plan, custodian)
    assert report == SettleReport(acked=2, dead_lettered=1)
    journal = settled_journal(run, generation)
    assert journal is not None
    assert (journal.report, journal.received, journal.by) == (report, 3, host_name())
    assert run.state(generation) == "settled"
    assert list(iter_unsettled(run.store, "Pipeline", "dag")) == []

    # Settling again returns the same report without the broker
    assert settle(run, pipeline, generation, plan, custodian) == report
    assert custodian.calls == 1


def test_failed_broker_leaves_the_generation_to_the_next_settlement(tmp_path):
    run, pipeline, generation, plan = ready(tmp_path)
    custodian = FakeCustodian({generation: ["m-0", "m-1", "m-2"]})

    custodian.before = mock.Mock(side_effect=ProducerUnavailable("away"))
    with pytest.raises(ProducerUnavailable):
        settle(run, pipeline, generation, plan, custodian)
    assert run.state(generation) == "settling"
    [(_, record)] = iter_unsettled(run.store, "Pipeline", "dag")
    assert record.state == "settling"

    custodian.before = lambda: None
    assert settle(run, pipeline, generation, plan, custodian).total == 3


# --------------------------------------------------------------------------------------------------
# Executions apart
# --------------------------------------------------------------------------------------------------


def test_outcome_counts_only_for_its_own_execution(tmp_path):
    # Given a batch with an outcome, whose messages went back (its process task was cleared) and
    # were received again
    run, pipeline = open_run(tmp_path), pipeline_with()
    first = publish(run, pipeline, [stream(3)])
    before = planned(run, pipeline, first)
    record_outcome(run, before, batches_of(run, before)[0], entries=[failed("m-1")])
    custodian = FakeCustodian({first: ["m-0", "m-1", "m-2"]})
    settle_generation(run, run.generation(first), custodian, Settlement(rest=RELEASE))
    second = publish(run, pipeline, [stream(3)])

    # When they are batched anew, into the same batch
    after = planned(run, pipeline, second)
    assert [b.batch_id for b in batches_of(run, after)] == [
        b.batch_id for b in batches_of(run, before)
    ]

    # Then it has no outcome yet: it was not handled for this execution
    assert [outcome for _, outcome in Recorded(run).outcomes(after)] == [None]
    settlement, complete, _ = build_settlement(run, second, pipeline, [after], final=False)
    assert not complete
    assert (settlement.rest, verdicts(settlement)) == (RELEASE, {})


def test_failure_next_to_another_execution_is_no_success_without_it(tmp_path):
    # Given batches of two producers, of which the second's has an outcome with a failure in it
    run, pipeline = open_run(tmp_path), pipeline_of(b=Batcher(batch_size=3))
    gone = publish(run, pipeline, [[m.put_batch_key("a") for m in stream(3)]])
    kept = publish(run, pipeline, [[m.put_batch_key("b") for m in stream(3, 3)]], map_index=1)
    both = planned(run, pipeline, gone, kept)
    second = batches_of(run, both)[1]
    assert list(second.sources) == [kept]
    record_outcome(run, both, second, entries=[failed("m-4")], sources=[1])

    # When the first producer's task is cleared and the batcher has only the second's messages
    alone = planned(run, pipeline, kept)
    assert batches_of(run, alone)[0].batch_id == second.batch_id
    settlement, _, _ = build_settlement(run, kept, pipeline, [alone], final=True)

    # Then nothing acks what failed
    assert verdicts(settlement).get("m-4", settlement.rest.action.value) != "ack"
