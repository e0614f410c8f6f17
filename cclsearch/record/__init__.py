"""The ledger of a run: its events, the state folded from them, and the writer."""
