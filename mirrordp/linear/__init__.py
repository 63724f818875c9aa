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

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
