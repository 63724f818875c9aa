"""Two kinds of data that cannot be confused; overlap; what is refused, and how it is said."""

import copy
import json
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pandas
import pytest

import mirrordp
from mirrordp import PrivateClients, PrivateData, PublicClients, PublicData, split_rows
from mirrordp.data import (
    UNPROTECTED,
    Overlap,
    UnprotectedWarning,
    excluded_rows,
    require_private,
    require_public,
)

BOTH = pytest.mark.parametrize("kind", [PrivateData, PublicData])


def rows(n=6, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(n, 2)).astype(np.float32), "y": rng.integers(0, 3, n)}


class TestTypes:
    @pytest.mark.parametrize(
        "data",
        [
            PrivateData({"x": np.full(3, 0.77)}),
            PrivateClients.from_rows(np.full(3, 0.77), ["ann", "bob", "bob"]),
        ],
    )
    def test_private_rows_are_not_printed(self, data):
        """What is logged as one of many arguments must not hold the data."""
        for text in (repr(data), str(data), f"{[data]}"):
            assert "0.77" not in text
            assert "ann" not in text
            assert type(data).__name__ in text

    @BOTH
    def test_holds_rows(self, kind):
        data = kind(rows())
        assert len(data) == 6
        assert data.nbytes == 6 * 2 * 4 + 6 * 8
        assert isinstance(kind(jnp.ones((3, 2))).arrays, np.ndarray)

    def test_neither_is_the_other(self):
        private, public = PrivateData(rows()), PublicData(rows())
        assert not isinstance(private, PublicData)
        assert not isinstance(public, PrivateData)
        require_private(private)
        require_public(public)
        with pytest.raises(TypeError, match="private must be PrivateData, got PublicData"):
            require_private(public)
        with pytest.raises(TypeError, match="public must be PublicData, got PrivateData"):
            require_public(private)
        with pytest.raises(TypeError, match=r"Wrap the sensitive rows: private=PrivateData"):
            require_private(rows())
        users = mirrordp.PrivateClients.from_users([np.ones((2, 3), np.float32)])
        with pytest.raises(TypeError, match=r"got PrivateClients\. Protect users with a Federated"):
            require_private(users)

    @BOTH
    def test_half_precision_features_are_numbers(self, kind):
        assert len(kind(jnp.ones((3, 2), jnp.bfloat16))) == 3
        with pytest.raises(ValueError, match="must be finite"):
            kind(jnp.full((3, 2), jnp.nan, jnp.bfloat16))


class TestBadInput:
    @BOTH
    def test_several_arrays_are_one_tree(self, kind):
        with pytest.raises(TypeError, match=r"Name them: \w+\(\{'x': X, 'y': y\}\)"):
            kind(np.ones((3, 2)), np.ones(3))
        made = kind({"x": np.ones((3, 2))})
        assert len(copy.deepcopy(made)) == len(pickle.loads(pickle.dumps(made))) == 3

    @BOTH
    def test_empty(self, kind):
        with pytest.raises(ValueError, match=f"{kind.__name__} needs at least one row"):
            kind(np.zeros((0, 3)))
        with pytest.raises(ValueError, match="at least one array, got an empty tree"):
            kind({})

    @BOTH
    def test_unequal_lengths(self, kind):
        with pytest.raises(ValueError, match=r"same number of rows, got .*'x'\]\": 6.*'y'\]\": 5"):
            kind({"x": np.ones((6, 2)), "y": np.ones(5)})

    @BOTH
    def test_scalars(self, kind):
        with pytest.raises(
            ValueError, match=r"leading example axis, got a scalar at arrays\['y'\]"
        ):
            kind({"x": np.ones(3), "y": 1.0})

    @BOTH
    @pytest.mark.parametrize("array", [np.array(["a", "b"]), np.array([{}, None], object)])
    def test_not_numbers(self, kind, array):
        with pytest.raises(TypeError, match=r"must hold numbers, got dtype .* at arrays\['x'\]"):
            kind({"x": array})

    @BOTH
    def test_non_finite_features_name_column_and_count(self, kind):
        data = rows()
        data["x"][[1, 3], 1] = np.nan
        data["x"][2, 0] = -np.inf
        with pytest.raises(ValueError) as caught:
            kind(data)
        message = str(caught.value)
        assert "got 3 NaN or infinite values" in message
        assert "arrays['x'] column 0 (1)" in message
        assert "arrays['x'] column 1 (2)" in message
        assert (UNPROTECTED in message) == (kind is PrivateData)

    @BOTH
    def test_many_bad_columns_are_counted(self, kind):
        with pytest.raises(ValueError, match="and 4 more columns"):
            kind(np.full((2, 9), np.inf))
        with pytest.raises(ValueError, match="2 NaN or infinite values in arrays"):
            kind(np.full(2, np.nan))

    def test_messages_about_private_rows_are_marked(self):
        with pytest.raises(ValueError) as caught:
            PrivateData({"x": np.ones((6, 2)), "y": np.ones(5)})
        assert UNPROTECTED in str(caught.value)


