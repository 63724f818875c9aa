"""The paper's tables and figures: `python -m experiments <command>`. Not part of the wheel."""
