"""Runs the peers of `experiments models` on saved arrays: `table_models_peer.py ROWS.npz`.

A script of its own, because diffprivlib 0.6.6 needs scikit-learn below 1.6. It imports neither
mirrordp nor the rest of the experiments. What the peers need to know of the data beforehand (bounds
and types of features, the range of the target) comes from public rows.
"""

import json
import sys
import time
import warnings

import diffprivlib.models
import numpy as np
from interpret.privacy import DPExplainableBoostingClassifier, DPExplainableBoostingRegressor


def ebm(data, about):
    """Fits a private explainable boosting machine with its default settings."""
    x, y = data["public_x"], data["public_y"]
    schema = [(float(low), float(high)) for low, high in zip(x.min(0), x.max(0), strict=True)]
    options = {
        "epsilon": about["epsilon"],
        "delta": about["delta"],
        "random_state": about["seed"],
        "privacy_bounds": dict(enumerate(schema)),
    }
    private_x = np.clip(data["private_x"], x.min(0), x.max(0))
    test_x = np.clip(data["test_x"], x.min(0), x.max(0))
    if about["task"] == "regression":
        model = DPExplainableBoostingRegressor(
            **options, privacy_target_min=float(y.min()), privacy_target_max=float(y.max())
        )
        model.fit(private_x, np.clip(data["private_y"], y.min(), y.max()))
        return np.clip(model.predict(test_x), y.min(), y.max())
    model = DPExplainableBoostingClassifier(**options)
    model.fit(private_x, data["private_y"])
    return model.predict_proba(test_x)[:, 1]


def linear(data, about):
    """Fits diffprivlib's linear or logistic regression, pure ε, with public bounds."""
    x, y = data["public_x"], data["public_y"]
    if about["task"] == "regression":
        varies = x.min(0) < x.max(0)
        model = diffprivlib.models.LinearRegression(
            epsilon=about["epsilon"],
            bounds_X=(x.min(0)[varies], x.max(0)[varies]),
            bounds_y=(y.min(), y.max()),
            random_state=about["seed"],
        )
        model.fit(data["private_x"][:, varies], data["private_y"])
        return np.clip(model.predict(data["test_x"][:, varies]), y.min(), y.max())
    norm = float(np.quantile(np.linalg.norm(x, axis=1), 0.95))
    model = diffprivlib.models.LogisticRegression(
        epsilon=about["epsilon"], data_norm=norm, max_iter=500, random_state=about["seed"]
    )
    model.fit(data["private_x"], data["private_y"])
    return model.predict_proba(data["test_x"])[:, 1]


def forest(data, about):
    """Fits diffprivlib's random forest, which knows classes only."""
    x = data["public_x"]
    model = diffprivlib.models.RandomForestClassifier(
        epsilon=about["epsilon"],
        bounds=(x.min(0), x.max(0)),
        classes=np.unique(data["public_y"]),
        max_depth=8,
        n_estimators=20,
        random_state=about["seed"],
    )
    model.fit(np.clip(data["private_x"], x.min(0), x.max(0)), data["private_y"])
    return model.predict_proba(data["test_x"])[:, 1]


def main(path):
    """Fits all that know the task, and writes predictions and seconds."""
    warnings.simplefilter("ignore")
    data = dict(np.load(path, allow_pickle=False))
    about = json.loads(str(data.pop("about")))
    found = {}
    fits = {"ebm": ebm, "diffprivlib": linear}
    if about["task"] == "classification":
        fits["forest"] = forest
    for name, fit in fits.items():
        began = time.perf_counter()
        found[name] = fit(data, about)
        found[f"{name}_seconds"] = time.perf_counter() - began
    np.savez(f"{path}.out.npz", **found)


if __name__ == "__main__":
    main(sys.argv[1])