class TestOverlap:
    def test_rows_that_are_also_public_are_masked_one_by_one(self):
        private, others = rows(), rows(3, seed=1)
        public = {
            name: np.concatenate([leaf[[4, 1, 1]], others[name]]) for name, leaf in private.items()
        }
        with pytest.warns(UnprotectedWarning, match="2 private rows equal a public row") as record:
            mask = excluded_rows(PrivateData(private), PublicData(public))
        assert UNPROTECTED in str(record[0].message)
        np.testing.assert_array_equal(np.flatnonzero(mask), [1, 4])
        assert len(mask) == 6

    def test_a_row_counts_only_as_a_whole(self):
        private = rows()
        public = {"x": private["x"].copy(), "y": private["y"] + 1}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not excluded_rows(PrivateData(private), PublicData(public)).any()

    def test_each_row_is_judged_by_itself(self):
        """Changing one private row changes the mask in that place only."""
        private, others = rows(), rows(seed=1)
        public = {name: np.concatenate([leaf, others[name]]) for name, leaf in rows().items()}
        with pytest.warns(UnprotectedWarning):
            before = excluded_rows(PrivateData(private), PublicData(public))
        private["x"][3] += 1
        with pytest.warns(UnprotectedWarning):
            after = excluded_rows(PrivateData(private), PublicData(public))
        np.testing.assert_array_equal(np.flatnonzero(before != after), [3])

    def test_refuse(self):
        with pytest.raises(
            ValueError, match=r"2 private rows equal a public row, and overlap=Overlap.REFUSE"
        ) as caught:
            excluded_rows(PrivateData(rows()), PublicData(self.few_private()), Overlap.REFUSE)
        assert UNPROTECTED in str(caught.value)

    def few_private(self):
        """Two private rows among eight public ones."""
        others = rows(seed=1)
        return {name: np.concatenate([leaf[:2], others[name]]) for name, leaf in rows().items()}

    @pytest.mark.parametrize("overlap", Overlap)
    def test_public_rows_that_are_mostly_private_are_refused(self, overlap):
        """A public gradient of private rows has no noise, whatever the private part does."""
        private = rows(40)
        public = {name: leaf[::2] for name, leaf in private.items()}
        with pytest.raises(
            ValueError, match="20 of 20 public rows that equal a private row"
        ) as bad:
            excluded_rows(PrivateData(private), PublicData(public), overlap)
        assert UNPROTECTED in str(bad.value)

    @pytest.mark.parametrize(
        ("private", "public", "is_refused"),
        [
            (np.arange(40), np.arange(40), True),
            # Every row has an equal, in the other process.
            (np.tile(np.arange(20), 2), np.arange(20), False),
            (np.tile(np.arange(20), 2), np.tile(np.arange(20), 2)[::-1], True),
            (np.tile(np.arange(20), 2), np.repeat(np.arange(10), 4), False),
            (np.arange(40), np.arange(20, 60), False),
            (np.arange(40), np.arange(19, 59), True),
        ],
        ids=["all", "repeated", "copied", "counted otherwise", "half", "more than half"],
    )
    @pytest.mark.filterwarnings("ignore:.*equal a public row")
    def test_several_processes_judge_as_one(self, private, public, is_refused):
        parts, barrier, said = np.split(private, 2), threading.Barrier(2), {}
        public = PublicData(public)

        def judged(part, gather=None):
            try:
                return excluded_rows(PrivateData(part), public, gather=gather)
            except ValueError as error:
                return str(error)

        def of_process(number):
            def gather(value):
                said[number] = json.dumps(value)
                barrier.wait(10)
                found = [json.loads(said[each]) for each in range(2)]
                barrier.wait(10)
                return found

            return judged(parts[number], gather)

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(of_process, range(2)))
        expected = judged(private)
        assert isinstance(expected, str) == is_refused
        if is_refused:
            assert found == [expected] * 2
        else:
            np.testing.assert_array_equal(np.concatenate(found), expected)

    def test_refuse_without_overlap(self):
        mask = excluded_rows(PrivateData(rows()), PublicData(rows(seed=1)), Overlap.REFUSE)
        assert not mask.any()

    @pytest.mark.parametrize(
        "public",
        [
            {"x": np.ones((2, 2), np.float32)},
            {"x": np.ones((2, 3), np.float32), "y": np.ones(2, int)},
            {"x": np.ones((2, 2)), "y": np.ones(2, int)},
        ],
        ids=["tree", "shape", "dtype"],
    )
    def test_mismatched_trees(self, public):
        with pytest.raises(ValueError, match=r"same structure, got private .*float32\[n, 2\]"):
            excluded_rows(PrivateData(rows()), PublicData(public))


