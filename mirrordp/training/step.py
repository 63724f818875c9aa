"""What a step of training is, for examples and for users alike.

A `Step` says how one step is computed: the clipped sum over private records, the public gradient,
and what follows the noise. `TrainStep` implements it for examples and `FederatedStep` for users.
The engine (`mirrordp.training.engine`) drives any of them and knows nothing of examples or users.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend import core

from mirrordp import _validate
from mirrordp._warn import warn
from mirrordp.data import Gather, Overlap, PrivateClients, PrivateData, PublicClients, PublicData
from mirrordp.privacy.clipping import example_key, example_of, takes_key, with_key
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.sums import ExactSum
from mirrordp.privacy.trainable import Trainable
from mirrordp.types import Batch, LossFn, Params, PyTree
from mirrordp.updates.averages import Average, ExponentialAverage, UniformAverage
from mirrordp.updates.mixing import mix_gradients

Private = PrivateData | PrivateClients
Public = PublicData | PublicClients


class Unprivatized(NamedTuple):
    """Quantities of the private batch *without* noise, for the operator's eyes only."""

    loss: Any
    clip_fraction: Any
    batch_size: Any

    @classmethod
    def zero(cls) -> "Unprivatized":
        """Returns zeros, for an empty batch or a run that does not show these quantities."""
        return cls(*jnp.zeros([3]))

    @classmethod
    def sums(
        cls, losses: jax.Array, is_clipped: jax.Array, is_padding: jax.Array
    ) -> "Unprivatized":
        """Returns sums over the records of one pass; `per_record` turns a step's into means."""
        real = ~is_padding
        return cls(
            loss=jnp.sum(jnp.where(real, losses, 0.0), dtype=jnp.float32),
            clip_fraction=jnp.sum(real & is_clipped, dtype=jnp.float32),
            batch_size=jnp.sum(real, dtype=jnp.float32),
        )

    def per_record(self) -> "Unprivatized":
        """Returns the loss and the clip fraction divided by the number of records."""
        count = jnp.maximum(self.batch_size, 1)
        return Unprivatized(self.loss / count, self.clip_fraction / count, self.batch_size)


class PrivateSum(NamedTuple):
    """The clipped sum over private records. It is not yet private.

    Attributes:
        total: the sum of the records' clipped contributions.
        unprivatized: sums of the quantities that the operator may see.
    """

    total: ExactSum
    unprivatized: Unprivatized

    def __add__(self, other: "PrivateSum") -> "PrivateSum":  # pyright: ignore[reportIncompatibleMethodOverride]
        unprivatized = jax.tree.map(jnp.add, self.unprivatized, other.unprivatized)
        return PrivateSum(self.total + other.total, unprivatized)


class PublicGradient(NamedTuple):
    """∇Ψ(θ), or what public users give in its place, and the public loss."""

    grad: PyTree
    loss: jax.Array


class StepInfo(NamedTuple):
    """What one step may show. Everything except `unprivatized` follows from released values."""

    noisy_grad_norm: Any
    public_loss: Any
    clip_norm: Any
    unprivatized: Unprivatized

    @classmethod
    def zero(cls) -> "StepInfo":
        """Returns zeros, for a pass that does not finish a step."""
        return cls(jnp.zeros([]), jnp.zeros([]), jnp.zeros([]), Unprivatized.zero())


@dataclasses.dataclass(frozen=True)
class TrainInfo:
    """What may be plotted, with one entry per step of the block that just finished.

    Attributes:
        step: the number of steps done so far.
        num_steps: the number of steps of the whole run.
        charged_steps: how many of them read private data, which are those with α_t > 0;
            `mechanism.epsilon(delta, num_steps=charged_steps)` is what they cost, and
            `RunReport.of(mechanism, delta, info=info)` reports it.
        alpha: α_t.
        noisy_grad_norm: the norm of the released gradient (zero where α_t = 0).
        public_loss: the loss on the public batch; NaN where no public gradient was computed.
        clip_norm: C_t, which moves only with `AdaptiveClip`.
        unprivatized: quantities without noise, if the step shows them, otherwise None. In federated
            training its `batch_size` counts users.
        seeded: whether the run was given a seed and is therefore not for release.
    """

    step: int
    num_steps: int
    charged_steps: int
    alpha: np.ndarray
    noisy_grad_norm: np.ndarray
    public_loss: np.ndarray
    clip_norm: np.ndarray
    unprivatized: Unprivatized | None
    seeded: bool


