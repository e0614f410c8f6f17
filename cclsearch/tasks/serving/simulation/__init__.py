"""A load simulated step by step: the scheduler, the seconds of a step, and corrections of the closed forms."""
