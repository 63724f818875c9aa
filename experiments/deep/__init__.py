"""The paper's experiments with deep networks: CIFAR-10, EMNIST and WikiText-2.

`settings` reads one TOML file per run, `tasks` says what a data set's network, loss and metrics
are, `training` turns settings into result lines, and `run`, `sweep`, `table` and `figures` are the
commands.
"""
