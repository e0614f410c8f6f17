"""Write the LLM's input before it decides."""
