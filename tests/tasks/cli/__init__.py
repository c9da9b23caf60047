"""The command line: options, help, standard streams and signals."""
