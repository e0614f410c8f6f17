"""What a configuration will take, before it runs: step time and memory with their parts."""