class State(Protocol):
    """What the next step needs, as a named tuple. `noise_state` is secret."""

    @property
    def step(self) -> jax.Array:
        """The number of steps taken."""
        ...

    @property
    def params(self) -> Params:
        """θ_t."""
        ...

    @property
    def opt_state(self) -> PyTree:
        """The state of the optimiser."""
        ...

    @property
    def noise_state(self) -> PyTree:
        """The state of the noise. Anyone who holds it can subtract the noise."""
        ...

    @property
    def average(self) -> Params | None:
        """The average of the iterates, if the step keeps one."""
        ...

    def _replace(self, **fields: Any) -> Self:
        """Returns a copy with other values."""
        ...


class Step(Protocol):
    """The pure functions of one training step, as a frozen value.

    The engine calls them in this order: `check` and `fitted` before anything is read, `init` once,
    and for each step `private_sum` over one or more passes, `public_grad` and `finish`; where a
    step `prepares`, `public_grad` and `prepare` come first. Everything before the noise, which
    `finish` adds, sees one record at a time.

    Attributes:
        loss_fn: the private loss of one example.
        mechanism: samples, clips, adds noise and accounts.
        optimizer: an optax transformation.
        public_loss_fn: the public loss, if it differs.
        scale_noise: see `mirrordp.mix_public_gradient`.
        average: an average of the iterates to keep, or None.
        trainable: which parameters are trained.
        show_unprivatized: whether the infos show quantities without noise.
        steps_per_call: how many steps lie between two yields unless the caller says otherwise.
        branches: whether the engine skips a pass that has nothing to do by a branch. A branch makes
            the host wait for the device, so it pays only where a pass is long.
    """

    steps_per_call: ClassVar[int]
    branches: ClassVar[bool]

    @property
    def loss_fn(self) -> LossFn: ...  # noqa: D102
    @property
    def mechanism(self) -> Mechanism: ...  # noqa: D102
    @property
    def optimizer(self) -> optax.GradientTransformation: ...  # noqa: D102
    @property
    def public_loss_fn(self) -> LossFn | None: ...  # noqa: D102
    @property
    def scale_noise(self) -> bool: ...  # noqa: D102
    @property
    def average(self) -> Average | None: ...  # noqa: D102
    @property
    def trainable(self) -> Trainable: ...  # noqa: D102
    @property
    def show_unprivatized(self) -> bool: ...  # noqa: D102

    def check(self, params: Params, private: Any, public: Any) -> None:
        """Raises for data of the wrong kind and for a loss that does not fit; reads no row."""
        ...

    def fitted(self, params: Params, private: Any, *, gather: Gather | None = None) -> Self:
        """Returns the step with everything decided that depends on the device's memory.

        With several processes, `gather` gives the values of all, which decide the same.
        """
        ...

    def excluded(
        self, private: Any, public: Any, overlap: Overlap, *, gather: Gather | None = None
    ) -> np.ndarray:
        """Returns which private records are left out because they are public too.

        With several processes, each makes this call for its own records.
        """
        ...

    def records(self, data: Any) -> PyTree:
        """Returns the data as a tree of arrays for the device."""
        ...

    @property
    def pass_size(self) -> int:
        """How many records one pass computes."""
        ...

    def ordered(self, batch: np.ndarray, private: Any) -> np.ndarray:
        """Returns the record numbers of a batch in the order in which they are computed."""
        ...

    def part(self, records: PyTree, numbers: np.ndarray) -> PyTree:
        """Returns the records of these numbers in the form of `records`, on the host."""
        ...

    def take(self, records: PyTree, numbers: Any) -> Batch:
        """Returns the records of these numbers, on the host or on the device."""
        ...

    def init(self, params: Params, key: jax.Array) -> Any:
        """Returns the state before the first step; `key` seeds the noise and must be secret."""
        ...

    def zero_sum(self, state: Any) -> PrivateSum:
        """Returns what `private_sum` gives for an empty batch."""
        ...

    def private_sum(
        self, state: Any, batch: Batch, is_padding: jax.Array, keys: jax.Array | None
    ) -> PrivateSum:
        """Returns the clipped sum over one pass of records."""
        ...

    def public_grad(self, state: Any, public: PyTree, key: jax.Array) -> PublicGradient:
        """Returns the public gradient and the public loss."""
        ...

    @property
    def prepares(self) -> bool:
        """Whether a step needs the public gradient before it reads private records."""
        ...

    def prepare(self, state: Any, public_gradient: PublicGradient) -> Any:
        """Returns the state that this step computes with, if it `prepares`."""
        ...

    def finish(
        self,
        state: Any,
        total: PrivateSum,
        public_gradient: PublicGradient | None,
        alpha: jax.typing.ArrayLike,
    ) -> tuple[Any, StepInfo]:
        """Adds the noise to a whole step's sum and takes the step; at α = 0, without either."""
        ...


