"""What the two ways to a norm cost: a model from sizes alone, by which each parameter's is chosen.

Both ways take the operations of an ordinary backward pass, Σ_t L_t ⊗ R_t for all examples. Beyond
that, with B examples, T positions, G groups, and K x N entries in a group:

    product     writes each example's gradient and reads it twice, for its norm and for the sum:
                3·B·G·K·N numbers of traffic, B·G·K·N of them in memory
    gram        2·B·G·T²·(K + N) operations; the sums of blocks of b examples are written and read
                once, and inputs and cotangents are read or written P times (lengths, rounding,
                scaling): 2·(B/b)·G·K·N + P·B·G·T·(K + N) numbers of traffic; cotangents wait for
                the clip factors, B·G·T·N numbers in memory

Machines differ in how many operations they do while a byte is moved. The model does not predict a
time to the percent, but which of the two is cheaper, and by about how much.
"""

from typing import NamedTuple

import jax


class Machine(NamedTuple):
    """A kind of device.

    Attributes:
        traffic: bytes that are read or written in a second.
        operations: multiplications and additions of Gram matrices in a second.
        passes: P.
    """

    traffic: float
    operations: float
    passes: int


MACHINES = {
    "cpu": Machine(traffic=1e9, operations=6e9, passes=2),
    "gpu": Machine(traffic=4.5e12, operations=2e14, passes=12),
    "tpu": Machine(traffic=2e12, operations=3e13, passes=4),
}
"""Two cores with float64 products, an H200 with products of 16 bits, a TPU with float32."""


FEW = 16
"""XLA sums up to so many gradients by a program that is slow if they have 16 bits."""


class Task(NamedTuple):
    """The sizes of a parameter's gradients, of all its uses together.

    Attributes:
        examples: B, of a microbatch.
        positions: T.
        left: K; a one-hot side counts as one entry in Gram matrices (`picked`).
        right: N.
        groups: G.
        inputs: numbers of the layer's input per position: K, and fewer where patches overlap.
        block: b, the examples of a block.
        width: bytes of a number of the gradient.
        picked: whether L is one-hot, so that G_i is mostly zeros.
        short: whether gradients are formed with 11 bits (see `_short`).
    """

    examples: int
    positions: int
    left: int
    right: int
    groups: int
    inputs: int
    block: int
    width: int
    picked: bool = False
    short: bool = False

    @property
    def entries(self) -> int:
        """The number of entries of one example's gradient."""
        return self.groups * self.left * self.right


class Cost(NamedTuple):
    """Seconds beyond an ordinary step, and bytes that are held until the clip factors are known."""

    seconds: float
    memory: int


def product_cost(task: Task, machine: Machine) -> Cost:
    """Returns the cost of forming each example's gradient."""
    memory = (2 if task.short else task.width) * task.examples * task.entries
    # Patches come in pieces, and their products are put together afterwards.
    passes = 3 if task.inputs >= task.left else 5
    seconds = passes * memory / machine.traffic
    if task.short:
        # Programs read numbers of 16 bits at two thirds of the speed, measured in bytes.
        seconds *= 1.5
        # Inputs and cotangents are read for their largest entry, read again and written in float16;
        # then the products take half the time that an ordinary step needs for them.
        inputs = task.groups * task.positions * (task.inputs + task.right)
        seconds += task.examples * 10 * inputs / machine.traffic
        seconds -= task.examples * task.positions * task.entries / machine.operations
    return Cost(seconds, memory)


def prefers_short(task: Task, machine: Machine, matters: bool) -> bool:
    """Returns whether forming gradients with 11 bits is cheaper than with all.

    `matters` says whether their memory does, however few the examples are.
    """
    if task.examples <= FEW and not matters:
        return False
    long, short = (product_cost(task._replace(short=value), machine) for value in (False, True))
    return short.seconds < long.seconds


def price(cost: Cost, machine: Machine) -> float:
    """Returns seconds, plus those that moving the held memory twice would take.

    So a path that is a little slower but holds much less is preferred.
    """
    return cost.seconds + 2 * cost.memory / machine.traffic


def gram_cost(task: Task, machine: Machine) -> Cost:
    """Returns the cost of Gram matrices and of a sum in blocks."""
    examples, positions = task.examples * task.groups, task.positions
    left = 1 if task.picked else task.inputs
    operations = 2 * examples * positions**2 * (left + task.right)
    blocks = 1 if task.picked else -(-task.examples // task.block)
    # Sums of blocks are float32, whatever the model's own type; two Gram matrices in float64.
    moved = 2 * 4 * blocks * task.entries + 4 * 8 * examples * positions**2
    moved += machine.passes * task.width * examples * positions * (left + task.right)
    memory = examples * positions * (task.width * task.right + 16 * positions)
    return Cost(operations / machine.operations + moved / machine.traffic, memory)


def machine() -> Machine:
    """Returns the kind of device that programs run on by default."""
    return MACHINES.get(jax.default_backend(), MACHINES["gpu"])
