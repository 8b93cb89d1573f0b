"""The same algorithm on Flower: simulated on Ray, and deployed over a real network."""
