"""Where the devices of a cohort round to int8, and to which grids."""
