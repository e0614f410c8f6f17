"""A load simulated step by step: the scheduler, the seconds of a step, and what it adds to the closed forms."""
