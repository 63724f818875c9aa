"""Figure 1 of the paper: simulated linear regression, `python -m experiments linreg`.

In: nothing but seeds. Out: one JSON line per dimension and algorithm, and the figure and the tables
made from those lines. `simulation` draws the data, `backends` runs the algorithms, `search` tunes
them, `command` is the command line and `report` draws.

**Data.** θ* ~ N(0, I_p). A feature vector has 40 of its first p/5 and 80 of its last 4p/5 entries,
drawn uniformly without replacement, equal to 0.05, the others 0; y ~ N(⟨θ*, x⟩, 0.01). There are n
= 10,000 private and 1.5 p public examples. The mean squared error of θ* is 0.01 in expectation.

**Algorithms.** The loss is ℓ(θ; x, y) = ½(⟨θ, x⟩ − y)². For T full-batch steps

    g_t     = (1/n) Σ_i clip(∇ℓ(θ_t; x_i, y_i), C) + b_t,     b_t ~ N(0, (σ₁ √T C / n)² I)
    θ_{t+1} = θ_t − η P g_t,

    cold        P = I                          θ_0 = 0
    warm        P = I                          θ_0 = θ_pub
    pda-dpmd    P = (λ_min + ρ) (H + ρ I)⁻¹    θ_0 = θ_pub

where θ_pub is the least-squares optimum on public data, H the public Hessian and ρ the ridge; the
factor λ_min + ρ gives P the largest eigenvalue 1, so that H ∝ I makes pda-dpmd and warm the same
algorithm. This is Algorithm 1 with the whole space as constraint set; it returns the average of
the iterates or the last one, whichever is better, for all three alike. The composition of T
Gaussian releases is one Gaussian release, so σ₁, the noise multiplier of a single release at
(ε, δ), is exact (`noise_multiplier`).

**Speed.** ∇ℓ is residual times row, hence clipping it means clipping the residual to ±C/‖x‖
(`clip_residuals`). All grid points with the same T are the columns of one matrix Θ, and one step
of all of them is XΘ and XᵀR; X has 120 non-zero entries per row and is stored sparse on a CPU.

**Search.** `search` evaluates a starting grid and widens it until a point as good as the best one
of each algorithm has evaluated neighbours on all sides. Tuning is not charged to the privacy
budget, as in the paper.
"""

import os

# Trials run in parallel threads; threads of BLAS inside them would only stand in their way. This
# must be set before NumPy is imported for the first time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from experiments.linreg.command import main

__all__ = ["main"]
