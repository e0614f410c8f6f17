"""Who decides the next trial, the LLM or the fallback; see `machine` for the states and `arbiter` for the proposer."""
