"""A Flower app: logistic regression under user-level privacy, helped by public rows."""
