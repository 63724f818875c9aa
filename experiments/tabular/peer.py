"""Runs diffprivlib's linear models on saved arrays: `peer.py INPUT.npz` prints one JSON list.

A script of its own, because diffprivlib 0.6.6 needs scikit-learn below 1.6 and mirrordp's
estimators need a newer one. It imports neither mirrordp nor the rest of the experiments.
"""

import json
import sys
import time
import warnings
from importlib import metadata

import diffprivlib.models
import numpy as np


def linear_regression(data, epsilon, seed, *, num_features):
    """Fits by the functional mechanism, pure ε; public rows decide features and bounds.

    Its noise grows with the square of the number of features, so that it may use the few that
    correlate most with the target on public rows.
    """
    x, y = data["public_x"], data["public_y"]
    centred = (x - x.mean(0)) / x.std(0)
    order = np.argsort(-np.abs(centred.T @ (y - y.mean())), kind="stable")[:num_features]
    model = diffprivlib.models.LinearRegression(
        epsilon=epsilon,
        bounds_X=(x[:, order].min(0), x[:, order].max(0)),
        bounds_y=(y.min(), y.max()),
        random_state=seed,
    )
    model.fit(data["private_x"][:, order], data["private_y"])
    # Cutting to the public range is post-processing, and it helps the model a lot.
    return np.clip(model.predict(data["test_x"][:, order]), y.min(), y.max())


def logistic_regression(data, epsilon, seed, *, norm_quantile, inverse_ridge):
    """Fits by objective perturbation, pure ε; a public quantile bounds the row norms."""
    norms = np.linalg.norm(data["public_x"], axis=1)
    model = diffprivlib.models.LogisticRegression(
        epsilon=epsilon,
        data_norm=float(np.quantile(norms, norm_quantile)),
        C=inverse_ridge,
        max_iter=500,
        random_state=seed,
    )
    model.fit(data["private_x"], data["private_y"])
    return model.predict_proba(data["test_x"])


MODELS = {"regression": linear_regression, "classification": logistic_regression}


def main(path):
    """Fits every job in the file; predictions go into OUTPUT beside it, timings to stdout."""
    warnings.simplefilter("ignore")
    data = dict(np.load(path, allow_pickle=False))
    jobs = json.loads(str(data["jobs"]))
    predictions, seconds = {}, []
    for index, job in enumerate(jobs):
        began = time.perf_counter()
        predictions[f"job{index}"] = MODELS[job["task"]](
            data, job["epsilon"], job["seed"], **job["settings"]
        )
        seconds.append(round(time.perf_counter() - began, 3))
    np.savez(f"{path}.out.npz", **predictions)
    packages = ("diffprivlib", "scikit-learn", "numpy")
    versions = {name: metadata.version(name) for name in packages}
    print(json.dumps({"seconds": seconds, "versions": versions}))


if __name__ == "__main__":
    main(sys.argv[1])
