"""The command line: options, config files, commands, signals."""
