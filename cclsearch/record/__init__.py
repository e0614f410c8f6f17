"""The ledger and its views: what happened, for good."""
