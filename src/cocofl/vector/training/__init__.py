"""Training the devices of a round: the cohort, optimizers, losses, widths, GPU memory."""
