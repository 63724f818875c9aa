"""Attacks that try to prove a stated ε wrong, and a replay that measures sensitivity.

An audit inserts *canaries*, records made to be noticed, trains, and guesses from the result which
of them took part. An attacker who guesses too well for an (ε, δ)-private mechanism has refuted the
claim, at a stated confidence, so the audit is a lower bound on ε. A bound below the reported ε
proves nothing; one above it proves a mistake. What each check can and cannot find is in
docs/auditing.md.

- `audit` runs all attacks on the library's own algorithms and states which deviation each of them
  would have noticed.
- `neighbour_replay` takes any loss function and searches for the two neighbouring data sets whose
  releases differ most under the same randomness.
- `one_run_epsilon`, `paired_epsilon`, `gaussian_mu`, `repeated_noise` and `not_poisson` are the
  statistics behind the attacks, for runs of your own.
"""

from typing import TYPE_CHECKING

from mirrordp._lazy import lazily

if TYPE_CHECKING:
    from mirrordp.auditing.attacks import (
        AUDIT_NOISE as AUDIT_NOISE,
        POWER as POWER,
        Attack as Attack,
        Audit as Audit,
        audit as audit,
    )
    from mirrordp.auditing.canaries import (
        Algorithm as Algorithm,
    )
    from mirrordp.auditing.replay import (
        Replay as Replay,
        neighbour_replay as neighbour_replay,
    )
    from mirrordp.auditing.statistics import (
        gaussian_mu as gaussian_mu,
        not_poisson as not_poisson,
        one_run_epsilon as one_run_epsilon,
        paired_epsilon as paired_epsilon,
        repeated_noise as repeated_noise,
    )

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
