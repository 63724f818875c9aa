"""Two arrays, one private and one public, and an epsilon: a private regression in a few lines.

Everything that is not given (scaling, clip norm, number of steps, learning rate) follows from the
public rows and the budget. The same data without public rows, and the public rows alone, show what
each of them is worth.
"""

import numpy as np
from sklearn.linear_model import RidgeCV

import mirrordp
from mirrordp.linear import PrivateLinearRegression

FEATURES = 12
rng = np.random.default_rng(0)
scales = np.arange(1, FEATURES + 1) ** -1.0
truth = rng.normal(size=FEATURES) / scales


def draw(rows):
    x = rng.normal(size=(rows, FEATURES)) * scales
    return x, x @ truth + 2 * rng.normal(size=rows)


(x, y), (x_public, y_public), (x_test, y_test) = draw(10_000), draw(100), draw(10_000)


def error(model):
    return float(np.mean((model.predict(x_test) - y_test) ** 2))


private = PrivateLinearRegression(epsilon=0.5, delta=1e-6, random_state=0)
private.fit(x, y, X_public=x_public, y_public=y_public)
cold = PrivateLinearRegression(epsilon=0.5, delta=1e-6, row_norm_bound=3.0, random_state=0)
cold.fit(x, y)
public_only = RidgeCV(np.logspace(-3, 3, 13)).fit(x_public, y_public)

print(
    f"mean squared error: private with public rows {error(private):.3f}, without "
    f"{error(cold):.3f}, public rows alone {error(public_only):.3f}, best possible 4"
)
print(private.privacy_.privacy_card().splitlines()[2])

assert isinstance(private.privacy_, mirrordp.RunReport)
assert private.privacy_.epsilon <= 0.5
assert error(private) < 4.15
assert error(private) < error(public_only) < error(cold)
