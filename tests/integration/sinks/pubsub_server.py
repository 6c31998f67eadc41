"""Pub/Sub over gRPC on the loopback, made of the library's own messages, with ways to fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.pubsub_v1 import types

from conquiet.message import Message

SERVICE = "google.pubsub.v1.Publisher"
DROP = "drop"


class PubSubServer:
    """`faults` maps the id of a message to what befalls requests that hold it.

    A status of gRPC, a number of seconds to wait first, or `DROP`: an answer that never comes.
    """

    def __init__(self) -> None:
        self.faults: dict[str, grpc.StatusCode | float | str] = {}
        self.requests: list[Any] = []
        self.arrived: list[tuple[str, Any]] = []
        self.topics = {"projects/shop/topics/orders", "projects/shop/topics/other"}
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        self._released.clear()
        self._server = grpc.server(
            ThreadPoolExecutor(16),
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)],
        )
        handlers = {
            "Publish": grpc.unary_unary_rpc_method_handler(
                self._publish,
                request_deserializer=types.PublishRequest.deserialize,
                response_serializer=types.PublishResponse.serialize,
            ),
            "GetTopic": grpc.unary_unary_rpc_method_handler(
                self._get_topic,
                request_deserializer=types.GetTopicRequest.deserialize,
                response_serializer=types.Topic.serialize,
            ),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        assert self._port
        self._server.start()

    def stop(self) -> None:
        self._released.set()
        self._server.stop(None).wait()

    @contextmanager
    def outage(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()

    @property
    def messages(self) -> list[Message[bytes]]:
        return [_message(topic, message) for topic, message in self.arrived]

    def _publish(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        if request.topic not in self.topics:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no topic {request.topic}")
        keys = {message.ordering_key for message in request.messages}
        if len(keys) > 1:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "several ordering keys")
        for message in request.messages:
            fault = self.faults.get(message.attributes["ce-id"])
            if isinstance(fault, float):
                self._released.wait(fault)
            elif fault == DROP:
                self._released.wait(60)
                context.abort(grpc.StatusCode.UNKNOWN, "dropped")
            elif isinstance(fault, grpc.StatusCode):
                context.abort(fault, "as the test wishes")
        with self._lock:
            self.arrived += [(request.topic, message) for message in request.messages]
            names = [str(len(self.arrived)) for _ in request.messages]
        return types.PublishResponse(message_ids=names)

    def _get_topic(self, request: Any, context: grpc.ServicerContext) -> Any:
        if request.topic not in self.topics:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no topic {request.topic}")
        return types.Topic(name=request.topic)


def _message(topic: str, message: Any) -> Message[bytes]:
    attributes = {
        name.removeprefix("ce-"): value
        for name, value in message.attributes.items()
        if name.startswith("ce-")
    }
    if "Content-Type" in message.attributes:
        attributes["datacontenttype"] = message.attributes["Content-Type"]
    return Message(message.data, attributes, topic=topic.rpartition("/")[2])