def check_options(step: Step, optimizer_advice: str) -> None:
    """Raises for a wrong value of an option that every step has."""
    _validate.instance_of(Mechanism, "Use Mechanism.calibrate(...).", mechanism=step.mechanism)
    _validate.instance_of(optax.GradientTransformation, optimizer_advice, optimizer=step.optimizer)
    if step.average is not None:
        _validate.instance_of((UniformAverage, ExponentialAverage), average=step.average)


def select(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """Returns one of two trees, leaf by leaf; leaves that are the same array are left as they are.

    What a step must not touch is put back by selection where a branch would make the host wait.
    """
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), yes, no)


def check_turn(mechanism: Mechanism, alpha: Any) -> None:
    """Raises for an α of 0 under correlated noise, unless a compiled program computes it."""
    if mechanism.noise.num_bands == 1 or isinstance(alpha, Tracer):
        return
    # Devices read subnormal numbers as zero.
    if not np.all(np.asarray(alpha, np.float32) >= np.finfo(np.float32).tiny):
        raise ValueError(
            f"correlated noise needs every step to be a private one, got alpha={alpha!r}. Keep "
            "alpha above 0, or use GaussianNoise()."
        )


def updated(
    step: Step,
    state: State,
    private_grad: PyTree,
    public_gradient: PublicGradient | None,
    alpha: jax.Array,
) -> tuple[Params, PyTree, Params | None]:
    """Mixes the gradients and applies the optimiser: everything that follows the noise.

    The optimiser receives the mixed gradient, and the public gradient alone as the optax extra
    argument `public_grad`.

    Returns:
        The parameters, the state of the optimiser, and the average of the iterates.
    """
    trainable = step.trainable
    part = trainable.part(state.params)

    def as_params(gradient: PyTree) -> PyTree:
        return jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, part)

    update, extra_args = private_grad, {}
    if public_gradient is not None:
        grad = public_gradient.grad
        update = mix_gradients(private_grad, grad, alpha=alpha, scale_noise=step.scale_noise)
        extra_args = {"public_grad": as_params(grad)}
    optimizer = optax.with_extra_args_support(step.optimizer)
    update, opt_state = optimizer.update(as_params(update), state.opt_state, part, **extra_args)
    part = optax.apply_updates(part, update)
    average = state.average
    if step.average is not None:
        kept = step.average.update(trainable.part(average), part, state.step + 1)
        average = trainable.merge(kept, average)
    return trainable.merge(part, state.params), opt_state, average


