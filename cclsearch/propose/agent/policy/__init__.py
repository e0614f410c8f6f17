"""Policy programs that the LLM writes, and the sandbox that runs them."""
