"""A cluster with a device for each replica, on two cores: emulated devices, the real server, and the simulator beside it."""
