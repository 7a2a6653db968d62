"""What only a cluster's administration tells; nothing but checks depends on it.

Each answer wants a right of its own, and not every broker knows every question: then nobody knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, Final

log = logging.getLogger(__name__)

#: Seconds that an answer may take.
_TIMEOUT: Final = 5.0


class Admin:
    """Asks with a client of its own, made when something is first asked.

    :param kafka: The client's module.
    :param make: Makes the ``AdminClient``.
    """

    def __init__(self, kafka: Any, make: Callable[[], Any]) -> None:
        self._kafka = kafka
        self._make = make
        self._made: Any = None  # it must outlive what it promises
        self._answers_at_all = False

    def topic_ids(self, topics: Collection[str]) -> dict[str, str]:
        """The id of each topic that has one: another, once the topic is made anew."""
        asked = self._kafka.TopicCollection(list(topics))
        found = self._answers(lambda admin: admin.describe_topics(asked, request_timeout=_TIMEOUT))
        ids = {topic: str(each.topic_id or "") for topic, each in found.items()}
        return {topic: each for topic, each in ids.items() if each.strip("A=-0")}

    def cleanup_policies(self, topics: Collection[str]) -> dict[str, str]:
        """What becomes of old messages, by topic: ``"delete"``, ``"compact"``, or both."""
        from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]

        asked = [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in topics]
        found = self._answers(lambda admin: admin.describe_configs(asked, request_timeout=_TIMEOUT))
        policies = {each.name: found[each].get("cleanup.policy") for each in found}
        return {topic: str(each.value) for topic, each in policies.items() if each is not None}

    def members(self, group: str) -> list[str] | None:
        """Who consumes as a member of a group, by client and host; ``None``: nobody says."""
        found = self._answers(
            lambda admin: admin.describe_consumer_groups([group], request_timeout=_TIMEOUT)
        )
        if group not in found:
            return None
        return sorted(f"{member.client_id} at {member.host}" for member in found[group].members)

    def _answers(self, ask: Callable[[Any], dict[Any, Any]]) -> dict[Any, Any]:
        """What is answered; without what is not."""
        try:
            if self._made is None:
                self._made = self._make()
                about = self._made.list_topics(timeout=_TIMEOUT)
                self._answers_at_all = about.controller_id in about.brokers
            if not self._answers_at_all:
                return {}
            asked = ask(self._made)
        except (self._kafka.KafkaException, ImportError, AttributeError, ValueError) as error:
            log.debug("The cluster's administration cannot be asked: %s", error)
            return {}
        found = {}
        for key, each in asked.items():
            try:
                found[key] = each.result(_TIMEOUT + 1)
            except (self._kafka.KafkaException, TimeoutError) as error:
                log.debug("%s is not known: %s", key, error)
        return found