class TestSplit:
    def test_partitions_the_rows(self):
        data = {"x": np.arange(100.0)[:, None], "y": np.arange(100)}
        private, public = split_rows(data, public_fraction=0.04, seed=1)
        assert (len(private), len(public)) == (96, 4)
        together = np.concatenate([private.arrays["y"], public.arrays["y"]])
        assert sorted(together) == list(range(100))
        np.testing.assert_array_equal(private.arrays["x"][:, 0], private.arrays["y"])

    def test_the_seed_decides(self):
        x = np.arange(100.0)
        same = [split_rows(x, public_fraction=0.1, seed=3)[1].arrays for _ in range(2)]
        np.testing.assert_array_equal(*same)
        assert (same[0] != split_rows(x, public_fraction=0.1, seed=4)[1].arrays).any()

    @pytest.mark.parametrize("bad", [0.0, 1.0, -1.0, np.nan])
    def test_bad_fraction(self, bad):
        with pytest.raises(ValueError, match=r"public_fraction must be a number in \(0, 1\)"):
            split_rows(np.arange(10.0), public_fraction=bad, seed=0)


def users_of(odd, kind=np.uint8):
    """Five users with rows of one dtype, and the odd one among them."""
    usual = [np.array([[200, 3], [k, 100]], kind) for k in range(5)]
    return [*usual[:2], odd, *usual[2:]], usual


