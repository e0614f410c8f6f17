"""Where trials run: launchers behind one protocol, and the trial contract with the run script."""
