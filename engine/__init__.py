"""The ground floor: records, files, stages, recipes and their runs, and the command line."""
