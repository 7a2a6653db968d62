"""Refusals of Pub/Sub as gRPC errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

__all__ = ["Refused", "of_ids"]


class Refused(Exception):
    """An error as an answer.

    :param code: gRPC's, e.g. ``"UNAVAILABLE"``.
    :param metadata: Of an ``ErrorInfo``: the refusal of each ack id.
    :param done: Whether the request is carried out nevertheless: its answer alone is lost.
    """

    def __init__(
        self,
        code: str,
        text: str = "",
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        done: bool = False,
    ) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.done = done

    def status(self) -> Any:
        """Returns the status with which a servicer aborts."""
        from google.protobuf.any_pb2 import Any as Packed
        from google.rpc.error_details_pb2 import ErrorInfo
        from google.rpc.status_pb2 import Status
        from grpc_status import rpc_status

        code = grpc.StatusCode[self.code]
        result = Status(code=code.value[0], message=self.text)
        if self.reason:
            info = ErrorInfo(
                reason=self.reason, domain="pubsub.googleapis.com", metadata=self.metadata
            )
            packed = Packed()
            packed.Pack(info)
            result.details.append(packed)
        return rpc_status.to_status(result)


def of_ids(found: Mapping[str, str]) -> Refused:
    """Returns the answer of an exactly-once subscription that refused some ids."""
    return Refused(
        "INVALID_ARGUMENT",
        "Some acknowledgement ids in the request were invalid. This could be because the"
        " acknowledgement ids have expired or the acknowledgement ids were malformed.",
        reason="EXACTLY_ONCE_ACKID_FAILURE",
        metadata=found,
    )
