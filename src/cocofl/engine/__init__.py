"""What executes rounds: the round loop, and executors that train the devices of a round."""
