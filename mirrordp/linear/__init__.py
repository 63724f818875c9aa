"""Generalised linear models: the private descent, its tuning, and scikit-learn estimators."""

from typing import TYPE_CHECKING

from mirrordp._lazy import lazily

if TYPE_CHECKING:
    from mirrordp.linear.estimators import (
        PrivateLinearRegression as PrivateLinearRegression,
        PrivateLogisticRegression as PrivateLogisticRegression,
        PrivateOrdinalRegression as PrivateOrdinalRegression,
        PrivatePoissonRegressor as PrivatePoissonRegressor,
    )
    from mirrordp.linear.nonlinear import (
        PrivateAutoClassifier as PrivateAutoClassifier,
        PrivateAutoPoissonRegressor as PrivateAutoPoissonRegressor,
        PrivateAutoRegressor as PrivateAutoRegressor,
        PrivateNetworkClassifier as PrivateNetworkClassifier,
        PrivateNetworkPoissonRegressor as PrivateNetworkPoissonRegressor,
        PrivateNetworkRegressor as PrivateNetworkRegressor,
        PrivateTreesClassifier as PrivateTreesClassifier,
        PrivateTreesPoissonRegressor as PrivateTreesPoissonRegressor,
        PrivateTreesRegressor as PrivateTreesRegressor,
    )

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
