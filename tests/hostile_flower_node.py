"""Nodes that speak Flower's protocol and lie: `python hostile_flower_node.py HOST:PORT KIND...`.

Each registers with the SuperLink as any SuperNode would. No app of the server's runs on it: it
answers every message with what its kind says, until it is killed.
"""

import hashlib
import sys
import threading
import time

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_connection import http_request_response


def masked(array, ticket, name):
    """The array as an honest node would send it."""
    stream = hashlib.shake_128(f"mirrordp {ticket} {name}".encode()).digest(len(array.data))
    data = bytes(one ^ other for one, other in zip(array.data, stream, strict=True))
    return Array(array.dtype, array.shape, array.stype, data)


def tampered(content, kind, number=0):
    """The model that was sent, as a delta that no honest user would send."""
    change = {
        "huge": lambda array: np.full_like(array, 1e30),
        "nan": lambda array: np.full_like(array, np.nan),
        "shape": lambda array: np.zeros((*array.shape, 2), array.dtype),
        # Twice, and not the same: whichever arrives first is the only one that may count.
        "repeated": lambda array: np.full_like(array, 1 + number),
        # From the second on announced and never uploaded: who waits for it waits for minutes.
        "stalled": np.zeros_like,
        # Itself in order, but see `junk`.
        "junk": np.zeros_like,
    }[kind]
    arrays = content.array_records["arrays"]
    ticket = content.config_records["config"]["ticket"]
    changed = {name: Array(change(array.numpy())) for name, array in arrays.items()}
    return RecordDict(
        {
            "arrays": ArrayRecord({k: masked(v, ticket, k) for k, v in changed.items()}),
            "config": ConfigRecord({"ticket": ticket}),
        }
    )


def junk(run, number):
    """A message that answers nobody and claims to come from the SuperLink, to the SuperLink.

    Flower 1.41 takes it, and hands it to the server app as if it were a reply to whatever the
    server asks for next.
    """
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, 1, 1
    content = RecordDict({"config": ConfigRecord({"number": number})})
    return Message(content, dst_node_id=1, message_type="train")


def node(address, kind):
    with http_request_response(address, insecure=True) as connection:
        _, receive, send, _, _, pull_object, push_object, confirm = connection
        print(f"{kind}: connected", flush=True)
        answered = 0
        while True:
            received = receive()
            if received is None:
                time.sleep(0.5)
                continue
            message, tree = received
            run = message.metadata.run_id
            names = [part.object_id for part in iterate_object_tree(tree)]
            contents = pull_objects(names, lambda name, run=run: pull_object(run, name))
            name = message.metadata.message_id
            question = inflate_object_from_contents(name, contents)
            question.metadata.__dict__["_message_id"] = name
            confirm(run, name)
            replies = [
                Message(tampered(question.content, kind, number), reply_to=question)
                for number in range(3 if kind == "repeated" else 1)
            ]
            extra = [junk(run, 100 * answered + number) for number in range(20)]
            for number, reply in enumerate((extra if kind == "junk" else []) + replies):
                reply.metadata.__dict__["_message_id"] = reply.object_id
                objects = get_all_nested_objects(reply)
                wanted, session = send(reply, get_object_tree(reply), 0.0)
                for part in () if kind == "stalled" and answered else wanted:
                    push_object(run, session, part, objects[part].deflate())
                print(f"{kind}: sent {number}, {len(wanted)} objects taken", flush=True)
            answered += 1


if __name__ == "__main__":
    nodes = [threading.Thread(target=node, args=(sys.argv[1], name)) for name in sys.argv[2:]]
    for thread in nodes:
        thread.start()
    for thread in nodes:
        thread.join()
