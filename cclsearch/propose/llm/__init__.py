"""The LLM agent: it reads what a numeric optimizer cannot, asks a few questions, and proposes with reasons."""
