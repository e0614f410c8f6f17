"""The LLM agent: its prompt, its turns, its tools and its memory."""
