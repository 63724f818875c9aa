"""Reads a loss function's jaxpr and finds where parameters meet data.

The loss of *one* example is traced to a jaxpr, and every value in it is one of three kinds:

    CONST   depends on neither the trainable parameters (unless no gradient passes, as through
            `stop_gradient` and comparisons) nor the example
    PARAM   depends on trainable parameters only
    BATCH   depends on the example (and perhaps on parameters)

An equation that takes a PARAM and a BATCH operand is a *site*, and example i's gradient is

    ∂ℓ_i/∂θ = Σ_sites (∂W/∂θ)ᵀ (∂site/∂W)ᵀ δ_i,        W(θ) the site's PARAM operand.

Zeros are added in one of two places, and one backward pass under `vmap` over examples finds their
gradients. Zeros added to a site's results (`Probes.results`) yield δ_i, from which, with the BATCH
operands, everything else follows. Zeros added to its PARAM operands (`Probes.operands`) yield
(∂site/∂W)ᵀ δ_i as JAX computes it, and nothing is kept for it: neither δ_i, nor a BATCH operand
that `jax.checkpoint` would rather compute again.

The jaxpr is interpreted three times, always in the same order, so that sites can be numbered: to
find the sites, to compute their PARAM operands as a function of the parameters (`operands`), and to
compute the losses with probes (`forward`). Sites inside `scan` gain one leading axis per loop, and
so do PARAM operands where a scan goes over parameters, as with stacked layers.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core

from mirrordp.privacy._convolutions import bind_apart, is_wide
from mirrordp.privacy._jaxprs import bind, called

CHECKPOINTS = {"checkpoint", "remat", "remat2"}
INLINED = {"jit", "pjit", "closed_call", "core_call", *CHECKPOINTS}


class Kind(enum.Enum):
    """What a value depends on."""

    CONST = 0
    PARAM = 1
    BATCH = 2


class View(NamedTuple):
    """A PARAM value that holds exactly the entries of one parameter leaf, rearranged.

    `layout` names the arrangement: equal layouts of one leaf are equal arrays. Where it is a pure
    permutation of axes, `axes` gives the leaf's axis for each axis of the value (None for an axis
    of size one that was inserted). `stacked` gives the leaf's axes that loops go over, outermost
    loop first; the value is then what one iteration sees.
    """

    leaf: int
    layout: tuple
    axes: tuple[int | None, ...] | None
    stacked: tuple[int, ...] = ()

    def rearranged(self, leaf: jax.Array) -> jax.Array:
        """Returns the viewed value, with all iterations of loops [*stacked, ...] and never cast."""
        _, axes, _, *steps = self.layout
        named = [axis for axis in axes if axis is not None]
        # Axes of the leaf that are not named have size one.
        order = [*self.stacked, *named]
        order += [axis for axis in range(leaf.ndim) if axis not in order]
        stacks = [leaf.shape[axis] for axis in self.stacked]
        shape = [1 if axis is None else leaf.shape[axis] for axis in axes]
        value = leaf.transpose(order).reshape(*stacks, *shape)
        for name, detail in steps:
            if name == "transpose":
                first = len(stacks)
                value = value.transpose(*range(first), *(first + axis for axis in detail))
            else:
                value = value.reshape(*stacks, *detail)
        return value

    def restored(self, gradient: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns the leaf's gradient from that of the value: `rearranged`, transposed."""
        leaf = jax.ShapeDtypeStruct(shape, gradient.dtype)
        return jax.linear_transpose(self.rearranged, leaf)(gradient)[0]


