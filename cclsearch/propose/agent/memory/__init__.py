"""Read the results of earlier turns: events, insights, evidence and records on disk."""
