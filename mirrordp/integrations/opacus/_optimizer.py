# pyright: reportMissingImports=false
"""Opacus' optimisers with public gradients.

A step clips, charges, adds noise and mixes. What it needs for that is certified before: `_passes`
says whose rows are in the gradients, `_batches` that no step has used them, `_ghost` that they are
clipped. `_add_part` puts these together.
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeAlias, cast

import numpy as np
import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping, DPPerLayerOptimizer
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

from mirrordp.integrations.opacus import _ghost, _report
from mirrordp.integrations.opacus._batches import Part, check_order
from mirrordp.integrations.opacus._charges import Books
from mirrordp.integrations.opacus._noise import Noises, check_seeds
from mirrordp.integrations.opacus._passes import Passes
from mirrordp.integrations.opacus._public import mean_loss, public_gradient
from mirrordp.privacy.accounting import Epsilon
from mirrordp.report import RunReport
from mirrordp.spending.budget import Budget
from mirrordp.spending.ledger import Ledger

Loss: TypeAlias = "torch.Tensor | DPTensorFastGradientClipping"
_SAVED = "mirrordp"


@dataclasses.dataclass
class Mixing:
    """The settings and the state of a `PublicGradientOptimizer`."""

    # Settings, as `with_public_gradient` describes them.
    alphas: Callable[[int], np.float32]
    scale_noise: bool
    noisy_clip_norm: float | None
    num_steps: int | None
    num_examples: int
    books: Books  # what was charged
    passes: Passes  # the forward and backward passes of the module
    noises: Noises  # what noise was drawn from
    divisor: int | None  # what Opacus divides the noisy sum by
    # The number of steps taken; those on parts of batches do not count.
    step: int = 0
    # The public gradient of the next step, one tensor per parameter.
    public_grad: list[torch.Tensor | None] | None = None
    # With ghost clipping, what the last backward pass left; None once it is used.
    clipped: _ghost.Clipped | None = None
    # The last part in the sum of the next step, and the largest clip norm of its parts.
    accumulated: Part | None = None
    clip_norm: float = 0.0
    # Whether the optimiser under Opacus' may be stepped, which is so after the noise.
    may_step: bool = False

    @property
    def is_split(self) -> bool:
        """Whether further parts of the next step's batch must follow."""
        return self.accumulated is not None and not self.accumulated.is_last