class Value(NamedTuple):
    """A value in the interpretation.

    Attributes:
        kind: what the value depends on; without a gradient with respect to parameters it is CONST.
        value: the value itself, or None where it is not computed.
        view: the view of a PARAM value that is a rearranged leaf.
        leaves: the leaves that a PARAM value depends on.
        varies: the enclosing loops (0 is the outermost) whose iterations see different PARAMs.
    """

    kind: Kind
    value: Any
    view: View | None = None
    leaves: frozenset[int] = frozenset()
    varies: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Site:
    """One place where parameters meet data.

    Attributes:
        name: the primitive's name, or "lift" where a PARAM becomes a loop's first carry or is what
            an iteration returns.
        params: the primitive's parameters.
        views: the View of each PARAM operand, or None.
        leaves: the parameter leaves that the PARAM operands depend on.
        param_positions: which operands of the equation are PARAM.
        param_shapes: shape and dtype of each PARAM operand, without loop axes.
        loops: lengths of the enclosing scans, outermost first.
        varies: for each PARAM operand and loop, whether iterations see different parameters; the
            operand then has an axis for that loop.
        out_shapes: shape and dtype of the outputs that carry gradients, without loop axes.
    """

    name: str
    params: dict[str, Any]
    views: tuple[View | None, ...]
    leaves: frozenset[int]
    param_positions: tuple[int, ...]
    param_shapes: tuple[jax.ShapeDtypeStruct, ...]
    loops: tuple[int, ...]
    varies: tuple[tuple[bool, ...], ...]
    out_shapes: tuple[jax.ShapeDtypeStruct, ...]

    def operand_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes of the PARAM operands, with an axis for each loop they differ in."""
        return tuple(
            jax.ShapeDtypeStruct(
                tuple(n for n, differs in zip(self.loops, varies, strict=True) if differs)
                + param.shape,
                param.dtype,
            )
            for param, varies in zip(self.param_shapes, self.varies, strict=True)
        )

    def result_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes of the results, with an axis for each loop."""
        return tuple(
            jax.ShapeDtypeStruct(self.loops + out.shape, out.dtype) for out in self.out_shapes
        )


class Probes(NamedTuple):
    """Zeros that are added to a site's PARAM operands or to its results; the other list is empty.

    The gradients that a backward pass finds for them have the same form. Where the gradient of a
    PARAM operand is not JAX's own (see `Program.forward`), its zeros are a tree like that gradient.
    """

    operands: Sequence[Any] = ()
    results: Sequence[jax.Array] = ()


Form: TypeAlias = Callable[[jax.Array, jax.Array], Any]
"""Makes an example's gradient of a PARAM operand from the BATCH operand and the cotangent."""


class UnrecognisedError(Exception):
    """The loss cannot be split into sites; per-example gradients must be taken of all of it."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced loss: its jaxpr, the number of trainable leaves, and its sites.

    Inputs of the jaxpr are the trainable leaves, the constants and the example, in this order.
    """

    jaxpr: core.ClosedJaxpr
    num_leaves: int
    sites: tuple[Site, ...]

    def operands(self, leaves: Sequence[jax.Array], constants: Sequence[jax.Array]) -> list:
        """Returns the PARAM operands of every site, differentiable with respect to the leaves."""
        run = _Interpreter(_Mode.OPERANDS)
        num_batch = len(self.jaxpr.jaxpr.invars) - len(leaves) - len(constants)
        run.program(self, leaves, constants, [None] * num_batch)
        return [list(operands) for operands in run.operands]

    def forward(
        self,
        leaves: Sequence[jax.Array],
        constants: Sequence[jax.Array],
        example: Sequence[jax.Array],
        probes: Sequence[Probes],
        forms: Mapping[int, Form],
    ) -> tuple[jax.Array, list]:
        """Returns the loss of one example with probes added, and each site's BATCH operands.

        Operands are returned only where a site's results are probed. Sites in `forms` have one
        PARAM and one BATCH operand; the probe of the first may be any tree.
        """
        run = _Interpreter(_Mode.FORWARD, probes, self.sites, forms)
        loss = run.program(self, leaves, constants, example)
        return loss.value, run.captured


def trace(
    loss: Callable[..., jax.Array],
    leaves: Sequence[Any],
    constants: Sequence[Any],
    example: Sequence[Any],
) -> Program:
    """Traces `loss(*leaves, *constants, *example)`, of one example, and finds its sites."""
    jaxpr = jax.make_jaxpr(loss)(*leaves, *constants, *example)
    # The explicit clipper, which is asked instead, has the better messages for these.
    if not all(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves):
        raise UnrecognisedError("there are trainable parameters that are not floats")
    outputs = [(out.shape, jnp.issubdtype(out.dtype, jnp.floating)) for out in jaxpr.out_avals]
    if outputs != [((), True)]:
        raise UnrecognisedError("the loss is not one real number")
    program = Program(jaxpr, len(leaves), ())
    run = _Interpreter(_Mode.OPERANDS)

    def record(leaves, constants):
        result = run.program(program, leaves, constants, [None] * len(example))
        if result.kind is not Kind.BATCH:
            raise UnrecognisedError("the loss does not depend on the example")
        return ()

    jax.eval_shape(record, leaves, constants)
    return dataclasses.replace(program, sites=tuple(run.sites))


