"""Launchers, which run trials behind one protocol, and the trial contract between launcher and run script."""
