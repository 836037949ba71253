"""The command line: thin commands over one embedded engine; what is slow to import is imported inside functions."""
