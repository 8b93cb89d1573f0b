"""Tables and figures for people to look at."""
