"""The task `serving`: requests that arrive over time; the task `inference` shares its parts."""
