"""Private training on examples.

One step of the paper's first-order form, with everything private inside one mechanism:

    s = Σ_{i ∈ batch} clip(∇ℓ(θ; d_i), C)        reads private data, one example at a time
    g = (s + noise) / B                           the release; the rest is post-processing
    u = α_t g + (1 − α_t) ∇Ψ(θ)                   mixes in the public gradient
    θ ← θ + optimizer(u)
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mirrordp import _validate
from mirrordp.data import (
    Gather,
    Overlap,
    PrivateData,
    PublicData,
    excluded_rows,
    have_same_structure,
    read_rows,
    require_private,
    require_public,
)
from mirrordp.privacy import _isolation
from mirrordp.privacy._convolutions import where_faster
from mirrordp.privacy.charts import CHARTED, Chart, charted_loss, charted_params
from mirrordp.privacy.clipping import ClippedGrad, example_key, example_of, value_and_grad_program
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.sums import ExactSum
from mirrordp.privacy.trainable import Trainable
from mirrordp.training.step import (
    PrivateSum,
    PublicGradient,
    StepInfo,
    Unprivatized,
    check_loss,
    check_options,
    check_turn,
    select,
    updated,
    warn_of_unused,
)
from mirrordp.types import Batch, LossFn, Params, PyTree
from mirrordp.updates.averages import Average
from mirrordp.updates.public import public_grad


class TrainState(NamedTuple):
    """What the next step needs. Anyone who holds `noise_state` can subtract the noise.

    `chart` holds the arrays of the step's chart, which come from public data.
    """

    step: jax.Array
    params: Params
    opt_state: PyTree
    noise_state: PyTree
    average: Params | None
    chart: PyTree = None


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """One training step on examples: a value, so that equal steps compile once.

    `mirrordp.train(step, params, private, public)` takes many steps per compiled call. For a loop
    of your own, begin with `state = step.init(params, key)` and call
    `state, info = step(state, batch, is_padding, public, alpha=..., keys=...)` for each batch that
    `mechanism.batches` draws.

    Args:
        loss_fn: `loss_fn(params, example) -> scalar`, a function of *one* example; optionally with
            a third argument, a random key, for dropout or augmentation.
        mechanism: decides sampling, clipping, noise and cost.
        optimizer: any optax transformation. It receives the mixed gradient, and the public gradient
            as the extra argument `public_grad`.
        public_loss_fn: ℓ_pub, if it differs from `loss_fn`; public rows may then have another
            structure.
        public_batch_size: the number of public rows per step, drawn at random with replacement,
            where the gradient of all rows would take too long; None takes all of them. It costs no
            privacy.
        scale_noise: True for α(g + b), the paper; False for αg + b, the authors' federated code.
        noisy_clip_norm: clips the released gradient to this norm once more, as the paper does for
            images.
        automatic_clip: scales each example's gradient g by C / (‖g‖ + C), automatic clipping, in
            place of min(1, C / ‖g‖). ε is the same. With a C far below the norms of gradients,
            all count alike, and only the product of C and the learning rate matters.
        average: `UniformAverage()` or `ExponentialAverage(decay)` of the iterates, kept in
            `state.average`; None keeps none.
        trainable: a tree of booleans over the parameters, or a prefix of one; the rest is frozen.
        chart: coordinates in which gradients are clipped, made of public data; see
            `mirrordp.updates.before_clip`. It does not change ε. None clips gradients themselves.
        microbatch_size: how many examples are taken at a time, at most; by default as many as fit
            into the device's memory.
        show_unprivatized: fills `info.unprivatized` with the batch's loss, clip fraction and size,
            which are not covered by the guarantee.
    """

    loss_fn: LossFn
    mechanism: Mechanism
    optimizer: optax.GradientTransformation
    _: dataclasses.KW_ONLY
    public_loss_fn: LossFn | None = None
    public_batch_size: int | None = None
    scale_noise: bool = True
    noisy_clip_norm: float | None = None
    automatic_clip: bool = False
    average: Average | None = None
    trainable: Any = None
    chart: Chart | None = None
    microbatch_size: int | None = None
    show_unprivatized: bool = False

    steps_per_call: ClassVar[int] = 50
    branches: ClassVar[bool] = False

    def __post_init__(self):
        _validate.make_plain(self)
        object.__setattr__(self, "trainable", Trainable.of(self.trainable))
        check_options(self, "Use optax.sgd(...), for example.")
        if self.chart is not None:
            _validate.instance_of(
                Chart, "Use mirrordp.updates.recentred(), for example.", chart=self.chart
            )
        if self.public_batch_size is not None:
            _validate.positive_integer(public_batch_size=self.public_batch_size)
        if self.noisy_clip_norm is not None:
            _validate.positive(noisy_clip_norm=self.noisy_clip_norm)
        if self.microbatch_size is not None:
            _validate.positive_integer(microbatch_size=self.microbatch_size)

    @property
    def clipped_grad(self) -> ClippedGrad:
        """The clipped sum of the private loss, without a chart."""
        return self._clipped_grad(where_faster(self.loss_fn), trainable=self.trainable)

    def _clipped_grad(self, loss_fn: LossFn, **options: Any) -> ClippedGrad:
        return self.mechanism.clipped_grad(
            loss_fn,
            microbatch_size=self.microbatch_size,
            automatic=self.automatic_clip,
            **options,
        )

    def _sum_of(self, state: TrainState) -> tuple[ClippedGrad, Params]:
        """Returns the clipped sum that a step takes, and the parameters that it is called with."""
        chart, loss_fn = self.chart, where_faster(self.loss_fn)
        if chart is None:
            return self.clipped_grad, state.params
        if chart.turns is not None:
            turns = chart.turns(state.chart)
            turned = self._clipped_grad(loss_fn, trainable=self.trainable, turns=turns)
            return turned, state.params
        part = self.trainable.part(state.params)
        charted = self._clipped_grad(
            charted_loss(chart, loss_fn, self.trainable),
            trainable=CHARTED,
            groups=None if chart.groups is None else chart.groups(part),
        )
        return charted, charted_params(chart, state.params, state.chart, self.trainable)

    def _zeros(self, params: Params) -> PyTree:
        """Returns the clipped sum over an empty batch."""
        if self.chart is None:
            return self.trainable.zero_sum(params)
        return self.chart.like(self.trainable.part(params))

    @property
    def prepares(self) -> bool:
        """Whether a step needs the public gradient before it reads private rows."""
        return self.chart is not None and self.chart.prepare is not None

    def prepare(self, state: TrainState, public_gradient: PublicGradient) -> TrainState:
        """Returns the state with the chart of this step."""
        if self.chart is None or self.chart.prepare is None:
            return state
        return state._replace(chart=self.chart.prepare(state.chart, public_gradient.grad))

    def check(self, params: Params, private: PrivateData, public: PublicData | None) -> None:
        """Raises for data of the wrong kind and for a loss that does not fit; reads no row.

        The gradient is read as a program before it runs: one that could see other examples is
        refused.
        """
        require_private(private)
        check_loss("loss_fn", self.loss_fn, params, private.arrays)
        if public is not None:
            require_public(public)
        self.trainable.check(params)
        traced = value_and_grad_program(
            self.loss_fn, params, self.trainable, example_of(private.arrays), example_key()
        )
        _isolation.check("the loss function", traced)
        warn_of_unused(traced, self.trainable.part(params))
        if self.chart is not None:
            self._check_chart(self.chart, params, example_of(private.arrays))

    def _check_chart(self, chart: Chart, params: Params, example: PyTree) -> None:
        """Traces the sum of a step, so that what does not fit fails before it is charged."""
        kept = chart.init(self.trainable.part(params))

        def released(params: Params, kept: Any, *rows: Any) -> PyTree:
            state = TrainState(None, params, None, None, None, kept)  # pyright: ignore
            total = self.zero_sum(state) + self.private_sum(state, *rows)
            return chart.release(kept, self.mechanism.mean(total.total.floats()))

        batch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), example
        )
        keys = jax.random.split(example_key(), 2)
        found = jax.eval_shape(released, params, kept, batch, np.zeros(2, bool), keys)
        expected = self.trainable.zero_sum(params)
        if jax.tree.map(jnp.shape, found) != jax.tree.map(jnp.shape, expected):
            raise ValueError(
                "a chart's release must have the shapes of the trained parameters, got "
                f"{jax.tree.map(jnp.shape, found)!s:.300}."
            )

    def fitted(self, params: Params, private: PrivateData, *, gather: Gather | None = None) -> Self:
        """Returns the step itself: `microbatch_size` alone decides what is in memory."""
        del params, private, gather
        return self

    def excluded(
        self,
        private: PrivateData,
        public: PublicData | None,
        overlap: Overlap,
        *,
        gather: Gather | None = None,
    ) -> np.ndarray:
        """Returns which private rows equal a public row and are left out.

        Rows of another structure, which `public_loss_fn` allows, are not compared.
        """
        if public is None or not (
            self.public_loss_fn is None or have_same_structure(private, public)
        ):
            return np.zeros(len(private), bool)
        return excluded_rows(private, public, overlap, gather=gather)

    def records(self, data: PrivateData | PublicData) -> Batch:
        """Returns the rows as a tree of arrays."""
        return data.arrays

    @property
    def pass_size(self) -> int:
        """How many rows one pass computes: nearly always all rows of a step."""
        return self.mechanism.sampling.capacity

    def ordered(self, batch: np.ndarray, private: PrivateData) -> np.ndarray:
        """Returns the row numbers of a batch as they were drawn."""
        del private
        return batch

    def part(self, records: Batch, numbers: np.ndarray) -> Batch:
        """Returns the rows of these numbers, on the host."""
        return self.take(records, numbers)

    def take(self, records: Batch, numbers: Any) -> Batch:
        """Returns the rows of these numbers, on the host or on the device."""
        if isinstance(numbers, np.ndarray):
            return read_rows(records, numbers.clip(0))
        return jax.tree.map(lambda leaf: leaf[numbers.clip(0)], records)

    def init(self, params: Params, key: jax.Array) -> TrainState:
        """Returns the state before the first step; `key` seeds the noise and must be secret."""
        part = self.trainable.part(params)
        return TrainState(
            step=jnp.zeros([], jnp.int32),
            params=params,
            opt_state=self.optimizer.init(part),
            noise_state=self.mechanism.init_noise(key, self._zeros(params)),
            average=None if self.average is None else params,
            chart=None if self.chart is None else self.chart.init(part),
        )

    def zero_sum(self, state: TrainState) -> PrivateSum:
        """Returns what `private_sum` gives for an empty batch."""
        zeros = self._zeros(state.params)
        return PrivateSum(ExactSum.zero(zeros, self.mechanism.l2_clip_norm), Unprivatized.zero())

    def __call__(
        self,
        state: TrainState,
        batch: Batch,
        is_padding: jax.Array,
        public: Batch | None = None,
        *,
        alpha: jax.typing.ArrayLike = 1.0,
        keys: jax.Array | None = None,
        public_key: jax.Array | None = None,
    ) -> tuple[TrainState, StepInfo]:
        """Takes one whole step on one padded batch; without public rows α must be left at 1.

        With correlated noise every step is a private one: α = 0 is refused, or, where a compiled
        program computes α, counts as a step of `mechanism.epsilon` like any other.
        """
        check_turn(self.mechanism, alpha)
        if public is None and not (isinstance(alpha, int | float) and alpha == 1):
            raise ValueError(
                f"alpha={alpha!r} mixes in a public gradient, but no public rows were given. Pass "
                "public=arrays, or leave alpha at 1 for DP-SGD."
            )
        public_gradient = None
        if public is not None:
            key = jax.random.key(0) if public_key is None else public_key
            public_gradient = self.public_grad(state, public, key)
        if self.prepares:
            if public_gradient is None:
                raise ValueError("the chart needs public rows, got none. Pass public=arrays.")
            state = self.prepare(state, public_gradient)
        total = self.private_sum(state, batch, is_padding, keys)
        return self.finish(state, total, public_gradient, alpha)

    def private_sum(
        self, state: TrainState, batch: Batch, is_padding: jax.Array, keys: jax.Array | None
    ) -> PrivateSum:
        """Returns the clipped sum over one pass of examples."""
        clipped_grad, params = self._sum_of(state)
        clipped_sum, stats = clipped_grad.exact_sum(
            params, batch, is_padding, keys=keys if clipped_grad.takes_key else None
        )
        if self.chart is not None and self.chart.turns is None:
            # In the form of φ: the rest of a charted loss's parameters is frozen.
            high, low = clipped_sum.high[0], clipped_sum.low[0]
            clipped_sum = dataclasses.replace(clipped_sum, high=high, low=low)
        if not self.show_unprivatized:
            return PrivateSum(clipped_sum, Unprivatized.zero())
        is_clipped = stats.unprivatized_norms > self.mechanism.l2_clip_norm
        shown = Unprivatized.sums(stats.unprivatized_losses, is_clipped, is_padding)
        return PrivateSum(clipped_sum, shown)

    def public_grad(self, state: TrainState, public: Batch, key: jax.Array) -> PublicGradient:
        """Returns ∇Ψ(θ) and Ψ(θ) on all public rows or on a random batch of them."""
        gradient = public_grad(
            self.public_loss_fn or self.loss_fn,
            batch_size=self.public_batch_size,
            trainable=self.trainable,
        )
        loss, grad = gradient(state.params, public, key)
        return PublicGradient(grad, loss)

    def finish(
        self,
        state: TrainState,
        total: PrivateSum,
        public_gradient: PublicGradient | None,
        alpha: jax.typing.ArrayLike,
    ) -> tuple[TrainState, StepInfo]:
        """Adds the noise to a whole step's sum and takes the step; at α = 0, without either."""
        alpha = jnp.asarray(alpha, jnp.float32)
        # A public constant of at most 1: the weighted sum has sensitivity at most C.
        weight = None if self.scale_noise else jnp.clip(alpha, 0, 1)
        noisy_sum, noise_state = self.mechanism.add_noise(
            total.total, state.noise_state, weight=weight
        )
        # Where α = 0 nothing is released.
        is_private = alpha > 0
        mean = self.mechanism.mean(noisy_sum)
        private_grad = select(is_private, mean, jax.tree.map(jnp.zeros_like, mean))
        if self.mechanism.noise.num_bands == 1:
            # Nor is noise used up. Correlated noise is: its steps are those of the sampling, which
            # keeps the steps of one record as many bands apart.
            noise_state = select(is_private, noise_state, state.noise_state)
        if self.chart is not None:
            # A chart may add what is public.
            released = self.chart.release(state.chart, private_grad)
            nothing = self.trainable.zero_sum(state.params)
            private_grad = select(is_private, released, nothing)
        noisy_grad_norm = optax.tree.norm(private_grad)
        if self.noisy_clip_norm is not None:
            clip = optax.clip_by_global_norm(self.noisy_clip_norm)
            private_grad, _ = clip.update(private_grad, clip.init(private_grad))
        params, opt_state, average = updated(self, state, private_grad, public_gradient, alpha)
        public_loss = jnp.full([], jnp.nan) if public_gradient is None else public_gradient.loss
        info = StepInfo(
            noisy_grad_norm=noisy_grad_norm.astype(jnp.float32),
            public_loss=public_loss.astype(jnp.float32),
            clip_norm=jnp.asarray(self.mechanism.l2_clip_norm, jnp.float32),
            unprivatized=total.unprivatized.per_record(),
        )
        state = TrainState(state.step + 1, params, opt_state, noise_state, average, state.chart)
        return state, info
