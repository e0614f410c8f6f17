"""The task `training`: predicted step time and memory, space rules, and memory by ahead-of-time compilation."""
