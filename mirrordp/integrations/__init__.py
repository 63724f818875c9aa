"""Bridges to other frameworks, each behind an optional extra; nothing in mirrordp imports them."""
