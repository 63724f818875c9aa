"""Where a run computes: its records cut into shards, and the shards laid on the devices of a mesh.

    mesh = jax.make_mesh((8,), ("data",));     train(step, params, private, mesh=mesh)

Every record belongs to one *shard*, and every device of the axis "data" holds equally many shards.
A device computes the sampled records of its own shards. The clipped sums of devices are integers
(`mirrordp.privacy.sums`) and are added once per step, which is all that travels between devices:

    s = Σ_devices Σ_{shards of the device} Σ_{i ∈ batch ∩ shard} clip(∇ℓ(θ; d_i), C)

A shard is computed like a microbatch, so the bound on the sensitivity of s is that of one device,
whatever the mesh. The batches are drawn for all records together, by the host, and so are the same
for every mesh. The noise is added to s after the reduction: once, by the program that all devices
share, with values that depend on the key and on the place of a number in its array alone
(`jax_threefry_partitionable`). With the same number of shards, a shard is the same program on every
mesh, and so are all sums, to the bit where a program is (on CPUs). The optimiser, which follows the
noise, may be compiled and so rounded differently.

Parameters and the state of the optimiser stay as the caller has placed them, replicated or sharded
over any axis of the mesh. All other axes are left to the compiler.

The devices may belong to several processes (`mirrordp.training.processes`). Records are then
numbered through all processes, in the order of the processes, and a process's records are cut into
the shards of its own devices. Every process draws the same batches, of all records, from the same
generator, and computes those of its own. So the run is the one that a single process would make of
all records with the same shards, and how many passes a step needs is known everywhere.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mirrordp import _validate
from mirrordp.data import UNPROTECTED
from mirrordp.privacy.accounting import Adjacency
from mirrordp.privacy.mechanism import Mechanism
from mirrordp.privacy.sampling import PADDING, in_random_places, passes
from mirrordp.training.processes import Group
from mirrordp.training.step import PrivateSum, State, Step, Unprivatized, record_keys
from mirrordp.types import Params, PyTree

DATA_AXIS = "data"
"""The name of the mesh axis over which records are split."""

# Smaller arrays of the noise's state are not worth a message between devices.
_LEAST_SHARDED = 2**10


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh and the number of shards; a value, since it is part of the compiled program.

    Attributes:
        mesh: the devices. All axes are of type Auto: the compiler places what nobody has placed.
        shards: the number of parts into which records are cut, a multiple of the devices.
        specs: where the leaves of the state of one run lie, in order; empty until it is known.
    """

    mesh: Mesh
    shards: int
    specs: tuple[PartitionSpec, ...] = ()

    @property
    def devices(self) -> int:
        """The number of devices, or groups of devices, that records are split over."""
        return self.mesh.shape[DATA_AXIS]

    def named(self, *spec: Any) -> NamedSharding:
        """Returns a place on the mesh; without arguments, a copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    @functools.cached_property
    def owners(self) -> tuple[int, ...]:
        """The process of each device, or group of devices, that records are split over."""
        devices = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(DATA_AXIS), 0)
        return tuple(group.flat[0].process_index for group in devices.reshape(self.devices, -1))

    @property
    def spans_processes(self) -> bool:
        """Whether some devices belong to other processes."""
        return len(set(self.owners)) > 1

    @property
    def shards_of_processes(self) -> list[int]:
        """The number of shards of each process, in order."""
        each = self.shards // self.devices
        return [each * self.owners.count(owner) for owner in sorted(set(self.owners))]

    @property
    def own_shards(self) -> slice:
        """The shards of this process."""
        each = self.shards // self.devices
        first = self.owners.index(jax.process_index())
        return slice(each * first, each * (first + self.owners.count(jax.process_index())))

    # On the host: parameters, states and records are put in their places.

    def put(self, tree: PyTree, shardings: PyTree | None = None) -> PyTree:
        """Returns arrays in their places, by default a copy on every device.

        All processes must hold the same arrays; nothing is sent between them.
        """
        if shardings is None:
            shardings = jax.tree.map(lambda _: self.named(), tree)
        if not self.spans_processes:
            return jax.device_put(tree, shardings)

        def placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
            if isinstance(leaf, jax.Array):
                if not leaf.is_fully_addressable:
                    if leaf.sharding == sharding:
                        return leaf
                    if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                        # The same place, on a mesh whose axes are of another type.
                        parts = [shard.data for shard in leaf.addressable_shards]
                        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)
                    return jax.jit(lambda leaf: leaf, out_shardings=sharding)(leaf)
                if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                    data = placed(jax.random.key_data(leaf), self.named(*sharding.spec))
                    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            host = np.asarray(jnp.asarray(leaf))
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(placed, tree, shardings)

    def put_params(self, params: Params) -> Params:
        """Returns parameters as the caller has placed them, and replicated where nobody has."""
        return self.put(params, jax.tree.map(self._sharding_of, params))

    def _sharding_of(self, leaf: Any) -> NamedSharding:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return self.named()
        mesh = sharding.mesh
        if (
            dict(mesh.shape) != dict(self.mesh.shape)
            or sharding.device_set != self.named().device_set
        ):
            raise ValueError(
                f"parameters must lie on the mesh of the run, {dict(self.mesh.shape)}, got an "
                f"array on another one, {dict(mesh.shape)}. Place them on the same mesh, or leave "
                "them on the host."
            )
        return self.named(*sharding.spec)

    def described(self, params: Params) -> str:
        """Returns in words what decides where sums are rounded, for a checkpoint."""
        specs = [str(self._sharding_of(leaf).spec) for leaf in jax.tree.leaves(params)]
        found = f"{dict(self.mesh.shape)}, parameters in {specs}"
        if self.spans_processes:
            found += f", shards of the processes {self.shards_of_processes}"
        return found

    def check(self, mechanism: Mechanism, num_records: int) -> None:
        """Raises for a capacity that cannot be divided and for fewer records than shards.

        Args:
            mechanism: decides the capacity.
            num_records: the number of private records of this process.
        """
        rows_per_shard(mechanism, self.shards)
        own = self.own_shards
        if num_records < own.stop - own.start:
            raise ValueError(
                "every shard needs a private record, got fewer records than "
                f"{own.stop - own.start} shards. Use fewer devices. {UNPROTECTED}"
            )

    def with_specs(self, state: State) -> "Placement":
        """Returns the placement of runs whose states are like this one, of a single run.

        What the optimiser makes of the parameters lies where they lie. The state of correlated
        noise is as large as several copies of the parameters, so it is split over the devices
        wherever it can be.
        """
        specs = jax.tree.map(lambda leaf: self._sharding_of(leaf).spec, state)
        shapes = [leaf.shape for leaf in jax.tree.leaves(state.params)]
        of_shape = dict(zip(shapes, jax.tree.leaves(specs.params), strict=True))
        noise = jax.tree.map(functools.partial(self._noise_spec, of_shape), state.noise_state)
        specs = specs._replace(noise_state=noise)
        return dataclasses.replace(self, specs=tuple(jax.tree.leaves(specs)))

    def _noise_spec(
        self, of_shape: dict[tuple[int, ...], PartitionSpec], leaf: Any
    ) -> PartitionSpec:
        if leaf.size < _LEAST_SHARDED:
            return PartitionSpec()
        for start in range(leaf.ndim):
            # A leaf that keeps its shape: axes for streams and bands, then its own.
            if any(of_shape.get(leaf.shape[start:], ())):
                return PartitionSpec(*(None,) * start, *of_shape[leaf.shape[start:]])
        divisible = [axis for axis, size in enumerate(leaf.shape) if size % self.devices == 0]
        if not divisible:
            return PartitionSpec()
        return PartitionSpec(*(None,) * divisible[-1], DATA_AXIS)

    def made(self, make: Callable[..., State], *args: Any) -> State:
        """Returns `make(*args)`, the state of one run, made where it shall lie."""
        tree = jax.tree.structure(jax.eval_shape(make, *args))
        shardings = [self.named(*spec) for spec in self.specs]
        if self.spans_processes:
            args = self.put(args, jax.tree.map(self._sharding_of, args))
        return jax.jit(make, out_shardings=jax.tree.unflatten(tree, shardings))(*args)

    def put_state(self, state: State, *, is_stacked: bool) -> State:
        """Returns the state of a run, or of runs with an axis for them first, in its place."""
        leaves, tree = jax.tree.flatten(state)
        first = (None,) if is_stacked else ()
        shardings = [self.named(*first, *spec) for spec in self.specs]
        return jax.tree.unflatten(tree, self.put(leaves, shardings))

    def put_sum(self, total: PrivateSum, *, is_stacked: bool) -> PrivateSum:
        """Returns a sum of nothing for every device, in its place."""
        axis = int(is_stacked)
        sharding = self.named(*(None,) * axis, DATA_AXIS)

        def of_devices(leaf: jax.Array) -> jax.Array:
            shape = (*leaf.shape[:axis], self.devices, *leaf.shape[axis:])
            return self.put(np.zeros(shape, leaf.dtype), sharding)

        return jax.tree.map(of_devices, total)

    def put_records(
        self, step: Step, records: PyTree, layout: "Layout", group: Group | None = None
    ) -> PyTree:
        """Returns each device's own records on it, as arrays with an axis for devices first.

        Args:
            step: what is trained.
            records: the records of this process.
            layout: where they belong.
            group: the processes, which agree on the length of the arrays; None if there is one.
        """
        first = self.owners.index(jax.process_index())
        members = layout.of_devices(self.devices)[first:]
        members = members[: self.owners.count(jax.process_index())]
        parts = [step.part(records, numbers - layout.first) for numbers in members]
        lengths = [len(leaf) for leaf in jax.tree.leaves(parts)]
        lengths = np.reshape(lengths, (len(parts), -1)).max(axis=0).tolist()
        if group is not None:
            lengths = np.max(group.gather(lengths), axis=0).tolist()

        def stacked(longest: int, *leaves: np.ndarray) -> jax.Array:
            shape = (self.devices, longest, *leaves[0].shape[1:])

            def on_device(index: Any) -> np.ndarray:
                own = leaves[(index[0].start or 0) - first]
                # Fewer records than on other devices: the rest is never looked up.
                extra = ((0, longest - len(own)), *((0, 0),) * (own.ndim - 1))
                return np.pad(own, extra)[None]

            return jax.make_array_from_callback(shape, self.named(DATA_AXIS), on_device)

        longest = jax.tree.unflatten(jax.tree.structure(parts[0]), lengths)
        return jax.tree.map(stacked, longest, *parts)

    def put_inputs(self, inputs: PyTree) -> PyTree:
        """Returns arrays with axes for runs, passes and shards of this process in their places."""
        sharding = self.named(None, None, DATA_AXIS)
        if not self.spans_processes:
            return jax.device_put(inputs, sharding)

        def placed(leaf: np.ndarray) -> jax.Array:
            shape = (*leaf.shape[:2], self.shards, *leaf.shape[3:])
            return jax.make_array_from_process_local_data(sharding, leaf, shape)

        return jax.tree.map(placed, inputs)

    # In the compiled program.

    def private_sum(
        self,
        step: Step,
        state: State,
        so_far: PrivateSum,
        inputs: Any,
        private: PyTree | None,
        key: jax.Array,
    ) -> PrivateSum:
        """Adds one pass of all shards to the sums of their devices; nothing travels.

        Args:
            step: what is trained.
            state: the state of one run.
            so_far: the devices' sums, with an axis for devices first.
            inputs: `numbers`, `places` and `batch` of the pass, with an axis for shards first.
            private: the devices' records, or None where they are streamed.
            key: the key of the step's losses.
        """
        # A record's gradient needs nothing else, so nothing else is gathered from other devices.
        seen = state._replace(opt_state=None, noise_state=None, average=None)

        def of_device(seen, so_far, shards, private, key):
            def add_shard(total, shard):
                numbers, places, batch = shard
                if private is not None:
                    batch = step.take(jax.tree.map(lambda leaf: leaf[0], private), places)
                keys = record_keys(key, numbers)
                return total + step.private_sum(seen, batch, numbers == PADDING, keys), None

            own = jax.tree.map(lambda leaf: leaf[0], so_far)
            total, _ = lax.scan(add_shard, own, shards)
            return jax.tree.map(lambda leaf: leaf[None], total)

        own = PartitionSpec(DATA_AXIS)
        mapped = self._mapped(of_device, (PartitionSpec(), own, own, own, PartitionSpec()), own)
        return mapped(seen, so_far, (inputs.numbers, inputs.places, inputs.batch), private, key)

    def total(self, step: Step, state: State, sums: PrivateSum) -> PrivateSum:
        """Returns the sum over all devices: the one message of a step, and it is exact.

        A device keeps what belongs to its own part of the parameters.
        """
        names = jax.tree.unflatten(jax.tree.structure(state), self.specs).params
        names = jax.tree.leaves(step.trainable.part(names))
        shapes = [high.shape[1:] for high in jax.tree.leaves(sums.total.high)]
        # The parameters come first in every sum; what else is counted is on every device.
        names += [PartitionSpec()] * (len(shapes) - len(names))
        axes = [_axis_over_data(spec) for spec in names]

        def summed(sums: PrivateSum) -> PrivateSum:
            own: PrivateSum = jax.tree.map(lambda leaf: leaf[0], sums)
            shown = Unprivatized.zero()
            if step.show_unprivatized:
                shown = jax.tree.map(self._reduction(None), own.unprivatized)
            reductions = [self._reduction(axis) for axis in axes]
            return PrivateSum(own.total.map_integers(reductions), shown)

        leaves = [
            PartitionSpec(*(None,) * axis, DATA_AXIS) if axis is not None else PartitionSpec()
            for axis in axes
        ]
        tree = jax.tree.structure(sums.total.high)
        total = dataclasses.replace(
            sums.total, high=jax.tree.unflatten(tree, leaves), low=jax.tree.unflatten(tree, leaves)
        )
        nowhere = jax.tree.map(lambda _: PartitionSpec(), sums.unprivatized)
        return self._mapped(summed, (PartitionSpec(DATA_AXIS),), PrivateSum(total, nowhere))(sums)

    def _reduction(self, axis: int | None) -> Callable[[jax.Array], jax.Array]:
        if self.devices == 1:
            # XLA cannot reduce over one device what is split over another axis.
            return lambda total: total
        if axis is None:
            return lambda total: lax.psum(total, DATA_AXIS)
        return lambda total: lax.psum_scatter(total, DATA_AXIS, scatter_dimension=axis, tiled=True)

    def kept(self, state: State) -> State:
        """Returns a state that stays where the first one was."""
        leaves, tree = jax.tree.flatten(state)
        shardings = [self.named(*spec) for spec in self.specs]
        return jax.tree.unflatten(tree, lax.with_sharding_constraint(leaves, shardings))

    def seen(self, tree: PyTree) -> PyTree:
        """Returns what the host reads, where every process can read it."""
        return lax.with_sharding_constraint(tree, self.named()) if self.spans_processes else tree

    def _mapped(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={DATA_AXIS},
            # The loss of a user knows nothing of the types that JAX would check here.
            check_vma=False,
        )


def _axis_over_data(spec: PartitionSpec) -> int | None:
    """Returns the axis of an array that is split over the devices of the data axis, if any is."""
    for axis, names in enumerate(spec):
        if names == DATA_AXIS or (isinstance(names, tuple) and DATA_AXIS in names):
            return axis
    return None


def off_mesh(leaf: Any) -> Any:
    """Returns an array on a mesh of one device as an array on that device.

    Where a mesh has axes of type Explicit, every operation would ask for them.
    """
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or len(sharding.device_set) > 1:
        return leaf
    return jax.device_put(leaf, *sharding.device_set)


def on_mesh(placement: Placement | None) -> contextlib.AbstractContextManager[Any]:
    """Makes the mesh known, so that constraints in a loss may name its axes alone."""
    return contextlib.nullcontext() if placement is None else jax.set_mesh(placement.mesh)


def placement_for(mesh: Mesh | None, shards: int | None) -> Placement | None:
    """Checks a mesh and the number of shards; None is one device and one shard.

    Raises:
        ValueError: if the mesh has no axis of the name "data", if its devices are some of several
            processes and not those of all, in order, or if shards cannot be dealt to devices
            evenly.
    """
    if mesh is None:
        if jax.process_count() > 1:
            raise ValueError(
                f"this is one of {jax.process_count()} processes, so a run needs to be told its "
                "devices, got mesh=None. Pass a mesh of jax.devices() to train with all processes "
                "together, or one of jax.local_devices() to train here alone."
            )
        mesh = Mesh(np.asarray(jax.devices()[:1]), (DATA_AXIS,))
    _validate.instance_of(Mesh, 'Use jax.make_mesh((8,), ("data",)).', mesh=mesh)
    if DATA_AXIS not in mesh.axis_names:
        raise ValueError(
            f"the mesh needs an axis {DATA_AXIS!r}, over which records are split, got the axes "
            f'{mesh.axis_names}. Use jax.make_mesh(({mesh.size},), ("data",)).'
        )
    _check_processes(mesh)
    devices = mesh.shape[DATA_AXIS]
    parts = devices if shards is None else shards
    if parts % devices:
        raise ValueError(
            f"every device computes equally many shards, got shards={parts} for {devices} "
            f"devices. Use a multiple of {devices}."
        )
    if parts == mesh.size == 1 and mesh.devices.flat[0] == jax.devices()[0]:
        return None
    # With axes of type Explicit, as `jax.make_mesh` makes them, every operation of every loss and
    # optimiser would have to say where its result shall lie.
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return Placement(auto, parts)


def _check_processes(mesh: Mesh) -> None:
    """Raises unless the devices are of this process, or of all processes and in their order."""
    groups = np.moveaxis(mesh.devices, mesh.axis_names.index(DATA_AXIS), 0)
    owners = [{device.process_index for device in np.ravel(group)} for group in groups]
    if all(each == {jax.process_index()} for each in owners):
        return
    order = [min(each) for each in owners]
    if any(len(each) > 1 for each in owners) or sorted(order) != order:
        raise ValueError(
            f"the axis {DATA_AXIS!r} must lie over the processes in their order, each of its "
            f"places in one process, got {owners}. Make the mesh of jax.devices() in order, with "
            "the other axes within a process."
        )
    everyone = set(range(jax.process_count()))
    if set(order) != everyone or jax.process_index() not in everyone:
        raise ValueError(
            f"a mesh must consist of devices of this process, or of all {jax.process_count()} "
            f"processes, got devices of the processes {sorted(set(order))}. Make it of "
            "jax.local_devices() or of jax.devices()."
        )


def rows_per_shard(mechanism: Mechanism, shards: int) -> int:
    """Returns the capacity of one shard: so that few steps need a further pass, as for one device.

    A capacity that the caller has stated is the capacity of all shards together.
    """
    sampling = mechanism.sampling
    if _states_capacity(sampling):
        if sampling.capacity % shards:
            raise ValueError(
                f"the capacity of a batch is divided among {shards} shards, got "
                f"capacity={sampling.capacity}. Use a multiple of {shards}, or leave it out."
            )
        return sampling.capacity // shards
    if sampling.sampling_prob == 1 and mechanism.adjacency is not Adjacency.ADD_REMOVE:
        return math.ceil(sampling.capacity / shards)
    # 4.5 standard deviations instead of 3.5: any of the shards may overflow.
    expected = sampling.expected_batch_size / shards
    return min(sampling.capacity, 8 * math.ceil((expected + 4.5 * math.sqrt(expected)) / 8))


def _states_capacity(sampling: Any) -> bool:
    """Returns whether a sampler has another capacity than it would choose itself."""
    if "capacity" not in getattr(sampling, "__dataclass_fields__", ()):
        return True
    return dataclasses.replace(sampling, capacity=0).capacity != sampling.capacity


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which shard each record belongs to, and how the records of a draw are laid out in passes.

    Attributes:
        starts: where each shard begins in the order of records, and at last their number.
        size: how many records of a shard one pass computes.
        shard: the shard that each record drew; None where shards are equal parts in order.
        entropy: under add-remove adjacency, decides the places of records within a pass.
        first: the number of the first record of this process.
    """

    starts: np.ndarray
    size: int
    shard: np.ndarray | None = None
    entropy: int = 0
    first: int = 0

    @classmethod
    def of(
        cls,
        mechanism: Mechanism,
        num_records: int | Sequence[int],
        shards: int | Sequence[int],
        *,
        size: int,
        entropy: int,
        first: int = 0,
    ) -> "Layout":
        """Deals records to shards: in equal parts where their number is public, else at random.

        If a record that is taken away moved others to other shards, these would be rounded
        differently, and the sum would change by more than this record. So under add-remove
        adjacency each record draws its shard by itself.

        Args:
            mechanism: decides the adjacency.
            num_records: the number of private records, of each process if there are several.
            shards: the number of shards, of each process if there are several.
            size: how many records of a shard one pass computes.
            entropy: the seed of the run, used under add-remove adjacency.
            first: the number of the first record of this process.
        """
        records, parts = np.atleast_1d(num_records), np.atleast_1d(shards)
        if mechanism.adjacency is not Adjacency.ADD_REMOVE:
            begins = [0, *np.cumsum(records)]
            cuts = [
                begin + np.arange(part) * count // part
                for begin, count, part in zip(begins, records, parts, strict=False)
            ]
            return cls(np.concatenate([*cuts, [begins[-1]]]), size, first=first)
        rng = _generator(entropy)
        drawn = [
            rng.integers(p, size=n, dtype=np.int32) for n, p in zip(records, parts, strict=True)
        ]
        before = np.cumsum(parts) - parts
        shard = np.concatenate([own + np.int32(b) for own, b in zip(drawn, before, strict=True)])
        starts = np.concatenate([[0], np.cumsum(np.bincount(shard, minlength=parts.sum()))])
        return cls(starts, size, shard, entropy, first)

    @functools.cached_property
    def _order(self) -> np.ndarray:
        """Record numbers, shard by shard."""
        assert self.shard is not None
        return np.argsort(self.shard, kind="stable")

    @functools.cached_property
    def _positions(self) -> np.ndarray:
        """Where each record lies in the order."""
        found = np.empty(len(self._order), np.int32)
        found[self._order] = np.arange(len(found))
        return found

    def of_devices(self, devices: int) -> list[np.ndarray]:
        """Returns the numbers of the records that each device holds."""
        firsts = self.starts[:: (len(self.starts) - 1) // devices]
        ranges = [np.arange(*pair) for pair in itertools.pairwise(firsts)]
        return ranges if self.shard is None else [self._order[part] for part in ranges]

    def places(self, numbers: np.ndarray, devices: int) -> np.ndarray:
        """Returns where records lie among those of their device; PADDING is anywhere."""
        found = np.maximum(numbers, 0)
        if self.shard is not None:
            found = self._positions[found]
        firsts = self.starts[:: (len(self.starts) - 1) // devices]
        device = np.searchsorted(firsts, found, side="right") - 1
        return np.where(numbers == PADDING, 0, found - firsts[device]).astype(np.int32)

    def passes(
        self, batch: np.ndarray, order: Callable[[np.ndarray], np.ndarray], *salt: int
    ) -> np.ndarray:
        """Returns the records of one draw as [passes, shards, size], filled up with PADDING.

        Where one shard needs a further pass, the others pad. Under add-remove adjacency records lie
        in random places; see `Mechanism.batches`.

        Args:
            batch: the draw.
            order: puts the records of a shard in the order in which they are computed.
            *salt: the numbers of the run and of the step, which decide random places.
        """
        numbers = batch[batch != PADDING]
        shards = len(self.starts) - 1
        if self.shard is None:
            shard = np.searchsorted(self.starts, numbers, side="right") - 1
        else:
            shard = self.shard[numbers]
        # One sort for all shards: looking for each one's records takes long if there are hundreds.
        ends = np.cumsum(np.bincount(shard, minlength=shards))
        sorted_numbers = numbers[np.argsort(shard, kind="stable")]
        parts = [order(part) for part in np.split(sorted_numbers, ends[:-1])]
        if self.shard is not None:
            rng = _generator(self.entropy, *salt)
            parts = [in_random_places(part, self.size, rng) for part in parts]
        rows = [passes(part, self.size) for part in parts]
        found = np.full((max(map(len, rows)), shards, self.size), PADDING, np.int32)
        for each, own in enumerate(rows):
            found[: len(own), each] = own
        return found


def _generator(entropy: int, *salt: int) -> np.random.Generator:
    """Returns randomness that is independent of sampling, noise and losses; see `randomness`."""
    return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=(PLACES, *salt)))


PLACES = 4
"""The number of the stream of `randomness` that shards and places are drawn from."""
