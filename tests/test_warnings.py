"""Warnings point at the line of the caller's program, whatever path they come by."""

import ast
import linecache
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import mirrordp
from mirrordp import Mechanism, PrivateData, PublicData
from mirrordp.data import excluded_rows
from mirrordp.linear.estimators import PrivateLinearRegression
from mirrordp.privacy import ghost
from mirrordp.training.federated import warm_start_clients
from tests import tools
from tests.tools import mechanism, sgd

PACKAGE = Path(mirrordp.__file__).parent
X = tools.features()
PARTLY_PUBLIC = np.concatenate([X[:2], X[:6] + 100])
USERS = [X[start : start + 4] for start in range(0, 40, 4)]
PARAMS = {"used": np.zeros(3, np.float32), "unused": np.zeros(2, np.float32)}


def loss_of_a_part(params, example):
    return tools.squared_distance(params["used"], example)


def step(loss):
    return mirrordp.TrainStep(loss, mechanism(num_steps=1), sgd(0.1))


def calibrated():
    options = {"num_steps": 5, "l2_clip_norm": 1.0, "sampling": mirrordp.privacy.FullBatch.of(40)}
    return Mechanism.calibrate(epsilon=1, delta=0.1, **options)  # here


def asked_for_epsilon():
    return mechanism().epsilon(0.1)  # here


def reported():
    return mirrordp.RunReport.of(mechanism(), 0.1)  # here


def compared():
    return excluded_rows(PrivateData(X), PublicData(PARTLY_PUBLIC))  # here


def trained_on_rows_that_are_public():
    run = mirrordp.train(  # here
        step(tools.squared_distance), jnp.zeros(3), PrivateData(X), PublicData(PARTLY_PUBLIC)
    )
    return list(run)  # here


def trained_with_unused_parameters():
    return list(mirrordp.train(step(loss_of_a_part), PARAMS, PrivateData(X)))  # here


def trained_by_users_with_unused_parameters():
    users = mirrordp.PrivateClients.from_users(USERS, max_examples_per_user=4)
    sampling = tools.poisson(rows=len(users))
    made = mechanism(unit="user", num_steps=1, sampling=sampling)
    run = mirrordp.FederatedStep(loss_of_a_part, made, client_learning_rate=0.1)
    return list(mirrordp.train(run, PARAMS, users))  # here


def clipped_by_explicit_gradients():
    step = ghost.clipped_grad(lambda p, x: jnp.sum(jnp.sin(p * x) * p), l2_clip_norm=1.0)
    return step(jnp.ones(3), X, is_padding=np.zeros(len(X), bool))  # here


def fitted():
    PrivateLinearRegression(epsilon=1.0, delta=1e-5).fit(X, X[:, 0])  # here


def fitted_in_a_pipeline():
    model = make_pipeline(FunctionTransformer(), PrivateLinearRegression(epsilon=1.0, delta=1e-5))
    model.fit(X, X[:, 0])  # here


def fitted_by_cross_validation():
    cross_val_score(PrivateLinearRegression(delta=1e-5), X, X[:, 0], cv=2)  # here


def started_warm():
    mirrordp.warm_start(tools.squared_distance, jnp.zeros(3), PublicData(X), max_epochs=1)  # here


def started_warm_by_users():
    public = mirrordp.PublicClients.from_users(USERS)
    warm_start_clients(tools.squared_distance, jnp.zeros(3), public, max_epochs=1)  # here


@pytest.mark.parametrize(
    "act",
    [
        calibrated, asked_for_epsilon, reported, compared, trained_on_rows_that_are_public,
        trained_with_unused_parameters, trained_by_users_with_unused_parameters,
        clipped_by_explicit_gradients, fitted, fitted_in_a_pipeline, fitted_by_cross_validation,
        started_warm, started_warm_by_users,
    ],
)  # fmt: skip
def test_a_warning_names_the_line_of_the_caller(act, monkeypatch):
    monkeypatch.setattr(ghost, "LARGE", 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    assert caught
    for warning in caught:
        line = linecache.getline(warning.filename, warning.lineno)
        assert (warning.filename, line.rstrip()[-6:]) == (__file__, "# here"), warning


def test_the_same_line_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            asked_for_epsilon()
    assert len(caught) == 1


def test_no_module_counts_stack_frames():
    """`mirrordp._warn` finds the caller; a fixed `stacklevel` was right for one path at most."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "warnings":
                found.append((path.name, node.lineno))
            if isinstance(node, ast.Attribute) and node.attr in ("warn", "warn_explicit"):
                found.append((path.name, node.lineno))
    assert [name for name, _ in found] == ["_warn.py"], found
