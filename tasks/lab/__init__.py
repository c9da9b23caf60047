"""The laboratory: grids of runs, compared over seeds."""
