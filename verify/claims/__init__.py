"""The claims ledger: every number, formula and listing of the texts this project teaches from, recomputed."""
