"""A user: trains on its own rows from the server's model and sends back a clipped delta."""

from flwr.app import Context

from mirrordp.integrations import flower
from private_app.task import PARAMS, draw, loss_fn


def load(context: Context):
    """The rows of this node's user, which nobody else can read."""
    return draw(20, seed=1_000 + int(context.node_config["partition-id"]))


app = flower.client_app(flower.local_sgd(loss_fn, learning_rate=0.5), load, PARAMS)
