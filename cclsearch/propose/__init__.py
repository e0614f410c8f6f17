"""Choose what runs next: the surrogate (`default`), its peers, and the LLM agent."""
