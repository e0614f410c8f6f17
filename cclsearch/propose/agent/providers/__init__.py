"""LLM providers: requests, responses, retries and cost."""