class _Mode(enum.Enum):
    OPERANDS = 0
    FORWARD = 1


class _Interpreter:
    """One walk over a program; see the module's docstring for the two modes."""

    def __init__(
        self,
        mode: _Mode,
        probes: Sequence[Probes] = (),
        sites: Sequence[Site] = (),
        forms: Mapping[int, Form] = MappingProxyType({}),
        first: int = 0,
        loops: tuple[int, ...] = (),
    ):
        self.mode = mode
        self.probes = probes
        self.sites = list(sites)
        self.forms = forms
        self.first = first
        self.loops = loops
        self.operands: list[tuple] = []
        self.captured: list[tuple] = []

    def program(self, program: Program, leaves, constants, example) -> Value:
        inputs = [
            *(
                Value(Kind.PARAM, leaf, _whole_leaf(n, jnp.ndim(leaf)), frozenset([n]))
                for n, leaf in enumerate(leaves)
            ),
            *(Value(Kind.CONST, constant) for constant in constants),
            *(Value(Kind.BATCH, part) for part in example),
        ]
        consts = [Value(Kind.CONST, const) for const in program.jaxpr.consts]
        (loss,) = self.jaxpr(program.jaxpr.jaxpr, consts, inputs)
        return loss

    def jaxpr(self, jaxpr, consts: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
        environment = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        def read(atom) -> Value:
            if isinstance(atom, core.Literal):
                return Value(Kind.CONST, atom.val)
            return environment[atom]

        for eqn in jaxpr.eqns:
            outputs = self.equation(eqn, [read(atom) for atom in eqn.invars])
            environment.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn, inputs: list[Value]) -> list[Value]:
        kinds = {value.kind for value in inputs}
        name = eqn.primitive.name
        if Kind.PARAM not in kinds:
            kind = Kind.BATCH if Kind.BATCH in kinds else Kind.CONST
            return self.plain(eqn, inputs, kind)
        if name in CHECKPOINTS and self.mode is _Mode.FORWARD and Kind.BATCH in kinds:
            return self.checkpoint(eqn, inputs)
        if name in INLINED:
            inner, consts = called(eqn)
            return self.jaxpr(inner, [Value(Kind.CONST, const) for const in consts], inputs)
        if Kind.BATCH not in kinds:
            return self.plain(eqn, inputs, Kind.PARAM)
        if name == "scan":
            return self.scan(eqn, inputs)
        if name in ("while", "cond") and _holds_while(eqn):
            # It has no transpose, and only the whole loss knows whether one is needed.
            raise UnrecognisedError("a while loop takes both parameters and data")
        return self.site(eqn, inputs)

    def plain(self, eqn, inputs: list[Value], kind: Kind) -> list[Value]:
        """Evaluates an equation that is no site, unless its inputs are unknown here."""
        leaves = frozenset().union(*(value.leaves for value in inputs))
        varies = frozenset().union(*(value.varies for value in inputs))
        if self.mode is _Mode.OPERANDS and kind is Kind.BATCH:
            return [Value(Kind.BATCH, None) for _ in eqn.outvars]
        # Records cannot meet where only the images of a convolution are theirs.
        fixed_kernel = (
            eqn.primitive.name == "conv_general_dilated"
            and [value.kind for value in inputs] == [Kind.BATCH, Kind.CONST]
            and eqn.params["batch_group_count"] == 1
            and not is_wide(eqn)
        )
        evaluate = bind if kind is not Kind.BATCH or fixed_kernel else bind_apart
        outputs = evaluate(eqn, [value.value for value in inputs])
        view = None
        if kind is Kind.PARAM and len(inputs) == len(outputs) == 1:
            view = _view_after(eqn, inputs[0].view)
        return [
            Value(Kind.PARAM, output, view, leaves, varies)
            if kind is Kind.PARAM and _carries_gradients(eqn, var)
            # Constants that were parameters may differ between the iterations of a loop.
            else Value(Kind.CONST if kind is Kind.PARAM else kind, output, varies=varies)
            for var, output in zip(eqn.outvars, outputs, strict=True)
        ]

    def site(self, eqn, inputs: list[Value]) -> list[Value]:
        # JAX derives the gradients of PARAM operands only where these are probed. Wide ones couple
        # even the images of runs side by side, whose weights differ.
        results = self.mode is _Mode.FORWARD and self.probes[len(self.captured)].results
        evaluate = bind if results and not is_wide(eqn) else bind_apart
        return self._meet(
            name=eqn.primitive.name,
            params=eqn.params,
            inputs=inputs,
            evaluate=functools.partial(evaluate, eqn),
            out_avals=[var.aval for var in eqn.outvars],
        )

    def lift(self, value: Value) -> Value:
        """Makes a PARAM value a BATCH one, by a site whose only operand is the parameter."""
        (lifted,) = self._meet(
            name="lift",
            params={},
            inputs=[value],
            evaluate=lambda values: values,
            out_avals=[jax.typeof(value.value)],
        )
        return lifted

    def lifted(self, values: Sequence[Value]) -> list[Value]:
        """Makes BATCH values of all PARAM values that enter or leave the body of a loop."""
        return [self.lift(value) if value.kind is Kind.PARAM else value for value in values]

    def _meet(self, *, name, params, inputs, evaluate, out_avals) -> list[Value]:
        positions = [i for i, value in enumerate(inputs) if value.kind is Kind.PARAM]
        wanted = [i for i, a in enumerate(out_avals) if jnp.issubdtype(a.dtype, jnp.inexact)]
        if self.mode is _Mode.OPERANDS:
            given = [inputs[i] for i in positions]
            self.operands.append(tuple(v.value for v in given))
            self.sites.append(
                Site(
                    name=name,
                    params=params,
                    views=tuple(v.view for v in given),
                    leaves=frozenset().union(*(v.leaves for v in given)),
                    param_positions=tuple(positions),
                    param_shapes=tuple(_shape(v.value) for v in given),
                    loops=self.loops,
                    varies=tuple(
                        tuple(depth in v.varies for depth in range(len(self.loops))) for v in given
                    ),
                    out_shapes=tuple(
                        jax.ShapeDtypeStruct(out_avals[i].shape, out_avals[i].dtype) for i in wanted
                    ),
                )
            )
            return [Value(Kind.BATCH, None) for _ in out_avals]
        probes = self.probes[len(self.captured)]
        values = [value.value for value in inputs]
        others = [values[i] for i in range(len(values)) if i not in positions]
        self.captured.append(tuple(others) if probes.results else ())
        form = self.forms.get(self.first + len(self.captured) - 1)
        if form:
            (i,), (probe,) = positions, probes.operands
            evaluate = _with_gradient_by(form, evaluate, i, probe)
        elif probes.operands:
            for i, probe in zip(positions, probes.operands, strict=True):
                values[i] = values[i] + probe
        outputs = list(evaluate(values))
        if probes.results:
            for i, probe in zip(wanted, probes.results, strict=True):
                outputs[i] = outputs[i] + probe
        return [Value(Kind.BATCH, output) for output in outputs]

    def inner(self, probes: Sequence[Probes], loops: tuple[int, ...]) -> "_Interpreter":
        """Returns an interpreter for a part of the program that begins at the next site."""
        count = len(self.captured)
        first = self.first + count
        return _Interpreter(self.mode, probes, self.sites[count:], self.forms, first, loops)

    def checkpoint(self, eqn, inputs: list[Value]) -> list[Value]:
        """Interprets a function whose intermediate values are computed again when needed."""
        body, consts = called(eqn)
        found: list[Value] = []

        def run(values):
            inner = self.inner(self.probes[len(self.captured) :], self.loops)
            given = [of._replace(value=value) for of, value in zip(inputs, values, strict=True)]
            outputs = inner.jaxpr(body, [Value(Kind.CONST, const) for const in consts], given)
            found[:] = [output._replace(value=None) for output in outputs]
            return [output.value for output in outputs], inner.captured

        again = jax.checkpoint(
            run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"]
        )
        outputs, captured = again([value.value for value in inputs])
        self.captured.extend(captured)
        return [of._replace(value=output) for of, output in zip(found, outputs, strict=True)]

    def scan(self, eqn, inputs: list[Value]) -> list[Value]:
        """Interprets a loop with parameters among its constants or among what it goes over.

        The sites inside it are probed at every iteration, except that operands which are the same
        in all iterations have one probe.
        """
        num_consts, num_carry = _scan_arity(eqn)
        length, body = eqn.params["length"], eqn.params["jaxpr"]
        consts = inputs[:num_consts]
        carry = self.lifted(inputs[num_consts : num_consts + num_carry])
        rest = [
            value if value.kind is Kind.PARAM else value._replace(kind=Kind.BATCH)
            for value in inputs[num_consts + num_carry :]
        ]
        loops = (*self.loops, length)
        if self.mode is _Mode.OPERANDS:
            sites, operands = _sites_of_body(body, consts, num_carry, rest, loops)
            self.sites += sites
            self.operands += operands
            return [Value(Kind.BATCH, None) for _ in eqn.outvars]

        first = len(self.captured)
        last = first + _count_sites(body, consts, num_carry, rest, length)
        probes, sites = self.probes[first:last], self.sites[first:last]
        stacked, whole = _by_iteration(probes, sites, depth=len(self.loops))
        body_consts = [Value(Kind.CONST, const) for const in body.consts]

        def step(state, inputs):
            xs, slices = inputs
            inner = self.inner(_joined(slices, whole), loops)
            values = [Value(Kind.BATCH, value) for value in state]
            values += [Value(of.kind, value) for of, value in zip(rest, xs, strict=True)]
            outputs = inner.lifted(inner.jaxpr(body.jaxpr, body_consts, [*consts, *values]))
            outputs = [output.value for output in outputs]
            return outputs[:num_carry], (outputs[num_carry:], inner.captured)

        state, (results, captured) = jax.lax.scan(
            step,
            [jnp.asarray(value.value) for value in carry],
            ([value.value for value in rest], stacked),
            length=length,
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        self.captured.extend(captured)
        return [Value(Kind.BATCH, value) for value in [*state, *results]]


def _with_gradient_by(form: Form, evaluate: Callable, place: int, probe: Any) -> Callable:
    """Returns `evaluate`, of a PARAM at a place and a BATCH operand, such that the probe's gradient
    is what `form` makes of the BATCH operand and the cotangent of the result."""

    def call(data, weight, probe):
        del probe
        (output,) = evaluate([weight, data] if place == 0 else [data, weight])
        return output

    def forward(data, weight, probe):
        output, pull = jax.vjp(lambda data: call(data, weight, probe), data)
        return output, (pull, data, jnp.zeros_like(weight))

    def backward(kept, cotangent):
        pull, data, no_gradient = kept
        return *pull(cotangent), no_gradient, form(data, cotangent)

    probed = jax.custom_vjp(call)
    probed.defvjp(forward, backward)
    return lambda values: [probed(values[1 - place], values[place], probe)]


def _by_iteration(
    probes: Sequence[Probes], sites: Sequence[Site], depth: int
) -> tuple[list[Probes], list[Probes]]:
    """Parts the probes of a loop's sites: those with an axis for the loop, and the others.

    Each part has None in place of what is in the other one.
    """
    stacked, whole = [], []
    for probe, site in zip(probes, sites, strict=True):
        differs = [varies[depth] for varies in site.varies] if probe.operands else []
        pairs = list(zip(probe.operands, differs, strict=True))
        stacked.append(Probes([value if own else None for value, own in pairs], probe.results))
        whole.append(Probes([None if own else value for value, own in pairs]))
    return stacked, whole


def _joined(stacked: Sequence[Probes], whole: Sequence[Probes]) -> list[Probes]:
    """Puts the two parts of probes together again."""
    return [
        Probes(
            [a if b is None else b for a, b in zip(one.operands, other.operands, strict=True)],
            one.results,
        )
        for one, other in zip(stacked, whole, strict=True)
    ]


def _holds_while(eqn) -> bool:
    if eqn.primitive.name == "while":
        return True
    inner = core.jaxprs_in_params(eqn.params)
    return any(_holds_while(part) for jaxpr in inner for part in jaxpr.eqns)


def _carries_gradients(eqn, output) -> bool:
    return eqn.primitive.name != "stop_gradient" and jnp.issubdtype(output.aval.dtype, jnp.inexact)


def _scan_arity(eqn) -> tuple[int, int]:
    """Returns the number of constants and of carried values among a scan's operands."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # From JAX 0.11 on a scan's operands are grouped by a tree instead.
    consts, carry, _ = eqn.params["ft_in"].update(list(eqn.invars)).unpack()
    return len(list(consts)), len(list(carry))


def _sites_of_body(
    body, consts: Sequence[Value], num_carry: int, rest: Sequence[Value], loops: tuple[int, ...]
) -> tuple[list[Site], list[tuple]]:
    """Returns the sites inside a loop and their PARAM operands, which are computed outside of it.

    A PARAM in the body is the same in all iterations, or a function of slices of what the loop goes
    over. In the second case the operand gets a leading axis for the loop.
    """
    inner = _Interpreter(_Mode.OPERANDS, loops=loops)
    depth = len(loops) - 1
    body_consts = [Value(Kind.CONST, const) for const in body.consts]
    over = [value for value in rest if value.kind is Kind.PARAM]
    varies: list[list[bool]] = []

    def one_iteration(slices):
        remaining = iter(slices)
        inputs = [
            Value(Kind.PARAM, next(remaining), _sliced(of.view), of.leaves, of.varies | {depth})
            if of.kind is Kind.PARAM
            else Value(Kind.BATCH, None)
            for of in rest
        ]
        unknown = [Value(Kind.BATCH, None)] * num_carry
        inner.lifted(inner.jaxpr(body.jaxpr, body_consts, [*consts, *unknown, *inputs]))
        varies.extend([of[depth] for of in site.varies] for site in inner.sites)
        return inner.operands

    if not over:
        return inner.sites, one_iteration([])
    operands = jax.vmap(one_iteration, axis_size=loops[-1])([value.value for value in over])
    operands = [
        tuple(value if differs else value[0] for value, differs in zip(values, differ, strict=True))
        for values, differ in zip(operands, varies, strict=True)
    ]
    return inner.sites, operands


def _sliced(view: View | None) -> View | None:
    """Returns the view of one slice along the first axis, for a loop over a PARAM value."""
    if view is None or view.axes is None or view.axes[0] is None:
        return None
    stacked, axes = (*view.stacked, view.axes[0]), view.axes[1:]
    return View(view.leaf, ("axes", axes, stacked), axes, stacked)


def _count_sites(
    body, consts: Sequence[Value], num_carry: int, rest: Sequence[Value], length: int
) -> int:
    """Counts the sites in a loop's body by walking it once more without values."""
    known = [*consts, *(value for value in rest if value.kind is Kind.PARAM)]
    found = []

    def record(values):
        given = iter(values)
        consts_now = [value._replace(value=next(given)) for value in consts]
        rest_now = [
            value._replace(value=next(given)) if value.kind is Kind.PARAM else value
            for value in rest
        ]
        found.extend(_sites_of_body(body, consts_now, num_carry, rest_now, (length,))[0])
        return ()

    jax.eval_shape(record, [value.value for value in known])
    return len(found)


def _shape(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))