def record_keys(key: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns a key per record, bound to the record and not to its place among the others."""
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.maximum(numbers, 0))


def needs_public_grad(step: Step, params: Params, *, has_public: bool) -> bool:
    """Returns whether the optimiser, or what comes before the clip, needs every public gradient.

    An optimiser does if its extra argument `public_grad` is required. With public data, it also
    does if the argument is optional and read.
    """
    if step.prepares:
        return True
    part = step.trainable.part(params)
    optimizer = optax.with_extra_args_support(step.optimizer)

    def update(**extra_args: PyTree) -> PyTree:
        return optimizer.update(part, optimizer.init(part), part, **extra_args)

    try:
        jax.eval_shape(update)
    except TypeError as error:
        if "public_grad" in str(error):
            return True
        raise
    if not has_public:
        return False
    program = jax.make_jaxpr(lambda grad: update(public_grad=grad))(part).jaxpr
    read = {id(atom) for equation in program.eqns for atom in equation.invars}
    read |= {id(atom) for atom in program.outvars}
    return any(id(atom) in read for atom in program.invars)


def check_loss(name: str, loss_fn: LossFn, params: Params, arrays: Batch) -> None:
    """Traces the loss on one example's shape, so that mistakes surface before training."""
    example = example_of(arrays)
    try:
        result = jax.eval_shape(with_key(loss_fn), params, example, example_key())
    except Exception as error:
        # Most often the loss was written for a batch, and JAX's message does not say so.
        shapes = jax.tree.map(lambda leaf: leaf.shape, (params, example))
        error.add_note(
            f"mirrordp called {name}(params, example) for a single example, without a batch axis; "
            "the shapes of params and example were {} and {}.".format(*shapes)
        )
        if takes_key(loss_fn):
            error.add_note(
                f"The third argument of {name} is a random key. If yours is the target, take both "
                "from the example: loss_fn(params, example) with x, y = example['x'], example['y']."
            )
        raise
    if getattr(result, "shape", None) != ():
        raise ValueError(
            f"{name}(params, example) must return one scalar for one example, got "
            f"{jax.tree.map(lambda leaf: leaf.shape, result)}. It sees a single example, without a "
            "batch axis."
        )


def warn_of_unused(traced: core.ClosedJaxpr, part: PyTree) -> None:
    """Warns of trainable parameters in which the loss has no gradient: only noise moves them.

    `stop_gradient` does not freeze a parameter here, and the running averages of a normalisation
    layer do not stay what they are: whatever is in `params` gets noise. A gradient that is zero for
    another reason than a missing dependence is not noticed.

    Args:
        traced: the program of the loss and its gradient.
        part: the trainable parameters.
    """
    sources = {id(out): equation for equation in traced.eqns for out in equation.outvars}

    def is_zero(atom: Any) -> bool:
        if isinstance(atom, core.Literal):
            return bool(np.all(atom.val == 0))
        equation = sources.get(id(atom))
        if equation is None or equation.primitive.name != "broadcast_in_dim":
            return False
        return is_zero(equation.invars[0])

    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(part)]
    unused = [
        f"params{jax.tree_util.keystr(path)}"
        for path, gradient in zip(paths, traced.jaxpr.outvars[1:-1], strict=True)
        if is_zero(gradient)
    ]
    if unused:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        warn(
            f"the loss has no gradient in {', '.join(unused[:5])}{more}: noise alone will move it. "
            "Exclude it with trainable=, or keep it out of params.",
        )


def shown_arrays(info: StepInfo, *, unprivatized: bool) -> dict[str, np.ndarray]:
    """Returns the arrays of the steps' infos by name, as a checkpoint keeps them."""
    found = {name: value for name, value in info._asdict().items() if name != "unprivatized"}
    if unprivatized:
        found |= {f"unprivatized.{k}": v for k, v in info.unprivatized._asdict().items()}
    return found


def info_of_run(
    shown: Mapping[str, np.ndarray],
    run: int,
    *,
    step: int,
    num_steps: int,
    charged_steps: int,
    seeded: bool,
) -> TrainInfo:
    """Returns the info of one run from arrays by name, which have an axis for runs first."""
    names = [f"unprivatized.{name}" for name in Unprivatized._fields]
    own = {name: array[run] for name, array in shown.items()}
    unprivatized = [own.pop(name) for name in names if name in own]
    return TrainInfo(
        step=step,
        num_steps=num_steps,
        charged_steps=charged_steps,
        unprivatized=Unprivatized(*unprivatized) if unprivatized else None,
        seeded=seeded,
        **own,
    )