class TestNobodyChangesTheNumbersOfAnother:
    """Rows of several people meet in one array, whose dtype one of them must not decide."""

    @pytest.mark.parametrize(
        ("kind", "odd_kind"),
        [
            (np.uint8, np.uint16),
            (np.uint8, np.int16),
            (np.int32, np.int64),
            (np.float16, np.float32),
            (np.float32, np.float64),
            (np.int32, np.float32),
            (np.uint8, bool),
        ],
    )
    def test_another_dtype_is_refused(self, kind, odd_kind):
        """A byte wraps around at 256; as uint16, which one user had, it does not."""
        users, _ = users_of(np.ones((1, 2), odd_kind), kind)
        with pytest.raises(TypeError, match=r"the same dtypes, got .* for user 2") as error:
            PrivateClients.from_users(users)
        assert UNPROTECTED in str(error.value)
        assert "dtypes=" in str(error.value)

    @pytest.mark.parametrize(
        "odd",
        [
            np.array([[1, 2]], np.uint16),
            np.array([[1.0, 2.0]]),
            np.array([[True, False]]),
            np.zeros((0, 2)),
            np.zeros((0, 2), object),
        ],
    )
    def test_declared_dtypes_hold_for_each_user_alone(self, odd):
        users, usual = users_of(odd)
        made = PrivateClients.from_users(users, dtypes=np.uint8)
        assert made.arrays.dtype == np.uint8
        np.testing.assert_array_equal(made.user(2), odd.astype(float))
        others = [made.user(number) for number in (0, 1, 3, 4, 5)]
        for found, expected in zip(others, usual, strict=True):
            assert found.tobytes() == expected.tobytes()

    @pytest.mark.parametrize(
        "odd",
        [
            np.array([[1, 256]]),
            np.array([[1, -1]]),
            np.array([[1.0, 0.5]]),
            np.array([[1.0, np.nan]]),
            np.array([[1j, 1]]),
            np.array([["1", "2"]]),
            np.array([[1, 2]], "m8[s]"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, odd):
        users, _ = users_of(odd)
        with pytest.raises(ValueError, match=r"declared dtypes, .* become uint8 for user 2") as bad:
            PrivateClients.from_users(users, dtypes=np.uint8)
        assert UNPROTECTED in str(bad.value)
        wide, _ = users_of(np.array([[-1]], np.int64), np.uint64)
        with pytest.raises(ValueError, match=r"int64 that cannot become uint64"):
            PrivateClients.from_users([user[:, :1] for user in wide], dtypes=np.uint64)

    def test_dtypes_of_a_tree_and_of_public_users(self):
        public = PublicClients.from_users(
            [{"x": np.ones((1, 2), np.float32), "y": np.zeros(1, "i4")}]
        )
        user = {"x": np.array([[1.1, 2]]), "y": np.array([1])}
        for dtypes in (public.arrays, {"x": np.float32, "y": "int32"}):
            made = PrivateClients.from_users([user], dtypes=dtypes)
            assert (made.arrays["x"].dtype, made.arrays["y"].dtype) == (np.float32, np.int32)
        with pytest.raises(ValueError, match="dtypes must be one dtype or a tree like a user's"):
            PrivateClients.from_users([user], dtypes={"x": np.float32, "z": np.int32})

    @pytest.mark.parametrize("odd", [2.5, "x", "7", b"y", np.float32(0.5), 2**70])
    def test_another_type_of_name(self, odd):
        """1 as 1.0 or '1' would keep other rows of all users, and sort them in another order."""
        owners = np.repeat(np.arange(1, 13), 20).tolist()
        rows = np.arange(len(owners) + 20.0)
        made = [
            PrivateClients.from_rows(rows, [*owners, *[name] * 20], max_examples_per_user=3)
            for name in (0, odd)
        ]
        kept = [
            {str(name): data.user(number).tolist() for number, name in enumerate(data.ids)}
            for data in made
        ]
        for name in map(str, range(1, 13)):
            if name != str(odd):
                assert kept[0][name] == kept[1][name]
        order = [[n for n in data.ids if n not in (0, 7, odd)] for data in made]
        assert order[0] == order[1] == [*range(1, 7), *range(8, 13)]

    def test_an_array_of_names_that_another_dtype_holds(self):
        owners = np.repeat(np.arange(1, 13), 20)
        first, second = (
            PrivateClients.from_rows(np.arange(240.0), names, max_examples_per_user=3)
            for names in (owners, owners.astype(float))
        )
        np.testing.assert_array_equal(first.arrays, second.arrays)
        text = PrivateClients.from_rows(
            np.arange(240.0), owners.astype(str), max_examples_per_user=3
        )
        np.testing.assert_array_equal(first.arrays, text.arrays)

    @BOTH
    def test_durations_are_no_numbers(self, kind):
        """NumPy counts them among the integers; one row in seconds turns days into seconds."""
        with pytest.raises(TypeError, match=r"must hold numbers, got dtype timedelta64"):
            kind(np.array([1, 2], "m8[D]"))


class OneAtATime:
    """A data set as PyTorch has them: it need never raise an IndexError."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index > 1_000:
            pytest.fail("it was read without end")
        return np.full(2, index % 3, np.float32)


class TensorDataset(OneAtATime):
    tensors = (np.zeros((3, 2), np.float32), np.zeros(3, np.float32))

    def __getitem__(self, index):
        super().__getitem__(index)
        return tuple(tensor[index % 3] for tensor in self.tensors)


class Loader:
    def __iter__(self):
        return iter(np.zeros((3, 2)))


class TestOtherContainers:
    """What gives one example at a time is refused at once, and in words."""

    @pytest.mark.parametrize("data", [OneAtATime(), TensorDataset(), Loader(), object()])
    @pytest.mark.parametrize(
        "make",
        [
            PrivateData,
            PublicData,
            lambda data: PrivateData({"x": np.zeros(3), "y": data}),
            lambda data: mirrordp.PrivateClients.from_rows(data, [0, 1, 1]),
            lambda data: mirrordp.PublicClients.from_users([data]),
            lambda data: mirrordp.PrivateClients(data, np.array([3]), None, 5),
            lambda data: mirrordp.split_rows(data, public_fraction=0.5, seed=0),
        ],
    )
    def test_refused(self, make, data):
        with pytest.raises(TypeError, match=f"takes arrays.* got {type(data).__name__} at arrays"):
            make(data)

    @pytest.mark.parametrize("mask", [False, [False, True, False]])
    def test_masked_values_are_not_taken_for_numbers(self, mask):
        with pytest.raises(TypeError, match=r"without a mask.* at arrays\['x'\]"):
            PublicData({"x": np.ma.array([1.0, 2.0, 3.0], mask=mask)})

    def test_the_advice_works(self):
        dataset = TensorDataset()
        with pytest.raises(TypeError, match=r"PrivateData\(tuple\(np.asarray\(t\) for t in"):
            PrivateData(dataset)
        assert len(PrivateData(tuple(np.asarray(t) for t in dataset.tensors))) == 3
        dataset = OneAtATime()
        with pytest.raises(TypeError, match=r"np.stack\(\[dataset\[i\] for i in range"):
            PrivateData(dataset)
        assert len(PrivateData(np.stack([dataset[i] for i in range(len(dataset))]))) == 3

    def test_arrays_of_other_libraries_are_taken(self):
        class Tensor:
            def __array__(self, dtype=None, copy=None):
                return np.ones((3, 2), np.float32)

        frame = pandas.DataFrame({"a": [1.0, 2.0, 3.0]})
        trees = [jnp.ones((3, 2)), frame, Tensor(), range(3), memoryview(np.ones(3)), {"x": frame}]
        for tree in trees:
            assert len(PrivateData(tree)) == 3

    def test_a_list_of_numbers_is_told_to_become_an_array(self):
        with pytest.raises(ValueError, match="Make an array of a list"):
            PrivateData({"x": [1.0, 2.0]})
