"""How ack ids are divided into requests."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.producers.engine.port import Hidden
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.producers.pubsub.adapter import PubSubBroker
from airflow_broadway.producers.pubsub.limits import MAX_IDS, MAX_REQUEST

portions = PubSubBroker(PubSubProducer(subscription="orders"), ProducerEnv()).requests


def entries(sizes: Iterable[int], seconds: int = 0) -> list[tuple[str, Hidden]]:
    return [(str(n), Hidden("x" * size, seconds)) for n, size in enumerate(sizes)]


def test_request_has_at_most_2500_ids():
    assert [len(request) for request in portions(entries([100] * 6000))] == [2500, 2500, 1000]


def test_request_has_at_most_512_kib_as_sent():
    from google.pubsub_v1.types import AcknowledgeRequest

    name = "projects/a-project-of-thirty-characters/subscriptions/" + "s" * 255
    made = list(portions(entries([300] * 2500)))
    assert len(made) == 2
    for request in made:
        sent = AcknowledgeRequest(subscription=name, ack_ids=[held.receipt for _, held in request])
        assert AcknowledgeRequest.pb(sent).ByteSize() <= MAX_REQUEST


@given(
    st.lists(st.tuples(st.integers(1, 600_000), st.sampled_from([0, 0, 0, 1, 600])), max_size=60)
)
def test_ids_keep_order_and_are_grouped_by_deadline(given):
    sent = [(str(n), Hidden("x" * size, seconds)) for n, (size, seconds) in enumerate(given)]
    made = list(portions(sent))
    for seconds in {item.seconds for _, item in sent}:
        call = [item for request in made for item in request if item[1].seconds == seconds]
        assert call == [item for item in sent if item[1].seconds == seconds]
    for request in made:
        assert len({item.seconds for _, item in request}) == 1
        assert len(request) <= MAX_IDS
        assert len(request) == 1 or sum(len(item.receipt) for _, item in request) < MAX_REQUEST
