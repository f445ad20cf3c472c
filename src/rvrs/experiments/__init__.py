"""The experiments of the paper: one module per figure or table."""
