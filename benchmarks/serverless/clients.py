"""Many functions in one process that compute nothing: ``python -m benchmarks.serverless.clients COUNT``, an order on stdin.

Each has a connection of its own and speaks the real protocol: two wishes open, an answer of one value to every task. What a
post can do is then not limited by what functions can.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import zmq

from polyhop.serverless import wire
from polyhop.serverless.channel import Channel
from polyhop.serverless.function import Order
from polyhop.serverless.secrets import Entry, KeyPair

__all__ = ["main"]

WISHES = 2
ANSWER = {"y": np.ones((1, 1), np.float32)}


def _dialled(context: zmq.Context[Any], order: Order) -> Channel:
    hello = wire.Hello(order.job, order.function, wire.PROTOCOL, 192, 600_000)
    entry, own = Entry(order.address, order.server_public), KeyPair(order.public, order.secret)
    made = Channel(context, entry, own, hello)
    reason = made.enter(60.0)
    if reason is not None:
        raise RuntimeError(f"{order.function} was not let in: {reason}")
    for _ in range(WISHES):
        made.send(wire.pack(wire.Pull()))
    return made


def main(count: int) -> None:
    """Answer until told to stop."""
    order = Order.from_json(json.loads(sys.stdin.read()))
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, max(count + 64, 1023))
    channels, held = dict[Any, Channel](), dict[Any, tuple[tuple[int, int], ...]]()
    poller = zmq.Poller()
    for number in range(count):
        made = _dialled(context, replace(order, function=f"{order.function}-{number}"))
        channels[made.socket], held[made.socket] = made, ()
        poller.register(made.socket, zmq.POLLIN)
    while held:
        for one, _ in poller.poll():
            channel = channels[one]
            while channel.poll(0):
                header, _ = wire.unpack(channel.receive())
                if isinstance(header, wire.Task):
                    held[one] = tuple({*held[one], (header.key.piece, header.version)})
                    push = wire.Push(header.key, header.lease, (), 0.0, 0.0, {})
                    channel.send(wire.pack(push, ANSWER))
                    channel.send(wire.pack(wire.Pull(held[one])))
                elif isinstance(header, wire.Stop):
                    poller.unregister(one)
                    del held[one]
                    break
    context.destroy(linger=0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
