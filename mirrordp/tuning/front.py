"""`mirrordp.train`: the loop for a step, or for a loss and (ε, δ) alone."""

from collections.abc import Iterator
from typing import Any, TypeGuard

import jax
import optax

from mirrordp import _validate
from mirrordp.privacy import accounting
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.noise import GaussianNoise
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Ledger
from mirrordp.training import engine
from mirrordp.training.bookkeeping import check_spend
from mirrordp.training.checkpoint import Checkpoint
from mirrordp.training.engine import Alpha, Private, Public, State, TrainOptions
from mirrordp.training.step import Step, TrainInfo
from mirrordp.tuning.automatic import further_rates
from mirrordp.tuning.search import Call, Free, automatic, choose, private_run
from mirrordp.tuning.trials import Makings, Start
from mirrordp.types import LossFn


def train(
    step: Step | LossFn,
    params: Start,
    private: Private,
    public: Public | None = None,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    allow_large_delta: bool = False,
    alpha: Alpha | None = None,
    num_steps: int | None = None,
    seed: int | None = None,
    spend: Ledger | Budget | None = None,
    checkpoint: Checkpoint | None = None,
    state: State | None = None,
    mesh: jax.sharding.Mesh | None = None,
    options: TrainOptions = TrainOptions(),
) -> Iterator[tuple[Any, TrainInfo]]:
    """Trains with differential privacy; yields `(state, info)` every few steps.

    With a step, under the guarantee of `step.mechanism`. With the default α = 1 this is DP-SGD (or
    DP-FedAvg): cold, or warm if `params` come from `mirrordp.warm_start`. With `alpha` below one it
    is PDA-DPMD in the paper's first-order form; the paper's federated schedule cos(πt/(iT)) is
    `schedules.cosine(decay_steps=i * T / 2)`.

    With a loss, under (ε, δ). Clip norm, batch size, number of steps, learning rate and α are
    chosen from public rows, at no cost: rules propose candidates, and a rehearsal takes one. That
    takes about as long as the private run, before the first state is yielded. `mirrordp.tune` does
    the same and more, and returns the settings and a report.

    Everything is checked, and a mistake raised, before the first private record is used. A block of
    steps is charged to `spend` before it runs.

    Args:
        step: a `TrainStep` for examples or a `FederatedStep` for users; or a loss,
            `loss_fn(params, example) -> scalar`.
        params: where to begin; must not come from private data. With a loss, it may be a function
            of public rows, such as `lambda rows: mirrordp.warm_start(loss_fn, cold, rows).params`,
            and should be one if the start is learned from them: rows that judge a rehearsal must
            not have been seen.
        private: the sensitive records, `PrivateData` or `PrivateClients` as the step needs them.
        public: the public records; needed where α < 1, and with a loss. A `FederatedStep` takes
            `PublicClients` for a pseudo-gradient by the same local training, or `PublicData` for
            the plain gradient.
        epsilon: ε, with a loss.
        delta: δ, with a loss; above 1/n it is refused.
        allow_large_delta: with a loss, whether to accept a δ above 1/n.
        alpha: with a step, α_t as a number, a list or a schedule (`mirrordp.schedules`), fixed
            beforehand; 1 by default.
        num_steps: with a step, the number of steps; by default as many as the mechanism was made
            for. Steps with α_t = 0 read no private data, are not charged, and do not count against
            the mechanism.
        seed: makes the run reproducible and therefore not for release; by default all randomness
            comes from the operating system.
        spend: a `Ledger` to charge, which composes several runs, or a `Budget`, which refuses the
            run before any record is used if all of it does not fit.
        checkpoint: keeps what is needed to go on after a crash, in a folder of the run's own. A
            resumed run first yields the state of its checkpoint once more, and ends exactly as the
            run that was never interrupted.
        state: with a step, instead of a checkpoint, goes on from the state that an earlier call
            with the same arguments and seed yielded; what came before was charged there. The
            remaining steps draw as they would have.
        mesh: several devices, such as `jax.make_mesh((8,), ("data",))`. Private records and batches
            are split over the axis "data". Parameters that the caller has sharded over the mesh
            stay so, and so does what the optimiser makes of them; all others are replicated. See
            docs/scaling.md.
        options: how the run is driven; see `TrainOptions`.

    Returns:
        An iterator of `(state, TrainInfo)`; the state is that of the step.
    """
    by_settings = {"alpha": alpha, "num_steps": num_steps, "state": state}
    given = [name for name, value in by_settings.items() if value is not None]
    if _is_step(step):
        if epsilon is not None or delta is not None or allow_large_delta:
            raise ValueError(
                "a step has a mechanism, which decides its privacy, got epsilon, delta or "
                "allow_large_delta too. Leave them out, or pass the loss in place of the step."
            )
        return engine.train(
            step, params, private, public, alpha=1.0 if alpha is None else alpha,
            num_steps=num_steps, seed=seed, spend=spend, checkpoint=checkpoint, state=state,
            mesh=mesh, options=options,
        )  # fmt: skip
    if epsilon is None or delta is None:
        raise ValueError(
            "a loss needs epsilon and delta, for which settings are chosen, got "
            f"epsilon={epsilon} and delta={delta}. Pass both, or a TrainStep with a mechanism."
        )
    if given:
        raise ValueError(
            f"with a loss in place of a step all settings are chosen, got {', '.join(given)}. Pass "
            "a TrainStep, or choose among candidates of your own with mirrordp.tune."
        )
    _validate.positive(epsilon=epsilon)
    _validate.open_unit_interval(delta=delta)
    makings = Makings(  # which refuses clients
        loss_fn=step, start=params,  # pyright: ignore[reportArgumentType]
        private=private, public=public,  # pyright: ignore[reportArgumentType]
        optimizer=optax.sgd,
        adjacency=Adjacency.ZERO_OUT, noise=GaussianNoise(), step_options={}, options=options,
        mesh=mesh, together=8,
    )  # fmt: skip
    accounting.require_small_delta(delta, len(makings.private), allow_large=allow_large_delta)
    check_spend(None, spend, checkpoint)
    call = Call(epsilon, delta, seed, spend, checkpoint, further=further_rates)
    chosen = choose(makings, automatic(makings, epsilon, delta), Free(), call)
    return private_run(makings, chosen, call)


def _is_step(step: Step | LossFn) -> TypeGuard[Step]:
    # A step can be called, too.
    return hasattr(step, "mechanism")
