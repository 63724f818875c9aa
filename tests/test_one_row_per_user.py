"""One row of each user: whatever rows a user has, one row of what is trained on changes."""

import random
import warnings

import numpy as np
import pandas
import pytest

from mirrordp.data import UNPROTECTED, PrivateClients, UnprotectedWarning, one_row_per_user
from mirrordp.data.users import _spelling
from mirrordp.linear import PrivateLinearRegression, estimators, nonlinear
from mirrordp.privacy.accounting import Adjacency
from mirrordp.spending.ledger import Ledger


def chosen(owners, values=None, **options):
    """The rows that are trained on, as owner and value."""
    rows = one_row_per_user(owners, **options)
    values = range(len(owners)) if values is None else values
    return [(owners[row], values[row]) for row in rows]


class TestTheChoice:
    def test_each_user_has_one_row_in_the_order_of_names(self):
        owners = [10, 9, 9, "b", "a", "b", 9]
        rows = one_row_per_user(owners)
        assert [owners[row] for row in rows] == [9, 10, "a", "b"]
        assert rows.tolist() == one_row_per_user(owners).tolist()

    def test_it_varies_with_the_name(self):
        """A choice of the first row, say, would be a choice by time."""
        owners = [name for _ in range(10) for name in range(1000)]
        counts = np.bincount(one_row_per_user(owners) // 1000, minlength=10)
        assert counts.min() > 60
        assert counts.max() < 150

    @pytest.mark.parametrize("seed", range(40))
    def test_the_rows_of_one_user_change_one_row(self, seed):
        rng = random.Random(seed)
        names = ["ann", "Ann", "anna", 7, "8", "7.5", "08", "é", 2**53, 2**53 + 1]
        victim = rng.choice(names)
        others = [(name, (name, k)) for name in names for k in range(rng.randint(1, 4))]
        others = [row for row in others if row[0] != victim]
        rng.shuffle(others)
        found = []
        for _ in range(5):
            table = list(others)
            for k in range(rng.randint(1, 5)):
                table.insert(rng.randint(0, len(table)), (victim, ("victim", rng.random(), k)))
            usable = np.array([row[1][-1] != 1 for row in table])
            owners, values = zip(*table, strict=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UnprotectedWarning)  # 8 and 08
                found.append(chosen(owners, values, usable=usable))
        places = [[i for i, row in enumerate(rows) if row[0] == victim] for rows in found]
        assert places == [places[0]] * 5
        assert len(places[0]) == 1
        for rows in found:
            assert len(rows) == len(names)
            del rows[places[0][0]]
        assert found == [found[0]] * 5

    def test_a_user_who_joins_changes_nobody_else(self):
        owners = ["c", "a", "c", "b", "a", "c"]
        assert [row for row in chosen([*owners, "aa", "aa"]) if row[0] != "aa"] == chosen(owners)

    def test_usable_rows_come_first(self):
        owners = ["a"] * 5 + ["b"] * 3
        usable = np.array([False, False, False, True, False] + [False] * 3)
        rows = one_row_per_user(owners, usable)
        assert rows[0] == 3
        assert rows[1] in (5, 6, 7)

    def test_names_are_those_of_clients(self):
        owners = ["é", "e\u0301", " é ", 7, 7.0, "7", b"7", "7 ", ("a", 7), ("a", 7.0), "x"]
        clients = PrivateClients.from_rows(np.arange(11.0), owners, max_examples_per_user=99)
        found = [owners[row] for row in one_row_per_user(owners)]
        assert clients.ids is not None
        assert list(map(_spelling, found)) == list(map(_spelling, clients.ids))
        assert len(found) == 4

    @pytest.mark.parametrize("missing", [None, "", "  ", np.nan, pandas.NA, pandas.NaT, ("a", "")])
    def test_rows_without_an_owner_are_refused(self, missing):
        with pytest.raises(ValueError, match=r"must have an owner, got 1 rows") as error:
            one_row_per_user(["a", missing, "b"])
        assert UNPROTECTED in str(error.value)

    def test_masked_names_are_refused(self):
        with pytest.raises(ValueError, match="must have an owner, got 1 rows"):
            one_row_per_user(np.ma.array([1, 2, 3], mask=[False, True, False]))

    def test_one_name_per_row_and_a_mask(self):
        for arguments in (([[1, 2]],), ([1, 2], [1.0, np.nan]), ([1, 2], [True])):
            with pytest.raises(ValueError, match="Pass one name per row"):
                one_row_per_user(np.array(arguments[0]), *arguments[1:])

    def test_one_number_in_two_ways_is_named(self):
        with pytest.warns(UnprotectedWarning, match="2 names are the number of another user"):
            assert len(one_row_per_user(["7", "7.0", "07", "x", "y"])) == 5
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            one_row_per_user(["7", "8.0", "x", "inf", "nan1", "infinity"])


ESTIMATORS = [
    getattr(module, name)
    for module in (estimators, nonlinear)
    for name in vars(module)
    if name.startswith("Private") and getattr(module, name).__module__ == module.__name__
]


def draw(rows, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 2))
    return x, (x[:, 0] - x[:, 1] + 0.1 * rng.normal(size=rows) > 0).astype(int)


@pytest.mark.filterwarnings("ignore:this is one of")
class TestTheUnitOfAnEstimator:
    @pytest.mark.parametrize("kind", ESTIMATORS, ids=lambda kind: kind.__name__)
    def test_it_is_stated_and_charged(self, kind):
        options = {"steps": 5} if "Network" in kind.__name__ else {}
        model = kind(1.0, 1e-5, unit="user", random_state=0, **options)
        ledger = Ledger(Adjacency.ZERO_OUT)
        model.fit(*draw(1000, 0), *draw(100, 1), spend=ledger)
        assert model.n_iter_ > 0
        assert model.privacy_.unit == "user"
        assert "every user" in model.privacy_.privacy_card()
        assert "one user each" in model.privacy_.statement()
        with pytest.raises(ValueError, match="a ledger that covers one user"):
            kind(1.0, 1e-5, **options).fit(*draw(1000, 0), *draw(100, 1), spend=ledger)

    def test_it_changes_no_number(self):
        found = [
            PrivateLinearRegression(unit=unit, random_state=0).fit(*draw(900, 0), *draw(80, 1))
            for unit in ("example", "user")
        ]
        np.testing.assert_array_equal(found[0].coef_, found[1].coef_)
        assert found[0].privacy_.epsilon == found[1].privacy_.epsilon
        assert found[0].privacy_.unit == "example"

    def test_other_units_are_refused(self):
        with pytest.raises(ValueError, match=r"unit must be one of \('example', 'user'\)"):
            PrivateLinearRegression(unit="person").fit(*draw(9, 0), *draw(9, 1))