class PublicGradientOptimizer(DPOptimizer):
    """An optimiser of Opacus that mixes in public gradients; made by `with_public_gradient`.

    It is the optimiser that Opacus returned, with its class changed, so that `BatchMemoryManager`,
    schedulers and ghost clipping's criterion, which hold that object, go on working.
    """

    _mixing: Mixing

    @property
    def alpha(self) -> float:
        """α of the next step."""
        return float(self._alpha())

    def _alpha(self) -> np.float32:
        step, end = self._mixing.step, self._mixing.num_steps
        if end is not None and step >= end:
            raise RuntimeError(
                f"expected at most {end} steps, for which with_public_gradient was called, got "
                "one more. Pass a larger num_steps."
            )
        return self._mixing.alphas(step)

    @property
    def charged_steps(self) -> int:
        """The number of charged steps, including those of before a resume."""
        return self._mixing.books.charged_steps

    @property
    def spend(self) -> Ledger | Budget:
        """The ledger or budget that steps are charged to."""
        return self._mixing.books.spend

    # The public gradient.

    def public_pass(self) -> AbstractContextManager[None]:
        """Turns Opacus' hooks off, so that nothing inside is taken for private gradients."""
        return self._mixing.passes.public()

    def public_step(self, loss: "Loss | Callable[[], Loss]") -> torch.Tensor | None:
        """Takes the gradient of a public loss, which the next `step()` mixes in.

        `p.grad` and `p.grad_sample` stay as they are, so it may be called before or after the
        private backward pass.

        A function is the better form. It is called with Opacus' hooks off, once for each step that
        has α < 1 and not at all for other steps. When `BatchMemoryManager` splits a batch, it is
        called for the first part only. How many parts there are depends on the private batch, so
        the function should also fetch the public rows: otherwise the parts would decide which rows
        are used. A tensor must come from a forward pass in `public_pass()`, or from one of the
        whole module while no private forward pass waits for its backward pass.

        Args:
            loss: the mean loss on public rows, or a function that returns it. Do not call
                `backward()` on it.

        Returns:
            The loss without its graph; None if the function was not called.
        """
        mixing = self._mixing
        given = not callable(loss) or isinstance(loss, torch.Tensor)
        if mixing.public_grad is not None:
            if not given and mixing.is_split:
                return None
            raise RuntimeError(
                "expected one public_step before each step, got a second one. To use more public "
                "rows, average their losses; with BatchMemoryManager, pass a function that fetches "
                "its rows, which is called once for each whole batch."
            )
        if not given and self._alpha() == 1:
            return None
        if given:
            mixing.passes.disown(mean_loss(loss))
        with mixing.passes.public(is_step=True), torch.enable_grad():
            found = mean_loss(loss if given else cast(Callable[[], Loss], loss)())
            mixing.public_grad = public_gradient(found, self.params)
        return found.detach()

    # The private gradient.

    def clipped_backward(self, loss: DPTensorFastGradientClipping) -> None:
        """Does what ghost clipping's `loss.backward()` does, and checks that it clips."""
        mixing = self._mixing
        mixing.clipped = None
        mixing.clipped = _ghost.clipped_backward(loss, self.params, self.zero_grad, mixing.passes)

    def signal_skip_step(self, do_skip: bool = True) -> NoReturn:
        """Refuses to accumulate batches; the loader of BatchMemoryManager announces its parts."""
        raise RuntimeError(
            f"expected no signal_skip_step, got signal_skip_step({do_skip}): a record may appear "
            "more than once in several batches. To accumulate the parts of one batch, iterate over "
            "the loader of opacus.utils.batch_memory_manager.BatchMemoryManager, which was made "
            "after mirrordp.integrations.opacus was imported."
        )

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        """Returns whether the batch of this step has further parts; read by Opacus' `pre_step`."""
        del pop_next
        return self._mixing.is_split

    def drop_parts(self) -> None:
        """Forgets what was gathered for a step from parts of its batch."""
        mixing = self._mixing
        if mixing.accumulated is not None:
            mixing.public_grad = None
        mixing.accumulated, mixing.clip_norm = None, 0.0
        self._is_last_step_skipped = False
        for param in self.params:
            param.summed_grad = None  # pyright: ignore[reportAttributeAccessIssue]

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Does what Opacus does before the optimiser under it steps, and mixes the gradients."""
        del closure
        mixing, alpha = self._mixing, self._alpha()
        if self.expected_batch_size != mixing.divisor:
            raise RuntimeError(
                f"expected the expected_batch_size of make_private, {mixing.divisor}, got another "
                "one. The size of a private batch is private, so the sum is divided by a number "
                "that is known before. Leave optimizer.expected_batch_size as it is."
            )
        parts = [rows.part for rows in mixing.passes.rows(self.params)]
        part = parts[0] if parts else mixing.books.draws.latest
        if alpha < 1 and mixing.public_grad is None and part.is_last:
            raise RuntimeError(
                f"expected a public gradient for step {mixing.step}, where alpha is {alpha:.4g}, "
                "got none. Call optimizer.public_step(...) before optimizer.step()."
            )
        if alpha == 0:
            self._discard(part)
        else:
            self._add_part()
        if mixing.is_split:
            return False
        if alpha < 1:
            self._mix(float(alpha), float(np.float32(1) - alpha))
        self.drop_parts()
        mixing.step, mixing.may_step = mixing.step + 1, True
        return True

    def _discard(self, part: Part) -> None:
        """Drops the private gradient of a batch or of a part of one."""
        mixing = self._mixing
        mixing.accumulated, mixing.clipped = part, None
        mixing.passes.forget_rows()
        self._drop_gradients()
        for param in self.params:
            param.grad = torch.zeros_like(param)

    def _drop_gradients(self) -> None:
        """Drops what Opacus keeps of single rows, which would be saved with a parameter."""
        for param in cast(list[Any], self._mixing.passes.trained):
            param.grad_sample = param._norm_sample = None
        if self._is_ghost:
            cast(Any, self._mixing.passes.hooks)._per_sample_gradient_norms = None

    def _add_part(self) -> None:
        """Adds the gradients of a part to the sum, and after the last part the noise."""
        mixing = self._mixing
        self._check_trained()
        self._check_gradients()
        part = mixing.books.draws.use(mixing.passes.rows(self.params))
        before, mixing.accumulated = mixing.accumulated, part
        try:
            check_order(part, before)
            self._check_rows(part)
            if mixing.clipped is not None:
                _ghost.check_unchanged(mixing.clipped, self.params)
            mixing.clip_norm, mixing.clipped = max(mixing.clip_norm, self._clip_norm()), None
            self._widen()
            is_whole = super().pre_step()
        except BaseException:
            # The part is used up, so its batch cannot be completed.
            self.drop_parts()
            raise
        mixing.passes.forget_rows()
        self._drop_gradients()
        if is_whole:
            mixing.books.note_accounted()
            if mixing.noisy_clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.params, mixing.noisy_clip_norm)

    def _widen(self) -> None:
        """Makes Opacus compute norms and sums in the precision of the parameters."""
        for param in cast(list[Any], self.params):
            if not self._is_ghost and param.grad_sample.dtype != param.dtype:
                param.grad_sample = param.grad_sample.to(param.dtype)

    def add_noise(self) -> None:
        """Charges the step, and then adds Opacus' noise to the sum."""
        mixing, alpha = self._mixing, self._alpha()
        check_seeds(self, mixing.books.draws)
        places = mixing.noises.unused(self)
        # The noise is a multiple of the optimiser's clip norm. The sum was clipped by the module
        # (ghost clipping), by a list of norms, or by what the norm was before a scheduler set it.
        noise_multiplier, norm = float(self.noise_multiplier), float(self.max_grad_norm)
        if mixing.clip_norm > norm:
            noise_multiplier *= norm / mixing.clip_norm
        mixing.books.charge_step(noise_multiplier)
        if not mixing.scale_noise and alpha < 1:
            for param in self.params:
                param.summed_grad *= float(alpha)  # pyright: ignore
        try:
            super().add_noise()
        finally:
            mixing.noises.note(places, self)

    def _clip_norm(self) -> float:
        """Returns the largest norm that one record can have in the sum."""
        if self._mixing.clipped is not None:
            return self._mixing.clipped.clip_norm
        if isinstance(self, DPPerLayerOptimizer):
            return torch.norm(torch.Tensor(self.max_grad_norms), p=2).item()
        return float(self.max_grad_norm)

    def _mix(self, alpha: float, rest: float) -> None:
        mixing = self._mixing
        assert mixing.public_grad is not None
        if self.loss_reduction == "sum":
            # Opacus then adds up the gradients of all processes, where it otherwise averages them.
            rest /= getattr(self, "world_size", 1)
        with torch.no_grad():
            for param, public in zip(self.params, mixing.public_grad, strict=True):
                assert param.grad is not None
                grad = alpha * param.grad if mixing.scale_noise else param.grad
                if public is not None:
                    grad = grad + rest * public.to(param.dtype)
                param.grad = grad

    # What is refused.

    def _guard(self) -> None:
        """Refuses a step of the optimiser under Opacus' that did not go through Opacus."""
        mixing = self._mixing
        if not mixing.may_step or mixing.passes.rows(self.params):
            raise RuntimeError(
                "expected a step of the optimiser that with_public_gradient returned, got one of "
                "the optimiser under it, which adds no noise. Call optimizer.step()."
            )
        mixing.may_step = False
        # Parameters that were frozen after the backward pass have gradients without noise.
        trained = {id(param) for param in self.params}
        for group in self.param_groups:
            for param in group["params"]:
                if id(param) not in trained:
                    param.grad = None

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """Refuses torch.amp.GradScaler, which reads this before it steps."""
        raise RuntimeError(
            "expected steps without a gradient scaler, got one of torch.amp.GradScaler, which "
            "leaves out a step if the gradient of a private row overflows. Use torch.autocast "
            "without a scaler, such as with bfloat16, and call optimizer.step()."
        )

    @property
    def _is_ghost(self) -> bool:
        return isinstance(self, DPOptimizerFastGradientClipping)

    def _check_trained(self) -> None:
        """Refuses parameters whose gradients Opacus does not clip; its hooks would fail on them."""
        passes, params = self._mixing.passes, self.params
        known = {id(param) for param in passes.trained}
        # Also those of other optimisers, whose steps would have no noise.
        found = [*params, *(p for p in passes.module.parameters() if p.requires_grad)]
        added = list({id(param): param for param in found if id(param) not in known}.values())
        if added:
            raise RuntimeError(
                "expected the parameters that were trainable when the model was made private, got "
                f"others besides: {passes.names(added)}. Opacus does not clip their gradients. "
                "Set requires_grad before make_private, and call make_private anew to unfreeze."
            )
        if self._is_ghost and len(params) < len(known):
            raise RuntimeError(
                "expected all parameters that were trainable when the model was made private, got "
                f"{len(params)} of {len(known)}. Ghost clipping takes norms over all of them. Call "
                "make_private anew after you freeze parameters."
            )

    def _check_gradients(self) -> None:
        """Refuses a step without the gradients of a backward pass."""
        if self._is_ghost and self._mixing.clipped is None:
            raise RuntimeError(
                "expected a backward pass with ghost clipping before each step and each part, "
                "got none since the last one. Compute the loss with the criterion that "
                "make_private returned, call backward() on it, and then step() once: other "
                "losses are not clipped."
            )
        if hasattr(self, "_adjusted_noise_multiplier"):
            refuse_adaptive_clipping()
        missing = [param for param in self.params if getattr(param, "grad_sample", None) is None]
        if missing and not self._is_ghost:
            if self._mixing.passes.num_activations > 0:
                raise RuntimeError(
                    "expected a backward pass for each private forward pass, got a forward pass "
                    "that waits for its own, so that the gradients are not complete. Make other "
                    "forward passes in evaluation mode, under torch.no_grad(), or inside 'with "
                    "optimizer.public_pass():'."
                )
            if not self._mixing.passes.rows(self.params):
                self._mixing.books.draws.use(set())  # raises
            raise RuntimeError(
                "expected the gradients of each row for all parameters, got none for "
                f"{self._mixing.passes.names(missing)}. Call backward() before each step on a loss "
                "that depends on all of them; freeze parameters that the model does not use before "
                "make_private."
            )
        if self.accumulated_iterations != 1:
            raise RuntimeError(
                "expected one Poisson batch for each step, got several accumulated ones, in which "
                "a record may appear more than once. Use a larger batch with BatchMemoryManager."
            )

    def _check_rows(self, part: Part) -> None:
        """Refuses a part whose records do not have one row each, which are clipped one by one."""
        clipped = self._mixing.clipped
        grads = [cast(Any, param).grad_sample for param in self.params]
        counts = [len(rows) for rows in grads] if clipped is None else [clipped.num_rows]
        wrong = [count for count in counts if count != part.rows]
        if wrong:
            raise RuntimeError(
                "expected gradients of one row for each record of the batch, got those of another "
                "number of rows. Pass each record to the model in one row: rows are clipped one by "
                "one, so a record with several rows has more influence than is accounted for. A "
                "collate_fn must keep every record that it is given; leave out records when you "
                "make the data set. Fetch the next batch only after the step."
            )

    # What is kept and reported.

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimiser, the step number and what was charged."""
        mixing = self._mixing
        saved = {"step": mixing.step, "noises": mixing.noises.saved(), **mixing.books.saved()}
        return {**super().state_dict(), _SAVED: saved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`.

        Charges that the ledger does not hold are charged to it. With a `FileLedger` or a `Budget`
        it also holds the steps that were taken after the state was saved, before a crash; these
        stay charged.
        """
        state = dict(state_dict)
        saved = state.pop(_SAVED, None)
        super().load_state_dict(state)
        if saved is not None:
            self._mixing.books.restore(saved)
            self._mixing.noises.restore(saved.get("noises", ""))
            self._mixing.step = int(saved["step"])

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an optimiser with public gradients cannot be copied, since the copy would charge a "
            "ledger of its own. Use state_dict()."
        )

    def spent(self, delta: float) -> Epsilon:
        """Returns ε at δ of all steps of this run so far."""
        books = self._mixing.books
        books.reconcile()
        return books.ledger_of_run().epsilon(delta, accountant=books.accountant)

    def report(self, delta: float, **options: Any) -> RunReport:
        """Returns the privacy report of the run so far.

        If the noise or the sampling rate changed during the run, ε is that of the steps as they
        were charged, and the report states the least noise and the largest rate.

        Args:
            delta: δ in (0, 1).
            **options: `title`, `results`, `seeded` and other arguments of `RunReport.of`. State
                `seeded=False` if neither PyTorch nor the noise generator was given a seed.
        """
        mixing = self._mixing
        return _report.report_of(self, mixing.books, mixing.num_examples, delta, options)


def refuse_adaptive_clipping() -> NoReturn:
    """Refuses clip norms that depend on private batches."""
    raise ValueError(
        "expected an optimiser with a fixed clip norm, got adaptive clipping, which divides by the "
        "exact size of the private batch and so releases more than is accounted for. Use "
        "clipping='flat'."
    )