def _whole_leaf(number: int, ndim: int) -> View:
    axes = tuple(range(ndim))
    return View(number, ("axes", axes, ()), axes)


def _view_after(eqn, view: View | None) -> View | None:
    """Returns the view after an equation that only rearranges entries; None after any other."""
    if view is None:
        return None
    name, axes = eqn.primitive.name, view.axes
    (out,) = eqn.outvars
    match name:
        case "transpose":
            order = eqn.params["permutation"]
            new = None if axes is None else tuple(axes[i] for i in order)
            step = (name, tuple(order))
        case "squeeze":
            dropped = eqn.params["dimensions"]
            kept = [i for i in range(len(eqn.invars[0].aval.shape)) if i not in dropped]
            new = None if axes is None else tuple(axes[i] for i in kept)
            step = ("reshape", tuple(out.aval.shape))
        case "expand_dims" | "broadcast_in_dim" | "reshape":
            shape = tuple(out.aval.shape)
            if out.aval.size != eqn.invars[0].aval.size:
                return None
            if eqn.params.get("dimensions") is not None:
                return None  # a reshape in another order of axes
            new = None
            step = ("reshape", shape)
            if name == "broadcast_in_dim" and axes is not None:
                kept = eqn.params["broadcast_dimensions"]
                new = tuple(axes[kept.index(i)] if i in kept else None for i in range(len(shape)))
            elif tuple(eqn.invars[0].aval.shape) == shape:
                return view
        case "convert_element_type" | "copy" | "copy_p" | "reduce_precision":
            return view if jnp.issubdtype(out.aval.dtype, jnp.floating) else None
        case _:
            return None
    if new is not None:
        # A pure permutation is named by its result, whatever steps led to it.
        return View(view.leaf, ("axes", new, view.stacked), new, view.stacked)
    return View(view.leaf, (*view.layout, step), None, view.stacked)
